//! Invalid operations in a kernel.

use super::{COUNTERS, Failure, Run, Step, signals};
use crate::plan::{Plan, Verdict};
use core::ptr::null_mut;
use ferrogin_device::{Action, Flags, Status, Window};

impl Run<'_> {
    /// Calls each operation with out-of-range arguments, then sends a signal. An operation that isn't refused would
    /// change a counter or memory.
    pub(super) fn send_refused(&self, _rep: u32) -> Step {
        let Plan { rank, nranks, window, .. } = *self.plan;
        let (context, none) = (&self.context, Window(null_mut()));
        let (to, from, flags) = (self.plan.inbox(rank), self.plan.outbox(), Flags::NONE);
        let last_signal = signals(nranks) as u16;
        let (no_signal, no_counter) = (Action::signal_inc(last_signal), Action::counter(COUNTERS as u16));
        for target in self.plan.targets() {
            let put =
                |peer, dst: Window, src: Window, action| context.put(peer, dst.at(to), src.at(from), 64, action, flags);
            let value =
                |peer, dst: Window, bytes, action| context.put_value(peer, dst.at(to), !0, bytes, action, flags);
            let get =
                |peer, remote: Window, local: Window| context.get(peer, remote.at(from), local.at(from), 8, flags);
            let results = [
                put(nranks, window, window, Action::NONE),
                put(u32::MAX, window, window, self.sent()),
                put(target, none, window, Action::NONE),
                put(target, window, none, self.sent()),
                put(target, window, window, no_signal),
                put(target, window, window, Action::signal_inc(u16::MAX - 1)),
                put(target, window, window, no_counter),
                put(target, window, window, self.sent().with_counter(u16::MAX - 1)),
                value(nranks, window, 8, self.sent()),
                value(target, none, 8, Action::NONE),
                value(target, window, 8, no_signal),
                value(target, window, 8, Action::counter(0)),
                value(target, window, 0, self.sent()),
                value(target, window, 3, self.sent()),
                value(target, window, 16, self.sent()),
                value(target, window, u32::MAX, self.sent()),
                get(nranks, window, window),
                get(target, none, window),
                get(target, window, none),
                context.signal(nranks, self.sent(), flags),
                context.signal(target, no_signal, flags),
                context.signal(target, no_counter, flags),
                context.wait_signal(last_signal.into(), 0),
                context.reset_signal(u32::MAX),
                context.wait_counter(COUNTERS, 0),
                context.read_counter(u32::MAX).map(drop),
            ];
            for (at, result) in results.into_iter().enumerate() {
                if result != Err(Status::InvalidArgument) {
                    let got = result.err().map_or(0, |status| status as u64);
                    let expected = Status::InvalidArgument as u64;
                    return Err(Failure { verdict: Verdict::Status, peer: target, at: at as u64, expected, got });
                }
            }
            self.raise(target, self.sent())?;
        }
        self.flush()
    }

    /// Checks that one signal arrived, and that memory and counters are unchanged.
    pub(super) fn take_nothing(&self, rep: u32) -> Step {
        for source in self.plan.sources() {
            let raised = u64::from(rep) + 1;
            self.await_signal(source, raised, source)?;
            self.exactly(source, raised, self.context.read_signal(source), source)?;
            for word in 0..8 {
                self.expect_word(self.plan.inbox(source) + word * 8, 0, source)?;
            }
            self.exactly(0, 0, self.context.read_counter(0), source)?;
            self.ack(source)?;
        }
        Ok(())
    }
}
