//! A device program's arguments and result: plain data, the same for CPU threads and for a kernel launch.

use core::ffi::c_void;
use ferrogin_device::{Status, Window};

/// Bytes of the window that each peer may write on a rank.
pub const INBOX: u64 = 2 << 20;
/// Bytes at the end of each inbox that no program writes.
pub const GUARD: u64 = 4096;
/// The value of every guard byte.
pub const GUARD_BYTE: u8 = 0xa5;
/// Bytes of the window, after the inboxes, that a rank sends from.
pub const OUTBOX: u64 = 2 << 20;
/// Bytes of an inbox per lane, in programs with lanes.
pub const LANE: u64 = 8 << 10;
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
    /// Puts whose source changes immediately after a flush, then a signal.
    FlushReuse,
    /// Back-to-back posts, many times more than the ring has slots.
    Flood,
    /// Signals that are reset each round.
    SignalReset,
    /// Signals raised by 4, 0 and 1.
    SignalAdd,
    /// Buffers of many sizes, which the receiver gets after a signal.
    Get,
    /// Samples latencies of [`Measured::operation`] between ranks 0 and 1.
    Latency,
    /// Rank 0 posts [`Measured::operation`], aggregated by `burst`, then flushes; measures the time of those after the
    /// warm-up.
    Stream,
    /// Samples barriers of all ranks.
    Barrier,
    /// Barriers; after each one, the values that all ranks wrote before it must have arrived.
    BarrierOfValues,
    /// Samples exchanges in which each rank sends a block to every other rank.
    AllToAll,
    /// Resets the signals below [`Measured::signals`].
    ResetSignals,
    /// Reads the signal [`Measured::awaited`].
    ReadSignal,
    /// A rank's threads post values on one endpoint and flush at different times; after each flush the values are read
    /// back from the peer.
    ValueStorm,
    /// Like `ValueStorm`, but each value has a signal.
    ValueStormSignal,
    /// Puts whose source changes once an earlier asynchronous flush is done; more puts follow that flush.
    FlushAsync,
    /// Operations that the device API must refuse.
    BadInput,
    /// A rank's threads post together, as a warp's lanes on a GPU: values, puts and signals to different peers and
    /// queues.
    Lanes,
    /// Puts and values, then a signal that covers all of them: strong if signals are emulated, otherwise after a flush.
    Strong,
    /// Resets signals and counters, and reads the value endpoint's number of slots.
    Reset,
    /// Barriers and all-to-all, as in NCCL's device code and examples.
    Barriers,
    /// Token dispatch and combine in DeepEP's pattern.
    DeepEp,
    /// Token dispatch in the pattern of Amazon's DeepEP variant, without signals in memory.
    DeepEpIndexed,
    /// Token dispatch in nccl_ep's pattern, where a signal's amount is a number of tokens.
    NcclEp,
}

impl Program {
    /// True for other projects' patterns, which need emulated signals.
    pub fn is_workload(self) -> bool {
        matches!(self, Program::Barriers | Program::DeepEp | Program::DeepEpIndexed | Program::NcclEp)
    }
}

/// A deliberate fault in a workload, which its checks must find.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Spoil {
    /// None.
    #[default]
    Nothing = 0,
    /// All strong signals are weak.
    Weak,
    /// One signal is not raised.
    Lost,
    /// One signal is raised twice.
    Doubled,
    /// One signal reset has no effect.
    Reset,
    /// A flush covers only its own thread's requests.
    Flush,
}

/// The threads that run a program together on a GPU: the first one runs it, and all call its operations. On a CPU, it's
/// one thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Threads {
    /// One thread.
    #[default]
    One = 0,
    /// 8 threads of a warp: a group that the kernel defines.
    Tile,
    /// A warp.
    Warp,
    /// A block.
    Block,
}

/// The form of the device API that a program calls on a GPU. On a CPU, it's the Rust crate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Api {
    /// The Rust crate, compiled with the programs.
    Rust = 0,
    /// The functions of `ferrogin/gin.h`, in the module that ships.
    #[default]
    C,
    /// `ferrogin/gin.cuh`, compiled by clang.
    Cuda,
}

/// Whether a round sends or receives first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Turn {
    /// Send, then receive.
    First = 0,
    /// Receive, then send.
    Second,
}

/// The pairs of ranks that communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Pattern {
    /// Each rank sends to the next rank.
    Ring = 0,
    /// Each rank sends to each other rank.
    AllPairs,
}

/// An operation between two ranks. Latencies are in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// A put; its latency includes the flush after it.
    #[default]
    Put = 0,
    /// A put with a signal; its latency is half a round trip.
    PutSignal,
    /// A value; its latency is half a round trip in which the ranks poll memory. In a stream, values have a signal.
    PutValue,
    /// A get; its latency includes the flush after it.
    Get,
    /// A signal without bytes; its latency is half a round trip.
    Signal,
    /// A flush; its latency is the time of the flush alone, after one put.
    Flush,
}

/// What the measuring programs repeat, and where in the window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Measured {
    /// The operation between ranks 0 and 1.
    pub operation: Operation,
    /// The peer's signal that this thread raises.
    pub raised: u32,
    /// The signal that the peer raises.
    pub awaited: u32,
    /// Signals of the context.
    pub signals: u32,
    /// Offset of the bytes to send; where each rank gets its own, those for rank 0.
    pub from: u64,
    /// Offset on the peer that this thread writes to.
    pub to: u64,
    /// Offset on this rank that the peer writes to; where all ranks write, that of rank 0's bytes.
    pub inbox: u64,
    /// Distance between the places of consecutive ranks, in bytes.
    pub stride: u64,
}

/// A program's arguments.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Plan {
    /// The program.
    pub program: Program,
    /// Order within a round.
    pub turn: Turn,
    /// The pairs of ranks that communicate.
    pub pattern: Pattern,
    /// Which of the handle's contexts to use.
    pub context_id: u32,
    /// The plugin's device contexts.
    pub handle: *mut c_void,
    /// The window, on every rank: [`INBOX`] bytes per rank, then [`OUTBOX`] bytes.
    pub window: Window,
    /// The memory of this rank's window.
    pub memory: *mut u8,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub nranks: u32,
    /// Number of rounds.
    pub reps: u32,
    /// Values or puts per round.
    pub burst: u32,
    /// If not 0, all values of a round but the last have the aggregate flag.
    pub aggregate: u32,
    /// Sharing mode, as flags of the device API: see [`ferrogin_device::Flags`].
    pub sharing: u32,
    /// This thread's part of the inbox.
    pub lane: u32,
    /// Threads per rank.
    pub lanes: u32,
    /// Bytes of a put, if the program does not choose them.
    pub bytes: u32,
    /// Rounds without samples.
    pub warmup: u32,
    /// The threads that run the program on a GPU.
    pub threads: Threads,
    /// The form of the device API on a GPU.
    pub api: Api,
    /// Time limit of one wait, in nanoseconds.
    pub deadline_ns: u64,
    /// `[reps - warmup]` times in nanoseconds, or null.
    pub samples: *mut u64,
    /// What a measuring program measures.
    pub measured: Measured,
    /// A deliberate fault.
    pub spoil: Spoil,
}

// SAFETY: any thread may use the addresses in a plan. `World` keeps them valid during the run, and the program accesses
// them with volatile or atomic operations.
#[allow(unsafe_code)]
unsafe impl Send for Plan {}

impl Plan {
    /// Offset, in every window, of the inbox that `rank` may write.
    pub fn inbox(&self, rank: u32) -> u64 {
        u64::from(rank) * INBOX + u64::from(self.lane) * LANE
    }

    /// Offset, in every window, of the outbox that its owner sends from.
    pub fn outbox(&self) -> u64 {
        u64::from(self.nranks) * INBOX
    }

    /// Offset of a word, after everything that programs use, which is nonzero once a thread or rank of a workload has
    /// failed.
    pub fn stop(&self) -> u64 {
        self.outbox() + OUTBOX - 8
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
    /// All repetitions passed.
    Passed = 0,
    /// An operation of the device API failed with the status `got`.
    Status,
    /// Memory did not have the expected value before the deadline.
    Late,
    /// Memory has a wrong value.
    Wrong,
    /// A signal or counter did not reach its value before the deadline.
    CountLate,
    /// A signal or counter is beyond its value.
    CountWrong,
    /// Another thread or rank failed earlier.
    Stopped,
}

/// A program's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    /// The reason.
    pub verdict: Verdict,
    /// The repetition.
    pub rep: u32,
    /// The peer.
    pub peer: u32,
    /// The rank's thread.
    pub lane: u32,
    /// Offset in the window, or the number of the signal or counter.
    pub at: u64,
    /// The expected value.
    pub expected: u64,
    /// The value found.
    pub got: u64,
    /// The clock at a stream's first operation.
    pub began: u64,
    /// Nanoseconds from the first operation to the last, if the program measures; the number of slots for
    /// [`Program::Reset`]; the count for [`Program::ReadSignal`].
    pub measured: u64,
}

impl Report {
    /// The report of a program that passed.
    pub const PASSED: Report = Report {
        verdict: Verdict::Passed,
        rep: 0,
        peer: 0,
        lane: 0,
        at: 0,
        expected: 0,
        got: 0,
        began: 0,
        measured: 0,
    };

    /// True if the program passed.
    pub fn passed(&self) -> bool {
        self.verdict == Verdict::Passed
    }

    /// The device API's status, if that is the reason.
    pub fn status(&self) -> Option<Status> {
        let all = [
            Status::InvalidArgument,
            Status::Unsupported,
            Status::Aborted,
            Status::Timeout,
            Status::CardError,
            Status::Poisoned,
        ];
        let is_got = |status: &Status| self.verdict == Verdict::Status && *status as u64 == self.got;
        all.into_iter().find(is_got)
    }

    /// The message for rank `rank`.
    #[cfg(feature = "host")]
    pub fn describe(&self, rank: usize) -> String {
        let Report { rep, peer, lane, at, expected, got, .. } = *self;
        let place = format!("rank {rank} (thread {lane}), repetition {rep}, with rank {peer}");
        match self.verdict {
            Verdict::Passed => format!("rank {rank} passed"),
            Verdict::Status => {
                let text = self.status().map_or_else(|| "unknown".to_owned(), |status| status.to_string());
                format!("{place}: status {got} of the device API: {text}")
            }
            Verdict::Late => format!("{place}: window offset {at}: waited for {expected:#018x}, still has {got:#018x}"),
            Verdict::Wrong => format!("{place}: window offset {at}: expected {expected:#018x}, got {got:#018x}"),
            Verdict::CountLate => format!("{place}: signal or counter {at}: waited for {expected}, still at {got}"),
            Verdict::Stopped => format!("{place}: stopped, because another thread or rank failed"),
            Verdict::CountWrong => format!("{place}: signal or counter {at}: expected exactly {expected}, got {got}"),
        }
    }
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
            threads: Threads::One,
            api: Api::C,
            deadline_ns: 1,
            samples: std::ptr::null_mut(),
            measured: Measured::default(),
            spoil: Spoil::Nothing,
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
