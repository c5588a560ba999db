//! Tests of the engine without threads, on a network that reorders and delays, and of reactors on that network.

pub(crate) mod fake_network;
mod flow;
pub(crate) mod malformed;
mod model;
mod reconnect;
mod shutdown;
