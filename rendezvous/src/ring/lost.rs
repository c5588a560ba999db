//! Ranks that exit between collective calls.

use super::allgather::{Ring, Side};
use super::error::RingError;
use super::step::Step;
use crate::frame::{Frame, FrameKind};
use crate::stream::End;
use std::time::{Duration, Instant};

/// How long after its streams end a rank counts as lost. If a program exits right after its last barrier without
/// closing the communicator, the others fail only if they're still working by then.
const GRACE: Duration = Duration::from_secs(2);

impl Ring {
    /// Returns a rank that exited without closing its communicator, whether seen here or reported by a neighbour, and
    /// tells the neighbours. Called repeatedly while no collective call is running; that also lets the ranks that wait
    /// in one know that this process runs.
    pub fn lost(&mut self, now: Instant) -> Option<usize> {
        if self.failed.is_none() {
            self.say_alive(now);
            // The last collective call that has completed here.
            let sequence = self.sequence.wrapping_sub(1);
            match self.receive(Step::Barrier, sequence, now) {
                Err(error) => self.fail(Step::Barrier, self.sequence, &error),
                Ok(()) => {
                    self.pass_on_closes(now);
                    self.check_streams(now);
                }
            }
        }
        let reported = self.abort.or(self.later_abort.map(|(frame, _)| (frame, now)));
        let lost = reported.filter(|(frame, _)| frame.kind == FrameKind::Abort).map(|(frame, _)| frame.origin as usize);
        lost.filter(|rank| *rank != self.rank)
    }

    /// Returns true if a rank closed its communicator a while ago, as of the last call to [`lost`](Self::lost).
    pub fn has_closed(&self, rank: usize, now: Instant) -> bool {
        self.closed.get(&rank).is_some_and(|at| now >= *at + GRACE)
    }

    /// Tells the other ranks that this one closes its communicator because of `rank`, so that they don't look for the
    /// reason here.
    pub fn blame(&mut self, rank: usize) {
        if self.failed.is_none() && rank != self.rank {
            let error = RingError::PeerClosed { rank, at: self.address(rank), step: Step::Barrier };
            self.fail(Step::Barrier, self.sequence, &error);
        }
    }

    /// Passes on a neighbour's close, which the neighbour itself only tells its own neighbours.
    fn pass_on_closes(&mut self, now: Instant) {
        for side in [Side::Prev, Side::Next] {
            let has_left = matches!(self.stream(side).and_then(|stream| stream.ended()), Some(End::Left));
            let head = Frame::new(FrameKind::Left, Step::Barrier as u16, self.sequence, self.rank_of(side));
            if has_left && self.note_close(head, now) {
                self.pass_on(head, side);
            }
        }
    }

    /// Gives up on a neighbour whose stream ended without a word, unless a neighbour has reported a failure that may
    /// explain it.
    fn check_streams(&mut self, now: Instant) {
        if self.later_abort.is_some_and(|(frame, _)| frame.kind == FrameKind::Abort) {
            return;
        }
        let streams = [(self.prev_rank(), &self.prev), (self.next_rank(), &self.next)];
        let closed = streams.into_iter().filter_map(|(rank, stream)| Some((stream.as_ref()?.closed_at()?, rank)));
        // A rank may end because of the one that ended first.
        let Some((at, rank)) = closed.min_by_key(|(at, _)| *at) else { return };
        if now >= at + GRACE {
            let error = RingError::PeerClosed { rank, at: self.address(rank), step: Step::Barrier };
            self.fail(Step::Barrier, self.sequence, &error);
        }
    }
}
