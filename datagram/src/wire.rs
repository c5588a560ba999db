//! The bytes in front of every message: 32 bytes, then the sender's endpoint name, the header, the payload.
//!
//! ```text
//! 0  magic        u32 LE   "FGM2"
//! 4  kind         u8       1 data, 2 control
//! 5  flags        u8       control: bit 0 please answer, bit 1 the sender closes, bit 2 heard that the receiver closes
//! 6  name_len     u8       bytes of the sender's name
//! 7  (zero)       u8
//! 8  header_len   u16 LE
//! 10 (zero)       u16
//! 12 payload_len  u32 LE
//! 16 from         u64 LE   the sending endpoint, a number of its own choice
//! 24 to           u64 LE   data: the endpoint that is meant; 0 if its number is not known
//! ```
//!
//! The name makes a message say from whom it is on every provider, whether or not it can tell (`FI_SOURCE`), and lets the
//! receiver answer a sender that it had not heard of. The numbers tell endpoints apart that have one name after the other: what one
//! sent, or was sent, is nothing for the next. It is not proof: the wire is for hosts that trust each other.

/// Bytes of the fixed part.
pub(super) const PREFIX: usize = 32;
const MAGIC: u32 = u32::from_le_bytes(*b"FGM2");

/// Control flag: the receiver shall send something back.
pub(super) const PLEASE_ANSWER: u8 = 1;
/// Control flag: the sender closes its endpoint.
pub(super) const CLOSING: u8 = 2;
/// Control flag: the sender has heard that the receiver closes.
pub(super) const GOODBYE: u8 = 4;
/// All combinations of control flags.
pub(super) const FLAG_SETS: u8 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message of the user.
    Data,
    /// Between the endpoints themselves, with its flags.
    Control(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix {
    pub kind: Kind,
    pub name_len: u8,
    pub header_len: u16,
    pub payload_len: u32,
    pub from: u64,
    pub to: u64,
}

/// A received message, taken apart.
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
    #[error("magic {0:#010x} is not ours")]
    Magic(u32),
    #[error("unknown kind {0}")]
    Kind(u8),
    #[error("the message is {actual} bytes long but says {stated}")]
    Length { stated: usize, actual: usize },
}

impl Prefix {
    pub fn emit(&self) -> [u8; PREFIX] {
        let (kind, flags) = match self.kind {
            Kind::Data => (1, 0),
            Kind::Control(flags) => (2, flags),
        };
        let mut bytes = [0; PREFIX];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = kind;
        bytes[5] = flags;
        bytes[6] = self.name_len;
        bytes[8..10].copy_from_slice(&self.header_len.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.payload_len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.from.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.to.to_le_bytes());
        bytes
    }
}

impl<'a> Frame<'a> {
    pub fn parse(message: &'a [u8]) -> Result<Self, FrameError> {
        let (prefix, rest) = message.split_first_chunk::<PREFIX>().ok_or(FrameError::Short(message.len()))?;
        let number = |at: usize| prefix[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let (from, to) = (number(16), number(24));
        let [m0, m1, m2, m3, kind, flags, name_len, _, h0, h1, _, _, p0, p1, p2, p3, ..] = *prefix;
        let magic = u32::from_le_bytes([m0, m1, m2, m3]);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let kind = match kind {
            1 => Kind::Data,
            2 => Kind::Control(flags),
            other => return Err(FrameError::Kind(other)),
        };
        let name_len = usize::from(name_len);
        let header_len = usize::from(u16::from_le_bytes([h0, h1]));
        let payload_len = u32::from_le_bytes([p0, p1, p2, p3]) as usize;
        let stated = PREFIX + name_len + header_len + payload_len;
        if stated != message.len() {
            return Err(FrameError::Length { stated, actual: message.len() });
        }
        let (name, rest) = rest.split_at(name_len);
        let (header, payload) = rest.split_at(header_len);
        Ok(Self { kind, from, to, name, header, payload })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Vec<u8> {
        let prefix = Prefix { kind: Kind::Data, name_len: 3, header_len: 2, payload_len: 4, from: 5, to: 6 };
        let mut bytes = prefix.emit().to_vec();
        bytes.extend_from_slice(b"abcHHpppp");
        bytes
    }

    #[test]
    fn golden_bytes() {
        let kind = Kind::Control(3);
        let prefix = Prefix { kind, name_len: 16, header_len: 0x0102, payload_len: 0x0304_0506, from: 0x0708, to: 9 };
        let emitted = prefix.emit();
        assert_eq!(emitted[..16], *b"FGM2\x02\x03\x10\0\x02\x01\0\0\x06\x05\x04\x03");
        assert_eq!(emitted[16..], *b"\x08\x07\0\0\0\0\0\0\x09\0\0\0\0\0\0\0");
        assert_eq!(&message()[..16], b"FGM2\x01\0\x03\0\x02\0\0\0\x04\0\0\0");
    }

    #[test]
    fn parts_come_back() {
        let bytes = message();
        let frame = Frame::parse(&bytes).unwrap();
        assert_eq!(frame, Frame { kind: Kind::Data, from: 5, to: 6, name: b"abc", header: b"HH", payload: b"pppp" });
    }

    #[test]
    fn every_cut_and_every_extension_is_refused() {
        let bytes = message();
        for len in 0..bytes.len() {
            assert!(Frame::parse(&bytes[..len]).is_err(), "{len}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(Frame::parse(&longer), Err(FrameError::Length { stated: 41, actual: 42 }));
    }

    #[test]
    fn foreign_bytes_are_refused() {
        let mut bytes = message();
        bytes[4] = 9;
        assert_eq!(Frame::parse(&bytes), Err(FrameError::Kind(9)));
        bytes[0] = b'X';
        assert!(matches!(Frame::parse(&bytes), Err(FrameError::Magic(_))));
    }
}
