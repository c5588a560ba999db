//! A signal, and its route from the sender.

use super::immediate::Immediate;
use super::message::Message;
use super::receiver::Region;
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

/// What carries a signal alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vehicle {
    /// An empty write with this immediate data.
    Write(Immediate),
    /// A send of these bytes.
    Send(Message),
}

/// How a signal travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// In the request of its own put, or in an empty write where it has none.
    WithPut(Immediate),
    /// In a request of its own, at once.
    Alone(Vehicle),
    /// In a request of its own, which is posted when everything has completed that the signal covers: its own put, and with
    /// [`Strength::Strong`] all earlier operations of the context to that peer.
    AfterCompletion(Vehicle),
}

/// The constants of one peer in one context, at the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// The generation of the peer's context.
    pub generation: Generation,
    /// The signals of the peer's context.
    pub n_signals: u32,
    /// This rank.
    pub rank: u32,
}

impl Sender {
    /// The route of a signal; `None` for an add of 0, which changes nothing.
    ///
    /// A weak signal that no immediate can hold waits for its own put, which makes it stronger than it has to be.
    ///
    /// # Errors
    /// The target does not exist, or is misaligned. The receiver checks the bounds of windows.
    #[inline]
    pub const fn route(&self, signal: Signal, strength: Strength, has_put: bool) -> Result<Option<Route>, Refusal> {
        if let Err(refusal) = signal.target.check(self.n_signals) {
            return Err(refusal);
        }
        if signal.add == 0 {
            return Ok(None);
        }
        let immediate = Immediate::new(signal, self.generation);
        Ok(Some(match (strength, immediate) {
            (Strength::Weak, Some(word)) => Route::WithPut(word),
            (_, Some(word)) => Route::AfterCompletion(Vehicle::Write(word)),
            (_, None) => {
                let message = Message { signal, generation: self.generation, rank: self.rank };
                match strength {
                    Strength::Weak if !has_put => Route::Alone(Vehicle::Send(message)),
                    _ => Route::AfterCompletion(Vehicle::Send(message)),
                }
            }
        }))
    }
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
