//! Records: what software matching puts into a datagram, one behind the other.
//!
//! Short messages, and the control data of long messages, travel together if they go to one peer at about the same time. A record is a
//! [`Header`], and the bytes of an inline eager message. The bytes of another eager message or of a data record are the payload of
//! the datagram; that record is the last one in its datagram.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// Bytes of a record's header.
pub(super) const HEADER: usize = size_of::<Header>();
/// Bytes of the records of a datagram.
pub(super) const RECORDS: usize = 32 << 10;
/// The longest inline message: to copy it costs less than to send it from where it lies.
pub(super) const MAX_INLINE: usize = 4 << 10;
const _: () = assert!(HEADER + MAX_INLINE <= RECORDS && RECORDS <= u16::MAX as usize);

/// Flag: the payload goes as one tagged message of the provider. In an RTS it may, in a CTS it must.
const DIRECT: u8 = 1;
/// Flag of an eager message: its bytes follow the header.
pub(super) const INLINE: u8 = 2;

/// Kinds of records.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
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

/// The header of a record, as it is sent: all numbers are little endian.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(C)]
pub(super) struct Header {
    pub kind: Kind,
    pub flags: u8,
    pub reserved: u16,
    /// RTS, CTS, decline: the sender's number of the message.
    pub number: u32,
    /// Eager, RTS: the tag. CTS, data: the receiver's number of the receive, which is also the tag of a direct payload.
    pub tag: u64,
    /// Bytes of the message.
    pub total: u64,
    /// Data: where the bytes belong.
    pub offset: u64,
}

const _: () = assert!(HEADER == 32 && cfg!(target_endian = "little"));

impl Header {
    pub fn new(kind: Kind, number: u32, tag: u64, total: usize) -> Self {
        Self { kind, flags: 0, reserved: 0, number, tag, total: total as u64, offset: 0 }
    }

    /// The header with or without the flag of a direct payload.
    pub fn direct(self, direct: bool) -> Self {
        Self { flags: if direct { DIRECT } else { 0 }, ..self }
    }

    pub fn is_direct(&self) -> bool {
        self.flags & DIRECT != 0
    }

    pub fn is_inline(&self) -> bool {
        self.kind == Kind::Eager && self.flags & INLINE != 0
    }

    pub fn emit(&self) -> [u8; HEADER] {
        zerocopy::transmute!(*self)
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
        let (header, rest) = Header::try_read_from_prefix(self.records).ok()?;
        let len = if header.is_inline() { usize::try_from(header.total).ok()? } else { 0 };
        let (inline, rest) = rest.split_at_checked(len)?;
        let bytes = match header.kind {
            Kind::Eager if header.is_inline() => inline,
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
        Header::try_read_from_bytes(bytes).ok()
    }

    #[test]
    fn header_round_trips_golden_bytes() {
        let header = Header { offset: 0x33, ..Header::new(Kind::Cts, 0x0102_0304, 0x11, 0x22).direct(true) };
        let mut golden = [0; HEADER];
        golden[..8].copy_from_slice(&[3, 1, 0, 0, 4, 3, 2, 1]);
        (golden[8], golden[16], golden[24]) = (0x11, 0x22, 0x33);
        assert_eq!(header.emit(), golden);
        assert_eq!(parse(&golden), Some(header));
        golden[0] = 9;
        assert_eq!(parse(&golden), None);
        let eager = Header { flags: INLINE, ..Header::new(Kind::Eager, 0, 5, 8) };
        assert_eq!((eager.emit()[0], eager.emit()[1], parse(&eager.emit())), (1, 2, Some(eager)));
    }

    fn eager(tag: u64, bytes: &[u8]) -> Vec<u8> {
        let header = Header { flags: INLINE, ..Header::new(Kind::Eager, 0, tag, bytes.len()) };
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
        let endless = Header { flags: INLINE, total: u64::MAX, ..Header::new(Kind::Eager, 0, 6, 0) }.emit();
        assert_eq!(tags(&[&good[..], &endless, &good].concat(), b""), one);
        let data_bytes = Header::new(Kind::Data, 0, 6, 4).emit();
        assert_eq!(tags(&[&good[..], &data_bytes, &good].concat(), b"four"), one);
    }
}
