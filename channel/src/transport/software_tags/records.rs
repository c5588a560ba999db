//! What our own matching puts into a datagram: records, one behind the other.
//!
//! Short messages, announcements and answers to one peer that are said together travel together: a message's length and its
//! bytes are one datagram, and so are the lengths of several. A record begins with these 32 bytes, little endian:
//!
//! ```text
//! 0  kind    u8    1 whole, 2 announce, 3 clear, 4 piece, 5 decline (the receive was too short)
//! 1  flags   u8    bit 0: announce: it can come as one tagged message; clear: it shall
//!                  bit 1: whole: its bytes follow; otherwise they are the payload of the datagram, and this record is the last
//! 2  (zero)  u8 * 2
//! 4  number  u32   announce, clear, decline: the sender's number of the message
//! 8  tag     u64   whole, announce: the tag; clear, piece: the receiver's number of the receive, the tag of the one message
//! 16 total   u64   bytes of the message
//! 24 offset  u64   piece: where it belongs
//! ```
//!
//! The bytes of a piece are the payload of its datagram, and its record is the last.

/// Bytes of a record without the message's own.
pub(super) const HEADER: usize = 32;
/// Bytes of the records of a datagram.
pub(super) const RECORDS: usize = 32 << 10;
/// Longest message whose bytes follow its record: to copy it costs less than to lend it.
pub(super) const MAX_INLINE: usize = 4 << 10;
const _: () = assert!(HEADER + MAX_INLINE <= RECORDS && RECORDS <= u16::MAX as usize);

/// Flags: as one tagged message; the bytes follow.
const DIRECT: u8 = 1;
const INLINE_DATA: u8 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Eager = 1,
    Rts = 2,
    Cts = 3,
    Data = 4,
    Decline = 5,
}

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
        let mut out = [0; HEADER];
        out[0] = self.kind as u8;
        out[1] = if self.direct { DIRECT } else { 0 } | if self.inline { INLINE_DATA } else { 0 };
        out[4..8].copy_from_slice(&self.number.to_le_bytes());
        out[8..16].copy_from_slice(&self.tag.to_le_bytes());
        out[16..24].copy_from_slice(&self.total.to_le_bytes());
        out[24..32].copy_from_slice(&self.offset.to_le_bytes());
        out
    }

    fn parse(bytes: &[u8; HEADER]) -> Option<Self> {
        let kind = [Kind::Eager, Kind::Rts, Kind::Cts, Kind::Data, Kind::Decline]
            .into_iter()
            .find(|kind| *kind as u8 == bytes[0])?;
        let word = |at: usize| bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let number = bytes[4..].first_chunk().copied().map_or(0, u32::from_le_bytes);
        let (direct, inline) = (bytes[1] & DIRECT != 0, bytes[1] & INLINE_DATA != 0 && kind == Kind::Eager);
        Some(Self { kind, direct, inline, number, tag: word(8), total: word(16), offset: word(24) })
    }
}

/// The records of a datagram, in order, each with its bytes; ends early, with a line in the log, where they make no sense.
pub(super) struct Records<'a> {
    records: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Records<'a> {
    pub fn new(records: &'a [u8], payload: &'a [u8]) -> Self {
        Self { records, payload }
    }

    fn take(&mut self) -> Option<(Header, &'a [u8])> {
        let (header, rest) = self.records.split_first_chunk()?;
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
        let next = self.take();
        if next.is_none() {
            log::warn!("what is left of a datagram was dropped: {} bytes make no sense", self.records.len());
            self.records = &[];
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips_golden_bytes() {
        let header = Header { direct: true, offset: 0x33, ..Header::new(Kind::Cts, 0x0102_0304, 0x11, 0x22) };
        let mut golden = [0; HEADER];
        golden[..8].copy_from_slice(&[3, 1, 0, 0, 4, 3, 2, 1]);
        (golden[8], golden[16], golden[24]) = (0x11, 0x22, 0x33);
        assert_eq!(header.emit(), golden);
        assert_eq!(Header::parse(&golden), Some(header));
        golden[0] = 9;
        assert_eq!(Header::parse(&golden), None);
        let whole = Header { inline: true, ..Header::new(Kind::Eager, 0, 5, 8) };
        assert_eq!((whole.emit()[0], whole.emit()[1], Header::parse(&whole.emit())), (1, 2, Some(whole)));
    }

    fn whole(tag: u64, bytes: &[u8]) -> Vec<u8> {
        let header = Header { inline: true, ..Header::new(Kind::Eager, 0, tag, bytes.len()) };
        [&header.emit()[..], bytes].concat()
    }

    fn tags(records: &[u8], payload: &[u8]) -> Vec<(u64, Vec<u8>)> {
        Records::new(records, payload).map(|(header, bytes)| (header.tag, bytes.to_vec())).collect()
    }

    #[test]
    fn records_keep_order_and_bytes() {
        let announce = Header::new(Kind::Rts, 1, 7, 1 << 20).emit();
        let last = Header::new(Kind::Eager, 0, 9, 4).emit();
        let records = [&whole(5, b"abc")[..], &whole(6, b""), &announce, &last].concat();
        let expected = [(5, b"abc".to_vec()), (6, Vec::new()), (7, Vec::new()), (9, b"rest".to_vec())];
        assert_eq!(tags(&records, b"rest"), expected);
        assert_eq!(tags(&[], b"rest"), []);
    }

    #[test]
    fn malformed_record_ends_iteration() {
        let good = whole(5, b"abc");
        let one = [(5, b"abc".to_vec())];
        let unknown = [9; HEADER];
        assert_eq!(tags(&[&good[..], &unknown].concat(), b""), one);
        assert_eq!(tags(&[&good[..], &good[..HEADER - 1]].concat(), b""), one);
        // Fewer bytes than it says, as many as no memory has, and a piece in the middle.
        assert_eq!(tags(&[&good[..], &good[..HEADER + 2]].concat(), b""), one);
        let endless = Header { inline: true, total: u64::MAX, ..Header::new(Kind::Eager, 0, 6, 0) }.emit();
        assert_eq!(tags(&[&good[..], &endless, &good].concat(), b""), one);
        let data_bytes = Header::new(Kind::Data, 0, 6, 4).emit();
        assert_eq!(tags(&[&good[..], &data_bytes, &good].concat(), b"four"), one);
    }
}
