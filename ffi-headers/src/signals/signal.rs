//! A signal, and the reasons to refuse one.

use core::fmt;

/// The number of a receiver's context, modulo 2^16. The receiver numbers its contexts in order of creation, and sends the number to
/// its peers along with the queue pair's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Generation(u16);

impl Generation {
    /// Returns the generation of context number `n`.
    pub const fn new(n: u64) -> Self {
        Self(n as u16)
    }

    /// Returns all 16 bits.
    pub const fn bits(self) -> u16 {
        self.0
    }
}

/// The 64-bit word that a signal is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// The word of this signal in the receiver's context.
    Indexed(u32),
    /// A word in a window.
    Va {
        /// The key of the receiver's memory registration, as in a put to that place.
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

/// A registered window of this rank, at the address that peers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The address of the first byte.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl Region {
    /// Returns whether all 8 bytes at `address` lie in the window.
    pub const fn has_word(&self, address: u64) -> bool {
        match address.checked_sub(self.start) {
            Some(offset) => self.bytes >= 8 && offset <= self.bytes - 8,
            None => false,
        }
    }
}

/// Why a signal isn't applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The context has no such signal.
    Signal {
        /// The requested signal.
        signal: u32,
        /// How many signals the context has.
        n_signals: u32,
    },
    /// The address isn't a multiple of 8.
    Misaligned {
        /// The requested address.
        address: u64,
    },
    /// The word isn't inside the window.
    Outside {
        /// The requested address.
        address: u64,
        /// The window.
        window: Region,
    },
    /// No window is registered with this key.
    Window {
        /// The requested key.
        rkey: u32,
    },
    /// The signal was for an earlier context with the same queue pair number.
    Stale,
    /// The message names a rank that doesn't exist.
    Rank {
        /// The rank in the message.
        rank: u32,
    },
    /// The bytes aren't a message of this protocol.
    Malformed,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal { signal, n_signals } => write!(f, "signal {signal} of a context with {n_signals} signals"),
            Self::Misaligned { address } => write!(f, "a signal at address {address:#x}, which is not a multiple of 8"),
            Self::Outside { address, window: Region { start, bytes } } => {
                write!(f, "a signal at address {address:#x}, outside its window of {bytes} bytes at {start:#x}")
            }
            Self::Window { rkey } => write!(f, "a signal for a window with the key {rkey:#x}, which no window has"),
            Self::Stale => write!(f, "a signal for an earlier context"),
            Self::Rank { rank } => write!(f, "a signal of rank {rank}, which does not exist"),
            Self::Malformed => write!(f, "bytes that are not a signal; do all ranks run the same release?"),
        }
    }
}

impl core::error::Error for Refusal {}
