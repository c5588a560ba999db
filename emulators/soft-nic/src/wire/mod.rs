//! The wires between cards: the formats of what cards exchange, and the transports that carry it.

/// Asserts the size and the field offsets of a wire format. All wire formats have alignment 1.
macro_rules! assert_layout {
    ($ty:ty, $size:literal, { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(::core::mem::size_of::<$ty>() == $size);
            assert!(::core::mem::align_of::<$ty>() == 1);
            $(assert!(::core::mem::offset_of!($ty, $field) == $offset);)*
        };
    };
}
pub(crate) use assert_layout;

mod error;
pub(crate) mod handshake;
pub(crate) mod packet;
pub(crate) mod ring;
pub(crate) mod shm;
pub(crate) mod tcp;

pub use error::{WireError, is_exhaustion};
