//! The tests of channels over real providers.

mod channel;
mod common;
mod idle;
mod malformed_peers;
mod reconnect;
mod strangers;
mod usage;
