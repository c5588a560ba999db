//! The scenarios' programs. They compile for CPU threads, and to PTX as kernels.
//!
//! | module | content |
//! |---|---|
//! | [`plan`] | arguments and results of a program: plain data |
//! | [`program`] | the programs, which use only the device API and plain memory |
//! | [`timed`] | the measuring loops |
//! | [`api`] | the device API; on a GPU through the Rust crate, the functions of `ferrogin/gin.h`, or `ferrogin/gin.cuh` |
//! | `kernel` | on a GPU: the kernel, whose thread groups each run a program |
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
