//! Asynchronous flushes.

use super::{Failure, Run, Step};
use crate::plan::{LANE, Plan};
use ferrogin_device::{Action, Flags, Status};

/// Bytes per put.
const BYTES: u64 = 256;

impl Run<'_> {
    /// Posts `burst` puts, starts a flush, and posts `burst` more puts. The first puts' sources change right after the
    /// wait for the flush.
    pub(super) fn send_async(&self, rep: u32) -> Step {
        let Plan { rank, burst, .. } = *self.plan;
        let failed = |status: Status| Failure::of(status, rank);
        for target in self.plan.targets() {
            self.put_row(target, rep, 0)?;
            let begun = self.context.flush_async().map_err(failed)?;
            self.put_row(target, rep, burst)?;
            self.context.wait_flush(&begun).map_err(failed)?;
            for i in 0..u64::from(burst) * BYTES / 8 {
                self.store(self.plan.outbox() + i * 8, !0);
            }
            // A second wait for the finished flush returns at once.
            self.context.wait_flush(&begun).map_err(failed)?;
            let ended = self.context.test_flush(&begun).map_err(failed)?;
            self.exactly(0, 1, Ok(ended.into()), target)?;
            self.flush()?;
            self.raise(target, self.sent())?;
        }
        Ok(())
    }

    /// Posts `burst` puts from number `first` on, each with its own source.
    fn put_row(&self, target: u32, rep: u32, first: u32) -> Step {
        let Plan { rank, burst, .. } = *self.plan;
        for k in first..first + burst {
            let at = u64::from(k) * BYTES;
            self.fill(self.plan.outbox() + at, BYTES, rep, k);
            let flags = if k % 3 == 0 { Flags::NONE } else { Flags::AGGREGATE };
            self.put(target, self.plan.inbox(rank) + at, self.plan.outbox() + at, BYTES, Action::NONE, flags)?;
        }
        Ok(())
    }

    pub(super) fn take_async(&self, rep: u32) -> Step {
        for source in self.plan.sources() {
            self.await_signal(source, u64::from(rep) + 1, source)?;
            for k in 0..2 * self.plan.burst {
                self.expect_buffer(self.plan.inbox(source) + u64::from(k) * BYTES, BYTES, source, rep, k)?;
            }
            self.ack(source)?;
        }
        Ok(())
    }
}

const _: () = assert!(32 * BYTES <= LANE, "two rows of a burst of 16 fit a lane");
