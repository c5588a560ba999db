//! The channel protocol, without I/O or threads: user requests and events of a [`transport`] go in, operations on the transport and
//! [callbacks](callback) come out.

pub(crate) mod callback;
pub(crate) mod channel_state;
pub(crate) mod engine;
pub(crate) mod hello;
pub(crate) mod incoming;
pub(crate) mod listening;
pub(crate) mod name;
pub(crate) mod operation;
pub(crate) mod outgoing;
pub(crate) mod secret;
pub(crate) mod tags;
pub(crate) mod transport;
pub(crate) mod wire;
