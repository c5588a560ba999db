//! Values from several threads on one endpoint, which reuse value slots and flush while other threads post.

use super::{Failure, Run, Step, value};
use crate::plan::{LANE, Plan};
use ferrogin_device::{Action, Flags};

const AGGREGATE: u32 = 2;
/// Words in a thread's part of the inbox.
const CELLS: u32 = (LANE / 8) as u32;

impl Run<'_> {
    /// Posts `reps` rounds of up to `burst` different values to each target; the rounds' lengths differ between
    /// threads. Each round ends with a flush; then the thread gets the target's words and compares them. A flush that
    /// returns early, or a slot that is overwritten while the card still needs it, causes a wrong value. If values
    /// carry a signal, its final count is the number of values from all threads.
    pub(super) fn storm(&self, rep: &mut u32, signalled: bool) -> Step {
        let Plan { lane, lanes, burst, reps, .. } = *self.plan;
        let action = if signalled { self.sent() } else { Action::NONE };
        let length = |round: u32, lane: u32| (burst - (round * 7 + lane * 13) % (burst / 2).max(1)).min(CELLS);
        for round in 0..reps {
            *rep = round;
            for target in self.plan.targets() {
                self.pour(target, round, length(round, lane), action)?;
            }
        }
        if !signalled {
            return Ok(());
        }
        let sent = |lane| (0..reps).map(|round| u64::from(length(round, lane))).sum::<u64>();
        let total = (0..lanes).map(sent).sum();
        for source in self.plan.sources() {
            self.await_signal(source, total, source)?;
            self.exactly(source, total, self.context.read_signal(source), source)?;
        }
        Ok(())
    }

    fn pour(&self, target: u32, round: u32, length: u32, action: Action) -> Step {
        let Plan { rank, lane, lanes, window, sharing, .. } = *self.plan;
        let there = self.plan.inbox(rank);
        let here = self.plan.outbox() + u64::from(lane) * LANE;
        for k in 0..length {
            // Runs of aggregated posts, longer than a small batch, between plain posts.
            let plain = (k + lane).is_multiple_of(7) || (lane == 0 && lanes > 1);
            let flags = Flags::from_bits(sharing | if plain { 0 } else { AGGREGATE });
            self.put_value(target, there + u64::from(k) * 8, value(rank, lane, round, k), 8, action, flags)?;
        }
        self.flush()?;
        let got = self.context.get(target, window.at(there), window.at(here), u64::from(length) * 8, Flags::NONE);
        got.map_err(|status| Failure::of(status, target))?;
        self.flush()?;
        for k in 0..length {
            self.expect_word(here + u64::from(k) * 8, value(rank, lane, round, k), target)?;
        }
        Ok(())
    }
}
