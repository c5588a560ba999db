//! Types of the C ABI, with their layout pinned at compile time.
//!
//! * [`nccl`]: the structs that NCCL and a GIN plugin exchange (`ncclGin_v14_t`, `ncclGin_v13_t`, properties,
//!   device handles).
//! * [`rma`]: the tables of an RMA plugin, which a NCCL host thread drives (`ncclRma_v16_t` to `ncclRma_v13_t`).
//! * [`device`]: the structs that `createContext` and `regMrSym` give to kernels; NCCL's EFA device code reads exactly these.
//! * [`ext`]: ferrogin's own device state, placed beside those structs and never inside them, so that NCCL's device
//!   code runs on the same handles unaware.
//! * [`failure`]: the word in which kernels tell the host what failed first.
//! * [`signals`]: the protocol of signals that EFA cards lack.
//! * [`settings`]: the names of ferrogin's environment variables, which the plugin and the tool check.
//!
//! Every size, alignment and offset is asserted under the struct's definition. `tests/layout.rs` compares the same numbers with
//! `tests/vectors/efa_layout.json`, which a C++ compiler made from the foreign headers.
#![cfg_attr(not(test), no_std)]

pub mod device;
pub mod ext;
pub mod failure;
pub mod nccl;
pub mod rma;
pub mod settings;
pub mod signals;

/// Asserts size, alignment and every field offset of a `repr(C)` type at compile time.
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
