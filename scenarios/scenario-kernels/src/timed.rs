//! Timed operations between two ranks: the measuring loops of the demo and `ferrogin perf`.

use crate::api::Context;
use crate::plan::Operation;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use ferrogin_device::platform::clock_ns;
use ferrogin_device::{Action, Flags, Status, Window};

/// Words that one lane's values use in turn.
pub const VALUE_SLOTS: u32 = 512;

/// One thread's part of an operation: its places in the window, and its peer.
#[derive(Clone, Copy)]
pub struct Lane<'a> {
    /// The context that the thread posts on.
    pub context: Context<'a>,
    /// The other rank.
    pub peer: u32,
    /// The window, on both ranks.
    pub window: Window,
    /// The memory of this rank's window.
    pub memory: *mut u8,
    /// Offset of the bytes to send, and of those that the peer gets.
    pub from: u64,
    /// Offset on the peer that this thread writes to.
    pub to: u64,
    /// Offset on this rank that the peer writes to, and that this thread's gets write to. A multiple of 8.
    pub inbox: u64,
    /// Bytes per operation.
    pub bytes: u64,
    /// The peer's signal that this thread raises.
    pub raised: u16,
    /// The signal that the peer raises.
    pub awaited: u32,
    /// Time limit of one wait, in nanoseconds.
    pub deadline_ns: u64,
}

// SAFETY: the address is that of a window, which its owner keeps mapped while lanes exist, and all accesses are atomic.
unsafe impl Send for Lane<'_> {}
// SAFETY: the address is that of a window, which its owner keeps mapped while lanes exist, and all accesses are atomic.
unsafe impl Sync for Lane<'_> {}

impl Lane<'_> {
    /// Runs `warmup` rounds, then `rounds` more, and calls `sample` with the latency of each of the latter. If only the
    /// first rank measures, does nothing on the second.
    ///
    /// # Errors
    /// An operation fails, or the peer does not answer in time.
    pub fn latencies(
        &self,
        operation: Operation,
        first: bool,
        (warmup, rounds): (u32, u32),
        mut sample: impl FnMut(u64),
    ) -> Result<(), Status> {
        self.context.set_timeout_ns(self.deadline_ns);
        let is_answered = matches!(operation, Operation::PutSignal | Operation::PutValue | Operation::Signal);
        if !first && !is_answered {
            return Ok(());
        }
        for round in 0..warmup + rounds {
            let latency = if is_answered {
                self.round_trip(operation, first, round)? / 2
            } else {
                self.completion(operation, round)?
            };
            if round >= warmup {
                sample(latency);
            }
        }
        self.context.flush()
    }

    /// The first rank sends, and the second one answers.
    fn round_trip(&self, operation: Operation, first: bool, round: u32) -> Result<u64, Status> {
        let start = clock_ns();
        if first {
            self.post(operation, round, false, Flags::NONE)?;
        }
        match operation {
            Operation::PutValue => self.poll_value(round)?,
            _ => self.context.wait_signal(self.awaited, u64::from(round) + 1)?,
        }
        if !first {
            self.post(operation, round, false, Flags::NONE)?;
        }
        Ok(clock_ns().wrapping_sub(start))
    }

    fn completion(&self, operation: Operation, round: u32) -> Result<u64, Status> {
        let mut start = clock_ns();
        self.post(operation, round, false, Flags::NONE)?;
        if operation == Operation::Flush {
            start = clock_ns();
        }
        self.context.flush()?;
        Ok(clock_ns().wrapping_sub(start))
    }

    /// The first rank posts `warmup` operations and flushes, then does the same with `posts` as fast as it can; the
    /// second one waits for the signals, if the operation has any. In each `burst` of posts, all but the last have the
    /// aggregate flag. Returns the times of the first post after the warm-up and of the end of the flush.
    ///
    /// # Errors
    /// An operation fails, or the peer does not post in time.
    pub fn stream(
        &self,
        operation: Operation,
        first: bool,
        (warmup, posts): (u32, u32),
        burst: u32,
    ) -> Result<Range<u64>, Status> {
        self.context.set_timeout_ns(self.deadline_ns);
        let mut begin = clock_ns();
        if first {
            for rounds in [0..warmup, warmup..warmup + posts] {
                begin = clock_ns();
                for round in rounds.clone() {
                    let is_last = (round - rounds.start) % burst + 1 == burst;
                    let flags = if is_last { Flags::NONE } else { Flags::AGGREGATE };
                    self.post(operation, round, true, flags)?;
                }
                self.context.flush()?;
            }
        } else if matches!(operation, Operation::PutSignal | Operation::PutValue | Operation::Signal) {
            self.await_signals((warmup + posts).into())?;
        }
        Ok(begin..clock_ns())
    }

    /// Waits for all of a stream's signals. The time limit restarts with each increment.
    fn await_signals(&self, least: u64) -> Result<(), Status> {
        let mut before = 0;
        loop {
            match self.context.wait_signal(self.awaited, least) {
                Err(Status::Timeout) => {
                    let count = self.context.read_signal(self.awaited)?;
                    if count == before {
                        return Err(Status::Timeout);
                    }
                    before = count;
                }
                result => return result,
            }
        }
    }

    fn post(&self, operation: Operation, round: u32, in_stream: bool, flags: Flags) -> Result<(), Status> {
        let Lane { context, peer, window, bytes, .. } = *self;
        let (to, from) = (window.at(self.to), window.at(self.from));
        let signal = Action::signal_inc(self.raised);
        match operation {
            Operation::Put | Operation::Flush => context.put(peer, to, from, bytes, Action::NONE, flags),
            Operation::PutSignal => context.put(peer, to, from, bytes, signal, flags),
            Operation::PutValue => {
                let to = window.at(self.to + value_offset(round));
                let action = if in_stream { signal } else { Action::NONE };
                context.put_value(peer, to, value(round, bytes), bytes as u32, action, flags)
            }
            Operation::Get => context.get(peer, from, window.at(self.inbox), bytes, flags),
            Operation::Signal => context.signal(peer, signal, flags),
        }
    }

    /// Polls memory for the value of a round.
    fn poll_value(&self, round: u32) -> Result<(), Status> {
        let at = self.memory.wrapping_add((self.inbox + value_offset(round)) as usize).cast::<u64>();
        // SAFETY: the word is aligned and within the window, which its owner keeps mapped while lanes exist. The access
        // is atomic, because the card writes the word concurrently.
        let word = unsafe { AtomicU64::from_ptr(at) };
        let expected = value(round, self.bytes);
        let (mut pauses, mut began) = (0u32, 0);
        while word.load(Ordering::Acquire) & mask(self.bytes) != expected {
            match pauses {
                0 => began = clock_ns(),
                n if n % 64 == 0 && clock_ns().wrapping_sub(began) > self.deadline_ns => return Err(Status::Timeout),
                _ => {}
            }
            self.context.relax(pauses);
            pauses = pauses.saturating_add(1);
        }
        Ok(())
    }
}

/// A round's value: nonzero, and different from the previous value in the same place.
pub fn value(round: u32, bytes: u64) -> u64 {
    let lap = round / VALUE_SLOTS;
    (u64::from(lap % 255 + 1) * 0x0101_0101_0101_0101) & mask(bytes)
}

/// Offset of a round's value in the inbox.
pub fn value_offset(round: u32) -> u64 {
    u64::from(round % VALUE_SLOTS) * 8
}

fn mask(bytes: u64) -> u64 {
    u64::MAX >> (64 - 8 * bytes.clamp(1, 8))
}

/// Repetitions for operations of `bytes`: one large put takes as long as many small ones.
pub fn repetitions(of_small: u32, bytes: u64) -> u32 {
    let divisor = (bytes / (16 << 10)).clamp(1, u32::MAX.into()) as u32;
    (of_small / divisor).max(50)
}

/// The smallest sample that at least `per_mille` of all samples do not exceed; 0 without samples.
pub fn percentile(sorted: &[u64], per_mille: usize) -> u64 {
    let index = (sorted.len() * per_mille).div_ceil(1000).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_sample_values() {
        let sorted: Vec<u64> = (1..=2000).collect();
        let of = |per_mille| percentile(&sorted, per_mille);
        assert_eq!((of(500), of(990), of(999), of(1000)), (1000, 1980, 1998, 2000));
        assert_eq!((percentile(&[7], 500), percentile(&[7], 999), percentile(&[], 500)), (7, 7, 0));
    }

    #[test]
    fn consecutive_values_of_a_place_differ() {
        for bytes in [1, 2, 4, 8] {
            for round in 0..300 * VALUE_SLOTS {
                let next = round + VALUE_SLOTS;
                assert_eq!(value_offset(round), value_offset(next));
                assert_ne!(value(round, bytes), 0);
                assert_ne!(value(round, bytes), value(next, bytes), "round {round}, {bytes} bytes");
            }
        }
    }

    #[test]
    fn large_operations_have_fewer_repetitions() {
        let of = |bytes| repetitions(2000, bytes);
        assert_eq!((of(8), of(16 << 10), of(64 << 10), of(1 << 20), of(1 << 40)), (2000, 2000, 500, 50, 50));
    }
}
