//! `connect`: a rank opens its channels to both neighbours.

use super::error::ControlError;
use super::frame::{Frame, FrameKind, emit_hello, parse_hello};
use super::listener::{Endpoint, Listener, VERSION};
use super::neighbors::{Deadline, Event, Neighbors, RankAddresses, Side, handle_address, unexpected};
use super::ring::Ring;
use super::step::Step;
use ferrogin_channel::{ChannelError, Reason};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::io;
use std::sync::PoisonError;
use std::time::Duration;

impl Ring {
    /// Joins the ring as `rank`. `handles` has one handle for each rank; `listener` made the handle of this rank.
    ///
    /// # Errors
    /// A peer is not reachable or does not connect within `timeout`; a handle is not valid. The listener then refuses further
    /// peers, so that they learn of the failure at once.
    pub fn connect(
        listener: &Listener,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
        timeout: Duration,
    ) -> Result<Self, ControlError> {
        let mut endpoint = listener.endpoint.lock().unwrap_or_else(PoisonError::into_inner);
        let checked = check(&endpoint, handles, rank);
        let Endpoint { listener: accepting, reactor } = match (checked, endpoint.take()) {
            (Ok(()), Some(endpoint)) => endpoint,
            (Err(error), _) => return Err(error),
            (Ok(()), None) => return Err(ControlError::WrongOrder { rank }),
        };
        drop(endpoint);
        let nranks = handles.len();
        let addresses = RankAddresses::new(handles);
        let mut ring = Self { rank, addresses, timeout, neighbors: None, sequence: 0, failed: None };
        if nranks == 1 {
            return Ok(ring);
        }
        let next = handle_address(&handles[ring.next()])
            .ok_or(ControlError::BadHandle { rank: ring.next(), version: VERSION })?;
        let mut neighbors = Neighbors::new(reactor);
        // Two ranks share one channel, which rank 0 opens.
        let connects = nranks != 2 || rank == 0;
        let accepts = nranks != 2 || rank == 1;
        if connects {
            neighbors.connect(&next);
        }
        if accepts {
            neighbors.accept(&accepting);
        }
        let deadline = Deadline::after(timeout);
        match ring.handshake(&mut neighbors, (connects, accepts), &deadline) {
            Ok(()) => {
                neighbors.close_port();
                ring.neighbors = Some(neighbors);
                Ok(ring)
            }
            Err(error) => {
                let failed = error.failed_rank().unwrap_or(rank);
                // The previous rank connects later: it gets the reason then. A rank that ended does not connect.
                if accepts && neighbors.prev.is_none() && failed != ring.prev() {
                    neighbors.keep_accepting(accepting);
                }
                neighbors.send_abort(Step::Connect, 0, failed, &error);
                listener.keep_failed(Self { neighbors: Some(neighbors), failed: Some(failed), ..ring });
                Err(error)
            }
        }
    }

    /// Sends a hello to the next rank and waits for its welcome; waits for the hello of the previous rank and welcomes it.
    fn handshake(
        &self,
        neighbors: &mut Neighbors,
        (connects, accepts): (bool, bool),
        deadline: &Deadline,
    ) -> Result<(), ControlError> {
        let step = Step::Connect;
        let (next, prev) = (self.next(), self.prev());
        let (mut next_ready, mut prev_ready) = (!connects, !accepts);
        let frame = |kind, sequence, len| Frame { kind, step: step as u16, sequence, origin: self.rank as u32, len };
        while !next_ready || !prev_ready {
            let Some(event) = neighbors.wait(deadline) else {
                let rank = if prev_ready { next } else { prev };
                return Err(self.addresses.timed_out(rank, step, self.timeout));
            };
            match event {
                Event::Connected(Ok(channel)) => {
                    let body = emit_hello(next as u32);
                    let hello = frame(FrameKind::Hello, self.nranks() as u32, body.len() as u32);
                    channel.write(hello.emit(&body), |_| ());
                    neighbors.receive_from(&channel, if self.nranks() == 2 { Side::Both } else { Side::Next });
                    neighbors.next = Some(channel);
                }
                Event::Accepted(Ok(channel)) => {
                    neighbors.receive_from(&channel, if self.nranks() == 2 { Side::Both } else { Side::Prev });
                    neighbors.prev = Some(channel);
                }
                Event::Connected(Err(ChannelError::Refused { reason: Reason::NotListening, .. })) => {
                    return Err(ControlError::PeerLeft { rank: next, step });
                }
                Event::Connected(Err(error)) => {
                    let at = self.addresses.get(next);
                    return Err(ControlError::Unreachable { rank: next, at, source: io::Error::other(error) });
                }
                Event::Accepted(Err(error)) => return Err(self.addresses.closed(prev, step, &error)),
                Event::Received(side, Ok(bytes)) => match Frame::parse(&bytes) {
                    Some((Frame { kind: FrameKind::Welcome, .. }, _)) if side.is_next() && !next_ready => {
                        next_ready = true;
                    }
                    Some((head @ Frame { kind: FrameKind::Hello, .. }, body)) if side.is_prev() && !prev_ready => {
                        let fits = head.origin as usize == prev && head.sequence as usize == self.nranks();
                        if !fits || parse_hello(body) != Some(self.rank as u32) {
                            return Err(ControlError::InvalidFrame { rank: prev, step });
                        }
                        prev_ready = true;
                        if let Some(channel) = &neighbors.prev {
                            channel.write(frame(FrameKind::Welcome, 0, 0).emit(&[]), |_| ());
                        }
                    }
                    // The previous rank has both its channels and has sent the first block.
                    Some((Frame { kind: FrameKind::Block | FrameKind::Failed, .. }, _))
                        if side.is_prev() && prev_ready =>
                    {
                        neighbors.early.push_back(bytes);
                    }
                    other => {
                        let rank = if side.is_next() { next } else { prev };
                        return Err(unexpected(other.map(|(head, _)| head), rank, step));
                    }
                },
                Event::Received(side, Err(end)) => {
                    let rank = if side.is_next() { next } else { prev };
                    return Err(self.addresses.closed(rank, step, &end));
                }
                Event::Written(_) => {}
            }
        }
        if self.nranks() == 2 {
            let both = neighbors.next.take().or(neighbors.prev.take());
            neighbors.next.clone_from(&both);
            neighbors.prev = both;
        }
        Ok(())
    }
}

/// Checks that this rank's handle is valid and is the one of its listener.
fn check(endpoint: &Option<Endpoint>, handles: &[[u8; HANDLE_MAXSIZE]], rank: usize) -> Result<(), ControlError> {
    let own = handle_address(&handles[rank]).ok_or(ControlError::BadHandle { rank, version: VERSION })?;
    match endpoint {
        Some(endpoint) if own == *endpoint.listener.address() => Ok(()),
        _ => Err(ControlError::WrongOrder { rank }),
    }
}
