//! `connect`: a rank opens its streams to both neighbours.

use super::allgather::{DOMAIN, Ring, Side, address_of};
use super::error::RingError;
use super::handle::{Handle, VERSION};
use super::listener::Listener;
use super::step::Step;
use super::time_limits::{ALIVE_EVERY, connect_limit};
use crate::claim::Claim;
use crate::dial::{Address, Dial};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::io;
use std::time::{Duration, Instant};

impl Ring {
    /// Joins the ring as `rank`. `handles` has one handle per rank; `listener` made this rank's.
    ///
    /// # Errors
    /// A peer is unreachable or doesn't connect within `timeout`; a handle is invalid. The listener then tells
    /// neighbours that connect later, until it's dropped.
    pub fn connect(
        listener: &Listener,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
        timeout: Duration,
    ) -> Result<Self, RingError> {
        let listening = listener.listening.lock().take();
        let listening = listening.ok_or(RingError::WrongOrder { rank })?;
        if handles[rank] != listener.handle() {
            Handle::parse(&handles[rank]).ok_or(RingError::BadHandle { rank, version: VERSION })?;
            return Err(RingError::WrongOrder { rank });
        }
        let nranks = handles.len();
        let mut ring = Self::new(rank, handles.iter().map(address_of).collect(), timeout);
        if nranks == 1 {
            return Ok(ring);
        }
        let (next, prev) = (ring.next_rank(), ring.prev_rank());
        let handle = Handle::parse(&handles[next]).ok_or(RingError::BadHandle { rank: next, version: VERSION })?;
        let addresses = handle.addresses.into_iter().map(Address::Tcp).collect();
        ring.dial = Some(Dial::new(addresses, DOMAIN, handle.secret, Claim { rank, nranks, called: next }));
        ring.listener = Some(listening);
        match ring.open_streams() {
            Ok(()) => Ok(ring),
            Err(error) => {
                // A rank that exited won't connect.
                let failed = error.failed_rank();
                ring.dial.take_if(|_| failed == Some(next));
                ring.listener.take_if(|_| failed == Some(prev));
                ring.fail(Step::Connect, 0, &error);
                listener.keep_failed(ring);
                Err(error)
            }
        }
    }

    /// Waits until the next rank has accepted this rank, and this rank the previous one.
    fn open_streams(&mut self) -> Result<(), RingError> {
        let (step, began) = (Step::Connect, Instant::now());
        let (deadline, reached) = (began + self.timeout, began + connect_limit(self.timeout));
        loop {
            // A next rank that is in the call waits for this one.
            let now = Instant::now();
            self.poll_opening(now)?;
            self.say_alive(now);
            self.receive(step, 0, now)?;
            match (&self.dial, &self.listener) {
                (None, None) => return Ok(()),
                (Some(dial), _) if now >= reached.min(deadline) && !dial.is_accepted() => {
                    return Err(self.unreachable(dial.last_error()));
                }
                (_, listener) if now >= deadline => {
                    let rank = if listener.is_none() { self.next_rank() } else { self.prev_rank() };
                    return Err(self.timed_out(rank, step, self.timeout));
                }
                (Some(dial), _) if !dial.is_accepted() => self.wait(reached.min(deadline))?,
                _ => self.wait(deadline.min(self.told + ALIVE_EVERY))?,
            }
        }
    }

    /// Makes progress on the streams that aren't open yet, and tells late neighbours about this rank's failure.
    pub(super) fn poll_opening(&mut self, now: Instant) -> Result<(), RingError> {
        if let Some(dial) = &mut self.dial {
            match dial.poll(now) {
                Ok(Some(stream)) => {
                    self.dial = None;
                    self.next = Some(stream);
                    self.tell_failure(Side::Next);
                }
                Ok(None) if dial.is_refused() => {
                    let error = dial.last_error();
                    return Err(self.unreachable(error));
                }
                Ok(None) => {}
                Err(error) => return Err(self.unreachable(error)),
            }
        }
        let (rank, nranks, prev) = (self.rank, self.nranks(), self.prev_rank());
        if let Some(listener) = &mut self.listener {
            let accepted = listener.poll(now).map_err(|source| RingError::Socket { call: "accept", source })?;
            if let Some((stream, claim)) = accepted {
                self.listener = None;
                if claim != (Claim { rank: prev, nranks, called: rank }) {
                    return Err(RingError::InvalidFrame { rank: prev, step: Step::Connect });
                }
                self.prev = Some(stream);
                self.tell_failure(Side::Prev);
            }
        }
        Ok(())
    }

    fn unreachable(&self, source: io::Error) -> RingError {
        let rank = self.next_rank();
        RingError::Unreachable { rank, at: self.address(rank), source }
    }
}
