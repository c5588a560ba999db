//! EFA queue formats and the direct data path: rings, WQE building, posting, CQE parsing.
//!
//! The same code runs on the host, on a GPU (nvptx64) and inside the software card. It needs no allocator, no operating
//! system, no libfabric and no CUDA.
//!
//! * [`wire`]: the formats that the card reads and writes, byte for byte: work requests, receive descriptors,
//!   completions.
//! * [`wqe`]: what a work request means ([`wqe::SendWqe`]), emitted to and parsed from bytes; and, for the posting
//!   path, the same bytes as 64-bit words built in registers ([`wqe::words`]).
//! * [`queue`]: the queue structs that kernels share with NCCL's device code, and their initialisers.
//! * [`sq`], [`rq`], [`cq`]: posting and polling on those structs with the device convention.
//! * [`host`]: the host providers' convention (rdma-core, libfabric): 16-bit doorbells, lists of requests, completion
//!   queue doorbells, queue limits.
//! * [`arch`]: MMIO stores and fences, the only code that differs between the host and nvptx64.
#![cfg_attr(not(test), no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]

pub mod arch;
pub mod cq;
pub mod host;
pub mod queue;
pub mod rq;
#[allow(unsafe_code)]
mod shared;
pub mod sq;
pub mod wire;
pub mod wqe;

/// Asserts size, alignment and every field offset of a `repr(C)` type at compile time.
macro_rules! assert_layout {
    ($ty:ty, size $size:literal, align $align:literal, { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(::core::mem::size_of::<$ty>() == $size);
            assert!(::core::mem::align_of::<$ty>() == $align);
            $(assert!(::core::mem::offset_of!($ty, $field) == $offset);)*
        };
    };
}
use assert_layout;
