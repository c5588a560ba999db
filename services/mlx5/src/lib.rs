#![doc = include_str!("../README.md")]
//!
//! The driver writes work requests into the card's ring, rings its doorbell and reads completions, without a system
//! call or a library in between. One trait, [`device::Device`], creates the queues: [`verbs::Hardware`] uses a card
//! through rdma-core, loaded at run time; the crate `soft-mlx5` implements a card in software, which executes the same
//! bytes.
//!
//! * [`wire`]: the formats that the card reads and writes, byte for byte. [`wqe`]: valid work requests, emitted and
//!   parsed.
//! * [`sq`], [`rq`], [`srq`]: send, receive and shared receive queues. [`qp`]: a queue pair.
//! * [`cq`]: completions, plain and compressed, and errors with their syndromes.
//! * [`mw`]: memory windows, bound and freed by work requests of the side that owns the memory.
//! * [`mmio`], [`ring`]: access to the memory that a card reads. [`cq`] reads the memory that a card writes.
//!
//! The crate guards against two silent traps. First, in a compressed queue, byte 62 of a slot, the lap count, makes the
//! slot valid; the owner bit does not ([`cq`]). Second, a bind with a wrong size, or a request that overtakes a bind
//! because a fence is missing, completes without an error and moves no byte ([`wqe::Umr`], [`sq`]).

pub mod cq;
pub mod device;
mod handle;
#[allow(unsafe_code)]
pub mod mmio;
pub mod mw;
pub mod qp;
#[allow(unsafe_code)]
pub mod ring;
pub mod rq;
pub mod sq;
pub mod srq;
#[allow(unsafe_code)]
pub mod verbs;
pub mod wire;
pub mod wqe;

/// Asserts size, alignment and field offsets of a `repr(C)` type at compile time.
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
