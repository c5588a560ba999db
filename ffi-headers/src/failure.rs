//! The word that tells the host which operation on a handle failed first, and the names of statuses.

use core::fmt;

/// The names of the `fgin_status` values, by number.
pub const STATUS_NAMES: [&core::ffi::CStr; 7] = [
    c"FGIN_OK",
    c"FGIN_INVALID_ARGUMENT",
    c"FGIN_UNSUPPORTED",
    c"FGIN_ABORTED",
    c"FGIN_TIMEOUT",
    c"FGIN_CARD_ERROR",
    c"FGIN_POISONED",
];

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
    Signal(u32),
    /// A counter.
    Counter(u32),
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
}

impl Failure {
    /// Packs the failure into a nonzero word: a byte each for status, function and kind of subject; the subject's number is the high half.
    #[inline(always)]
    pub const fn to_word(self) -> u64 {
        let (kind, number) = match self.subject {
            Subject::Context => (0, 0),
            Subject::Peer(peer) => (1, peer),
            Subject::Signal(id) => (2, id),
            Subject::Counter(id) => (3, id),
        };
        self.status as u64 | (self.function as u64) << 8 | kind << 16 | (number as u64) << 32
    }

    /// Unpacks a word; `None` for 0. Accepts any bits, because a kernel can write anything.
    pub const fn from_word(word: u64) -> Option<Self> {
        let number = (word >> 32) as u32;
        let subject = match word >> 16 & 0xff {
            1 => Subject::Peer(number),
            2 => Subject::Signal(number),
            3 => Subject::Counter(number),
            _ => Subject::Context,
        };
        if word == 0 { None } else { Some(Self { function: (word >> 8) as u8, status: word as u8, subject }) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = FUNCTIONS.get(usize::from(self.function)).unwrap_or(&FUNCTIONS[0]);
        f.write_str(function)?;
        match self.subject {
            Subject::Context => {}
            Subject::Peer(peer) => write!(f, " to peer {peer}")?,
            Subject::Signal(id) => write!(f, " on signal {id}")?,
            Subject::Counter(id) => write!(f, " on counter {id}")?,
        }
        match STATUS_NAMES.get(usize::from(self.status)).and_then(|name| name.to_str().ok()) {
            Some(name) => write!(f, " returned {name}"),
            None => write!(f, " returned {}", self.status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_survives_its_word_and_names_operation_and_subject() {
        let function = function_number("fgin_wait_signal");
        for (subject, text) in [
            (Subject::Context, "fgin_wait_signal returned FGIN_TIMEOUT"),
            (Subject::Peer(1 << 19), "fgin_wait_signal to peer 524288 returned FGIN_TIMEOUT"),
            (Subject::Signal(u32::MAX), "fgin_wait_signal on signal 4294967295 returned FGIN_TIMEOUT"),
            (Subject::Counter(0), "fgin_wait_signal on counter 0 returned FGIN_TIMEOUT"),
        ] {
            let failure = Failure { function, status: 4, subject };
            assert_eq!(Failure::from_word(failure.to_word()), Some(failure));
            assert_eq!(failure.to_string(), text);
        }
    }

    #[test]
    fn every_word_has_a_text() {
        assert_eq!(Failure::from_word(0), None);
        assert_eq!(Failure::from_word(0xffff).unwrap().to_string(), "an operation returned 255");
        assert_eq!(function_number("fgin_ring"), 0);
    }
}
