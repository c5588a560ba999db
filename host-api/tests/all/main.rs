//! Tests of the host API on the software card, in Rust, C and C++.

mod bad_input;
mod c_layout;
mod close;
mod common;
mod examples;
mod failures;
mod install;
mod isolation;
mod lsa;
mod metrics;
mod waits;
mod windows;
