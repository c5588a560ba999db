//! The ring: the exchange between the ranks of a communicator.
//!
//! A [`Listener`] listens on TCP, and writes its addresses and a secret into a 128-byte handle, which the plugin gives to NCCL.
//! [`Ring::connect`] builds the ring from all ranks' handles: each rank sends to the next rank and receives from the previous one. A
//! stream carries nothing until both ends have proved that they know the secret ([`proof`](crate::proof)). Every wait has a deadline. A
//! rank that fails tells both neighbours which rank failed, and they pass that on, so all ranks name the same rank without waiting for
//! their own deadlines. Everything runs in the calling thread.

mod allgather;
mod connect;
mod error;
mod handle;
mod listener;
mod lost;
mod step;
mod time_limits;

#[cfg(test)]
mod tests;

pub use allgather::{Ring, Traffic};
pub use error::RingError;
pub use listener::Listener;
pub use step::Step;
