//! Types of the C ABI, with their layout pinned at compile time.
//!
//! * [`nccl`]: the structs that NCCL and a GIN plugin exchange (`ncclGin_v14_t`, `ncclGin_v13_t`, properties,
//!   device handles).
//! * [`rma`]: an RMA plugin's function tables, which a NCCL host thread calls (`ncclRma_v16_t` to `ncclRma_v13_t`).
//! * [`device`]: the structs that `createContext` and `regMrSym` hand to kernels; NCCL's EFA device code reads exactly
//!   these.
//! * [`ext`]: ferrogin's own device state, next to those structs and never inside them, so that NCCL's device code can
//!   use the same handles without knowing about it.
//! * `block`, for hosts: lays out and fills these structs, as bytes for a device address.
//! * [`failure`]: the word through which kernels tell the host what failed first.
//! * [`signals`]: the protocol that emulates the signals that EFA cards lack.
//! * [`settings`]: the names of ferrogin's environment variables, so that the plugin and the tool can warn about
//!   unknown ones.
//!
//! Every size, alignment and offset is asserted below the struct's definition. `tests/all/layout.rs` compares the same
//! numbers with `tests/vectors/efa_layout.json`, generated from the foreign headers by a C++ compiler.
#![cfg_attr(not(test), no_std)]

// A GPU has no allocator.
#[cfg(not(target_arch = "nvptx64"))]
extern crate alloc;

#[cfg(not(target_arch = "nvptx64"))]
pub mod block;
pub mod device;
pub mod ext;
pub mod failure;
pub mod nccl;
pub mod rma;
pub mod settings;
pub mod signals;

/// Asserts the size, alignment and field offsets of a `repr(C)` type at compile time.
#[macro_export]
macro_rules! assert_layout {
    ($ty:ty, size $size:literal, align $align:literal, { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(::core::mem::size_of::<$ty>() == $size);
            assert!(::core::mem::align_of::<$ty>() == $align);
            $(assert!(::core::mem::offset_of!($ty, $field) == $offset);)*
        };
    };
}
