//! What endpoints of the `efa` fabric say to one another, inside the card's sends.

use soft_nic::address::{ADDRESS_LEN, Address};
use soft_nic::card::MAX_SEND_SIZE;

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// A whole message follows.
    Message = 1,
    /// A message that is to be fetched: its [`Piece`]s follow.
    Request = 2,
    /// A message was received, or fetched; `data` is how that ended.
    Done = 3,
    /// Asks whether the other side is still there.
    Ping = 4,
}

/// The message has a tag.
pub(super) const TAGGED: u8 = 1;
/// The message has data for the completion.
pub(super) const DATA: u8 = 2;
/// The sender waits for [`Kind::Done`].
pub(super) const RECEIPT: u8 = 4;

/// The beginning of every packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    /// Sum of [`TAGGED`], [`DATA`] and [`RECEIPT`].
    pub flags: u8,
    /// Counts the messages from this endpoint to that one; 0 in others than messages.
    pub seq: u32,
    /// Who sends.
    pub from: Address,
    /// Bytes of the whole message.
    pub len: u64,
    pub tag: u64,
    pub data: u64,
    /// Names the message to its sender.
    pub id: u64,
}

/// Bytes of [`Head`].
pub(super) const HEAD_LEN: usize = 8 + ADDRESS_LEN + 4 * 8;
/// Bytes of a message that a packet holds at most.
pub(super) const MAX_MESSAGE: usize = MAX_SEND_SIZE as usize - HEAD_LEN;

/// Memory of the sender to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub addr: u64,
    pub len: u64,
    pub rkey: u32,
}

/// Bytes of [`Piece`].
pub(super) const PIECE_LEN: usize = 24;
/// Pieces of a message at most.
pub(super) const MAX_PIECES: usize = super::super::call::MAX_IOV;

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl Head {
    pub(super) fn to_bytes(self) -> [u8; HEAD_LEN] {
        let mut bytes = [0; HEAD_LEN];
        (bytes[0], bytes[1]) = (self.kind as u8, self.flags);
        bytes[4..8].copy_from_slice(&self.seq.to_le_bytes());
        bytes[8..8 + ADDRESS_LEN].copy_from_slice(&self.from.to_bytes());
        let words = [self.len, self.tag, self.data, self.id];
        for (chunk, word) in bytes[8 + ADDRESS_LEN..].as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *chunk = word.to_le_bytes();
        }
        bytes
    }

    /// A packet's head and what follows it; `None` for bytes that no endpoint sends.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, payload) = bytes.split_at_checked(HEAD_LEN)?;
        let kind = match head[0] {
            1 => Kind::Message,
            2 => Kind::Request,
            3 => Kind::Done,
            4 => Kind::Ping,
            _ => return None,
        };
        let at = |i: usize| word(head, 8 + ADDRESS_LEN + 8 * i);
        let parsed = Self {
            kind,
            flags: head[1],
            seq: u32::from_le_bytes(*head[4..].first_chunk()?),
            from: Address::from_bytes(head[8..].first_chunk()?).ok()?,
            len: at(0)?,
            tag: at(1)?,
            data: at(2)?,
            id: at(3)?,
        };
        let consistent = match kind {
            Kind::Message => payload.len() as u64 == parsed.len,
            Kind::Request => pieces(payload).is_some_and(|(pieces, count)| {
                let sum = pieces[..count].iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len));
                sum == Some(parsed.len)
            }),
            Kind::Done | Kind::Ping => payload.is_empty(),
        };
        (consistent && parsed.flags <= TAGGED | DATA | RECEIPT && head[2..4] == [0; 2]).then_some((parsed, payload))
    }
}

impl Piece {
    pub(super) fn to_bytes(self) -> [u8; PIECE_LEN] {
        let mut bytes = [0; PIECE_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }
}

/// What follows the head of a request, and how many of it are there.
pub(super) fn pieces(payload: &[u8]) -> Option<([Piece; MAX_PIECES], usize)> {
    let (chunks, rest) = payload.as_chunks::<PIECE_LEN>();
    if !rest.is_empty() || chunks.len() > MAX_PIECES {
        return None;
    }
    let mut pieces = [Piece { addr: 0, len: 0, rkey: 0 }; MAX_PIECES];
    for (piece, bytes) in pieces.iter_mut().zip(chunks) {
        let rkey = u32::from_le_bytes(*bytes[16..].first_chunk()?);
        *piece = Piece { addr: word(bytes, 0)?, len: word(bytes, 8)?, rkey };
    }
    Some((pieces, chunks.len()))
}

/// Reads any bytes as a packet: what is understood says the same again.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn check_packet(bytes: &[u8]) {
    if let Some((head, payload)) = Head::parse(bytes) {
        let again = [&head.to_bytes(), payload].concat();
        assert_eq!(Head::parse(&again), Some((head, payload)));
        assert!(head.kind != Kind::Request || pieces(payload).is_some());
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use soft_nic::address::Gid;

    fn head(kind: Kind, len: u64) -> Head {
        let gid = Gid { host: 1, ip: Ipv4Addr::LOCALHOST, port: 3, nonce: 4 };
        let from = Address { gid, qpn: 5, qkey: 6 };
        Head { kind, flags: TAGGED | RECEIPT, seq: 0xfffe, from, len, tag: 8, data: 9, id: u64::MAX }
    }

    fn packet(head: Head, payload: &[u8]) -> Vec<u8> {
        [&head.to_bytes(), payload].concat()
    }

    #[test]
    fn round_trip() {
        let bytes = packet(head(Kind::Message, 5), b"hello");
        assert_eq!(Head::parse(&bytes), Some((head(Kind::Message, 5), &b"hello"[..])));
        let piece = Piece { addr: 0x0102_0304_0506_0708, len: 1 << 33, rkey: 0xdead_beef };
        let bytes = packet(head(Kind::Request, 1 << 33), &piece.to_bytes());
        let (parsed, payload) = Head::parse(&bytes).unwrap();
        assert_eq!((parsed.kind, pieces(payload).unwrap().1), (Kind::Request, 1));
        assert_eq!(pieces(payload).unwrap().0[0], piece);
        assert!(Head::parse(&packet(head(Kind::Done, 0), b"")).is_some());
        assert_eq!(HEAD_LEN + MAX_MESSAGE, 8928);
        check_packet(&bytes);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(Head::parse(&[]).is_none());
        assert!(Head::parse(&[0xff; HEAD_LEN]).is_none());
        assert!(Head::parse(&packet(head(Kind::Message, 6), b"hello")).is_none(), "another length");
        assert!(Head::parse(&packet(head(Kind::Done, 0), b"x")).is_none());
        assert!(Head::parse(&packet(head(Kind::Request, 8), &[0; 23])).is_none());
        assert!(Head::parse(&packet(head(Kind::Request, 0), &[0; 5 * PIECE_LEN])).is_none(), "too many pieces");
        let huge = Piece { addr: 0, len: u64::MAX, rkey: 0 }.to_bytes();
        assert!(Head::parse(&packet(head(Kind::Request, u64::MAX - 1), &[huge, huge].concat())).is_none());
        let mut unknown = packet(head(Kind::Message, 0), b"");
        unknown[1] = 8;
        assert!(Head::parse(&unknown).is_none(), "a flag that does not exist");
    }
}
