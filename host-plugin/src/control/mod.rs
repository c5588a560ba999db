//! The control plane: the exchange of addresses and keys between the ranks of a communicator during set-up.
//!
//! `listen` listens on TCP, and writes its addresses and a secret into NCCL's 128-byte handle. `connect` builds a ring: each rank sends
//! to the next rank and receives from the previous one. A stream carries nothing before both ends have proved that they know the
//! secret ([`ferrogin_rendezvous::proof`]). Every wait has a deadline. A rank that fails tells both neighbours which rank failed, and
//! they pass the report on, so that all ranks name the same rank without waiting for their own deadlines. All of it runs in the
//! calling thread.

mod connect;
mod error;
mod handle;
mod listener;
mod lost;
mod ring;
mod step;
mod time_limits;

#[cfg(test)]
mod tests;

pub use error::ControlError;
pub use listener::Listener;
pub use ring::Ring;
pub use step::Step;
