//! What a device program is told and what it tells: plain data, the same for CPU threads and for a kernel launch.

use ferrogin_device::Window;
use std::ffi::c_void;

/// Bytes of the window that each peer may write on a rank.
pub const INBOX: u64 = 2 << 20;
/// Last bytes of each inbox: nobody may write them.
pub const GUARD: u64 = 4096;
/// Byte of the guards.
pub const GUARD_BYTE: u8 = 0xa5;
/// Bytes of the window that a rank sends from, behind the inboxes.
pub const OUTBOX: u64 = 2 << 20;
/// Bytes of an inbox that one lane uses, where a program has lanes.
pub const LANE: u64 = 64 << 10;
/// Largest put.
pub const LARGEST: u64 = 1 << 20;

/// Device programs; see [`program`](crate::program).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Program {
    /// Values without a signal; the receiver polls memory.
    ValuePoll = 0,
    /// Values with a signal; the receiver waits for it, then finds them.
    ValueSignal,
    /// Values of 1, 2, 4 and 8 bytes between bytes that must not change.
    ValueSizes,
    /// Buffers of many sizes with a signal.
    PutSignal,
    /// Puts whose source changes right after a flush, then a signal.
    FlushReuse,
    /// Many times more posts than the ring has slots, without a pause.
    Flood,
    /// Signals that are reset each round.
    SignalReset,
    /// Signals raised by five, and by nothing.
    SignalAdd,
    /// Buffers of many sizes that the receiver gets, once a signal says that they are ready.
    Get,
    /// Values to and fro; samples round trips.
    PingPongValue,
    /// Puts with a signal to and fro; samples round trips.
    PingPongPut,
    /// Rank 0 posts values, aggregated by `burst`, then flushes; measures the time of all.
    StreamValue,
    /// Rank 0 posts puts with a signal, then flushes; measures the time of all.
    StreamPut,
    /// Threads of a rank post values on one endpoint and flush at different times; after each flush the values are read
    /// back from the peer.
    ValueStorm,
    /// The same, each value with a signal.
    ValueStormSignal,
    /// Puts whose source changes after the wait for a flush that was begun before more was posted.
    FlushAsync,
    /// Operations that must be refused, and do nothing.
    BadInput,
}

/// Whether a rank of a round sends before it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Turn {
    /// Send, then receive.
    First = 0,
    /// Receive, then send.
    Second,
}

/// Who sends to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Pattern {
    /// To the next rank, from the one before.
    Ring = 0,
    /// To and from every other rank.
    AllPairs,
}

/// A program's arguments.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Plan {
    /// What to run.
    pub program: Program,
    /// Order within a round.
    pub turn: Turn,
    /// Who sends to whom.
    pub pattern: Pattern,
    /// Context of the handle.
    pub context_id: u32,
    /// Device contexts, as the plugin gave them.
    pub handle: *mut c_void,
    /// The window, on every rank: [`INBOX`] bytes for each rank, then [`OUTBOX`] bytes.
    pub window: Window,
    /// This rank's window as memory.
    pub memory: *mut u8,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub nranks: u32,
    /// Rounds.
    pub reps: u32,
    /// Values or puts of a round.
    pub burst: u32,
    /// Not 0: all but the last of a round's values are posted with the aggregate flag.
    pub aggregate: u32,
    /// Sharing mode, as flags of the device API: see [`ferrogin_device::Flags`].
    pub sharing: u32,
    /// Part of the inbox that this thread uses.
    pub lane: u32,
    /// Threads of each rank.
    pub lanes: u32,
    /// Bytes of a put, where the program does not choose.
    pub bytes: u32,
    /// Rounds that are not sampled.
    pub warmup: u32,
    /// Nanoseconds that one wait may last.
    pub deadline_ns: u64,
    /// `[reps - warmup]` times in nanoseconds, or null.
    pub samples: *mut u64,
}

// SAFETY: a plan is addresses that outlive the run of it; the program's accesses are volatile or atomic.
#[allow(unsafe_code)]
unsafe impl Send for Plan {}

impl Plan {
    /// First byte, in every window, of what `rank` may write.
    pub fn inbox(&self, rank: u32) -> u64 {
        u64::from(rank) * INBOX + u64::from(self.lane) * LANE
    }

    /// First byte, in every window, of what its owner sends from.
    pub fn outbox(&self) -> u64 {
        u64::from(self.nranks) * INBOX
    }

    /// Peers that this rank sends to, in order.
    pub fn targets(&self) -> impl Iterator<Item = u32> {
        let (rank, nranks) = (self.rank, self.nranks);
        self.distances().map(move |distance| (rank + distance) % nranks)
    }

    /// Peers that this rank receives from, in order.
    pub fn sources(&self) -> impl Iterator<Item = u32> {
        let (rank, nranks) = (self.rank, self.nranks);
        self.distances().map(move |distance| (rank + nranks - distance) % nranks)
    }

    fn distances(&self) -> core::ops::Range<u32> {
        match self.pattern {
            Pattern::Ring => 1..2,
            Pattern::AllPairs => 1..self.nranks,
        }
    }
}

/// Why a program stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Verdict {
    /// It did not: all repetitions passed.
    Passed = 0,
    /// An operation of the device API returned a status; `got` is it.
    Status,
    /// Memory did not take the expected value in time.
    Late,
    /// Memory has a value that nobody should have put there.
    Wrong,
    /// A signal or counter did not reach its value in time.
    CountLate,
    /// A signal or counter is beyond its value.
    CountWrong,
}

/// A program's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    /// Why it stopped.
    pub verdict: Verdict,
    /// Repetition in which it did.
    pub rep: u32,
    /// The peer concerned.
    pub peer: u32,
    /// Thread of the rank.
    pub lane: u32,
    /// Offset in the window; or the number of the signal or counter.
    pub at: u64,
    /// What should have been there.
    pub expected: u64,
    /// What was.
    pub got: u64,
    /// Nanoseconds from the first operation to the last, where the program measures.
    pub elapsed_ns: u64,
}

impl Report {
    /// Nothing happened yet.
    pub const PASSED: Report =
        Report { verdict: Verdict::Passed, rep: 0, peer: 0, lane: 0, at: 0, expected: 0, got: 0, elapsed_ns: 0 };

    /// It passed.
    pub fn passed(&self) -> bool {
        self.verdict == Verdict::Passed
    }

    /// One line for people; `rank` is the one that reports.
    pub fn describe(&self, rank: usize) -> String {
        let Report { rep, peer, lane, at, expected, got, .. } = *self;
        let who = format!("rank {rank} (thread {lane}), repetition {rep}, with rank {peer}");
        match self.verdict {
            Verdict::Passed => format!("rank {rank} passed"),
            Verdict::Status => format!("{who}: status {got} of the device API: {}", status_text(got)),
            Verdict::Late => format!("{who}: window offset {at}: waited for {expected:#018x}, still has {got:#018x}"),
            Verdict::Wrong => format!("{who}: window offset {at}: expected {expected:#018x}, got {got:#018x}"),
            Verdict::CountLate => format!("{who}: signal or counter {at}: waited for {expected}, still at {got}"),
            Verdict::CountWrong => format!("{who}: signal or counter {at}: expected exactly {expected}, got {got}"),
        }
    }
}

fn status_text(code: u64) -> &'static str {
    use ferrogin_device::Status;
    let all = [
        Status::InvalidArgument,
        Status::Unsupported,
        Status::Aborted,
        Status::Timeout,
        Status::CardError,
        Status::Poisoned,
    ];
    all.into_iter().find(|status| *status as u64 == code).map_or("unknown", Status::text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_pair_targets_with_sources() {
        for pattern in [Pattern::Ring, Pattern::AllPairs] {
            for nranks in 2..6 {
                for rank in 0..nranks {
                    for target in plan(rank, nranks, pattern).targets() {
                        assert_ne!(target, rank);
                        assert!(plan(target, nranks, pattern).sources().any(|source| source == rank));
                    }
                }
            }
        }
    }

    fn plan(rank: u32, nranks: u32, pattern: Pattern) -> Plan {
        Plan {
            program: Program::ValuePoll,
            turn: Turn::First,
            pattern,
            context_id: 0,
            handle: std::ptr::null_mut(),
            window: Window(std::ptr::null_mut()),
            memory: std::ptr::null_mut(),
            rank,
            nranks,
            reps: 1,
            burst: 1,
            aggregate: 0,
            sharing: 0,
            lane: 0,
            lanes: 1,
            bytes: 8,
            warmup: 0,
            deadline_ns: 1,
            samples: std::ptr::null_mut(),
        }
    }

    #[test]
    fn reports_name_rank_repetition_and_values() {
        let report =
            Report { verdict: Verdict::Wrong, rep: 17, peer: 3, at: 64, expected: 1, got: 2, ..Report::PASSED };
        let text = report.describe(1);
        for part in ["rank 1", "repetition 17", "rank 3", "64", "0x0000000000000001", "0x0000000000000002"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
