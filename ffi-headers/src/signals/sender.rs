//! How the sender routes a signal.

use super::immediate::Immediate;
use super::message::Message;
use super::signal::{Generation, Refusal, Signal, Strength};

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
    /// A weak signal that doesn't fit in an immediate waits for its own put, which makes it stronger than it needs to be.
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
