//! Messages between the ranks: a header and a payload. Integers are little endian.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"fgbs";
/// Blocks are handles and small reports; the limit catches messages of other programs.
const MAX_PAYLOAD: u64 = 64 << 20;

/// A header on the wire, with any values.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    kind: U32,
    sequence: U64,
    length: U64,
}

ferrogin_ffi::assert_layout!(RawHeader, size 24, align 1, { magic @ 0, kind @ 4, sequence @ 8, length @ 16 });

/// The payload of a hello.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    pub rank: U64,
    pub nranks: U64,
}

ferrogin_ffi::assert_layout!(Hello, size 16, align 1, { rank @ 0, nranks @ 8 });

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum MessageKind {
    /// The first message of a rank: a [`Hello`].
    Hello = 1,
    /// A rank's block of an allgather.
    Block = 2,
    /// All blocks: for each rank a u64 length and the bytes.
    Blocks = 3,
    /// The end of the job; the payload is the reason.
    Abort = 4,
}

impl MessageKind {
    fn from_raw(raw: u32) -> Option<MessageKind> {
        [Self::Hello, Self::Block, Self::Blocks, Self::Abort].into_iter().find(|kind| *kind as u32 == raw)
    }
}

/// A valid header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: MessageKind,
    pub sequence: u64,
    pub length: usize,
}

impl Header {
    /// Bytes on the wire.
    pub const SIZE: usize = size_of::<RawHeader>();

    /// The message of this header and `payload`, whose length `length` says.
    pub fn emit(self, payload: &[u8]) -> Vec<u8> {
        let header = RawHeader {
            magic: MAGIC,
            kind: (self.kind as u32).into(),
            sequence: self.sequence.into(),
            length: (self.length as u64).into(),
        };
        [header.as_bytes(), payload].concat()
    }

    /// The header in [`Header::SIZE`] bytes, or a description of the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Header, String> {
        let raw = RawHeader::read_from_bytes(bytes).map_err(|_| format!("{} bytes are no header", bytes.len()))?;
        if raw.magic != MAGIC {
            return Err(format!("{:02x?} is no bootstrap message", raw.magic));
        }
        let kind = MessageKind::from_raw(raw.kind.get()).ok_or_else(|| format!("unknown message kind {}", raw.kind))?;
        if raw.length.get() > MAX_PAYLOAD {
            return Err(format!("a message of {} bytes", raw.length));
        }
        Ok(Header { kind, sequence: raw.sequence.get(), length: raw.length.get() as usize })
    }
}

/// The payload of [`MessageKind::Blocks`].
pub(super) fn emit_blocks(blocks: &[Vec<u8>]) -> Vec<u8> {
    blocks.iter().flat_map(|block| [U64::new(block.len() as u64).as_bytes(), block].concat()).collect()
}

/// The blocks of `nranks` ranks; `None` if the payload is not valid.
pub(super) fn parse_blocks(mut payload: &[u8], nranks: usize) -> Option<Vec<Vec<u8>>> {
    let mut blocks = Vec::with_capacity(nranks);
    for _ in 0..nranks {
        let (length, rest) = U64::read_from_prefix(payload).ok()?;
        let (block, rest) = rest.split_at_checked(usize::try_from(length.get()).ok()?)?;
        blocks.push(block.to_vec());
        payload = rest;
    }
    payload.is_empty().then_some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_invalid_ones_are_refused() {
        let header = Header { kind: MessageKind::Blocks, sequence: 0x0807_0605_0403_0201, length: 2 };
        let bytes = header.emit(b"ab");
        assert_eq!(bytes, b"fgbs\x03\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08\x02\0\0\0\0\0\0\0ab");
        assert_eq!(Header::parse(&bytes[..Header::SIZE]), Ok(header));
        for (at, value) in [(0, b'F'), (4, 9), (23, 1)] {
            let mut invalid = bytes[..Header::SIZE].to_vec();
            invalid[at] = value;
            assert!(Header::parse(&invalid).is_err(), "byte {at}");
        }
        assert!(Header::parse(&bytes[..23]).is_err());
    }

    #[test]
    fn blocks_round_trip_and_truncated_ones_are_refused() {
        let blocks = vec![vec![1, 2, 3], vec![], vec![4; 100]];
        let payload = emit_blocks(&blocks);
        assert_eq!(parse_blocks(&payload, 3), Some(blocks));
        for len in 0..payload.len() {
            assert_eq!(parse_blocks(&payload[..len], 3), None);
        }
        assert_eq!(parse_blocks(&payload, 2), None);
        assert_eq!(parse_blocks(&[0xff; 16], 1), None);
    }
}
