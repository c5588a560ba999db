//! The tests of channels over real providers.

mod channel;
mod close;
mod common;
mod idle;
mod untrusted_peers;
mod usage;
