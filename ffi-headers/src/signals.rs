//! The protocol that emulates the GIN signals that EFA cards lack: strong signals, signals at an address in a window,
//! and adds that become visible in a single step. It's shared by the device code that posts a signal and the signal
//! proxy that applies it, and does no I/O.
//!
//! ```rust
//! use ferrogin_ffi::signals::{Generation, Receiver, Route, Sender, Signal, Strength, Target, Vehicle};
//!
//! // Both sides know the generation of the receiver's context and its number of signals.
//! let generation = Generation::new(1);
//! let sender = Sender { generation, n_signals: 64, rank: 3 };
//! let receiver = Receiver { generation, n_signals: 64, nranks: 4 };
//!
//! // A weak signal travels as the immediate data of its own put.
//! let signal = Signal { target: Target::Indexed(7), add: 100 };
//! let route = sender.route(signal, Strength::Weak, true);
//! let Ok(Some(Route::WithPut(word))) = route else { panic!("{route:?}") };
//! assert_eq!(receiver.immediate(word.bits()), Ok(signal));
//!
//! // A strong one waits until the earlier puts have completed.
//! let route = sender.route(signal, Strength::Strong, true);
//! assert!(matches!(route, Ok(Some(Route::AfterCompletion(Vehicle::Write(_))))));
//! ```
//!
//! The sender picks a route with [`Sender::route`]; the receiver decodes each completion with [`Receiver`] and adds
//! once.

use core::fmt;

/// The number of a receiver's context, modulo 2^16. The receiver numbers its contexts in order of creation, and sends
/// the number to its peers along with the queue pair's address.
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

/// What carries a signal that travels on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vehicle {
    /// An empty write with this immediate data.
    Write(Immediate),
    /// A send of this message.
    Send(Message),
}

/// How a signal travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// In its own put's request, or in an empty write if it has no put.
    WithPut(Immediate),
    /// In a request of its own, at once.
    Alone(Vehicle),
    /// In a request of its own, posted once everything that the signal covers has completed: its own put and, with
    /// [`Strength::Strong`], all of the context's earlier operations to that peer.
    AfterCompletion(Vehicle),
}

/// What the sender knows about one peer in one context.
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
    /// Returns the route of a signal; `None` for an add of 0, which changes nothing.
    ///
    /// A weak signal that doesn't fit in an immediate waits for its own put, which makes it stronger than it needs to
    /// be.
    ///
    /// # Errors
    /// The target doesn't exist, or is misaligned. Window bounds are up to the receiver to check.
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

/// Widths of an [`Immediate`]'s fields.
const SIGNAL_BITS: u32 = 16;
const ADD_BITS: u32 = 12;
const GENERATION_BITS: u32 = 4;
const _: () = assert!(SIGNAL_BITS + ADD_BITS + GENERATION_BITS == u32::BITS);

/// The 32-bit form of a signal: a write's immediate data. It carries an indexed signal below [`Self::MAX_SIGNALS`] with
/// an amount from 1 to [`Self::MAX_ADD`]. Every bit pattern is valid.
///
/// | bits | field |
/// |---|---|
/// | 0 to 15 | the signal |
/// | 16 to 27 | the amount minus one |
/// | 28 to 31 | the generation's low bits |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Immediate(u32);

impl Immediate {
    /// How many signals an immediate can name.
    pub const MAX_SIGNALS: u32 = 1 << SIGNAL_BITS;
    /// The largest amount that fits in an immediate.
    pub const MAX_ADD: u64 = 1 << ADD_BITS;

    /// Returns the immediate for a signal; `None` if the signal doesn't fit.
    #[inline]
    pub const fn new(signal: Signal, generation: Generation) -> Option<Self> {
        match signal {
            Signal { target: Target::Indexed(index), add: 1..=Self::MAX_ADD } if index < Self::MAX_SIGNALS => {
                let amount = (signal.add as u32 - 1) << SIGNAL_BITS;
                Some(Self(index | amount | (generation.bits() as u32) << (SIGNAL_BITS + ADD_BITS)))
            }
            _ => None,
        }
    }

    /// Wraps the immediate data of a completion.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns the immediate data.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns the signal.
    pub const fn signal(self) -> Signal {
        let add = (self.0 >> SIGNAL_BITS & (Self::MAX_ADD as u32 - 1)) as u64 + 1;
        Signal { target: Target::Indexed(self.0 & (Self::MAX_SIGNALS - 1)), add }
    }

    /// Returns whether the immediate is for a context of this generation, as far as its few bits can tell.
    pub const fn is_of(self, generation: Generation) -> bool {
        self.0 >> (SIGNAL_BITS + ADD_BITS) == generation.bits() as u32 & ((1 << GENERATION_BITS) - 1)
    }
}

/// The 32-byte form of a signal: a send, inline in a 64-byte request. It carries any signal.
///
/// | bytes | field, little-endian |
/// |---|---|
/// | 0 | the kind: 1 indexed, 2 virtual address |
/// | 1 | the protocol version |
/// | 2, 3 | the generation |
/// | 4 to 7 | the signal, or the key of the receiver's memory registration |
/// | 8 to 15 | the amount |
/// | 16 to 23 | the address in that registration, or 0 |
/// | 24 to 27 | the sender's rank |
/// | 28 to 31 | 0 |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The signal.
    pub signal: Signal,
    /// The generation of the receiver's context.
    pub generation: Generation,
    /// The sender's rank.
    pub rank: u32,
}

impl Message {
    /// Bytes of a message: the inline bytes of a 64-byte request.
    pub const BYTES: usize = 32;
    /// The protocol version.
    pub const VERSION: u8 = 1;

    const INDEXED: u8 = 1;
    const VA: u8 = 2;

    /// Returns the message as words, in memory order on a little-endian processor.
    #[inline]
    pub const fn words(&self) -> [u64; Self::BYTES / 8] {
        let (kind, number, address) = match self.signal.target {
            Target::Indexed(signal) => (Self::INDEXED, signal, 0),
            Target::Va { rkey, address } => (Self::VA, rkey, address),
        };
        let head =
            kind as u64 | (Self::VERSION as u64) << 8 | (self.generation.bits() as u64) << 16 | (number as u64) << 32;
        [head, self.signal.add, address, self.rank as u64]
    }

    /// Returns the message as bytes.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.words()) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a message.
    ///
    /// # Errors
    /// [`Refusal::Malformed`]: wrong length, kind or version, or a nonzero reserved byte.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Refusal> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| Refusal::Malformed)?;
        let mut words = [0; Self::BYTES / 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        let [head, add, address, tail] = words;
        let number = (head >> 32) as u32;
        let target = match (head as u8, address) {
            (Self::INDEXED, 0) => Target::Indexed(number),
            (Self::VA, address) => Target::Va { rkey: number, address },
            _ => return Err(Refusal::Malformed),
        };
        let rank = u32::try_from(tail).map_err(|_| Refusal::Malformed)?;
        if (head >> 8) as u8 != Self::VERSION {
            return Err(Refusal::Malformed);
        }
        Ok(Self { signal: Signal { target, add }, generation: Generation::new(head >> 16), rank })
    }
}

/// Turns a completion into one add; what the receiver knows about one context. A completion's queue pair identifies the
/// context.
///
/// A completion names one signal, and the card reports each completion once, so the receiver adds once per completion
/// and keeps no per-sender state. What a signal covers has landed by then, because the sender posted the signal with it
/// or after it completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receiver {
    /// The generation of the context.
    pub generation: Generation,
    /// The signals of the context.
    pub n_signals: u32,
    /// Ranks of the communicator.
    pub nranks: u32,
}

impl Receiver {
    /// Returns the signal of a write with this immediate data.
    ///
    /// # Errors
    /// The signal is for another context, or doesn't exist. The caller then changes nothing.
    pub fn immediate(&self, bits: u32) -> Result<Signal, Refusal> {
        let word = Immediate::from_bits(bits);
        if !word.is_of(self.generation) {
            return Err(Refusal::Stale);
        }
        let signal = word.signal();
        signal.target.check(self.n_signals)?;
        Ok(signal)
    }

    /// Returns the signal of a send with these bytes. `window` looks up this rank's window by its key.
    ///
    /// # Errors
    /// The bytes aren't a message, or it is for another context, or its rank or word doesn't exist. The caller then
    /// changes nothing.
    pub fn message(&self, bytes: &[u8], window: impl Fn(u32) -> Option<Region>) -> Result<Signal, Refusal> {
        let message = Message::from_bytes(bytes)?;
        if message.generation != self.generation {
            return Err(Refusal::Stale);
        }
        if message.rank >= self.nranks {
            return Err(Refusal::Rank { rank: message.rank });
        }
        let signal = message.signal;
        signal.target.check(self.n_signals)?;
        if let Target::Va { rkey, address } = signal.target {
            let window = window(rkey).ok_or(Refusal::Window { rkey })?;
            if !window.has_word(address) {
                return Err(Refusal::Outside { address, window });
            }
        }
        Ok(signal)
    }
}

/// A queue pair's receives: how many the signal proxy posts.
///
/// Every write with immediate data and every send consumes a posted receive. If none is posted, the receiver's card
/// refuses the request and the sender's card retries it. So the posted receives are credits that all senders share, and
/// no sender counts them. A completion queue with as many entries as there are receives never overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receives {
    depth: u32,
    batch: u32,
    posted: u32,
}

impl Receives {
    /// Creates a queue of `depth` receives, none of them posted. They are reposted `batch` at a time, and at least half
    /// of the queue stays posted while the signal proxy keeps up.
    pub const fn new(depth: u32, batch: u32) -> Self {
        let most = if depth / 2 > 1 { depth / 2 } else { 1 };
        let batch = if batch == 0 {
            1
        } else if batch > most {
            most
        } else {
            batch
        };
        Self { depth, batch, posted: 0 }
    }

    /// Returns how many posted receives no completion has consumed yet.
    pub const fn posted(&self) -> u32 {
        self.posted
    }

    /// Consumes the receive of one completion. Returns false if none was posted: the completion is invalid.
    #[must_use]
    pub const fn take(&mut self) -> bool {
        match self.posted.checked_sub(1) {
            Some(left) => {
                self.posted = left;
                true
            }
            None => false,
        }
    }

    /// Returns how many receives the caller posts now. With `idle`, the batch needn't be full: the signal proxy is
    /// about to sleep.
    #[must_use]
    pub const fn refill(&mut self, idle: bool) -> u32 {
        let missing = self.depth - self.posted;
        if missing < self.batch && !idle {
            return 0;
        }
        self.posted = self.depth;
        missing
    }
}
