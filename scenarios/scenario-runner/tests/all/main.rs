//! Tests of the scenarios.

mod bad_input;
mod common;
mod emulated;
mod failures;
mod faults;
mod killed;
mod leftovers;
mod machine;
mod nccl_kernels;
mod on_gpu;
mod one_process;
mod scenarios;
mod seeds;
mod two_hosts;
mod values;
mod workloads;
