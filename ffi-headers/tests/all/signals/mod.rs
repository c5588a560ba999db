//! The tests of the protocol of signals.

mod forms;
mod model;
mod network;
mod resets;
