//! Instruction counts and rates, each beside its baseline.
//!
//! [`card`] is a device context in plain memory whose card completes what is rung at once, at no cost; [`callgrind`]
//! counts instructions; [`nccl`] is NCCL's own device code, compiled for this processor, on the same context.

#[allow(unsafe_code)]
pub mod callgrind;
#[allow(unsafe_code)]
pub mod card;
#[allow(unsafe_code)]
pub mod nccl;
