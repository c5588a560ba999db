//! Tests of the built plugin on the software card.

mod abi_fuzz;
mod bad_input;
mod contract;
mod errors;
mod fork;
mod gpu_windows;
mod harness;
mod handles;
mod leaks;
mod limits;
mod machines;
mod metrics;
mod rma;
mod scale;
mod signals;
