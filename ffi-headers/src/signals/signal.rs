//! A signal, and the reasons to refuse one.

use core::fmt;

/// The number of a context of the receiver, modulo 2^16. The receiver numbers its contexts in the order in which it makes them, and tells
/// peers the number with the address of the queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Generation(u16);

impl Generation {
    /// The generation of the context that was made as number `n`.
    pub const fn new(n: u64) -> Self {
        Self(n as u16)
    }

    /// All bits.
    pub const fn bits(self) -> u16 {
        self.0
    }
}

/// The 64-bit word that a signal is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// The word of this signal of the receiver's context.
    Indexed(u32),
    /// A word of a window.
    Va {
        /// The key of the receiver's registration, as a put to that place has it.
        rkey: u32,
        /// The address in that registration, a multiple of 8.
        address: u64,
    },
}

/// One signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Signal {
    /// The word.
    pub target: Target,
    /// The amount, modulo 2^64.
    pub add: u64,
}

/// What a signal covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strength {
    /// Its own put.
    Weak,
    /// Its own put and all earlier operations of the context to that peer.
    Strong,
}

impl Target {
    pub(crate) const fn check(self, n_signals: u32) -> Result<(), Refusal> {
        match self {
            Target::Indexed(signal) if signal >= n_signals => Err(Refusal::Signal { signal, n_signals }),
            Target::Va { address, .. } if address % 8 != 0 => Err(Refusal::Misaligned { address }),
            _ => Ok(()),
        }
    }
}

/// A registered window of this rank, in the addresses that peers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The address of the first byte.
    pub start: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Region {
    /// Whether all 8 bytes at `address` lie in the window.
    pub const fn has_word(&self, address: u64) -> bool {
        match address.checked_sub(self.start) {
            Some(offset) => self.bytes >= 8 && offset <= self.bytes - 8,
            None => false,
        }
    }
}

/// The reason why a signal is not applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The context has no such signal.
    Signal {
        /// The number that was named.
        signal: u32,
        /// The signals of the context.
        n_signals: u32,
    },
    /// The address is no multiple of 8.
    Misaligned {
        /// The address that was named.
        address: u64,
    },
    /// The word does not lie in the window.
    Outside {
        /// The address that was named.
        address: u64,
        /// The window.
        window: Region,
    },
    /// No window is registered with this key.
    Window {
        /// The key that was named.
        rkey: u32,
    },
    /// The signal was for an earlier context, which had the same queue pair number.
    Stale,
    /// The message names a rank that does not exist.
    Rank {
        /// The number that was named.
        rank: u32,
    },
    /// The bytes are no message of this protocol.
    Malformed,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal { signal, n_signals } => write!(f, "signal {signal} of a context with {n_signals} signals"),
            Self::Misaligned { address } => write!(f, "a signal at address {address:#x}, which is no multiple of 8"),
            Self::Outside { address, window: Region { start, bytes } } => {
                write!(f, "a signal at address {address:#x}, outside its window of {bytes} bytes at {start:#x}")
            }
            Self::Window { rkey } => write!(f, "a signal for a window with the key {rkey:#x}, which no window has"),
            Self::Stale => write!(f, "a signal for an earlier context"),
            Self::Rank { rank } => write!(f, "a signal of rank {rank}, which does not exist"),
            Self::Malformed => write!(f, "bytes that are no signal; do all ranks run the same release?"),
        }
    }
}

impl core::error::Error for Refusal {}
