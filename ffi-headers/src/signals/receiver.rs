//! Turns a completion into one add.
//!
//! A completion names one signal, and the card reports each completion once, so the receiver adds once per completion and keeps no
//! per-sender state. What a signal covers has landed by then, because the sender posted the signal with it or after it completed.

use super::immediate::Immediate;
use super::message::Message;
use super::signal::{Generation, Refusal, Region, Signal, Target};

/// What the receiver knows about one context. A completion's queue pair identifies the context.
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
    /// The bytes aren't a message, or it is for another context, or its rank or word doesn't exist. The caller then changes nothing.
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
