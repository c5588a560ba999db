//! What cards say to one another. Both ends run the same release: the hello compares [`WIRE_VERSION`].
//!
//! [`WIRE_VERSION`]: crate::address::WIRE_VERSION

/// What a packet is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A piece of an RDMA write; its payload follows.
    Write = 1,
    /// All pieces of a request have been dealt with; `status` says how.
    Ack = 2,
    /// Asks for memory.
    Read = 3,
    /// A piece of the answer to [`Kind::Read`]; its payload follows.
    Data = 4,
    /// The sender gave up on a request: forget its pieces.
    Abort = 5,
    /// [`Hello`](super::hello::Hello), on wires without a handshake of their own.
    Hello = 6,
    /// The answer to it.
    Welcome = 7,
    /// Nothing but the [`Acknowledgement`]s that may follow every packet on wires where a packet is dear.
    Acks = 8,
    /// A send, whole: its payload follows.
    Send = 9,
}

impl Kind {
    fn from_raw(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::Write,
            2 => Self::Ack,
            3 => Self::Read,
            4 => Self::Data,
            5 => Self::Abort,
            6 => Self::Hello,
            7 => Self::Welcome,
            8 => Self::Acks,
            9 => Self::Send,
            _ => return None,
        })
    }
}

/// The fixed part of every packet. Which fields mean something depends on `kind`; the others are 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Header {
    /// [`Kind`], if it is one.
    pub kind: u8,
    /// EFA completion status, of an ack or a data packet.
    pub status: u8,
    /// Queue pair of the one who asks.
    pub src_qpn: u16,
    /// Queue pair that is asked.
    pub dst_qpn: u16,
    /// [`HAS_IMM`], or 0.
    pub flags: u16,
    /// Key of the queue pair that is asked.
    pub qkey: u32,
    /// Key of the memory that is asked for.
    pub rkey: u32,
    /// First byte of the whole request in that memory.
    pub addr: u64,
    /// Bytes of the whole request.
    pub total: u32,
    /// Where this piece begins in the request.
    pub offset: u32,
    /// Bytes of payload behind this header.
    pub len: u32,
    /// Immediate data, if `flags` says so.
    pub imm: u32,
    /// Names the request to the one who asks.
    pub token: u64,
}

/// A send or a write has immediate data.
pub(crate) const HAS_IMM: u16 = 1;

/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = size_of::<Header>();
/// Words of a header.
pub(crate) const HEADER_WORDS: usize = HEADER_LEN / 8;
const _: () = assert!(HEADER_LEN == 48);

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Acknowledgement {
    pub token: u64,
    /// EFA completion status.
    pub status: u8,
}

/// Bytes of an acknowledgement among others.
pub(crate) const ACKNOWLEDGEMENT_LEN: usize = 16;
/// An acknowledgement as it travels.
pub(crate) type AcknowledgementBytes = [u8; ACKNOWLEDGEMENT_LEN];

impl Acknowledgement {
    pub(crate) fn to_bytes(self) -> AcknowledgementBytes {
        let mut bytes = [0; ACKNOWLEDGEMENT_LEN];
        bytes[..8].copy_from_slice(&self.token.to_le_bytes());
        bytes[8] = self.status;
        bytes
    }

    pub(crate) fn from_bytes(bytes: &AcknowledgementBytes) -> Self {
        let mut token = [0; 8];
        token.copy_from_slice(&bytes[..8]);
        Self { token: u64::from_le_bytes(token), status: bytes[8] }
    }
}

impl Header {
    pub(crate) fn new(kind: Kind, token: u64) -> Self {
        Self { kind: kind as u8, token, ..Self::default() }
    }

    /// What the packet is about; `None` is a packet that no card of this version sends.
    pub(crate) fn kind(&self) -> Option<Kind> {
        Kind::from_raw(self.kind)
    }

    pub(crate) fn to_words(self) -> [u64; HEADER_WORDS] {
        let low = |a: u32, b: u32| u64::from(a) | u64::from(b) << 32;
        [
            u64::from(self.kind)
                | u64::from(self.status) << 8
                | u64::from(self.src_qpn) << 16
                | u64::from(self.dst_qpn) << 32
                | u64::from(self.flags) << 48,
            low(self.qkey, self.rkey),
            self.addr,
            low(self.total, self.offset),
            low(self.len, self.imm),
            self.token,
        ]
    }

    pub(crate) fn from_words(words: [u64; HEADER_WORDS]) -> Self {
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let (qkey, rkey) = halves(words[1]);
        let (total, offset) = halves(words[3]);
        let (len, imm) = halves(words[4]);
        Self {
            kind: words[0] as u8,
            status: (words[0] >> 8) as u8,
            src_qpn: (words[0] >> 16) as u16,
            dst_qpn: (words[0] >> 32) as u16,
            flags: (words[0] >> 48) as u16,
            qkey,
            rkey,
            addr: words[2],
            total,
            offset,
            len,
            imm,
            token: words[5],
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.to_words()) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut words = [0; HEADER_WORDS];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(chunk);
            *word = u64::from_le_bytes(eight);
        }
        Self::from_words(words)
    }

    /// Immediate data of a send or a write.
    pub(crate) fn immediate(&self) -> Option<u32> {
        (self.flags & HAS_IMM != 0).then_some(self.imm)
    }

    /// The end of this piece lies in the request, and what has no payload has none.
    pub(crate) fn is_consistent(&self) -> bool {
        if self.flags & !HAS_IMM != 0 {
            return false;
        }
        match self.kind() {
            Some(Kind::Write | Kind::Data | Kind::Hello | Kind::Welcome) => {
                self.offset.checked_add(self.len).is_some_and(|end| end <= self.total)
            }
            Some(Kind::Send) => self.offset == 0 && self.len == self.total,
            Some(Kind::Ack | Kind::Acks | Kind::Read | Kind::Abort) => self.len == 0,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let header = Header {
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
        assert_eq!(Header::from_words(header.to_words()), header);
        assert_eq!(Header::from_bytes(&header.to_bytes()), header);
    }

    #[test]
    fn acknowledgements() {
        let one = Acknowledgement { token: 0x0102_0304_0506_0708, status: 9 };
        assert_eq!(Acknowledgement::from_bytes(&one.to_bytes()), one);
    }

    #[test]
    fn pieces_must_fit() {
        let mut header = Header { total: 10, offset: 4, len: 6, ..Header::new(Kind::Write, 1) };
        assert!(header.is_consistent());
        header.len = 7;
        assert!(!header.is_consistent());
        (header.offset, header.len) = (u32::MAX, 2);
        assert!(!header.is_consistent());
        assert!(!Header { len: 1, ..Header::new(Kind::Ack, 1) }.is_consistent());
        assert!(Header { total: 9, len: 9, ..Header::new(Kind::Send, 1) }.is_consistent());
        assert!(!Header { total: 9, len: 8, ..Header::new(Kind::Send, 1) }.is_consistent(), "sends come whole");
        assert!(!Header { flags: 2, ..Header::new(Kind::Send, 1) }.is_consistent(), "no such flag");
        assert!(!Header::default().is_consistent());
    }
}
