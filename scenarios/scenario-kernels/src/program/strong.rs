//! Strong signals and signals in memory. If the card counts signals, these must be refused, and a flush takes their
//! place.

use super::{Failure, Run, Step, value};
use crate::plan::{LANE, Plan, Verdict};
use ferrogin_device::{Action, Flags, Status};

/// Words in an inbox, after the values: one for strong signals and one for weak ones.
const STRONG_WORD: u64 = LANE;
const WEAK_WORD: u64 = LANE + 8;
/// A place after them for puts that carry signals.
const SPARE: u64 = LANE + 16;
/// What a signal adds to a word in memory; both halves change.
const STEP: u64 = 0x0003_0000_0002_0001;

impl Run<'_> {
    /// What the round adds to a signal; in every second round, more than an immediate holds.
    fn amount(&self, rep: u32) -> u32 {
        if self.context.emulates_signals() && rep % 2 == 1 { 70_000 } else { 3 }
    }

    /// Posts a burst to each target, alternating between values, puts, and puts with a counter, some of them deferred.
    /// Then come two strong signals, one in memory and one by id, and a weak one in memory.
    pub(super) fn send_strong(&self, rep: u32) -> Step {
        let Plan { rank, lane, burst, window, .. } = *self.plan;
        let word = |at| window.at(self.plan.inbox(rank) + at);
        for target in self.plan.targets() {
            for k in 0..burst {
                let (sent, to) = (value(rank, lane, rep, k), self.slot(rank, rep, k));
                let from = self.plan.outbox() + to % LANE;
                let flags = if k % 3 == 2 { Flags::NONE } else { Flags::AGGREGATE };
                self.store(from, sent);
                match k % 3 {
                    0 => self.put_value(target, to, sent, 8, Action::NONE, flags)?,
                    1 => self.put(target, to, from, 8, Action::NONE, flags)?,
                    _ => self.put(target, to, from, 8, Action::counter(0), flags)?,
                }
            }
            let weak = || self.context.signal_at(target, word(WEAK_WORD), STEP, Flags::NONE);
            let result = if self.context.emulates_signals() {
                self.raise_strong(target, rep).and_then(|()| weak())
            } else {
                self.refused_strong(target)?;
                self.flush()?;
                self.context.signal(target, Action::signal_add(rank as u16, self.amount(rep)), Flags::NONE)
            };
            result.map_err(|status| Failure::of(status, target))?;
        }
        Ok(())
    }

    fn raise_strong(&self, target: u32, rep: u32) -> Result<(), Status> {
        let Plan { rank, window, .. } = *self.plan;
        let (context, strong, inbox) = (&self.context, Flags::STRONG, self.plan.inbox(rank));
        let (word, to, from) =
            (window.at(inbox + STRONG_WORD), window.at(inbox + SPARE), window.at(self.plan.outbox()));
        match rep % 3 {
            0 => context.signal_at(target, word, STEP, strong)?,
            // In some rounds there are no bytes, so the counter counts the signal.
            1 => {
                let bytes = if rep.is_multiple_of(2) { 8 } else { 0 };
                context.put_signal_at(target, to, from, bytes, word, STEP, Action::counter(0), strong)?
            }
            _ => context.put_value_signal_at(target, to, 1, 8, word, STEP, strong)?,
        }
        let action = Action::signal_add(rank as u16, self.amount(rep));
        match rep % 4 {
            0 => context.signal(target, action, strong),
            1 => context.put(target, to, from, 8, action, strong),
            2 => context.put_value(target, to, 1, 8, action, strong),
            _ => context.put(target, to, from, 8, action.with_counter(0), strong),
        }
    }

    fn refused_strong(&self, target: u32) -> Step {
        let (here, action) = (self.plan.window.at(0), Action::signal_inc(self.plan.rank as u16));
        let results = [
            self.context.signal_at(target, here, STEP, Flags::NONE),
            self.context.put_signal_at(target, here, here, 8, here, STEP, Action::NONE, Flags::NONE),
            self.context.put_value_signal_at(target, here, 1, 8, here, STEP, Flags::NONE),
            self.context.signal(target, action, Flags::STRONG),
            self.context.put(target, here, here, 8, action, Flags::STRONG),
            self.context.put_value(target, here, 1, 8, action, Flags::STRONG),
        ];
        for (at, result) in results.into_iter().enumerate() {
            if result != Err(Status::Unsupported) {
                let (got, expected) = (result.err().map_or(0, |status| status as u64), Status::Unsupported as u64);
                return Err(Failure { verdict: Verdict::Status, peer: target, at: at as u64, expected, got });
            }
        }
        Ok(())
    }

    /// Checks the burst after each strong signal.
    pub(super) fn take_strong(&self, rep: u32) -> Step {
        let sum = |rounds| (0..rounds).map(|round| u64::from(self.amount(round))).sum();
        let words = u64::from(rep).wrapping_mul(STEP);
        for source in self.plan.sources() {
            let inbox = self.plan.inbox(source);
            if self.context.emulates_signals() {
                self.poll_word(inbox + STRONG_WORD, words.wrapping_add(STEP), words, source)?;
                self.expect_burst(source, rep)?;
                self.await_step(source, sum(rep), sum(rep + 1))?;
                self.poll_word(inbox + WEAK_WORD, words.wrapping_add(STEP), words, source)?;
            } else {
                self.await_signal(source, sum(rep + 1), source)?;
            }
            self.expect_burst(source, rep)?;
            self.ack(source)?;
        }
        Ok(())
    }

    /// Waits for a signal that goes from `before` straight to `after`.
    pub(super) fn await_step(&self, id: u32, before: u64, after: u64) -> Step {
        let (mut round, mut began) = (0u32, 0);
        loop {
            let got = self.context.read_signal(id).map_err(|status| Failure::of(status, id))?;
            let failure = |verdict| Failure { verdict, peer: id, at: id.into(), expected: after, got };
            if got == after {
                return self.context.wait_signal(id, after).map_err(|status| Failure::of(status, id));
            }
            if got != before {
                return Err(failure(Verdict::CountWrong));
            }
            if self.late(&mut round, &mut began) {
                return Err(failure(Verdict::CountLate));
            }
        }
    }

    fn expect_burst(&self, source: u32, rep: u32) -> Step {
        let Plan { lane, burst, .. } = *self.plan;
        for k in 0..burst {
            self.expect_word(self.slot(source, rep, k), value(source, lane, rep, k), source)?;
        }
        Ok(())
    }
}
