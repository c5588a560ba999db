//! A ring that goes on without the ranks that have gone.
//!
//! Its ranks listen for as long as it lives. A rank whose next rank has gone connects to the one after that, and so on,
//! and the two tell each other which ranks have gone; both pass on what's new to them. So every rank learns of every
//! rank that has gone, whichever rank noticed first. A rank that the others have given up on, because it was stopped,
//! learns that too. Collective calls need all ranks, and fail from then on.

use super::allgather::{DOMAIN, Ring, Side};
use super::error::RingError;
use super::gone::{Departure, Survivors, news};
use super::handle::{Handle, VERSION};
use super::listener::Listener;
use super::step::Step;
use super::time_limits::{Wait, connect_limit};
use crate::claim::Claim;
use crate::dial::{Address, Dial};
use crate::frame::{Frame, FrameKind};
use crate::stream::Stream;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long after it closed its communicator a rank counts as gone: the others may be about to close theirs.
pub(super) const CLOSE_GRACE: Duration = Duration::from_millis(300);

impl Ring {
    /// From now on, the ring goes on without ranks that go. All ranks make this call between the same collective calls,
    /// with the listeners whose handles these are.
    ///
    /// # Errors
    /// A handle is invalid.
    pub fn go_on_without(&mut self, listener: &Listener, handles: &[[u8; HANDLE_MAXSIZE]]) -> Result<(), RingError> {
        let parsed = handles
            .iter()
            .enumerate()
            .map(|(rank, handle)| Handle::parse(handle).ok_or(RingError::BadHandle { rank, version: VERSION }));
        let handles = parsed.collect::<Result<Vec<_>, _>>()?;
        let listener = listener.listening.lock().take().ok_or(RingError::WrongOrder { rank: self.rank })?;
        let (neighbours, now) = ([self.next_rank(), self.prev_rank()], Instant::now());
        let (gone, silence) = (BTreeMap::new(), Wait::new(now));
        self.survivors = Some(Survivors { listener, handles, gone, neighbours, candidate: None, called: now, silence });
        Ok(())
    }

    /// Returns whether the ring goes on without ranks that go.
    pub fn goes_on(&self) -> bool {
        self.survivors.is_some()
    }

    /// Returns the ranks that have gone, and tells the others. Called repeatedly while no collective call is running.
    /// `reported` are ranks that the caller knows to be lost.
    ///
    /// # Errors
    /// The other ranks have given up on this one, or this process is out of descriptors or memory.
    pub fn departures(
        &mut self,
        reported: impl Iterator<Item = usize>,
        now: Instant,
    ) -> Result<Vec<(usize, Departure)>, RingError> {
        if let Some(failed) = self.failed {
            return Err(self.given_up(failed));
        }
        reported.for_each(|rank| self.learn(rank, Departure::Lost, now));
        self.say_alive(now);
        let result = self.receive(Step::Barrier, self.sequence.wrapping_sub(1), now).and_then(|()| self.close_up(now));
        if let Err(error) = result {
            self.fail(Step::Barrier, self.sequence, &error);
            return Err(error);
        }
        let Some(survivors) = &self.survivors else { return Ok(Vec::new()) };
        let counts = |departure, at| departure == Departure::Lost || now >= at + CLOSE_GRACE;
        let gone = survivors.gone.iter().filter(|(_, (departure, at))| counts(*departure, *at));
        Ok(gone.map(|(rank, (departure, _))| (*rank, *departure)).collect())
    }

    fn given_up(&self, failed: usize) -> RingError {
        if failed == self.rank { RingError::GivenUp { rank: failed } } else { RingError::AlreadyFailed { failed } }
    }

    /// Records that a rank has gone, and tells the neighbours if that's news.
    pub(super) fn learn(&mut self, rank: usize, departure: Departure, now: Instant) {
        let Some(survivors) = &mut self.survivors else { return };
        if rank == self.rank {
            self.failed = Some(rank);
        }
        let is_known =
            survivors.gone.get(&rank).is_some_and(|(known, _)| *known == Departure::Lost || *known == departure);
        if rank >= survivors.handles.len() || is_known {
            return;
        }
        survivors.gone.insert(rank, (departure, now));
        // The rank itself hears it too, if it was only stopped.
        for stream in [&mut self.prev, &mut self.next].into_iter().flatten() {
            stream.send(news(rank, departure), &[]);
        }
    }

    /// Handles a frame about a rank that has gone; false if it's another one.
    pub(super) fn learn_from(&mut self, head: Frame, now: Instant) -> bool {
        let departure = match head.kind {
            FrameKind::Lost => Departure::Lost,
            FrameKind::Left => Departure::Closed,
            _ => return false,
        };
        self.learn(head.origin as usize, departure, now);
        self.survivors.is_some()
    }

    /// Fails if a rank has gone, because a collective call needs all of them.
    pub(super) fn check_complete(&self, step: Step) -> Result<(), RingError> {
        match (self.failed, self.survivors.as_ref().and_then(Survivors::first)) {
            (Some(failed), _) if self.survivors.is_some() => Err(self.given_up(failed)),
            (_, Some(rank)) => Err(RingError::Gone { rank, step }),
            _ => Ok(()),
        }
    }

    /// Replaces neighbours that have gone.
    fn close_up(&mut self, now: Instant) -> Result<(), RingError> {
        if let Some(failed) = self.failed {
            return Err(self.given_up(failed));
        }
        let Some(survivors) = &mut self.survivors else { return Ok(()) };
        let [next, prev] = survivors.neighbours;
        let heard = self.prev.as_ref().map(Stream::heard);
        let is_silent = heard.is_some() && survivors.silence.silence(now, heard) >= self.timeout;
        for (side, rank) in [(Side::Next, next), (Side::Prev, prev)] {
            let has_ended = self.stream(side).is_some_and(|stream| stream.ended().is_some());
            // One that closed its communicator has said so.
            if has_ended && !self.has_gone(rank) {
                self.learn(rank, Departure::Lost, now);
            }
        }
        if is_silent {
            self.learn(prev, Departure::Lost, now);
        }
        if self.has_gone(prev) {
            self.prev = None;
        }
        self.accept(now)?;
        self.call(now)
    }

    fn has_gone(&self, rank: usize) -> bool {
        self.survivors.as_ref().is_some_and(|survivors| survivors.has_gone(rank))
    }

    /// Accepts a new previous rank.
    fn accept(&mut self, now: Instant) -> Result<(), RingError> {
        let (rank, nranks) = (self.rank, self.nranks());
        let Some(survivors) = &mut self.survivors else { return Ok(()) };
        let failed = |source| RingError::Socket { call: "accept", source };
        while let Some((mut stream, claim)) = survivors.listener.poll(now).map_err(failed)? {
            if claim.nranks != nranks || claim.called != rank || claim.rank >= nranks || claim.rank == rank {
                continue;
            }
            survivors.news().for_each(|frame| stream.queue(frame, &[]));
            stream.flush();
            // One that has gone hears so, and no more.
            if !survivors.has_gone(claim.rank) {
                survivors.candidate = Some((claim.rank, stream));
            }
        }
        let Some((from, mut stream)) = survivors.candidate.take() else { return Ok(()) };
        stream.fill(now);
        while let Some((head, _)) =
            stream.frame().map_err(|_| RingError::InvalidFrame { rank: from, step: Step::Barrier })?
        {
            self.learn_from(head, now);
        }
        let is_prev = self.prev_rank() == from && self.prev.is_none();
        let Some(survivors) = &mut self.survivors else { return Ok(()) };
        if is_prev {
            survivors.neighbours[1] = from;
            self.prev = Some(stream);
        } else {
            survivors.candidate = Some((from, stream));
        }
        Ok(())
    }

    /// Connects to the next rank that hasn't gone.
    fn call(&mut self, now: Instant) -> Result<(), RingError> {
        loop {
            let next = self.next_rank();
            let Some(survivors) = &mut self.survivors else { return Ok(()) };
            if survivors.neighbours[0] != next {
                self.next = None;
                (survivors.neighbours[0], survivors.called) = (next, now);
                let Handle { secret, addresses } = survivors.handles[next].clone();
                let claim = Claim { rank: self.rank, nranks: survivors.handles.len(), called: next };
                let addresses = addresses.into_iter().map(Address::Tcp).collect();
                self.dial = (next != self.rank).then(|| Dial::new(addresses, DOMAIN, secret, claim));
            }
            let Some(dial) = &mut self.dial else { return Ok(()) };
            match dial.poll(now) {
                Ok(Some(mut stream)) => {
                    survivors.news().for_each(|frame| stream.queue(frame, &[]));
                    stream.flush();
                    (self.next, self.dial) = (Some(stream), None);
                    return Ok(());
                }
                Ok(None) if dial.is_refused() => self.learn(next, Departure::Closed, now),
                Ok(None) if now >= survivors.called + connect_limit(self.timeout) => {
                    self.learn(next, Departure::Lost, now);
                }
                Ok(None) => return Ok(()),
                Err(source) => return Err(RingError::Unreachable { rank: next, at: self.address(next), source }),
            }
        }
    }

    /// Returns the first rank after this one, in steps of `step`, that hasn't gone; this rank if there is none.
    pub(super) fn neighbour(&self, step: usize) -> usize {
        let n = self.nranks();
        let mut rank = (self.rank + step) % n;
        while rank != self.rank && self.has_gone(rank) {
            rank = (rank + step) % n;
        }
        rank
    }

    /// Returns the rank at the end of a stream.
    pub(super) fn connected_rank(&self, side: Side) -> usize {
        match &self.survivors {
            Some(survivors) => survivors.neighbours[usize::from(side == Side::Prev)],
            None if side == Side::Next => self.next_rank(),
            None => self.prev_rank(),
        }
    }
}
