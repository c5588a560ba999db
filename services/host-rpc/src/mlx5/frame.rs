//! The formats of an mlx5 connection: the hello that the two ends exchange, and the header in front of each of the
//! card's messages.

use mlx5::device::RawEndpoint;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, big_endian, little_endian};

/// One end's hello, big endian.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct Hello {
    /// [`Hello::MAGIC`].
    pub magic: [u8; 2],
    /// Length of the longest eager message that this end accepts, in bytes.
    pub eager: big_endian::U32,
    /// The queue pair.
    pub endpoint: RawEndpoint,
}
mlx5::assert_layout!(Hello, size 32, align 1, { magic @ 0, eager @ 2, endpoint @ 6 });

impl Hello {
    /// The name and version of the format.
    pub const MAGIC: [u8; 2] = *b"m1";
}

/// The header in front of every message, little endian: any 24 bytes are valid.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
struct RawHeader {
    /// 1 eager, 2 RTS, 3 FIN, 4 close.
    kind: little_endian::U32,
    /// RTS: the key of the window.
    rkey: little_endian::U32,
    /// Eager, RTS: length of the message in bytes.
    length: little_endian::U64,
    /// Zero.
    reserved: [u8; 8],
}
mlx5::assert_layout!(RawHeader, size 24, align 1, { kind @ 0, rkey @ 4, length @ 8, reserved @ 16 });

const EAGER: u32 = 1;
const RTS: u32 = 2;
const FIN: u32 = 3;
const CLOSE: u32 = 4;

/// Size in bytes of the header in front of every message.
pub(super) const HEADER: usize = size_of::<RawHeader>();

/// The meaning of one of the card's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// The `length` bytes of the message follow.
    Eager { length: u64 },
    /// Ready to send: the receiver can read the `length` bytes of the message through the window `rkey`, from offset 0.
    Rts { length: u64, rkey: u32 },
    /// The receiver has read a message. The SEND that carries this frame, or any other SEND, invalidates the window.
    Fin,
    /// The last message of this direction.
    Close,
}

impl Frame {
    pub fn emit(self) -> [u8; HEADER] {
        let (kind, rkey, length) = match self {
            Self::Eager { length } => (EAGER, 0, length),
            Self::Rts { length, rkey } => (RTS, rkey, length),
            Self::Fin => (FIN, 0, 0),
            Self::Close => (CLOSE, 0, 0),
        };
        let raw = RawHeader { kind: kind.into(), rkey: rkey.into(), length: length.into(), reserved: [0; 8] };
        zerocopy::transmute!(raw)
    }

    /// Parses one of the card's messages; None if it isn't a frame. What follows an eager header must be as long as the
    /// header says.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let (raw, rest) = RawHeader::ref_from_prefix(message).ok()?;
        let length = raw.length.get();
        let (frame, expected) = match raw.kind.get() {
            EAGER => (Self::Eager { length }, length),
            RTS => (Self::Rts { length, rkey: raw.rkey.get() }, 0),
            FIN => (Self::Fin, 0),
            CLOSE => (Self::Close, 0),
            _ => return None,
        };
        (rest.len() as u64 == expected).then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rts_has_golden_bytes() {
        let mut bytes = [0xa5; HEADER];
        bytes.copy_from_slice(&Frame::Rts { length: 0x0102_0304_0506_0708, rkey: 0x090a_0b0c }.emit());
        assert_eq!(bytes, *b"\x02\0\0\0\x0c\x0b\x0a\x09\x08\x07\x06\x05\x04\x03\x02\x01\0\0\0\0\0\0\0\0");
    }

    proptest! {
        #[test]
        fn frames_round_trip(length in any::<u64>(), rkey in any::<u32>(), body in prop::collection::vec(any::<u8>(), 0..50)) {
            for frame in [Frame::Rts { length, rkey }, Frame::Fin, Frame::Close] {
                prop_assert_eq!(Frame::parse(&frame.emit()), Some(frame));
            }
            let eager = Frame::Eager { length: body.len() as u64 };
            let bytes = [&eager.emit()[..], &body].concat();
            prop_assert_eq!(Frame::parse(&bytes), Some(eager));
            prop_assert_eq!(Frame::parse(&[&bytes[..], &[0]].concat()), None);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::parse(&bytes);
        }
    }
}
