//! Packets between endpoints of the `efa` fabric. Each travels in one of the card's sends.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use soft_nic::address::{Address, Gid};
use soft_nic::card::MAX_SEND_SIZE;

/// A packet's kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub(super) enum Kind {
    /// A whole message, with payload.
    Eager = 1,
    /// The announcement of a message that the receiver reads from the sender's memory: its [`RemoteBuffer`]s follow.
    Rendezvous = 2,
    /// The receiver has the message; `data` is the status.
    Done = 3,
    /// Asks whether the peer is alive.
    Ping = 4,
}

/// The message has a tag.
pub(super) const TAGGED: u8 = 1;
/// The message has data for the completion.
pub(super) const DATA: u8 = 2;
/// The sender waits for [`Kind::Done`].
pub(super) const RECEIPT: u8 = 4;

/// The head of every packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    /// Sum of [`TAGGED`], [`DATA`] and [`RECEIPT`].
    pub flags: u8,
    /// Number of the message or receipt from this sender to this receiver; 0 in a ping.
    pub seq: u32,
    /// The sender. Only its QKey travels: the card knows the rest, and a GID is never sent in the clear.
    pub from: Address,
    /// Length of the whole message in bytes.
    pub len: u64,
    pub tag: u64,
    pub data: u64,
    /// The sender's identifier for the message.
    pub id: u64,
}

/// A [`Head`] on the wire.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHead {
    kind: u8,
    flags: u8,
    reserved: [u8; 2],
    seq: U32,
    from_qkey: U32,
    reserved2: [u8; 4],
    len: U64,
    tag: U64,
    data: U64,
    id: U64,
}

/// Size of a [`Head`] in bytes.
pub(super) const HEAD_LEN: usize = size_of::<RawHead>();
const _: () = {
    use std::mem::offset_of;
    assert!(HEAD_LEN == 48 && offset_of!(RawHead, kind) == 0 && offset_of!(RawHead, flags) == 1);
    assert!(offset_of!(RawHead, seq) == 4 && offset_of!(RawHead, from_qkey) == 8 && offset_of!(RawHead, len) == 16);
    assert!(offset_of!(RawHead, tag) == 24 && offset_of!(RawHead, data) == 32 && offset_of!(RawHead, id) == 40);
};
/// Maximum size of a message that fits in one packet, in bytes.
pub(super) const MAX_MESSAGE: usize = MAX_SEND_SIZE as usize - HEAD_LEN;

/// Sender memory that the receiver reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RemoteBuffer {
    pub addr: U64,
    pub len: U64,
    pub rkey: U32,
    reserved: [u8; 4],
}

/// Size of a [`RemoteBuffer`] in bytes.
pub(super) const REMOTE_BUFFER_LEN: usize = size_of::<RemoteBuffer>();
const _: () = assert!(REMOTE_BUFFER_LEN == 24 && std::mem::offset_of!(RemoteBuffer, rkey) == 16);
/// Maximum number of a message's remote buffers.
const MAX_REMOTE_BUFFERS: usize = super::super::call::MAX_IOV;

impl RemoteBuffer {
    pub(super) fn new(addr: u64, len: u64, rkey: u32) -> Self {
        Self { addr: addr.into(), len: len.into(), rkey: rkey.into(), reserved: [0; 4] }
    }
}

impl Head {
    pub(super) fn to_bytes(self) -> [u8; HEAD_LEN] {
        zerocopy::transmute!(RawHead {
            kind: self.kind as u8,
            flags: self.flags,
            reserved: [0; 2],
            seq: self.seq.into(),
            from_qkey: self.from.qkey.into(),
            reserved2: [0; 4],
            len: self.len.into(),
            tag: self.tag.into(),
            data: self.data.into(),
            id: self.id.into(),
        })
    }

    /// Parses the head and payload of a packet that queue pair `qpn` of the card `gid` sent; `None` for malformed
    /// bytes.
    pub(super) fn parse(bytes: &[u8], gid: Gid, qpn: u16) -> Option<(Self, &[u8])> {
        let (raw, payload) = RawHead::ref_from_prefix(bytes).ok()?;
        let head = Self {
            kind: Kind::try_read_from_bytes(&[raw.kind]).ok()?,
            flags: raw.flags,
            seq: raw.seq.get(),
            from: Address { gid, qpn, qkey: raw.from_qkey.get() },
            len: raw.len.get(),
            tag: raw.tag.get(),
            data: raw.data.get(),
            id: raw.id.get(),
        };
        let consistent = match head.kind {
            Kind::Eager => payload.len() as u64 == head.len,
            Kind::Rendezvous => remote_buffers(payload).is_some_and(|buffers| {
                let sum = buffers.iter().try_fold(0u64, |sum, buffer| sum.checked_add(buffer.len.get()));
                sum == Some(head.len)
            }),
            Kind::Done | Kind::Ping => payload.is_empty(),
        };
        let reserved = (raw.reserved, raw.reserved2) == ([0; 2], [0; 4]);
        (consistent && head.flags <= TAGGED | DATA | RECEIPT && reserved).then_some((head, payload))
    }
}

/// Returns the remote buffers after the head of a [`Kind::Rendezvous`].
pub(super) fn remote_buffers(payload: &[u8]) -> Option<&[RemoteBuffer]> {
    <[RemoteBuffer]>::ref_from_bytes(payload).ok().filter(|buffers| buffers.len() <= MAX_REMOTE_BUFFERS)
}

/// Parses any bytes as a packet. A parsed packet must emit bytes that parse to the same packet.
#[cfg(any(test, feature = "fuzzing"))]
pub fn check_packet(bytes: &[u8]) {
    let gid = Gid { address: None, secret: [4; 8] };
    if let Some((head, payload)) = Head::parse(bytes, gid, 5) {
        let emitted = [&head.to_bytes(), payload].concat();
        assert_eq!(Head::parse(&emitted, gid, 5), Some((head, payload)));
        assert!(head.kind != Kind::Rendezvous || remote_buffers(payload).is_some());
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    const GID: Gid = Gid { address: None, secret: [4; 8] };

    fn parse(bytes: &[u8]) -> Option<(Head, &[u8])> {
        Head::parse(bytes, GID, 5)
    }

    fn head(kind: Kind, len: u64) -> Head {
        let from = Address { gid: GID, qpn: 5, qkey: 6 };
        Head { kind, flags: TAGGED | RECEIPT, seq: 0xfffe, from, len, tag: 8, data: 9, id: u64::MAX }
    }

    fn packet(head: Head, payload: &[u8]) -> Vec<u8> {
        [&head.to_bytes(), payload].concat()
    }

    #[test]
    fn head_is_emitted_as_golden_bytes() {
        let bytes = head(Kind::Eager, 0x0102).to_bytes();
        assert_eq!(bytes[..8], [1, 5, 0, 0, 0xfe, 0xff, 0, 0]);
        assert_eq!(bytes[8..16], [6, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..32], [2, 1, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[32..], [9, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255]);
        let buffer = RemoteBuffer::new(0x0102, 3, 0x0405_0607);
        assert_eq!(buffer.as_bytes(), [2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 7, 6, 5, 4, 0, 0, 0, 0]);
    }

    #[test]
    fn packets_round_trip() {
        let bytes = packet(head(Kind::Eager, 5), b"hello");
        assert_eq!(parse(&bytes), Some((head(Kind::Eager, 5), &b"hello"[..])));
        let buffer = RemoteBuffer::new(0x0102_0304_0506_0708, 1 << 33, 0xdead_beef);
        let bytes = packet(head(Kind::Rendezvous, 1 << 33), buffer.as_bytes());
        let (parsed, payload) = parse(&bytes).unwrap();
        assert_eq!((parsed.kind, remote_buffers(payload).unwrap()), (Kind::Rendezvous, &[buffer][..]));
        assert!(parse(&packet(head(Kind::Done, 0), b"")).is_some());
        assert_eq!(HEAD_LEN + MAX_MESSAGE, 8928);
        check_packet(&bytes);
    }

    #[test]
    fn malformed_packets_are_refused() {
        assert!(parse(&[]).is_none());
        assert!(parse(&[0xff; HEAD_LEN]).is_none());
        assert!(parse(&packet(head(Kind::Eager, 6), b"hello")).is_none(), "another length");
        assert!(parse(&packet(head(Kind::Done, 0), b"x")).is_none());
        assert!(parse(&packet(head(Kind::Rendezvous, 8), &[0; 23])).is_none());
        let five = [0; 5 * REMOTE_BUFFER_LEN];
        assert!(parse(&packet(head(Kind::Rendezvous, 0), &five)).is_none(), "too many buffers");
        let huge = RemoteBuffer::new(0, u64::MAX, 0);
        assert!(parse(&packet(head(Kind::Rendezvous, u64::MAX - 1), [huge, huge].as_bytes())).is_none());
        let mut unknown = packet(head(Kind::Eager, 0), b"");
        unknown[1] = 8;
        assert!(parse(&unknown).is_none(), "a flag that does not exist");
    }
}
