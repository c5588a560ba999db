//! What these cards say to one another: a header, and bytes behind it, in a stream.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What a frame is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// First on a connection: who calls.
    Hello = 1,
    /// A piece of a message.
    Send = 2,
    /// A piece of a write.
    Write = 3,
    /// Asks for memory.
    Read = 4,
    /// Compare and swap.
    CompareSwap = 5,
    /// Fetch and add.
    FetchAdd = 6,
    /// A datagram.
    Datagram = 7,
    /// A request was carried out, or why not.
    Ack = 8,
    /// A piece of what was read.
    Data = 9,
}

impl Kind {
    fn from_raw(raw: u8) -> Option<Kind> {
        const KINDS: [Kind; 9] = [
            Kind::Hello,
            Kind::Send,
            Kind::Write,
            Kind::Read,
            Kind::CompareSwap,
            Kind::FetchAdd,
            Kind::Datagram,
            Kind::Ack,
            Kind::Data,
        ];
        KINDS.into_iter().find(|kind| *kind as u8 == raw)
    }
}

/// The fixed part. Which fields mean something depends on `kind`; the others are 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct Header {
    pub kind: u8,
    /// `HAS_IMM` and its siblings.
    pub flags: u8,
    /// A syndrome, 0 for none.
    pub status: u8,
    pub reserved: u8,
    pub src_qpn: U32,
    pub dst_qpn: U32,
    /// Remote key; of a hello the version; of a datagram the queue key.
    pub rkey: U32,
    /// Bytes of payload behind this header.
    pub len: U32,
    /// Immediate data, or the key to invalidate.
    pub imm: U32,
    /// Names the request to the one who asks.
    pub token: U64,
    /// First byte of the whole request, in the peer's terms.
    pub addr: U64,
    /// Bytes of the whole request.
    pub total: U32,
    /// Where this piece begins.
    pub offset: U32,
    /// First operand of an atomic; of a message how many milliseconds it may wait for a receive.
    pub operand: U64,
    /// Second operand of an atomic.
    pub second: U64,
}

pub(super) const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == 64);

/// Most bytes of payload in one frame.
pub(super) const PIECE: usize = 64 << 10;
/// Both ends run the same release.
pub(super) const VERSION: u32 = 1;

/// There is immediate data.
pub(super) const HAS_IMM: u8 = 1;
/// A key is to be invalidated.
pub(super) const INVALIDATE: u8 = 2;
/// The completion raises an event.
pub(super) const SOLICITED: u8 = 4;
/// The last piece.
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

    /// The kind, if a card of this version sends such a frame.
    pub(super) fn check(&self) -> Option<Kind> {
        let kind = Kind::from_raw(self.kind)?;
        let end = u64::from(self.offset.get()) + u64::from(self.len.get());
        let pieces = matches!(kind, Kind::Send | Kind::Write | Kind::Data | Kind::Datagram);
        let payload =
            if pieces { end <= u64::from(self.total.get()) } else { self.len.get() == 0 || kind == Kind::Hello };
        (payload && self.len.get() as usize <= PIECE).then_some(kind)
    }
}

/// A frame that came.
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
    fn what_no_card_sends_is_refused() {
        let good = Header { total: 8.into(), len: 8.into(), ..Header::new(Kind::Write, 1, 2, 3) };
        assert_eq!(good.check(), Some(Kind::Write));
        for bad in [
            Header { kind: 0, ..good },
            Header { kind: 77, ..good },
            Header { offset: 1.into(), ..good },
            Header { len: (PIECE as u32 + 1).into(), total: u32::MAX.into(), ..good },
            Header { kind: Kind::Ack as u8, ..good },
        ] {
            assert_eq!(bad.check(), None, "{bad:?}");
        }
    }
}
