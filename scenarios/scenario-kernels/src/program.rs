//! The device programs, which use only the device API and plain memory.
//!
//! Most programs consist of rounds: send to the targets, receive from the sources, acknowledge, wait for
//! acknowledgements. EFA delivers in any order, and a signal's count only says how many messages have arrived, so no
//! rank sends the next round before the current one is acknowledged. Signal `s`, below the number of ranks, means that
//! rank `s` has sent; signal `nranks + s` means that rank `s` has read. Each context needs [`signals`] signals.

use crate::api::Context;
use crate::plan::{INBOX, LANE, LARGEST, OUTBOX, Pattern, Plan, Program, Report, Turn, Verdict};
use core::sync::atomic::{AtomicU64, Ordering};
use ferrogin_device::platform::clock_ns;
use ferrogin_device::{Action, Flags, Status};
use ferrogin_ffi::device::DevHandle;

mod async_flush;
mod lanes;
mod measured;
mod refusals;
mod storm;
mod strong;
pub mod workloads;

/// Signals that the programs need in each context.
pub const fn signals(nranks: u32) -> u32 {
    2 * nranks
}

/// Counters that the programs need in each context.
pub const COUNTERS: u32 = 1;

/// Words per lane, which the rounds use in turn.
const SLOTS: u64 = 512;

/// Sizes of puts; large ones are rarer.
const SIZES: [u64; 16] = [8, 1, 64, 7, 4096, 16, 100, 8, 3, 4097, 65_536, 8, 64, 9, 1000, LARGEST];

/// Runs a plan on its context until it ends or fails.
pub fn run(plan: &Plan, context: Result<Context<'_>, Status>) -> Report {
    let mut report = Report { lane: plan.lane, ..Report::PASSED };
    let result = context.map_err(|status| Failure::of(status, plan.rank)).and_then(|context| {
        let run = Run { plan, context };
        (report.began, report.measured) = run.dispatch(&mut report.rep)?;
        Ok(())
    });
    if let Err(failure) = result {
        let Failure { verdict, peer, at, expected, got } = failure;
        report = Report { verdict, peer, at, expected, got, ..report };
    }
    report
}

/// The value that `source` sends as number `k` in round `rep`: unique, never 0, and readable in a report.
pub fn value(source: u32, lane: u32, rep: u32, k: u32) -> u64 {
    (u64::from(source) + 1) << 56 | u64::from(lane & 0xff) << 48 | (u64::from(rep) + 1) << 16 | u64::from(k & 0xffff)
}

/// Word `i` of the buffer that `source` sends as number `k` in round `rep`.
fn pattern_word(source: u32, rep: u32, k: u32, i: u64) -> u64 {
    // splitmix64's finaliser: neighbouring inputs give results that differ in all bytes.
    let mut z = value(source, 0, rep, k).wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

struct Failure {
    verdict: Verdict,
    peer: u32,
    at: u64,
    expected: u64,
    got: u64,
}

impl Failure {
    fn of(status: Status, peer: u32) -> Failure {
        Failure { verdict: Verdict::Status, peer, at: 0, expected: 0, got: status as u64 }
    }
}

type Step = Result<(), Failure>;

#[derive(Clone, Copy)]
struct Run<'a> {
    plan: &'a Plan,
    context: Context<'a>,
}

impl Run<'_> {
    /// Returns the report's `began` and `measured`.
    fn dispatch(&self, rep: &mut u32) -> Result<(u64, u64), Failure> {
        match self.plan.program {
            Program::ValuePoll => self.rounds(rep, Run::send_values, Run::poll_values, |_, _| Ok(()))?,
            Program::ValueSignal => self.rounds(rep, Run::send_signalled, Run::take_signalled, Run::await_acks)?,
            Program::ValueSizes => self.rounds(rep, Run::send_sizes, Run::take_sizes, Run::await_acks)?,
            Program::PutSignal => self.rounds(rep, Run::send_put, Run::take_put, Run::await_acks_and_flush)?,
            Program::FlushReuse => self.rounds(rep, Run::send_reused, Run::take_reused, Run::await_acks)?,
            Program::SignalReset => self.rounds(rep, Run::send_three, Run::take_three, Run::await_acks)?,
            Program::SignalAdd => self.rounds(rep, Run::send_added, Run::take_added, Run::await_acks)?,
            Program::Get => self.rounds(rep, Run::send_ready, Run::take_get, Run::await_acks)?,
            Program::Flood => self.flood(rep)?,
            Program::FlushAsync => self.rounds(rep, Run::send_async, Run::take_async, Run::await_acks)?,
            Program::BadInput => self.rounds(rep, Run::send_refused, Run::take_nothing, Run::await_acks)?,
            Program::Lanes => self.together(rep)?,
            Program::Strong => self.rounds(rep, Run::send_strong, Run::take_strong, Run::await_acks_and_flush)?,
            Program::ValueStorm => self.storm(rep, false)?,
            Program::ValueStormSignal => self.storm(rep, true)?,
            Program::Latency => self.latencies()?,
            Program::Stream => return self.stream(),
            Program::Barrier => self.barriers(rep)?,
            Program::BarrierOfValues => self.barriers_of_values(rep)?,
            Program::AllToAll => self.all_to_all(rep)?,
            Program::ResetSignals => self.reset_signals(self.plan.measured.signals)?,
            Program::ReadSignal => return self.read_signal(),
            Program::Reset => return self.reset(),
            Program::Barriers => self.workload(rep, Run::exchange)?,
            Program::DeepEp => self.workload(rep, Run::deep_ep)?,
            Program::DeepEpIndexed => self.workload(rep, Run::deep_ep_indexed)?,
            Program::NcclEp => self.workload(rep, Run::nccl_ep)?,
        }
        self.flush()?;
        Ok((0, 0))
    }

    fn rounds(
        &self,
        rep: &mut u32,
        // Not function pointers, so that the kernel has no indirect calls.
        send: impl Fn(&Self, u32) -> Step,
        receive: impl Fn(&Self, u32) -> Step,
        finish: impl Fn(&Self, u32) -> Step,
    ) -> Step {
        for round in 0..self.plan.reps {
            *rep = round;
            match self.plan.turn {
                Turn::First => {
                    send(self, round)?;
                    receive(self, round)?;
                }
                Turn::Second => {
                    receive(self, round)?;
                    send(self, round)?;
                }
            }
            finish(self, round)?;
        }
        Ok(())
    }

    fn flush(&self) -> Step {
        self.context.flush().map_err(|status| Failure::of(status, self.plan.rank))
    }

    fn flags(&self, k: u32) -> Flags {
        if self.plan.aggregate != 0 && k + 1 < self.plan.burst { Flags::AGGREGATE } else { Flags::NONE }
    }

    /// Offset in the window of value `k` of a round.
    fn slot(&self, source: u32, rep: u32, k: u32) -> u64 {
        let index = u64::from(rep) * u64::from(self.plan.burst) + u64::from(k);
        self.plan.inbox(source) + index % SLOTS * 8
    }

    fn put_value(&self, peer: u32, offset: u64, value: u64, bytes: u32, action: Action, flags: Flags) -> Step {
        let window = self.plan.window;
        let posted = self.context.put_value(peer, window.at(offset), value, bytes, action, flags);
        posted.map_err(|status| Failure::of(status, peer))
    }

    fn put(&self, peer: u32, to: u64, from: u64, bytes: u64, action: Action, flags: Flags) -> Step {
        let window = self.plan.window;
        let posted = self.context.put(peer, window.at(to), window.at(from), bytes, action, flags);
        posted.map_err(|status| Failure::of(status, peer))
    }

    fn raise(&self, peer: u32, action: Action) -> Step {
        self.context.signal(peer, action, Flags::NONE).map_err(|status| Failure::of(status, peer))
    }

    /// The action that signals that this rank has sent.
    fn sent(&self) -> Action {
        Action::signal_inc(self.plan.rank as u16)
    }

    /// Signals `source` that this rank has read.
    fn ack(&self, source: u32) -> Step {
        self.raise(source, Action::signal_inc((self.plan.nranks + self.plan.rank) as u16))
    }

    fn await_acks(&self, rep: u32) -> Step {
        for target in self.plan.targets() {
            self.await_signal(self.plan.nranks + target, u64::from(rep) + 1, target)?;
        }
        Ok(())
    }

    fn await_acks_and_flush(&self, rep: u32) -> Step {
        self.await_acks(rep)?;
        self.flush()
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8));
        let at = self.plan.memory.wrapping_add(offset as usize).cast::<u64>();
        // SAFETY: the word is aligned and within the window, which `World` keeps mapped during the run. The access is
        // atomic, because the card writes the word concurrently.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn load(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn store(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    /// Polls a word until its value is `expected`. Until then it may only be `before`.
    fn poll_word(&self, offset: u64, expected: u64, before: u64, peer: u32) -> Step {
        let (mut round, mut began) = (0u32, 0);
        loop {
            let got = self.load(offset);
            if got == expected {
                return Ok(());
            }
            let failure = |verdict| Failure { verdict, peer, at: offset, expected, got };
            if got != before {
                return Err(failure(Verdict::Wrong));
            }
            if self.late(&mut round, &mut began) {
                return Err(failure(Verdict::Late));
            }
        }
    }

    fn late(&self, round: &mut u32, began: &mut u64) -> bool {
        match *round {
            0 => *began = clock_ns(),
            r if r % 64 == 0 && self.must_stop(*began) => return true,
            _ => {}
        }
        self.context.relax(*round);
        *round = round.saturating_add(1);
        false
    }

    fn must_stop(&self, began: u64) -> bool {
        let has_failed = || self.plan.program.is_workload() && self.load(self.plan.stop()) != 0;
        clock_ns().wrapping_sub(began) > self.plan.deadline_ns || has_failed()
    }

    /// Waits for a signal with this program's deadline, so that its count can be reported, then as kernels do. The
    /// deadline restarts with each increment, because the peer may have a whole program to run before the last one.
    fn await_signal(&self, id: u32, least: u64, peer: u32) -> Step {
        let (mut round, mut began, mut before) = (0u32, 0, 0);
        loop {
            let got = self.context.read_signal(id).map_err(|status| Failure::of(status, peer))?;
            if got >= least {
                break;
            }
            if got != before {
                (before, began) = (got, clock_ns());
            }
            if self.late(&mut round, &mut began) {
                return Err(Failure { verdict: Verdict::CountLate, peer, at: id.into(), expected: least, got });
            }
        }
        self.context.wait_signal(id, least).map_err(|status| Failure::of(status, peer))
    }

    fn exactly(&self, id: u32, expected: u64, got: Result<u64, Status>, peer: u32) -> Step {
        let got = got.map_err(|status| Failure::of(status, peer))?;
        if got == expected {
            return Ok(());
        }
        Err(Failure { verdict: Verdict::CountWrong, peer, at: id.into(), expected, got })
    }

    fn expect_word(&self, offset: u64, expected: u64, peer: u32) -> Step {
        let got = self.load(offset);
        if got == expected {
            return Ok(());
        }
        Err(Failure { verdict: Verdict::Wrong, peer, at: offset, expected, got })
    }

    fn send_values(&self, rep: u32) -> Step {
        for target in self.plan.targets() {
            self.send_burst(target, rep, Action::NONE)?;
        }
        Ok(())
    }

    fn send_burst(&self, target: u32, rep: u32, action: Action) -> Step {
        let Plan { rank, lane, burst, .. } = *self.plan;
        for k in 0..burst {
            self.put_value(target, self.slot(rank, rep, k), value(rank, lane, rep, k), 8, action, self.flags(k))?;
        }
        Ok(())
    }

    fn poll_values(&self, rep: u32) -> Step {
        let Plan { lane, burst, .. } = *self.plan;
        for source in self.plan.sources() {
            for k in 0..burst {
                let index = u64::from(rep) * u64::from(burst) + u64::from(k);
                let before = match index.checked_sub(SLOTS) {
                    None => 0,
                    Some(index) => {
                        value(source, lane, (index / u64::from(burst)) as u32, (index % u64::from(burst)) as u32)
                    }
                };
                self.poll_word(self.slot(source, rep, k), value(source, lane, rep, k), before, source)?;
            }
        }
        Ok(())
    }

    fn send_signalled(&self, rep: u32) -> Step {
        for target in self.plan.targets() {
            self.send_burst(target, rep, self.sent())?;
        }
        Ok(())
    }

    fn take_signalled(&self, rep: u32) -> Step {
        let Plan { lane, burst, .. } = *self.plan;
        for source in self.plan.sources() {
            self.await_signal(source, u64::from(burst) * (u64::from(rep) + 1), source)?;
            for k in 0..burst {
                self.expect_word(self.slot(source, rep, k), value(source, lane, rep, k), source)?;
            }
            self.ack(source)?;
        }
        Ok(())
    }

    /// Value `k` is `SIZE_OF[k]` bytes at byte `SIZE_AT[k]` of its 16-byte cell.
    const SIZE_AT: [u64; 4] = [3, 2, 4, 8];
    const SIZE_OF: [u32; 4] = [1, 2, 4, 8];

    fn send_sizes(&self, rep: u32) -> Step {
        let rank = self.plan.rank;
        for target in self.plan.targets() {
            for k in 0..4u32 {
                let (at, bytes) = (Self::SIZE_AT[k as usize], Self::SIZE_OF[k as usize]);
                let offset = self.plan.inbox(rank) + u64::from(k) * 16 + at;
                self.put_value(target, offset, pattern_word(rank, rep, k, 0), bytes, self.sent(), Flags::NONE)?;
            }
        }
        Ok(())
    }

    fn take_sizes(&self, rep: u32) -> Step {
        for source in self.plan.sources() {
            self.await_signal(source, 4 * (u64::from(rep) + 1), source)?;
            for k in 0..4u32 {
                let (at, bytes) = (Self::SIZE_AT[k as usize] as usize, Self::SIZE_OF[k as usize] as usize);
                let mut cell = [0u8; 16];
                cell[at..at + bytes].copy_from_slice(&pattern_word(source, rep, k, 0).to_le_bytes()[..bytes]);
                let (low, high) = cell.split_at(8);
                let offset = self.plan.inbox(source) + u64::from(k) * 16;
                for (at, half) in [(offset, low), (offset + 8, high)] {
                    let mut word = [0; 8];
                    word.copy_from_slice(half);
                    self.expect_word(at, u64::from_le_bytes(word), source)?;
                }
            }
            self.ack(source)?;
        }
        Ok(())
    }

    /// Fills the outbox from `offset`, in whole words, with a buffer of `bytes`.
    fn fill(&self, offset: u64, bytes: u64, rep: u32, k: u32) {
        for i in 0..bytes.div_ceil(8) {
            self.store(offset + i * 8, pattern_word(self.plan.rank, rep, k, i));
        }
    }

    /// Checks a buffer of `bytes`. The bytes after it, up to a whole word, must be 0.
    fn expect_buffer(&self, offset: u64, bytes: u64, source: u32, rep: u32, k: u32) -> Step {
        for i in 0..bytes.div_ceil(8) {
            let word = pattern_word(source, rep, k, i);
            let left = bytes - i * 8;
            let expected = if left < 8 { word & ((1 << (left * 8)) - 1) } else { word };
            self.expect_word(offset + i * 8, expected, source)?;
        }
        Ok(())
    }

    /// Clears a buffer's words for the next round, whose buffer may be shorter.
    fn clear(&self, offset: u64, bytes: u64) {
        for i in 0..bytes.div_ceil(8) {
            self.store(offset + i * 8, 0);
        }
    }

    fn size_of_round(rep: u32) -> u64 {
        SIZES[rep as usize % SIZES.len()]
    }

    fn send_put(&self, rep: u32) -> Step {
        let Plan { rank, .. } = *self.plan;
        let bytes = Self::size_of_round(rep);
        let from = self.plan.outbox();
        self.fill(from, bytes, rep, 0);
        for target in self.plan.targets() {
            self.put(target, self.plan.inbox(rank), from, bytes, self.sent(), Flags::NONE)?;
        }
        Ok(())
    }

    fn take_put(&self, rep: u32) -> Step {
        let bytes = Self::size_of_round(rep);
        for source in self.plan.sources() {
            let inbox = self.plan.inbox(source);
            self.await_signal(source, u64::from(rep) + 1, source)?;
            self.expect_buffer(inbox, bytes, source, rep, 0)?;
            self.clear(inbox, bytes);
            self.ack(source)?;
        }
        Ok(())
    }

    fn send_ready(&self, rep: u32) -> Step {
        self.fill(self.plan.outbox(), Self::size_of_round(rep), rep, 0);
        for target in self.plan.targets() {
            self.raise(target, self.sent())?;
        }
        Ok(())
    }

    fn take_get(&self, rep: u32) -> Step {
        let bytes = Self::size_of_round(rep);
        let window = self.plan.window;
        for source in self.plan.sources() {
            let inbox = self.plan.inbox(source);
            self.await_signal(source, u64::from(rep) + 1, source)?;
            let got = self.context.get(source, window.at(self.plan.outbox()), window.at(inbox), bytes, Flags::NONE);
            got.map_err(|status| Failure::of(status, source))?;
            self.flush()?;
            self.expect_buffer(inbox, bytes, source, rep, 0)?;
            self.clear(inbox, bytes);
            self.ack(source)?;
        }
        Ok(())
    }

    const REUSED: u64 = 256;

    fn send_reused(&self, rep: u32) -> Step {
        let Plan { rank, burst, .. } = *self.plan;
        let from = self.plan.outbox();
        for target in self.plan.targets() {
            for k in 0..burst {
                self.fill(from, Self::REUSED, rep, k);
                let to = self.plan.inbox(rank) + u64::from(k) * Self::REUSED;
                self.put(target, to, from, Self::REUSED, Action::NONE, Flags::NONE)?;
                self.flush()?;
                for i in 0..Self::REUSED / 8 {
                    self.store(from + i * 8, !0);
                }
            }
            // A weak signal after a flush proves that all earlier data has arrived.
            self.raise(target, self.sent())?;
        }
        Ok(())
    }

    fn take_reused(&self, rep: u32) -> Step {
        for source in self.plan.sources() {
            self.await_signal(source, u64::from(rep) + 1, source)?;
            for k in 0..self.plan.burst {
                let at = self.plan.inbox(source) + u64::from(k) * Self::REUSED;
                self.expect_buffer(at, Self::REUSED, source, rep, k)?;
            }
            self.ack(source)?;
        }
        Ok(())
    }

    fn send_three(&self, _rep: u32) -> Step {
        for target in self.plan.targets() {
            for _ in 0..3 {
                self.raise(target, self.sent())?;
            }
        }
        Ok(())
    }

    fn take_three(&self, _rep: u32) -> Step {
        for source in self.plan.sources() {
            self.await_signal(source, 3, source)?;
            self.exactly(source, 3, self.context.read_signal(source), source)?;
            self.context.reset_signal(source).map_err(|status| Failure::of(status, source))?;
            self.exactly(source, 0, self.context.read_signal(source), source)?;
            self.ack(source)?;
        }
        Ok(())
    }

    fn send_added(&self, rep: u32) -> Step {
        let Plan { rank, lane, .. } = *self.plan;
        let id = rank as u16;
        for target in self.plan.targets() {
            let offset = self.slot(rank, rep, 0);
            let word = value(rank, lane, rep, 0);
            self.put_value(target, offset, word, 8, Action::signal_add(id, 4), Flags::NONE)?;
            self.raise(target, Action::signal_add(id, 0))?;
            self.raise(target, Action::signal_add(id, 1))?;
        }
        Ok(())
    }

    fn take_added(&self, rep: u32) -> Step {
        for source in self.plan.sources() {
            let total = 5 * (u64::from(rep) + 1);
            self.await_signal(source, total, source)?;
            self.expect_word(self.slot(source, rep, 0), value(source, self.plan.lane, rep, 0), source)?;
            self.exactly(source, total, self.context.read_signal(source), source)?;
            self.ack(source)?;
        }
        Ok(())
    }

    /// All ranks post at once: alternating values and puts with a signal, and some puts with a counter.
    fn flood(&self, rep: &mut u32) -> Step {
        let Plan { rank, reps, .. } = *self.plan;
        let outbox = self.plan.outbox();
        let counted_at = INBOX / 2;
        for i in 0..reps {
            self.store(outbox + u64::from(i) * 8, value(rank, 0, i, 1));
        }
        let mut counted = 0;
        for i in 0..reps {
            *rep = i;
            let at = self.plan.inbox(rank) + u64::from(i) * 8;
            let from = outbox + u64::from(i) * 8;
            for target in self.plan.targets() {
                if i % 2 == 0 {
                    self.put_value(target, at, value(rank, 0, i, 1), 8, self.sent(), Flags::NONE)?;
                } else {
                    self.put(target, at, from, 8, self.sent(), Flags::NONE)?;
                }
                if i % 4 == 0 {
                    self.put(target, counted_at + at, from, 8, Action::counter(0), Flags::NONE)?;
                    counted += 1;
                }
            }
        }
        self.flush()?;
        self.exactly(0, counted, self.context.read_counter(0), rank)?;
        for source in self.plan.sources() {
            self.await_signal(source, reps.into(), source)?;
            self.exactly(source, reps.into(), self.context.read_signal(source), source)?;
            for i in 0..reps {
                *rep = i;
                let at = self.plan.inbox(source) + u64::from(i) * 8;
                self.expect_word(at, value(source, 0, i, 1), source)?;
                if i % 4 == 0 {
                    self.poll_word(counted_at + at, value(source, 0, i, 1), 0, source)?;
                }
            }
        }
        Ok(())
    }

    fn reset(&self) -> Result<(u64, u64), Failure> {
        let failed = |status| Failure::of(status, self.plan.rank);
        self.reset_signals(self.plan.measured.signals)?;
        for counter in 0..COUNTERS {
            self.context.reset_counter(counter).map_err(failed)?;
        }
        let handle = self.plan.handle.cast::<DevHandle>();
        // SAFETY: the context is open, so the handle is the plugin's, and this field is constant.
        Ok((0, unsafe { (*handle).pvdata.sq_size }.into()))
    }
}

// The largest put, and all of a flood's writes, end before the inbox's guard.
const _: () = assert!(LARGEST + crate::plan::GUARD <= INBOX && LANE >= SLOTS * 8 && LARGEST <= OUTBOX);
const _: () = assert!(OUTBOX >= INBOX, "every lane has a part of the outbox, too");
// In a ring, a rank gets ahead of its source by less than the number of ranks, which is less than a lap.
const _: () = assert!(SLOTS >= 64 && Pattern::Ring as u32 == 0);
