//! Frames between software ConnectX cards, in a byte stream: a header followed by payload.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// A frame's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub(super) enum Kind {
    /// The first frame on a connection: the version, and the nonce of the receiving card's address.
    Hello = 1,
    /// Part of a message, with payload.
    Send = 2,
    /// Part of an RDMA write, with payload.
    Write = 3,
    /// An RDMA read.
    Read = 4,
    /// Compare and swap.
    CompareSwap = 5,
    /// Fetch and add.
    FetchAdd = 6,
    /// A datagram.
    Datagram = 7,
    /// The result of a request.
    Ack = 8,
    /// Part of the answer to a read or atomic, with payload.
    Data = 9,
}

/// The header of every frame. The kind decides which fields are used; the others are 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct Header {
    pub kind: u8,
    /// Any of [`HAS_IMM`], [`INVALIDATE`], [`SOLICITED`] and [`LAST`].
    pub flags: u8,
    /// A syndrome, or 0 for none.
    pub status: u8,
    pub reserved: u8,
    pub src_qpn: U32,
    pub dst_qpn: U32,
    /// The remote key; in a hello, the version; in a datagram, the queue key.
    pub rkey: U32,
    /// Bytes of payload after this header.
    pub len: U32,
    /// Immediate data, or the key to invalidate.
    pub imm: U32,
    /// The requester's ID for the request.
    pub token: U64,
    /// The address of the whole request in the peer's memory.
    pub addr: U64,
    /// The length of the whole request in bytes.
    pub total: U32,
    /// The offset of this frame's payload in the request.
    pub offset: U32,
    /// An atomic's first operand; in a message or write, the RNR timeout in milliseconds; in a hello, the nonce.
    pub operand: U64,
    /// An atomic's second operand.
    pub second: U64,
}

pub(super) const HEADER: usize = size_of::<Header>();
const _: () = {
    use std::mem::offset_of;
    assert!(HEADER == 64 && align_of::<Header>() == 1);
    assert!(offset_of!(Header, kind) == 0 && offset_of!(Header, flags) == 1 && offset_of!(Header, status) == 2);
    assert!(offset_of!(Header, src_qpn) == 4 && offset_of!(Header, dst_qpn) == 8 && offset_of!(Header, rkey) == 12);
    assert!(offset_of!(Header, len) == 16 && offset_of!(Header, imm) == 20 && offset_of!(Header, token) == 24);
    assert!(offset_of!(Header, addr) == 32 && offset_of!(Header, total) == 40 && offset_of!(Header, offset) == 44);
    assert!(offset_of!(Header, operand) == 48 && offset_of!(Header, second) == 56);
};

/// The most payload bytes per frame.
pub(super) const MAX_PAYLOAD: usize = 64 << 10;
/// The version of the frames. Cards only connect to cards of the same version.
pub(super) const VERSION: u32 = 1;

/// The frame has immediate data.
pub(super) const HAS_IMM: u8 = 1;
/// Tells the receiver to invalidate a key.
pub(super) const INVALIDATE: u8 = 2;
/// The completion is a solicited one.
pub(super) const SOLICITED: u8 = 4;
/// This is the last frame of a request.
pub(super) const LAST: u8 = 8;

impl Header {
    pub(super) fn new(kind: Kind, src_qpn: u32, dst_qpn: u32, token: u64) -> Self {
        Self {
            kind: kind as u8,
            src_qpn: src_qpn.into(),
            dst_qpn: dst_qpn.into(),
            token: token.into(),
            ..Self::default()
        }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Checks the header and returns the kind; `None` for a frame that no card of this version sends.
    pub(super) fn check(&self) -> Option<Kind> {
        let kind = Kind::try_read_from_bytes(&[self.kind]).ok()?;
        let end = u64::from(self.offset.get()) + u64::from(self.len.get());
        let has_payload = matches!(kind, Kind::Send | Kind::Write | Kind::Data | Kind::Datagram);
        let payload =
            if has_payload { end <= u64::from(self.total.get()) } else { self.len.get() == 0 || kind == Kind::Hello };
        (payload && self.len.get() as usize <= MAX_PAYLOAD).then_some(kind)
    }
}

/// A frame that arrived.
#[derive(Debug)]
pub(super) struct Frame {
    pub kind: Kind,
    pub header: Header,
    pub payload: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_emitted_and_parsed_as_golden_bytes() {
        let header = Header {
            flags: HAS_IMM | LAST,
            status: 3,
            rkey: 4.into(),
            len: 5.into(),
            imm: 6.into(),
            addr: 7.into(),
            total: 8.into(),
            offset: 9.into(),
            operand: 10.into(),
            second: 11.into(),
            ..Header::new(Kind::Write, 0x0102_0304, 2, 0x0506)
        };
        let words = [0x0003_0903, 0x0102_0304, 2, 4, 5, 6, 0x0506, 0, 7, 0, 8, 9, 10, 0, 11, 0];
        let golden = words.map(u32::to_le_bytes).concat();
        let mut room = [0xa5; HEADER];
        room.copy_from_slice(header.as_bytes());
        assert_eq!(room[..], golden);
        assert_eq!(Header::read_from_bytes(&golden), Ok(header));
    }

    #[test]
    fn malformed_header_is_refused() {
        let good = Header { total: 8.into(), len: 8.into(), ..Header::new(Kind::Write, 1, 2, 3) };
        assert_eq!(good.check(), Some(Kind::Write));
        for bad in [
            Header { kind: 0, ..good },
            Header { kind: 77, ..good },
            Header { offset: 1.into(), ..good },
            Header { len: (MAX_PAYLOAD as u32 + 1).into(), total: u32::MAX.into(), ..good },
            Header { kind: Kind::Ack as u8, ..good },
        ] {
            assert_eq!(bad.check(), None, "{bad:?}");
        }
    }
}
