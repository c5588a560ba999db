//! The programs of the scenarios. They compile for CPU threads, and as kernels in PTX.
//!
//! | module | content |
//! |---|---|
//! | [`plan`] | arguments and results of a program: plain data |
//! | [`program`] | the programs, which use only the device API and plain memory |
//! | [`timed`] | the loops that measure |
//! | [`api`] | the device API: on a GPU by the Rust crate, by the functions of `ferrogin/gin.h`, or by `ferrogin/gin.cuh` |
//! | `kernel` | on a GPU: the kernel, whose groups of threads run a program each |
#![cfg_attr(not(any(test, feature = "host")), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

#[allow(unsafe_code)]
pub mod api;
#[cfg(target_arch = "nvptx64")]
#[allow(unsafe_code)]
mod kernel;
pub mod plan;
#[allow(unsafe_code)]
pub mod program;
#[allow(unsafe_code)]
pub mod timed;
