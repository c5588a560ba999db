//! Packets between cards. Both ends run the same release: the hello compares
//! [`WIRE_VERSION`](crate::address::WIRE_VERSION).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// A packet's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub enum Kind {
    /// A part of an RDMA write, with payload.
    Write = 1,
    /// The peer has handled all packets of a request; `status` is the result.
    Ack = 2,
    /// An RDMA read.
    Read = 3,
    /// A part of the answer to [`Kind::Read`], with payload.
    Data = 4,
    /// The sender gave up a request: the peer drops what it has received of it.
    Abort = 5,
    /// A whole send, with payload.
    Send = 6,
}

/// The header of every packet. The kind decides which fields are used; the others are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// A [`Kind`], if the number is valid.
    pub kind: u8,
    /// EFA completion status of an acknowledgement or of read data.
    pub status: u8,
    /// The requester's queue pair.
    pub src_qpn: u16,
    /// Queue pair that the request is for.
    pub dst_qpn: u16,
    /// [`HAS_IMM`], or 0.
    pub flags: u16,
    /// QKey of the target queue pair.
    pub qkey: u32,
    /// Key of the target memory.
    pub rkey: u32,
    /// Address of the whole request in that memory.
    pub addr: u64,
    /// Length of the whole request in bytes.
    pub total: u32,
    /// Offset of this packet's payload in the request.
    pub offset: u32,
    /// Payload bytes after this header.
    pub len: u32,
    /// Immediate data, with [`HAS_IMM`].
    pub imm: u32,
    /// The requester's name for the request.
    pub token: u64,
}

/// Flag of a send or a write with immediate data.
pub const HAS_IMM: u16 = 1;

/// A [`Header`] on the wire.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    kind: u8,
    status: u8,
    src_qpn: U16,
    dst_qpn: U16,
    flags: U16,
    qkey: U32,
    rkey: U32,
    addr: U64,
    total: U32,
    offset: U32,
    len: U32,
    imm: U32,
    token: U64,
}
assert_layout!(RawHeader, 48, {
    kind @ 0, status @ 1, src_qpn @ 2, dst_qpn @ 4, flags @ 6, qkey @ 8, rkey @ 12, addr @ 16, total @ 24, offset @ 28,
    len @ 32, imm @ 36, token @ 40,
});

/// Size of a header in bytes.
pub const HEADER_LEN: usize = size_of::<RawHeader>();
/// Size of a header in words.
pub const HEADER_WORDS: usize = HEADER_LEN / 8;

impl From<Header> for RawHeader {
    fn from(header: Header) -> Self {
        Self {
            kind: header.kind,
            status: header.status,
            src_qpn: header.src_qpn.into(),
            dst_qpn: header.dst_qpn.into(),
            flags: header.flags.into(),
            qkey: header.qkey.into(),
            rkey: header.rkey.into(),
            addr: header.addr.into(),
            total: header.total.into(),
            offset: header.offset.into(),
            len: header.len.into(),
            imm: header.imm.into(),
            token: header.token.into(),
        }
    }
}

impl From<RawHeader> for Header {
    fn from(raw: RawHeader) -> Self {
        Self {
            kind: raw.kind,
            status: raw.status,
            src_qpn: raw.src_qpn.get(),
            dst_qpn: raw.dst_qpn.get(),
            flags: raw.flags.get(),
            qkey: raw.qkey.get(),
            rkey: raw.rkey.get(),
            addr: raw.addr.get(),
            total: raw.total.get(),
            offset: raw.offset.get(),
            len: raw.len.get(),
            imm: raw.imm.get(),
            token: raw.token.get(),
        }
    }
}

impl Header {
    pub fn new(kind: Kind, token: u64) -> Self {
        Self { kind: kind as u8, token, ..Self::default() }
    }

    /// Returns the packet's kind; `None` for a number that no card of this version sends.
    pub fn kind(&self) -> Option<Kind> {
        Kind::try_read_from_bytes(&[self.kind]).ok()
    }

    /// Returns the header as words for shared memory.
    pub fn to_words(self) -> [u64; HEADER_WORDS] {
        zerocopy::transmute!(RawHeader::from(self))
    }

    pub fn from_words(words: [u64; HEADER_WORDS]) -> Self {
        let raw: RawHeader = zerocopy::transmute!(words);
        raw.into()
    }

    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        zerocopy::transmute!(RawHeader::from(self))
    }

    pub fn from_bytes(bytes: [u8; HEADER_LEN]) -> Self {
        let raw: RawHeader = zerocopy::transmute!(bytes);
        raw.into()
    }

    /// Returns the immediate data of a send or a write.
    pub fn immediate(&self) -> Option<u32> {
        (self.flags & HAS_IMM != 0).then_some(self.imm)
    }

    /// Whether the payload lies within the request, and a kind without payload has none.
    pub fn is_consistent(&self) -> bool {
        if self.flags & !HAS_IMM != 0 {
            return false;
        }
        match self.kind() {
            Some(Kind::Write | Kind::Data) => self.offset.checked_add(self.len).is_some_and(|end| end <= self.total),
            Some(Kind::Send) => self.offset == 0 && self.len == self.total,
            Some(Kind::Ack | Kind::Read | Kind::Abort) => self.len == 0,
            None => false,
        }
    }
}

/// The peer wrote an impossible packet or an impossible ring cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent a corrupt packet")]
pub struct Corrupt;

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = Header {
        kind: 3,
        status: 4,
        src_qpn: 0x1234,
        dst_qpn: 0xfedc,
        flags: 1,
        qkey: 0x8000_0001,
        rkey: 0x7fff_fff0,
        addr: 0xdead_beef_0123_4567,
        total: 77,
        offset: 0xffff_fff0,
        len: 9,
        imm: 0xcafe_babe,
        token: 0x0102_0304_0506_0708,
    };
    /// `HEADER`, encoded by hand.
    const BYTES: [u8; HEADER_LEN] = [
        0x03, 0x04, 0x34, 0x12, 0xdc, 0xfe, 0x01, 0x00, 0x01, 0x00, 0x00, 0x80, 0xf0, 0xff, 0xff, 0x7f, 0x67, 0x45,
        0x23, 0x01, 0xef, 0xbe, 0xad, 0xde, 0x4d, 0x00, 0x00, 0x00, 0xf0, 0xff, 0xff, 0xff, 0x09, 0x00, 0x00, 0x00,
        0xbe, 0xba, 0xfe, 0xca, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01,
    ];

    #[test]
    fn header_is_emitted_as_golden_bytes() {
        let mut room = [0xa5; HEADER_LEN];
        room.copy_from_slice(&HEADER.to_bytes());
        assert_eq!(room, BYTES);
    }

    #[test]
    fn header_is_parsed_from_golden_bytes() {
        assert_eq!(Header::from_bytes(BYTES), HEADER);
    }

    #[test]
    fn header_round_trips() {
        assert_eq!(Header::from_words(HEADER.to_words()), HEADER);
        assert_eq!(Header::from_bytes(HEADER.to_bytes()), HEADER);
        assert_eq!(
            HEADER.to_words().map(u64::to_le_bytes).concat(),
            BYTES,
            "words of shared memory are the same bytes"
        );
    }

    #[test]
    fn payload_outside_the_request_is_inconsistent() {
        let mut header = Header { total: 10, offset: 4, len: 6, ..Header::new(Kind::Write, 1) };
        assert!(header.is_consistent());
        header.len = 7;
        assert!(!header.is_consistent());
        (header.offset, header.len) = (u32::MAX, 2);
        assert!(!header.is_consistent());
        assert!(!Header { len: 1, ..Header::new(Kind::Ack, 1) }.is_consistent());
        assert!(Header { total: 9, len: 9, ..Header::new(Kind::Send, 1) }.is_consistent());
        assert!(!Header { total: 9, len: 8, ..Header::new(Kind::Send, 1) }.is_consistent(), "a send is one packet");
        assert!(!Header { flags: 2, ..Header::new(Kind::Send, 1) }.is_consistent(), "no such flag");
        assert!(!Header::default().is_consistent());
    }
}
