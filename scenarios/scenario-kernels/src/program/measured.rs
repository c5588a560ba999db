//! The measuring programs: the loops of [`timed`](crate::timed) between ranks 0 and 1, and operations of all ranks.

use super::{Failure, Run, Step};
use crate::plan::{Measured, Plan};
use crate::timed::Lane;
use ferrogin_device::platform::clock_ns;
use ferrogin_device::{Action, Flags, Status};

/// The signals of [`Run::all_to_all`]: blocks that have arrived, and ranks that have read theirs.
const ARRIVED: u16 = 0;
const READ: u16 = 1;

impl Run<'_> {
    fn lane(&self) -> Lane<'_> {
        let Plan { rank, window, memory, bytes, deadline_ns, measured, .. } = *self.plan;
        let Measured { raised, awaited, from, to, inbox, .. } = measured;
        Lane {
            context: self.context,
            peer: 1 - rank,
            window,
            memory,
            from,
            to,
            inbox,
            bytes: bytes.into(),
            raised: raised as u16,
            awaited,
            deadline_ns,
        }
    }

    /// The repetitions of the warm-up, and those after it.
    fn counts(&self) -> (u32, u32) {
        (self.plan.warmup, self.plan.reps - self.plan.warmup)
    }

    /// Stores the time of repetition `number` after the warm-up.
    fn sample(&self, number: u32, time: u64) {
        if !self.plan.samples.is_null() {
            let place = self.plan.samples.wrapping_add(number as usize);
            // SAFETY: `samples` has an element for each repetition after the warm-up.
            unsafe { place.write(time) };
        }
    }

    /// Ranks 0 and 1 measure; other ranks do nothing.
    pub(super) fn latencies(&self) -> Step {
        let rank = self.plan.rank;
        if rank > 1 {
            return Ok(());
        }
        let mut number = 0;
        let sample = |time| {
            self.sample(number, time);
            number += 1;
        };
        let result = self.lane().latencies(self.plan.measured.operation, rank == 0, self.counts(), sample);
        result.map_err(|status| Failure::of(status, 1 - rank))
    }

    /// Returns the stream's start and duration.
    pub(super) fn stream(&self) -> Result<(u64, u64), Failure> {
        let Plan { rank, burst, measured, .. } = *self.plan;
        if rank > 1 {
            return Ok((0, 0));
        }
        let time = self.lane().stream(measured.operation, rank == 0, self.counts(), burst);
        time.map(|time| (time.start, time.end - time.start)).map_err(|status| Failure::of(status, 1 - rank))
    }

    /// In round r, a rank signals the rank 2^r ahead and waits for the one 2^r behind. `number` counts the barriers
    /// from 1, because the signals are never reset.
    fn barrier(&self, number: u32) -> Result<(), Status> {
        let Plan { rank, nranks, .. } = *self.plan;
        let (mut round, mut distance) = (0, 1);
        while distance < nranks {
            self.context.signal((rank + distance) % nranks, Action::signal_inc(round), Flags::NONE)?;
            self.context.wait_signal(round.into(), number.into())?;
            (round, distance) = (round + 1, distance * 2);
        }
        Ok(())
    }

    /// Runs `operation` for each repetition and samples its time.
    fn timed(&self, rep: &mut u32, operation: impl Fn(u32) -> Result<(), Status>) -> Step {
        self.context.set_timeout_ns(self.plan.deadline_ns);
        for round in 0..self.plan.reps {
            *rep = round;
            let begin = clock_ns();
            operation(round).map_err(|status| Failure::of(status, self.plan.rank))?;
            if let Some(number) = round.checked_sub(self.plan.warmup) {
                self.sample(number, clock_ns().wrapping_sub(begin));
            }
        }
        Ok(())
    }

    pub(super) fn barriers(&self, rep: &mut u32) -> Step {
        self.timed(rep, |round| self.barrier(round + 1))
    }

    pub(super) fn barriers_of_values(&self, rep: &mut u32) -> Step {
        let Plan { rank, nranks, reps, measured, .. } = *self.plan;
        let failed = |status| Failure::of(status, rank);
        for number in 1..=reps {
            *rep = number;
            // Two alternating places, since a fast rank writes its next value while a slow rank is still reading.
            let place = |rank: u32| measured.inbox + u64::from(number % 2 * nranks + rank) * 8;
            for peer in 0..nranks {
                self.put_value(peer, place(rank), number.into(), 8, Action::NONE, Flags::NONE)?;
            }
            self.flush()?;
            self.barrier(number).map_err(failed)?;
            for peer in 0..nranks {
                self.expect_word(place(peer), number.into(), peer)?;
            }
        }
        Ok(())
    }

    /// Each rank puts a block to every other rank. One signal counts the blocks that have arrived, in any order;
    /// another counts the ranks that have read theirs, so that no rank overwrites an unread block.
    pub(super) fn all_to_all(&self, rep: &mut u32) -> Step {
        let Plan { rank, nranks, window, bytes, measured, .. } = *self.plan;
        let others = u64::from(nranks - 1);
        let at = |base: u64, rank: u32| window.at(base + u64::from(rank) * measured.stride);
        // Each rank starts with a different peer, so that they don't all put to the same rank at once.
        let peers = || (1..nranks).map(|distance| (rank + distance) % nranks);
        self.timed(rep, |round| {
            let context = &self.context;
            context.wait_signal(READ.into(), u64::from(round) * others)?;
            for peer in peers() {
                let (to, from) = (at(measured.inbox, rank), at(measured.from, peer));
                context.put(peer, to, from, bytes.into(), Action::signal_inc(ARRIVED), Flags::NONE)?;
            }
            context.wait_signal(ARRIVED.into(), (u64::from(round) + 1) * others)?;
            for peer in peers() {
                context.signal(peer, Action::signal_inc(READ), Flags::NONE)?;
            }
            context.flush()
        })
    }

    pub(super) fn reset_signals(&self, signals: u32) -> Step {
        for signal in 0..signals {
            self.context.reset_signal(signal).map_err(|status| Failure::of(status, self.plan.rank))?;
        }
        Ok(())
    }

    pub(super) fn read_signal(&self) -> Result<(u64, u64), Failure> {
        let count = self.context.read_signal(self.plan.measured.awaited);
        count.map(|count| (0, count)).map_err(|status| Failure::of(status, self.plan.rank))
    }
}
