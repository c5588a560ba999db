//! ConnectX queues driven directly: work requests, completion queues with compression, memory windows.

pub mod card;
pub mod cq;
pub mod device;
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
