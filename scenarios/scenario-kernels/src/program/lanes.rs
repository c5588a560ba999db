//! Posts that a rank's threads make together: on a GPU, as the lanes of a warp.

use super::{COUNTERS, Failure, Run, Step, signals, value};
use crate::api;
use crate::plan::{LANE, Plan, Verdict};
use core::ptr::null_mut;
use ferrogin_device::{Action, Flags, Status, Window};

/// Values per round, and puts per round.
const ROW: u32 = 8;
/// Bytes per put of lane 0; other lanes' puts may be longer.
const BYTES: u64 = 16;
/// Offset of the puts in a lane's part of an inbox, after the values.
const PUTS: u64 = LANE / 2;
/// Offset, in a lane's part of the outbox, of the puts that it gets back.
const COPY: u64 = PUTS + LANE / 4;

impl Run<'_> {
    /// In each of `reps` rounds, every lane posts a row of values and a row of puts to each target; the lanes take the
    /// targets in different orders. Values have a signal in every second round, and puts a counter in every third.
    /// Lanes whose operations are refused take part in each round. After a flush, the lane gets everything back and
    /// compares it. The signal counts must be exact.
    pub(super) fn together(&self, rep: &mut u32) -> Step {
        let Plan { lanes, reps, rank, nranks, .. } = *self.plan;
        let (mut counted, ntargets) = (0, self.plan.targets().count() as u32);
        // A lane that has failed still makes the calls that the other lanes wait for.
        let mut failed = Ok(());
        for round in 0..reps {
            if failed.is_ok() {
                *rep = round;
            }
            for turn in 0..ntargets {
                // Each lane has a different peer at any given time.
                let target = self.plan.targets().nth(((turn + self.plan.lane) % ntargets) as usize).unwrap_or(rank);
                let row = self.row(target, round);
                let refused = self.refused_of_one_lane(target);
                failed = failed.and(row).and(refused);
                counted += if round.is_multiple_of(3) { ROW } else { 0 };
            }
            if failed.is_ok() {
                failed = self.flush();
            }
            for target in self.plan.targets() {
                if failed.is_ok() {
                    failed = self.read_back(target, round);
                }
            }
        }
        for target in self.plan.targets() {
            let posted = api::signal_by_lanes(&self.context, target, self.sent(), self.mode(0));
            failed = failed.and(posted.map_err(|status| Failure::of(status, target)));
        }
        failed?;
        self.flush()?;
        // In half of the rounds, each of the row's values raises the signal; at the end, every lane raises it once.
        let raised = u64::from(lanes) * (u64::from(reps.div_ceil(2)) * u64::from(ROW) + 1);
        for source in self.plan.sources() {
            self.await_signal(source, raised, source)?;
            self.exactly(source, raised, self.context.read_signal(source), source)?;
        }
        if lanes == 1 {
            self.exactly(0, counted.into(), self.context.read_counter(0), nranks)?;
        }
        Ok(())
    }

    /// All but every fourth lane aggregate, so both kinds of groups meet on a queue.
    fn mode(&self, k: u32) -> Flags {
        let aggregate = if (k + self.plan.lane).is_multiple_of(4) { 0 } else { Flags::AGGREGATE.bits() };
        Flags::from_bits(self.plan.sharing | if k + 1 < ROW { aggregate } else { 0 })
    }

    fn length(&self) -> u64 {
        BYTES + u64::from(self.plan.lane % 4) * 8
    }

    fn row(&self, target: u32, round: u32) -> Step {
        let Plan { rank, lane, window, .. } = *self.plan;
        let (there, here) = (self.plan.inbox(rank), self.plan.outbox() + u64::from(lane) * LANE);
        let mut failed = Ok(());
        for k in 0..ROW {
            let action = if round.is_multiple_of(2) { self.sent() } else { Action::NONE };
            let to = window.at(there + u64::from(k) * 8);
            let posted = api::put_value_by_lanes(
                &self.context,
                target,
                to,
                value(rank, lane, round, k),
                8,
                action,
                self.mode(k),
            );
            failed = failed.and(posted.map_err(|status| Failure::of(status, target)));
        }
        let bytes = self.length();
        for k in 0..ROW {
            let at = PUTS + u64::from(k) * 64;
            for word in 0..bytes / 8 {
                self.store(here + at + word * 8, value(rank, lane, round, k) ^ word << 40);
            }
            let action = if round.is_multiple_of(3) { Action::counter(0) } else { Action::NONE };
            let (to, from) = (window.at(there + at), window.at(here + at));
            let posted = api::put_by_lanes(&self.context, target, to, from, bytes, action, self.mode(k));
            failed = failed.and(posted.map_err(|status| Failure::of(status, target)));
        }
        failed
    }

    /// Posts an operation that is valid only in some lanes.
    fn refused_of_one_lane(&self, target: u32) -> Step {
        let Plan { lane, nranks, window, rank, .. } = *self.plan;
        let to = self.plan.inbox(rank) + LANE - 8;
        let bad = [
            (nranks, window, 8, Action::NONE),
            (target, Window(null_mut()), 8, Action::NONE),
            (target, window, 3, Action::NONE),
            (target, window, 8, Action::signal_inc(signals(nranks) as u16)),
            (target, window, 8, Action::counter(COUNTERS as u16)),
        ];
        let refused = bad.get(lane as usize % 7);
        let &(peer, dst, bytes, action) = refused.unwrap_or(&(target, window, 8, Action::NONE));
        let got =
            api::put_value_by_lanes(&self.context, peer, dst.at(to), !u64::from(lane), bytes, action, self.mode(ROW));
        let expected = if refused.is_some() { Err(Status::InvalidArgument) } else { Ok(()) };
        if got == expected {
            return Ok(());
        }
        let number = |result: Result<(), Status>| result.err().map_or(0, |status| status as u64);
        let (expected, got) = (number(expected), number(got));
        Err(Failure { verdict: Verdict::Status, peer: target, at: lane.into(), expected, got })
    }

    fn read_back(&self, target: u32, round: u32) -> Step {
        let Plan { rank, lane, window, .. } = *self.plan;
        let (there, here) = (self.plan.inbox(rank), self.plan.outbox() + u64::from(lane) * LANE);
        for (from, to, bytes) in
            [(0, 0, u64::from(ROW) * 8), (PUTS, COPY, u64::from(ROW) * 64), (LANE - 8, LANE - 8, 8)]
        {
            let got = self.context.get(target, window.at(there + from), window.at(here + to), bytes, Flags::NONE);
            got.map_err(|status| Failure::of(status, target))?;
        }
        self.flush()?;
        for k in 0..ROW {
            let (sent, at) = (value(rank, lane, round, k), here + COPY + u64::from(k) * 64);
            self.expect_word(here + u64::from(k) * 8, sent, target)?;
            for word in 0..self.length() / 8 {
                self.expect_word(at + word * 8, sent ^ word << 40, target)?;
            }
            // The word after a put.
            self.expect_word(at + self.length(), 0, target)?;
        }
        self.expect_word(here + LANE - 8, if lane % 7 < 5 { 0 } else { !u64::from(lane) }, target)
    }
}

const _: () = assert!(PUTS + ROW as u64 * 64 <= COPY && COPY + ROW as u64 * 64 <= LANE - 8);
