//! The 32-byte form of a signal: a send, inline in a 64-byte request.
//!
//! | bytes | field, little-endian |
//! |---|---|
//! | 0 | the kind: 1 indexed, 2 virtual address |
//! | 1 | the protocol version |
//! | 2, 3 | the generation |
//! | 4 to 7 | the signal, or the key of the receiver's memory registration |
//! | 8 to 15 | the amount |
//! | 16 to 23 | the address in that registration, or 0 |
//! | 24 to 27 | the sender's rank |
//! | 28 to 31 | 0 |

use super::signal::{Generation, Refusal, Signal, Target};

/// Bytes of a message: the inline bytes of a 64-byte request.
pub const BYTES: usize = 32;
/// The protocol version.
pub const VERSION: u8 = 1;

const INDEXED: u8 = 1;
const VA: u8 = 2;

/// A message, which can carry any signal.
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
    /// Returns the message as words, in memory order on a little-endian processor.
    #[inline]
    pub const fn words(&self) -> [u64; BYTES / 8] {
        let (kind, number, address) = match self.signal.target {
            Target::Indexed(signal) => (INDEXED, signal, 0),
            Target::Va { rkey, address } => (VA, rkey, address),
        };
        let head = kind as u64 | (VERSION as u64) << 8 | (self.generation.bits() as u64) << 16 | (number as u64) << 32;
        [head, self.signal.add, address, self.rank as u64]
    }

    /// Returns the message as bytes.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
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
        let bytes: &[u8; BYTES] = bytes.try_into().map_err(|_| Refusal::Malformed)?;
        let mut words = [0; BYTES / 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        let [head, add, address, tail] = words;
        let number = (head >> 32) as u32;
        let target = match (head as u8, address) {
            (INDEXED, 0) => Target::Indexed(number),
            (VA, address) => Target::Va { rkey: number, address },
            _ => return Err(Refusal::Malformed),
        };
        let rank = u32::try_from(tail).map_err(|_| Refusal::Malformed)?;
        if (head >> 8) as u8 != VERSION {
            return Err(Refusal::Malformed);
        }
        Ok(Self { signal: Signal { target, add }, generation: Generation::new(head >> 16), rank })
    }
}
