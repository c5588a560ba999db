//! Records: what software matching puts into a datagram, one behind the other.
//!
//! Short messages, and the control data of long messages, travel together if they go to one peer at about the same time. A record is a
//! [`RecordHeader`], and the bytes of an inline eager message. The bytes of another eager message or of a data record are the payload of
//! the datagram; that record is the last one in its datagram.

use std::mem::{offset_of, size_of};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// Bytes of a record's header.
pub(super) const HEADER: usize = size_of::<RecordHeader>();
/// Bytes of the records of a datagram.
pub(super) const RECORDS: usize = 32 << 10;
/// The longest inline message: to copy it costs less than to send it from where it lies.
pub(super) const MAX_INLINE: usize = 4 << 10;
const _: () = assert!(HEADER + MAX_INLINE <= RECORDS && RECORDS <= u16::MAX as usize);

/// Flag: the payload goes as one tagged message of the provider. In an RTS it may, in a CTS it must.
const DIRECT: u8 = 1;
/// Flag of an eager message: its bytes follow the header.
const INLINE: u8 = 2;

/// The header of a record, as it is sent.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct RecordHeader {
    kind: u8,
    flags: u8,
    reserved: U16,
    /// RTS, CTS, decline: the sender's number of the message.
    number: U32,
    /// Eager, RTS: the tag. CTS, data: the receiver's number of the receive, which is also the tag of a direct payload.
    tag: U64,
    /// Bytes of the message.
    total: U64,
    /// Data: where the bytes belong.
    offset: U64,
}

const _: () = {
    assert!(HEADER == 32);
    assert!(offset_of!(RecordHeader, flags) == 1);
    assert!(offset_of!(RecordHeader, number) == 4);
    assert!(offset_of!(RecordHeader, tag) == 8);
    assert!(offset_of!(RecordHeader, total) == 16);
    assert!(offset_of!(RecordHeader, offset) == 24);
};

/// Kinds of records.
#[derive(Clone, Copy, Debug, Immutable, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub(super) enum Kind {
    /// A whole message.
    Eager = 1,
    /// Request to send: a long message has a sender.
    Rts = 2,
    /// Clear to send: the long message has a receive.
    Cts = 3,
    /// A part of a long message.
    Data = 4,
    /// The receive is too short for the long message.
    Decline = 5,
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub direct: bool,
    pub inline: bool,
    pub number: u32,
    pub tag: u64,
    pub total: u64,
    pub offset: u64,
}

impl Header {
    pub fn new(kind: Kind, number: u32, tag: u64, total: usize) -> Self {
        Self { kind, direct: false, inline: false, number, tag, total: total as u64, offset: 0 }
    }

    pub fn emit(&self) -> [u8; HEADER] {
        let header = RecordHeader {
            kind: self.kind as u8,
            flags: if self.direct { DIRECT } else { 0 } | if self.inline { INLINE } else { 0 },
            reserved: 0.into(),
            number: self.number.into(),
            tag: self.tag.into(),
            total: self.total.into(),
            offset: self.offset.into(),
        };
        zerocopy::transmute!(header)
    }

    /// None for an unknown kind.
    fn parse(header: &RecordHeader) -> Option<Self> {
        let kind = Kind::try_read_from_bytes(&[header.kind]).ok()?;
        Some(Self {
            kind,
            direct: header.flags & DIRECT != 0,
            inline: header.flags & INLINE != 0 && kind == Kind::Eager,
            number: header.number.get(),
            tag: header.tag.get(),
            total: header.total.get(),
            offset: header.offset.get(),
        })
    }
}

/// The records of a datagram, in order, each with its bytes. A malformed record ends the iteration, with a line in the log.
pub(super) struct Records<'a> {
    pub records: &'a [u8],
    pub payload: &'a [u8],
}

impl<'a> Records<'a> {
    /// The next record, without a line in the log.
    pub fn parse_next(&mut self) -> Option<(Header, &'a [u8])> {
        let (header, rest) = RecordHeader::ref_from_prefix(self.records).ok()?;
        let header = Header::parse(header)?;
        let len = if header.inline { usize::try_from(header.total).ok()? } else { 0 };
        let (inline, rest) = rest.split_at_checked(len)?;
        let bytes = match header.kind {
            Kind::Eager if header.inline => inline,
            Kind::Eager | Kind::Data if rest.is_empty() => self.payload,
            Kind::Eager | Kind::Data => return None,
            Kind::Rts | Kind::Cts | Kind::Decline => &[],
        };
        self.records = rest;
        Some((header, bytes))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = (Header, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        if self.records.is_empty() {
            return None;
        }
        let next = self.parse_next();
        if next.is_none() {
            log::warn!("the rest of a datagram was dropped: its {} bytes are malformed", self.records.len());
            self.records = &[];
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8; HEADER]) -> Option<Header> {
        Header::parse(RecordHeader::ref_from_bytes(bytes).ok()?)
    }

    #[test]
    fn header_round_trips_golden_bytes() {
        let header = Header { direct: true, offset: 0x33, ..Header::new(Kind::Cts, 0x0102_0304, 0x11, 0x22) };
        let mut golden = [0; HEADER];
        golden[..8].copy_from_slice(&[3, 1, 0, 0, 4, 3, 2, 1]);
        (golden[8], golden[16], golden[24]) = (0x11, 0x22, 0x33);
        assert_eq!(header.emit(), golden);
        assert_eq!(parse(&golden), Some(header));
        golden[0] = 9;
        assert_eq!(parse(&golden), None);
        let eager = Header { inline: true, ..Header::new(Kind::Eager, 0, 5, 8) };
        assert_eq!((eager.emit()[0], eager.emit()[1], parse(&eager.emit())), (1, 2, Some(eager)));
    }

    fn eager(tag: u64, bytes: &[u8]) -> Vec<u8> {
        let header = Header { inline: true, ..Header::new(Kind::Eager, 0, tag, bytes.len()) };
        [&header.emit()[..], bytes].concat()
    }

    fn tags(records: &[u8], payload: &[u8]) -> Vec<(u64, Vec<u8>)> {
        Records { records, payload }.map(|(header, bytes)| (header.tag, bytes.to_vec())).collect()
    }

    #[test]
    fn records_keep_order_and_bytes() {
        let rts = Header::new(Kind::Rts, 1, 7, 1 << 20).emit();
        let last = Header::new(Kind::Eager, 0, 9, 4).emit();
        let records = [&eager(5, b"abc")[..], &eager(6, b""), &rts, &last].concat();
        let expected = [(5, b"abc".to_vec()), (6, Vec::new()), (7, Vec::new()), (9, b"rest".to_vec())];
        assert_eq!(tags(&records, b"rest"), expected);
        assert_eq!(tags(&[], b"rest"), []);
    }

    #[test]
    fn malformed_record_ends_iteration() {
        let good = eager(5, b"abc");
        let one = [(5, b"abc".to_vec())];
        let unknown = [9; HEADER];
        assert_eq!(tags(&[&good[..], &unknown].concat(), b""), one);
        assert_eq!(tags(&[&good[..], &good[..HEADER - 1]].concat(), b""), one);
        // Fewer bytes than the header states, more bytes than any memory has, and a data record in the middle.
        assert_eq!(tags(&[&good[..], &good[..HEADER + 2]].concat(), b""), one);
        let endless = Header { inline: true, total: u64::MAX, ..Header::new(Kind::Eager, 0, 6, 0) }.emit();
        assert_eq!(tags(&[&good[..], &endless, &good].concat(), b""), one);
        let data_bytes = Header::new(Kind::Data, 0, 6, 4).emit();
        assert_eq!(tags(&[&good[..], &data_bytes, &good].concat(), b"four"), one);
    }
}
