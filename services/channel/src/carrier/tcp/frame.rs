//! A connection's frames: a header, followed in some kinds by bytes.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// Size of a header in bytes.
pub(super) const HEADER: usize = size_of::<Header>();
/// The longest message that is sent before the other end has a receive for it, in bytes.
pub(super) const EAGER_MAX: usize = 64 << 10;

/// Kinds of frames.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u64)]
pub(super) enum Kind {
    /// A whole message of at most [`EAGER_MAX`] bytes, which follow.
    Message = 1,
    /// A longer message, which waits for a receive.
    Offer = 2,
    /// The sender has a receive for an offered message.
    Request = 3,
    /// A message that was requested; its bytes follow.
    Requested = 4,
}

/// A frame's header, as it is sent: all numbers are little endian.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(C)]
pub(super) struct Header {
    pub kind: Kind,
    pub tag: u64,
    /// Length of the message in bytes.
    pub len: u64,
}

const _: () = assert!(HEADER == 24 && cfg!(target_endian = "little"));

impl Header {
    pub fn new(kind: Kind, tag: u64, len: usize) -> Self {
        Self { kind, tag, len: len as u64 }
    }

    pub fn emit(&self) -> [u8; HEADER] {
        zerocopy::transmute!(*self)
    }

    /// None if the bytes aren't a header.
    pub fn parse(bytes: &[u8; HEADER]) -> Option<Self> {
        Self::try_read_from_bytes(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips_golden_bytes() {
        let header = Header::new(Kind::Request, 0x11, 0x22);
        let mut golden = [0; HEADER];
        (golden[0], golden[8], golden[16]) = (3, 0x11, 0x22);
        assert_eq!(header.emit(), golden);
        assert_eq!(Header::parse(&golden), Some(header));
        for kind in [0, 5] {
            golden[0] = kind;
            assert_eq!(Header::parse(&golden), None);
        }
    }
}
