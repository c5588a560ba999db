//! The control plane: the exchange of addresses and keys between the ranks of a communicator during set-up.
//!
//! `listen` opens a libfabric endpoint for message channels ([`ferrogin_channel`]) and writes its address, with a secret, into
//! NCCL's 128-byte handle. `connect` builds a ring: each rank sends to the next rank and receives from the previous one. A peer
//! without the secret cannot connect. Every wait has a deadline. A rank that fails tells both neighbours which rank
//! failed, and they pass the report on, so that all ranks name the same rank without waiting for their own deadlines.

mod connect;
mod error;
mod frame;
mod interface;
mod listener;
mod neighbors;
mod ring;
mod step;
mod time_limits;

#[cfg(test)]
mod tests;

pub use error::ControlError;
pub use listener::Listener;
pub use ring::Ring;
pub use step::Step;
