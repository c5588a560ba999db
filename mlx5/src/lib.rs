//! ConnectX queues driven directly: work requests, completion queues with compression, memory windows.
//!
//! The driver builds work requests in the card's ring, rings its doorbell and reads completions, without a system call or a
//! library between. Where queues come from is behind one trait, [`device::Device`]: [`verbs::Hardware`] is a card through
//! rdma-core, loaded at run time; the software card executes the same bytes where there is none.
//!
//! * [`wire`]: what the card reads and writes, byte for byte. [`wqe`]: work requests as a meaning, emitted and parsed.
//! * [`sq`], [`rq`], [`srq`]: the queues that requests and receives are posted to. [`qp`]: a pair of them.
//! * [`cq`]: completions, plain and compressed, and errors with their syndromes.
//! * [`mw`]: memory windows, bound and freed by requests of the side that owns the memory.
//! * [`mmio`], [`ring`]: the only places that touch memory which a card reads or writes.
//!
//! Two traps that this crate is built around: a compressed queue's slots are valid by the count of laps in byte 62, not by
//! the owner bit ([`cq`]); and a window that is bound with a wrong size completes well and moves nothing, as does what
//! overtakes a bind for want of a fence ([`wqe::Umr`], [`sq`]).

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
