//! EFA queue formats and the direct data path: rings, WQE building, posting, CQE parsing.
//!
//! No allocator, no operating system, no libfabric and no CUDA: the same code runs on the host, on the GPU and in
//! models. [`wire`] holds the bytes as the card reads and writes them, [`wqe`] work requests with a meaning, [`queue`]
//! the queue structs that the host fills and device code reads, [`arch`] the only loads and stores to device memory.
#![cfg_attr(not(test), no_std)]

#[allow(unsafe_code)]
pub mod arch;
pub mod queue;
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
pub(crate) use assert_layout;
