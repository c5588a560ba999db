//! The bytes before every message: a [`RawPrefix`], the sender's endpoint name, the header, the payload.
//!
//! The name identifies the sender on every provider, also without `FI_SOURCE`, and lets a receiver answer an unknown sender. The endpoint
//! numbers distinguish endpoints that have the same name one after the other: a message from or for an earlier one is dropped. Neither is a
//! proof: the hosts on this wire trust each other.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the prefix.
pub(super) const PREFIX: usize = size_of::<RawPrefix>();
const MAGIC: [u8; 4] = *b"FGM2";

/// The prefix of a message, as it is sent.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPrefix {
    magic: [u8; 4],
    /// 1 data, 2 control.
    kind: u8,
    /// Control: [`PING`], [`CLOSING`], [`CLOSE_ACK`].
    flags: u8,
    /// Bytes of the sender's name.
    name_len: u8,
    reserved: u8,
    header_len: U16,
    reserved2: U16,
    payload_len: U32,
    /// The number of the sending endpoint, which it draws when it opens.
    from: U64,
    /// Data: the number of the receiving endpoint; 0 if the sender does not know it.
    to: U64,
}

const _: () = {
    assert!(PREFIX == 32);
    assert!(offset_of!(RawPrefix, kind) == 4);
    assert!(offset_of!(RawPrefix, name_len) == 6);
    assert!(offset_of!(RawPrefix, header_len) == 8);
    assert!(offset_of!(RawPrefix, payload_len) == 12);
    assert!(offset_of!(RawPrefix, from) == 16);
    assert!(offset_of!(RawPrefix, to) == 24);
};

/// Control flag: the receiver must answer.
pub(super) const PING: u8 = 1;
/// Control flag: the sender closes its endpoint.
pub(super) const CLOSING: u8 = 2;
/// Control flag: the sender has received the close of the receiver.
pub(super) const CLOSE_ACK: u8 = 4;
/// Number of combinations of control flags.
pub(super) const FLAG_SETS: u8 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message of the user.
    Data,
    /// A message between the endpoints themselves, with its flags.
    Control(u8),
}

/// A received message in parts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame<'a> {
    pub kind: Kind,
    pub from: u64,
    pub to: u64,
    pub name: &'a [u8],
    pub header: &'a [u8],
    pub payload: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("{0} bytes are too short for a message")]
    Short(usize),
    #[error("unknown magic {0:#010x}")]
    Magic(u32),
    #[error("unknown kind {0}")]
    Kind(u8),
    #[error("the message is {actual} bytes long but says {stated}")]
    Length { stated: usize, actual: usize },
}

/// Writes prefix, name and header into `buffer`; gives the offset of the payload. The caller has checked the lengths. `from` and `to` are
/// the numbers of the two endpoints.
pub(super) fn emit(
    buffer: &mut [u8],
    kind: Kind,
    name: &[u8],
    (from, to): (u64, u64),
    header: &[u8],
    payload_len: usize,
) -> usize {
    let (kind, flags) = match kind {
        Kind::Data => (1, 0),
        Kind::Control(flags) => (2, flags),
    };
    let prefix = RawPrefix {
        magic: MAGIC,
        kind,
        flags,
        name_len: name.len() as u8,
        reserved: 0,
        header_len: (header.len() as u16).into(),
        reserved2: 0.into(),
        payload_len: (payload_len as u32).into(),
        from: from.into(),
        to: to.into(),
    };
    let mut end = 0;
    for part in [prefix.as_bytes(), name, header] {
        buffer[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    end
}

impl<'a> Frame<'a> {
    pub fn parse(message: &'a [u8]) -> Result<Self, FrameError> {
        let (raw, rest) = RawPrefix::ref_from_prefix(message).map_err(|_| FrameError::Short(message.len()))?;
        if raw.magic != MAGIC {
            return Err(FrameError::Magic(u32::from_le_bytes(raw.magic)));
        }
        let kind = match raw.kind {
            1 => Kind::Data,
            2 => Kind::Control(raw.flags),
            other => return Err(FrameError::Kind(other)),
        };
        let (name_len, header_len) = (usize::from(raw.name_len), usize::from(raw.header_len.get()));
        let stated = PREFIX + name_len + header_len + raw.payload_len.get() as usize;
        if stated != message.len() {
            return Err(FrameError::Length { stated, actual: message.len() });
        }
        let (name, rest) = rest.split_at(name_len);
        let (header, payload) = rest.split_at(header_len);
        Ok(Self { kind, from: raw.from.get(), to: raw.to.get(), name, header, payload })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Vec<u8> {
        let mut bytes = vec![0xa5; PREFIX + 5];
        assert_eq!(emit(&mut bytes, Kind::Data, b"abc", (5, 6), b"HH", 4), PREFIX + 5);
        [&bytes[..], b"pppp"].concat()
    }

    #[test]
    fn prefix_has_golden_bytes() {
        let mut emitted = [0xa5; PREFIX + 0x112];
        emit(&mut emitted, Kind::Control(3), &[7; 16], (0x0708, 9), &[8; 0x0102], 0x0304_0506);
        assert_eq!(emitted[..16], *b"FGM2\x02\x03\x10\0\x02\x01\0\0\x06\x05\x04\x03");
        assert_eq!(emitted[16..PREFIX], *b"\x08\x07\0\0\0\0\0\0\x09\0\0\0\0\0\0\0");
        assert_eq!(&message()[..16], b"FGM2\x01\0\x03\0\x02\0\0\0\x04\0\0\0");
    }

    #[test]
    fn frame_round_trips() {
        let bytes = message();
        let frame = Frame::parse(&bytes).unwrap();
        assert_eq!(frame, Frame { kind: Kind::Data, from: 5, to: 6, name: b"abc", header: b"HH", payload: b"pppp" });
    }

    #[test]
    fn frame_of_wrong_length_is_refused() {
        let bytes = message();
        for len in 0..bytes.len() {
            assert!(Frame::parse(&bytes[..len]).is_err(), "{len}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(Frame::parse(&longer), Err(FrameError::Length { stated: 41, actual: 42 }));
    }

    #[test]
    fn unknown_magic_or_kind_is_refused() {
        let mut bytes = message();
        bytes[4] = 9;
        assert_eq!(Frame::parse(&bytes), Err(FrameError::Kind(9)));
        bytes[0] = b'X';
        assert!(matches!(Frame::parse(&bytes), Err(FrameError::Magic(_))));
    }
}
