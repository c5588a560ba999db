//! Tests of the signal protocol.

mod forms;
mod model;
mod network;
mod resets;
