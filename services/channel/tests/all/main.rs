//! The tests of channels over real providers.

mod channel;
mod close;
mod common;
mod idle;
mod malformed_peers;
mod reconnect;
mod untrusted_peers;
mod usage;
