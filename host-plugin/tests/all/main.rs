//! Tests of the built plugin on the software card.

mod abi_fuzz;
mod bad_input;
mod both;
mod close;
mod contract;
mod errors;
mod fork;
mod gpu_contexts;
mod gpu_windows;
mod handles;
mod harness;
mod leaks;
mod limits;
mod machines;
mod metrics;
mod rma;
mod scale;
mod signals;
