//! The ring: the exchange between the ranks of a communicator.
//!
//! A [`Listener`] listens on TCP, and writes its addresses and a secret into a 128-byte handle, which the plugin gives
//! to NCCL. [`Ring::connect`] builds the ring from all ranks' handles: each rank sends to the next rank and receives
//! from the previous one. A stream carries nothing until both ends have proved that they know the secret
//! ([`proof`](crate::proof)).
//!
//! A rank waits in a call for as long as the previous rank says, twice a second, that its process runs. A rank in a
//! call says so itself; between calls, a thread of the program does, with [`Ring::lost`]. So a late rank is waited for.
//! A rank that is silent for too long has failed, and its next rank notices. A rank that fails, or that finds a failed
//! one, tells both neighbours which rank failed, and they pass that on, so all ranks name the same rank.
//!
//! After that, the ring is of no use, unless it was told to go on ([`Ring::go_on_without`]): then it closes up around
//! the rank.

mod allgather;
mod connect;
mod error;
mod gone;
mod handle;
mod listener;
mod lost;
mod step;
mod survivors;
mod time_limits;

#[cfg(test)]
mod tests;

pub use allgather::{Ring, Traffic};
pub use error::RingError;
pub use gone::Departure;
pub use listener::Listener;
pub use step::Step;
