//! The route of a signal from its sender.

use super::immediate::Immediate;
use super::message::Message;
use super::signal::{Generation, Refusal, Signal, Strength};

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
