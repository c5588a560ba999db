//! Work requests of a send queue: valid values, emitted to bytes and parsed from bytes.
//!
//! A caller passes a [`WorkRequest`], which borrows its lists. A card parses bytes into a [`Wqe`], which owns its
//! lists. Both contain an [`Op`]. A queue emits through a [`SegmentWriter`], which wraps at the end of the ring;
//! [`emit`] writes into a slice.
//!
//! The bytes are checked by `tests/vectors/mlx5_wqe.json`, taken from rdma-core's `providers/mlx5/qp.c`.

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

/// A local buffer. Key and length are adjacent, so that one load reads both.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Local key.
    pub lkey: u32,
    /// Length in bytes, below 2^31. An empty buffer is left out of the work request.
    pub length: u32,
}

impl Sge {
    /// Returns the length (high) and key: the first word of a data segment.
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

/// The 8 local bytes that receive the old value of an atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AtomicResult {
    /// Address.
    pub addr: u64,
    /// Local key.
    pub lkey: u32,
}

/// What a message carries besides its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum With {
    /// Nothing.
    #[default]
    Nothing,
    /// Immediate data, sent in big-endian order.
    Imm(u32),
    /// A key of the peer that the message invalidates when it arrives.
    Invalidate(u32),
}

/// The data of a message or write: buffers (`S`, a list of [`Sge`]) or inline bytes (`I`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data<S, I> {
    /// Buffers, in order.
    Sges(S),
    /// Bytes that are copied into the work request.
    Inline(I),
}

/// The destination of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Destination {
    /// The address vector, made by [`AhAttr::address_vector`]. Its queue key and number are ignored.
    pub av: AddressVector,
    /// Queue pair number of the peer.
    pub qpn: u32,
    /// Queue key of the peer.
    pub qkey: u32,
}

/// The operation of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op<S, I> {
    /// No operation.
    Nop,
    /// A message over a connection.
    Send {
        /// The message.
        data: Data<S, I>,
        /// What the message carries besides its data.
        with: With,
    },
    /// A message as a datagram.
    Datagram {
        /// The destination.
        to: Destination,
        /// The message.
        data: Data<S, I>,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// A write to the peer's memory.
    Write {
        /// The remote memory.
        remote: Remote,
        /// The data.
        data: Data<S, I>,
        /// Immediate data: the peer gets a completion.
        imm: Option<u32>,
    },
    /// A read from the peer's memory.
    Read {
        /// The remote memory.
        remote: Remote,
        /// The local buffers.
        into: S,
    },
    /// Stores `swap` if the peer's word equals `compare`.
    CompareSwap {
        /// The peer's word, 8-byte aligned.
        remote: Remote,
        /// The value to compare with.
        compare: u64,
        /// The value to store.
        swap: u64,
        /// Receives the old value.
        into: AtomicResult,
    },
    /// Adds to the peer's word.
    FetchAdd {
        /// The peer's word, 8-byte aligned.
        remote: Remote,
        /// The value to add.
        add: u64,
        /// Receives the old value.
        into: AtomicResult,
    },
    /// Binds or invalidates a window.
    Umr {
        /// The change of the key.
        umr: Umr,
        /// The purpose: the card's completions of both have the same code.
        kind: UmrKind,
    },
}

/// A work request that a caller posts.
pub type WorkRequest<'a> = Op<&'a [Sge], &'a [&'a [u8]]>;
/// An operation that a card parsed.
pub type Parsed = Op<Vec<Sge>, Vec<u8>>;

/// The data of a [`WorkRequest`].
pub type RequestData<'a> = Data<&'a [Sge], &'a [&'a [u8]]>;

/// The memory that receives the segments of one work request.
pub trait SegmentWriter {
    /// Stores `value` at segment `index` of the work request. Callers never let a value cross the end of a block.
    fn put<T: IntoBytes + Immutable>(&mut self, index: usize, value: T);
    /// Stores bytes from byte `offset` of the work request on.
    fn put_bytes(&mut self, offset: usize, bytes: &[u8]);
}

/// The limits of one work request of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of inline bytes.
    pub max_inline: u32,
    /// Maximum number of buffers.
    pub max_sge: u32,
}

/// Why a work request cannot be built. Nothing was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The inline data are longer than the queue pair allows.
    #[error("{length} bytes of inline data: the queue pair allows {max}; send the bytes from registered memory")]
    InlineTooLong {
        /// Inline bytes of the work request.
        length: usize,
        /// Inline bytes that the queue pair allows.
        max: u32,
    },
    /// The work request has more buffers than the queue pair allows.
    #[error("a work request of {count} buffers: the queue pair allows {max}; split the work request")]
    TooManySges {
        /// Buffers of the work request.
        count: usize,
        /// Buffers that the queue pair allows.
        max: u32,
    },
    /// The length of a buffer does not fit 31 bits.
    #[error("a buffer of {length} bytes: the limit is 2^31 - 1; split the buffer")]
    SgeTooLong {
        /// The length of the buffer.
        length: u32,
    },
    /// The queue pair's transport lacks the operation.
    #[error("the transport of this queue pair lacks the operation; datagrams need UD, all other operations RC")]
    Transport,
}

/// The size of a work request: all of its segments, the `ds` field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// 16-byte units.
    pub ds: u8,
}

impl Size {
    /// Returns the number of ring blocks that the work request occupies.
    #[inline(always)]
    pub const fn blocks(self) -> u32 {
        (self.ds as u32).div_ceil(BLOCK_SEGMENTS as u32)
    }
}

/// Returns the total length of all pieces in bytes.
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
            // The limits of a queue are below 2^31 (`Limits::fit`).
            sink.put(at, InlineHeader { byte_count: U32::new(length as u32 | INLINE_FLAG) });
            let mut offset = at * SEGMENT + size_of::<InlineHeader>();
            for piece in *pieces {
                sink.put_bytes(offset, piece);
                offset += piece.len();
            }
        }
    }
}

/// The number of segments before the data, by operation.
const CONTROL: usize = 1;
const REMOTE: usize = CONTROL + 1;
const ATOMIC: usize = REMOTE + 1;
const DATAGRAM: usize = CONTROL + size_of::<AddressVector>() / SEGMENT;

impl WorkRequest<'_> {
    /// Checks the work request against the limits and returns its size.
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
        // The limits of a queue ensure this (`Limits::fit`).
        debug_assert!(ds <= MAX_DS);
        Ok(Size { ds: ds as u8 })
    }

    /// Returns the size of a work request for the fast path: on RC, with one nonempty buffer, so that it fits one block
    /// and the limits of any queue. `None` for all others.
    #[inline(always)]
    pub fn simple_size(&self) -> Option<Size> {
        let (ds, sges) = match self {
            Op::Send { data: Data::Sges(sges), .. } => (CONTROL + 1, sges),
            Op::Write { data: Data::Sges(sges), .. } => (REMOTE + 1, sges),
            Op::Read { into, .. } => (REMOTE + 1, into),
            _ => return None,
        };
        match sges {
            // One signed comparison: the length is not 0 and has no inline flag.
            [one] if one.word() as i64 > u32::MAX as i64 => Some(Size { ds: ds as u8 }),
            _ => None,
        }
    }

    /// Returns the operation code and the fourth word of the control segment.
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

    /// Stores all segments after the control segment. Call [`WorkRequest::size`] first, which checks the limits.
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

    /// Returns the operation as a card parses it: with owned lists, and without empty buffers, which are not emitted.
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
    /// Returns the largest `ds` of a work request within these limits.
    pub fn max_ds(&self) -> usize {
        let inline = (size_of::<InlineHeader>() + self.max_inline as usize).div_ceil(SEGMENT);
        let data = inline.max(self.max_sge as usize);
        (DATAGRAM + data).max(Umr::BIND_SEGMENTS)
    }

    /// Returns whether every work request within these limits fits the 6 bits of `ds`.
    pub fn fit(&self) -> bool {
        self.max_inline < INLINE_FLAG && self.max_ds() <= MAX_DS
    }
}

/// Writes segments into a slice, for tests and tools.
struct Slice<'a>(&'a mut [u8]);

impl SegmentWriter for Slice<'_> {
    fn put<T: IntoBytes + Immutable>(&mut self, index: usize, value: T) {
        self.put_bytes(index * SEGMENT, value.as_bytes());
    }

    fn put_bytes(&mut self, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// Emits a work request into a slice and returns its bytes; `None` if `out` is too short. `index` is the 16-bit index
/// of the first block, `qpn` the queue pair.
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
