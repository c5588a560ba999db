//! The record that tells the host which operation on a context failed first and why, its text, and the names of
//! statuses.

use crate::assert_layout;
use core::fmt;
use core::time::Duration;

/// The names of the `fgin_status` values, by number.
pub const STATUS_NAMES: [&core::ffi::CStr; 8] = [
    c"FGIN_OK",
    c"FGIN_INVALID_ARGUMENT",
    c"FGIN_UNSUPPORTED",
    c"FGIN_ABORTED",
    c"FGIN_TIMEOUT",
    c"FGIN_CARD_ERROR",
    c"FGIN_POISONED",
    c"FGIN_PEER_LOST",
];

/// The number of `FGIN_CARD_ERROR`.
pub const CARD_ERROR: u8 = 5;

/// The functions of `ferrogin/gin.h`, by [`Failure::function`]. Functions that aren't listed use entry 0.
pub const FUNCTIONS: [&str; 16] = [
    "an operation",
    "fgin_put",
    "fgin_put_value",
    "fgin_get",
    "fgin_signal",
    "fgin_put_signal_at",
    "fgin_put_value_signal_at",
    "fgin_signal_at",
    "fgin_flush",
    "fgin_wait_request",
    "fgin_wait_signal",
    "fgin_read_signal",
    "fgin_reset_signal",
    "fgin_wait_counter",
    "fgin_read_counter",
    "fgin_reset_counter",
];

/// Returns the index of a function in `FUNCTIONS`; 0 if it isn't listed.
pub const fn function_number(name: &str) -> u8 {
    let mut i = 1;
    while i < FUNCTIONS.len() {
        if is_same(FUNCTIONS[i].as_bytes(), name.as_bytes()) {
            return i as u8;
        }
        i += 1;
    }
    0
}

const fn is_same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    a.len() == b.len() && i == a.len()
}

/// What a failed operation was about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The whole context.
    Context,
    /// A peer.
    Peer(u32),
    /// A signal of this rank.
    Signal {
        /// Its number.
        id: u32,
        /// Its value.
        count: u64,
        /// The value that was awaited.
        least: u64,
    },
    /// A counter.
    Counter {
        /// Its number.
        id: u32,
        /// Its value.
        count: u64,
        /// The value that was awaited.
        least: u64,
    },
    /// A peer that doesn't exist.
    NoPeer {
        /// The number.
        peer: u32,
        /// How many ranks there are.
        ranks: u32,
    },
    /// A signal that this rank's context doesn't have.
    NoSignal {
        /// The number.
        id: u32,
        /// How many signals the context has.
        signals: u32,
    },
    /// A counter that the context doesn't have.
    NoCounter {
        /// The number.
        id: u32,
        /// How many counters the context has.
        counters: u32,
    },
    /// A signal that the peer's context doesn't have.
    NoPeerSignal {
        /// The peer.
        peer: u32,
        /// The signal's number.
        id: u32,
    },
    /// A value of a size that values don't have.
    ValueSize {
        /// The peer.
        peer: u32,
        /// The size in bytes.
        bytes: u32,
    },
    /// A value with a counter.
    ValueCounter {
        /// The peer.
        peer: u32,
    },
}

/// An operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The function's [`function_number`].
    pub function: u8,
    /// An `fgin_status` other than `FGIN_OK`.
    pub status: u8,
    /// What it was about.
    pub subject: Subject,
    /// The time limit of the context's waits in nanoseconds; 0 means none.
    pub limit_ns: u64,
}

/// A [`Failure`] in memory that the host and a device share. All words are 0 until an operation fails.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// A byte each for status, function and kind of subject; the subject's number is the high half. [`Record::CLAIMED`]
    /// while the first failed operation writes the other words; it writes this one last.
    pub head: u64,
    /// The count of a signal or counter, or how many there are.
    pub found: u64,
    /// The count that was awaited.
    pub least: u64,
    /// [`Failure::limit_ns`].
    pub limit_ns: u64,
}
assert_layout!(Record, size 32, align 8, { head @ 0, found @ 8, least @ 16, limit_ns @ 24 });

impl Record {
    /// Keeps later failures from replacing the first one.
    pub const CLAIMED: u64 = u64::MAX;
}

impl From<Failure> for Record {
    #[inline(always)]
    fn from(failure: Failure) -> Self {
        let (kind, number, found, least) = match failure.subject {
            Subject::Context => (0, 0, 0, 0),
            Subject::Peer(peer) => (1, peer, 0, 0),
            Subject::Signal { id, count, least } => (2, id, count, least),
            Subject::Counter { id, count, least } => (3, id, count, least),
            Subject::NoPeer { peer, ranks } => (4, peer, ranks.into(), 0),
            Subject::NoSignal { id, signals } => (5, id, signals.into(), 0),
            Subject::NoCounter { id, counters } => (6, id, counters.into(), 0),
            Subject::NoPeerSignal { peer, id } => (7, peer, id.into(), 0),
            Subject::ValueSize { peer, bytes } => (8, peer, bytes.into(), 0),
            Subject::ValueCounter { peer } => (9, peer, 0, 0),
        };
        let head = u64::from(failure.status) | u64::from(failure.function) << 8 | kind << 16 | u64::from(number) << 32;
        Record { head, found, least, limit_ns: failure.limit_ns }
    }
}

impl Failure {
    /// Unpacks a record; `None` while there is no complete one. Accepts any bits, because a kernel can write anything.
    pub const fn from_record(record: Record) -> Option<Self> {
        let Record { head, found, least, limit_ns } = record;
        if head == 0 || head == Record::CLAIMED {
            return None;
        }
        let number = (head >> 32) as u32;
        let subject = match head >> 16 & 0xff {
            1 => Subject::Peer(number),
            2 => Subject::Signal { id: number, count: found, least },
            3 => Subject::Counter { id: number, count: found, least },
            4 => Subject::NoPeer { peer: number, ranks: found as u32 },
            5 => Subject::NoSignal { id: number, signals: found as u32 },
            6 => Subject::NoCounter { id: number, counters: found as u32 },
            7 => Subject::NoPeerSignal { peer: number, id: found as u32 },
            8 => Subject::ValueSize { peer: number, bytes: found as u32 },
            9 => Subject::ValueCounter { peer: number },
            _ => Subject::Context,
        };
        Some(Self { function: (head >> 8) as u8, status: head as u8, subject, limit_ns })
    }
}

const NEW_CONTEXT: &str = "destroy the context on all ranks and create it again";

/// What failed, why, and what to do.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = FUNCTIONS.get(usize::from(self.function)).unwrap_or(&FUNCTIONS[0]);
        f.write_str(function)?;
        if let Subject::Peer(peer) | Subject::ValueSize { peer, .. } | Subject::ValueCounter { peer } = self.subject {
            write!(f, " to peer {peer}")?;
        }
        let Some(name) = STATUS_NAMES.get(usize::from(self.status)).and_then(|name| name.to_str().ok()) else {
            return write!(f, " returned {}", self.status);
        };
        write!(f, " returned {name}: ")?;
        match name {
            "FGIN_INVALID_ARGUMENT" => self.invalid_argument(f, function),
            "FGIN_UNSUPPORTED" => {
                f.write_str("the card has no strong signals and no signals in windows: set FERROGIN_SIGNALS=emulated")
            }
            "FGIN_TIMEOUT" => self.timeout(f),
            "FGIN_ABORTED" => write!(f, "a request failed or a rank ended, as standard error says: {NEW_CONTEXT}"),
            "FGIN_PEER_LOST" => f.write_str(match self.subject {
                Subject::Peer(_) => "the rank is lost: leave it out",
                _ => "a rank is lost: ferrogin_lost_ranks names it; call ferrogin_acknowledge_lost and leave it out",
            }),
            "FGIN_CARD_ERROR" => write!(f, "the card failed a request, as standard error says: {NEW_CONTEXT}"),
            _ => write!(f, "an earlier operation failed: {NEW_CONTEXT}"),
        }
    }
}

impl Failure {
    fn invalid_argument(&self, f: &mut fmt::Formatter<'_>, function: &str) -> fmt::Result {
        match self.subject {
            Subject::NoPeer { ranks: 1, .. } => f.write_str("there is only one rank, so the peer must be 0"),
            Subject::NoPeer { peer, ranks } => {
                write!(f, "peer {peer} does not exist: the ranks are 0 to {}", ranks.saturating_sub(1))
            }
            Subject::NoSignal { id, signals } => missing(f, "signal", id, signals),
            Subject::NoCounter { id, counters } => missing(f, "counter", id, counters),
            Subject::NoPeerSignal { peer, id } => {
                write!(
                    f,
                    "rank {peer} has no signal {id}: create its context with at least {} signals",
                    u64::from(id) + 1
                )
            }
            Subject::ValueSize { bytes, .. } => write!(f, "a value has 1, 2, 4 or 8 bytes, not {bytes}: use fgin_put"),
            Subject::ValueCounter { .. } => f.write_str("a value can't name a counter: use fgin_put"),
            Subject::Peer(_) if function.ends_with("_signal_at") => {
                f.write_str("a window is NULL, the word's offset isn't a multiple of 8, or counter names a signal")
            }
            Subject::Peer(_) => f.write_str("a window is NULL: pass one that was registered"),
            _ => f.write_str("an argument is invalid: compare it with ferrogin/gin.h"),
        }
    }

    fn timeout(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = Duration::from_nanos(self.limit_ns);
        match self.subject {
            Subject::Signal { id, count, least } => write!(
                f,
                "signal {id} is {count}, and not {least}, after {limit:?}: check that the peer runs and raises it"
            ),
            Subject::Counter { id, count, least } => write!(
                f,
                "counter {id} is {count}, and not {least}, after {limit:?}: check that the operations name it"
            ),
            Subject::Peer(peer) => write!(f, "no room in the queue after {limit:?}: check that rank {peer} runs"),
            _ => write!(f, "not all operations completed within {limit:?}: check that the peers run"),
        }
    }
}

fn missing(f: &mut fmt::Formatter<'_>, kind: &str, id: u32, n: u32) -> fmt::Result {
    match n {
        0 => write!(f, "the context has no {kind}s: create it with at least {}", u64::from(id) + 1),
        _ => write!(f, "the context has no {kind} {id}: it has {n}, from 0 to {}", n - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_survives_its_record_and_names_cause_and_fix() {
        let function = function_number("fgin_wait_signal");
        for (status, subject, text) in [
            (4, Subject::Context, "returned FGIN_TIMEOUT: not all operations completed within 20ms"),
            (4, Subject::Peer(1 << 19), "to peer 524288 returned FGIN_TIMEOUT: no room in the queue after 20ms"),
            (
                4,
                Subject::Signal { id: u32::MAX, count: 1 << 40, least: u64::MAX },
                "returned FGIN_TIMEOUT: signal 4294967295 is 1099511627776, and not 18446744073709551615, after 20ms: check",
            ),
            (4, Subject::Counter { id: 0, count: 2, least: 3 }, "counter 0 is 2, and not 3, after 20ms: check"),
            (1, Subject::NoPeer { peer: 7, ranks: 2 }, "peer 7 does not exist: the ranks are 0 to 1"),
            (1, Subject::NoPeer { peer: 7, ranks: 1 }, "there is only one rank, so the peer must be 0"),
            (1, Subject::NoSignal { id: 4, signals: 4 }, "the context has no signal 4: it has 4, from 0 to 3"),
            (1, Subject::NoCounter { id: 4, counters: 0 }, "the context has no counters: create it with at least 5"),
            (
                1,
                Subject::NoPeerSignal { peer: 3, id: 9 },
                "rank 3 has no signal 9: create its context with at least 10 signals",
            ),
            (
                1,
                Subject::ValueSize { peer: 1, bytes: 3 },
                "to peer 1 returned FGIN_INVALID_ARGUMENT: a value has 1, 2, 4 or 8 bytes, not 3",
            ),
            (
                1,
                Subject::ValueCounter { peer: 1 },
                "to peer 1 returned FGIN_INVALID_ARGUMENT: a value can't name a counter",
            ),
            (1, Subject::Peer(1), "to peer 1 returned FGIN_INVALID_ARGUMENT: a window is NULL"),
            (3, Subject::Context, "returned FGIN_ABORTED: a request failed or a rank ended"),
        ] {
            let failure = Failure { function, status, subject, limit_ns: 20_000_000 };
            assert_eq!(Failure::from_record(failure.into()), Some(failure));
            let found = failure.to_string();
            assert!(found.starts_with("fgin_wait_signal ") && found.contains(text), "{found}");
        }
    }

    #[test]
    fn every_record_has_a_text() {
        let of = |head| Failure::from_record(Record { head, ..Record::default() });
        assert_eq!((of(0), of(Record::CLAIMED)), (None, None));
        assert_eq!(of(0xffff).unwrap().to_string(), "an operation returned 255");
        assert_eq!(function_number("fgin_ring"), 0);
        for kind in 0..=10 {
            for status in 0..8 {
                assert!(!of(1 << 63 | kind << 16 | 9 << 8 | status).unwrap().to_string().is_empty());
            }
        }
    }
}
