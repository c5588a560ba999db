//! A connection's frames: a header, and as many bytes as it says.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// Size of a header in bytes.
pub(super) const HEADER: usize = size_of::<Header>();

/// Kinds of frames.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u64)]
pub(super) enum Kind {
    /// A control message.
    Control = 1,
    /// The sender's next message.
    Message = 2,
}

/// A frame's header, as it is sent: all numbers are little endian.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(C)]
pub(super) struct Header {
    pub kind: Kind,
    /// Number of bytes that follow.
    pub len: u64,
}

const _: () = assert!(HEADER == 16 && cfg!(target_endian = "little"));

impl Header {
    pub fn new(kind: Kind, len: usize) -> Self {
        Self { kind, len: len as u64 }
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
        let header = Header::new(Kind::Message, 0x22);
        let mut golden = [0; HEADER];
        (golden[0], golden[8]) = (2, 0x22);
        assert_eq!(header.emit(), golden);
        assert_eq!(Header::parse(&golden), Some(header));
        for kind in [0, 3] {
            golden[0] = kind;
            assert_eq!(Header::parse(&golden), None);
        }
    }
}
