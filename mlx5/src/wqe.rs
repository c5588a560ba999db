//! Work requests of a send queue as a meaning, emitted to bytes and parsed from them.
//!
//! [`WorkRequest`] is what a caller hands over; it borrows its lists. [`Wqe`] is what a card reads back from the bytes; it owns
//! them. Both are an [`Op`] and the flags of the control segment. A queue emits through [`SegmentWriter`], which knows where
//! the ring ends; [`emit`] does the same into a slice.
//!
//! Byte truth is `tests/vectors/mlx5_wqe.json`, taken from rdma-core's `providers/mlx5/qp.c`.

mod address;
mod parse;
mod umr;

pub use address::{AhAttr, Grh, LinkLayer};
pub use parse::{ParseError, Transport, Wqe, parse};
pub use umr::{Bind, BindError, MAX_BIND, Umr, UmrKind, WINDOW_OCTOWORDS, WindowType};

use crate::wire::{
    AddressVector, AtomicSeg, BLOCK_SEGMENTS, CtrlSeg, DataSeg, FmCeSe, INLINE_FLAG, InlineHeader, MAX_DS, Opcode,
    RaddrSeg, SEGMENT,
};
use zerocopy::big_endian::U32;
use zerocopy::{Immutable, IntoBytes};

/// A local buffer. The order of the fields lets key and length travel as one word.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Local key.
    pub lkey: u32,
    /// Bytes, below 2^31. A buffer of none is left out of the request.
    pub length: u32,
}

impl Sge {
    /// Length (high) and key: the first word of a data segment.
    #[inline(always)]
    const fn word(&self) -> u64 {
        (self.length as u64) << 32 | self.lkey as u64
    }
}

/// Memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Remote {
    /// Address of the first byte, or the offset in a zero-based window.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
}

/// The 8 local bytes that an atomic fills with the old value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtomicResult {
    /// Address.
    pub addr: u64,
    /// Local key.
    pub lkey: u32,
}

/// What goes with a message beside its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum With {
    /// Nothing.
    #[default]
    Nothing,
    /// Immediate data; the value whose big-endian form is sent.
    Imm(u32),
    /// A key of the peer that becomes invalid when the message arrives.
    Invalidate(u32),
}

/// Data of a message or write: buffers (`S`: a list of [`Sge`]) or the bytes themselves (`I`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data<S, I> {
    /// Buffers, in order.
    Sges(S),
    /// Bytes that are copied into the request.
    Inline(I),
}

/// Where a datagram goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Destination {
    /// The way there; [`AhAttr::address_vector`] makes one. Its queue key and number are not looked at.
    pub av: AddressVector,
    /// Queue pair number of the peer.
    pub qpn: u32,
    /// Queue key of the peer.
    pub qkey: u32,
}

/// What a request asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op<S, I> {
    /// Nothing.
    Nop,
    /// A message over a connection.
    Send {
        /// The message.
        data: Data<S, I>,
        /// What goes with it.
        with: With,
    },
    /// A message as a datagram.
    Datagram {
        /// Where it goes.
        to: Destination,
        /// The message.
        data: Data<S, I>,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// A write to the peer's memory.
    Write {
        /// Where.
        remote: Remote,
        /// What.
        data: Data<S, I>,
        /// Immediate data: the peer gets a completion.
        imm: Option<u32>,
    },
    /// A read from the peer's memory.
    Read {
        /// From where.
        remote: Remote,
        /// To where.
        into: S,
    },
    /// Stores `swap` if the peer's word equals `compare`.
    CompareSwap {
        /// The peer's word, 8-byte aligned.
        remote: Remote,
        /// What it must be.
        compare: u64,
        /// What it becomes.
        swap: u64,
        /// Takes what it was.
        into: AtomicResult,
    },
    /// Adds to the peer's word.
    FetchAdd {
        /// The peer's word, 8-byte aligned.
        remote: Remote,
        /// What is added.
        add: u64,
        /// Takes what it was.
        into: AtomicResult,
    },
    /// Binds or invalidates a window.
    Umr {
        /// What becomes of the key.
        umr: Umr,
        /// What the completion is for: the card's code is the same for both.
        kind: UmrKind,
    },
}

/// What a caller posts.
pub type WorkRequest<'a> = Op<&'a [Sge], &'a [&'a [u8]]>;
/// What a card reads.
pub type Parsed = Op<Vec<Sge>, Vec<u8>>;

/// Data of a [`WorkRequest`].
pub type RequestData<'a> = Data<&'a [Sge], &'a [&'a [u8]]>;

/// Where the segments of one request go.
pub trait SegmentWriter {
    /// Stores `value` at segment `index` of the request. No value crosses the end of a block.
    fn put<T: IntoBytes + Immutable>(&mut self, index: usize, value: T);
    /// Stores bytes from byte `offset` of the request on.
    fn put_bytes(&mut self, offset: usize, bytes: &[u8]);
}

/// What a queue pair can take in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Inline bytes.
    pub max_inline: u32,
    /// Buffers.
    pub max_sge: u32,
}

/// Why a request cannot be built. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// More inline data than the queue takes.
    #[error("{length} bytes of inline data, but the queue pair takes {max}; send them from registered memory")]
    InlineTooLong {
        /// Bytes given.
        length: usize,
        /// Bytes that the queue takes.
        max: u32,
    },
    /// More buffers than the queue takes.
    #[error("{count} buffers, but the queue pair takes {max}; split the request")]
    TooManySges {
        /// Buffers given.
        count: usize,
        /// Buffers that the queue takes.
        max: u32,
    },
    /// A buffer whose length does not fit its 31 bits.
    #[error("a buffer of {length} bytes: one holds less than 2^31; split it")]
    SgeTooLong {
        /// Its length.
        length: u32,
    },
    /// The operation does not exist on this kind of queue pair.
    #[error("the operation does not exist on this kind of queue pair; use a connected one, and datagrams on UD only")]
    Transport,
}

/// Header segments, then data segments of a request: its `ds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// 16-byte units.
    pub ds: u8,
}

impl Size {
    /// Blocks of the ring that the request takes.
    #[inline(always)]
    pub const fn blocks(self) -> u32 {
        (self.ds as u32).div_ceil(BLOCK_SEGMENTS as u32)
    }
}

/// Bytes of all pieces together.
#[inline(always)]
fn inline_length(pieces: &[&[u8]]) -> usize {
    pieces.iter().map(|piece| piece.len()).sum()
}

#[inline(always)]
fn sges_fit(sges: &[Sge], limits: &Limits) -> bool {
    sges.len() <= limits.max_sge as usize && sges.iter().all(|sge| sge.length & INLINE_FLAG == 0)
}

#[inline(always)]
fn sge_segments(sges: &[Sge]) -> usize {
    sges.iter().filter(|sge| sge.length != 0).count()
}

#[cold]
fn refuse_sges(sges: &[Sge], limits: &Limits) -> BuildError {
    match sges.iter().find(|sge| sge.length & INLINE_FLAG != 0) {
        Some(sge) if sges.len() <= limits.max_sge as usize => BuildError::SgeTooLong { length: sge.length },
        _ => BuildError::TooManySges { count: sges.len(), max: limits.max_sge },
    }
}

#[inline(always)]
fn check_sges(sges: &[Sge], limits: &Limits) -> Result<usize, BuildError> {
    if sges_fit(sges, limits) { Ok(sge_segments(sges)) } else { Err(refuse_sges(sges, limits)) }
}

#[inline(always)]
fn check_data(data: &RequestData<'_>, limits: &Limits) -> Result<usize, BuildError> {
    match data {
        Data::Sges(sges) => check_sges(sges, limits),
        Data::Inline(pieces) => match inline_length(pieces) {
            0 => Ok(0),
            length if length > limits.max_inline as usize => {
                Err(BuildError::InlineTooLong { length, max: limits.max_inline })
            }
            length => Ok((size_of::<InlineHeader>() + length).div_ceil(SEGMENT)),
        },
    }
}

#[inline(always)]
fn put_sges(sink: &mut impl SegmentWriter, at: usize, sges: &[Sge]) {
    if let [one] = sges {
        if one.length != 0 {
            sink.put(at, data_seg(one));
        }
        return;
    }
    let full = sges.iter().filter(|sge| sge.length != 0);
    for (place, sge) in full.enumerate() {
        sink.put(at + place, data_seg(sge));
    }
}

#[inline(always)]
fn data_seg(sge: &Sge) -> [u64; 2] {
    [sge.word().to_be(), sge.addr.to_be()]
}

#[inline(always)]
fn put_data(sink: &mut impl SegmentWriter, at: usize, data: &RequestData<'_>) {
    match data {
        Data::Sges(sges) => put_sges(sink, at, sges),
        Data::Inline(pieces) => {
            let length = inline_length(pieces);
            if length == 0 {
                return;
            }
            // The queue's limit is below 2^31.
            sink.put(at, InlineHeader { byte_count: U32::new(length as u32 | INLINE_FLAG) });
            let mut offset = at * SEGMENT + size_of::<InlineHeader>();
            for piece in *pieces {
                sink.put_bytes(offset, piece);
                offset += piece.len();
            }
        }
    }
}

/// Segments before the data of each kind.
const CONTROL: usize = 1;
const REMOTE: usize = CONTROL + 1;
const ATOMIC: usize = REMOTE + 1;
const DATAGRAM: usize = CONTROL + size_of::<AddressVector>() / SEGMENT;

impl WorkRequest<'_> {
    /// Checks against the limits and gives the size.
    #[inline(always)]
    pub fn size(&self, limits: &Limits) -> Result<Size, BuildError> {
        let ds = match self {
            Op::Nop => CONTROL,
            Op::Send { data, .. } => CONTROL + check_data(data, limits)?,
            Op::Datagram { data, .. } => DATAGRAM + check_data(data, limits)?,
            Op::Write { data, .. } => REMOTE + check_data(data, limits)?,
            Op::Read { into, .. } => REMOTE + check_sges(into, limits)?,
            Op::CompareSwap { .. } | Op::FetchAdd { .. } => ATOMIC + 1,
            Op::Umr { umr, .. } => umr.segments(),
        };
        // Limits of a queue are such that this holds; see `max_ds`.
        debug_assert!(ds <= MAX_DS);
        Ok(Size { ds: ds as u8 })
    }

    /// The size of a request of the common kind: over a connection, with one buffer that is not empty, so that it fits a
    /// block and any queue's limits. `None` for all others.
    #[inline(always)]
    pub fn simple_size(&self) -> Option<Size> {
        let (ds, sges) = match self {
            Op::Send { data: Data::Sges(sges), .. } => (CONTROL + 1, sges),
            Op::Write { data: Data::Sges(sges), .. } => (REMOTE + 1, sges),
            Op::Read { into, .. } => (REMOTE + 1, into),
            _ => return None,
        };
        match sges {
            // As a signed number: the length is neither 0 nor has the inline flag.
            [one] if one.word() as i64 > u32::MAX as i64 => Some(Size { ds: ds as u8 }),
            _ => None,
        }
    }

    /// The operation code and the fourth word of the control segment.
    #[inline(always)]
    pub fn code(&self) -> (Opcode, u32) {
        let imm_or = |imm: Option<u32>, with: Opcode, without: Opcode| match imm {
            Some(imm) => (with, imm),
            None => (without, 0),
        };
        match *self {
            Op::Nop => (Opcode::Nop, 0),
            Op::Send { with: With::Nothing, .. } => (Opcode::Send, 0),
            Op::Send { with: With::Imm(imm), .. } => (Opcode::SendImm, imm),
            Op::Send { with: With::Invalidate(rkey), .. } => (Opcode::SendInval, rkey),
            Op::Datagram { imm, .. } => imm_or(imm, Opcode::SendImm, Opcode::Send),
            Op::Write { imm, .. } => imm_or(imm, Opcode::RdmaWriteImm, Opcode::RdmaWrite),
            Op::Read { .. } => (Opcode::RdmaRead, 0),
            Op::CompareSwap { .. } => (Opcode::AtomicCs, 0),
            Op::FetchAdd { .. } => (Opcode::AtomicFa, 0),
            Op::Umr { ref umr, .. } => (Opcode::Umr, umr.key),
        }
    }

    /// Stores all segments after the control segment. [`WorkRequest::size`] must have said yes.
    #[inline(always)]
    pub fn put(&self, sink: &mut impl SegmentWriter) {
        let raddr = |remote: Remote| RaddrSeg::words(remote.addr, remote.rkey);
        let word = |word: AtomicResult| DataSeg::words(size_of::<u64>() as u32, word.lkey, word.addr);
        match self {
            Op::Nop => {}
            Op::Send { data, .. } => put_data(sink, CONTROL, data),
            Op::Datagram { to, data, .. } => {
                let av =
                    AddressVector { qkey: to.qkey.into(), dqp_dct: (to.qpn | AddressVector::EXTENDED).into(), ..to.av };
                sink.put(CONTROL, av);
                put_data(sink, DATAGRAM, data);
            }
            Op::Write { remote, data, .. } => {
                sink.put(CONTROL, raddr(*remote));
                put_data(sink, REMOTE, data);
            }
            Op::Read { remote, into } => {
                sink.put(CONTROL, raddr(*remote));
                put_sges(sink, REMOTE, into);
            }
            Op::CompareSwap { remote, compare, swap, into } => {
                sink.put(CONTROL, raddr(*remote));
                sink.put(REMOTE, AtomicSeg { swap_add: (*swap).into(), compare: (*compare).into() });
                sink.put(ATOMIC, word(*into));
            }
            Op::FetchAdd { remote, add, into } => {
                sink.put(CONTROL, raddr(*remote));
                sink.put(REMOTE, AtomicSeg { swap_add: (*add).into(), compare: 0.into() });
                sink.put(ATOMIC, word(*into));
            }
            Op::Umr { umr, .. } => umr.put(sink),
        }
    }

    /// The same with owned lists: what a card reads back. Empty buffers are left out, as they are on the wire.
    pub fn to_parsed(&self) -> Parsed {
        let list = |sges: &[Sge]| sges.iter().copied().filter(|sge| sge.length != 0).collect::<Vec<_>>();
        let data = |data: &RequestData<'_>| match data {
            Data::Sges(sges) => Data::Sges(list(sges)),
            Data::Inline(pieces) if inline_length(pieces) == 0 => Data::Sges(Vec::new()),
            Data::Inline(pieces) => Data::Inline(pieces.concat()),
        };
        match *self {
            Op::Nop => Op::Nop,
            Op::Send { data: ref d, with } => Op::Send { data: data(d), with },
            Op::Datagram { to, data: ref d, imm } => Op::Datagram { to, data: data(d), imm },
            Op::Write { remote, data: ref d, imm } => Op::Write { remote, data: data(d), imm },
            Op::Read { remote, into } => Op::Read { remote, into: list(into) },
            Op::CompareSwap { remote, compare, swap, into } => Op::CompareSwap { remote, compare, swap, into },
            Op::FetchAdd { remote, add, into } => Op::FetchAdd { remote, add, into },
            Op::Umr { umr, kind } => Op::Umr { umr, kind },
        }
    }
}

impl Limits {
    /// The largest `ds` that a request within these limits has.
    pub fn max_ds(&self) -> usize {
        let inline = (size_of::<InlineHeader>() + self.max_inline as usize).div_ceil(SEGMENT);
        let data = inline.max(self.max_sge as usize);
        (DATAGRAM + data).max(Umr::BIND_SEGMENTS)
    }

    /// Whether every request within these limits fits the 6 bits of `ds`.
    pub fn fit(&self) -> bool {
        self.max_inline < INLINE_FLAG && self.max_ds() <= MAX_DS
    }
}

/// A slice as a sink, for formats in tests and tools.
struct Slice<'a>(&'a mut [u8]);

impl SegmentWriter for Slice<'_> {
    fn put<T: IntoBytes + Immutable>(&mut self, index: usize, value: T) {
        self.put_bytes(index * SEGMENT, value.as_bytes());
    }

    fn put_bytes(&mut self, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// Emits a request into a slice and gives its bytes; `None` if `out` is too short for it. `index` is the 16-bit index of
/// its first block, `qpn` the queue pair that posts it.
pub fn emit<'a>(
    post: &WorkRequest<'_>,
    limits: &Limits,
    index: u16,
    qpn: u32,
    flags: FmCeSe,
    out: &'a mut [u8],
) -> Result<Option<&'a mut [u8]>, BuildError> {
    let size = post.size(limits)?;
    let Some(out) = out.get_mut(..size.ds as usize * SEGMENT) else { return Ok(None) };
    let (opcode, imm) = post.code();
    let mut sink = Slice(&mut *out);
    sink.put(0, CtrlSeg::new(opcode.code(), index, qpn, size.ds, flags, imm));
    post.put(&mut sink);
    Ok(Some(out))
}
