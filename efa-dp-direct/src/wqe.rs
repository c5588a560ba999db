//! What a work request means, and its bytes.
//!
//! [`SendWqe`] can't hold a request that is illegal for its operation. [`SendWqe::emit`] writes it, and [`parse()`]
//! reads what a poster wrote, as strictly as a card does. [`words`] builds the same bytes as 64-bit words in registers,
//! for the posting path.

mod emit;
mod parse;
pub mod words;

pub use emit::PayloadError;
pub use parse::{WqeError, parse};

use crate::queue::WrCtxV0;
use crate::wire::{
    ProcessingHint, RemoteMemAddr, SendOp, TX_DESC_INLINE_MAX_SIZE, TX_DESC_INLINE_MAX_SIZE_128, TxBufDesc,
};

/// Size of a queue's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WqeSize {
    /// 64 bytes: 32 inline bytes, in sends only.
    Narrow,
    /// 128 bytes: 80 inline bytes, in sends and RDMA writes.
    Wide,
}

impl WqeSize {
    /// Returns the size with that many bytes, if there is one.
    pub const fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            64 => Some(Self::Narrow),
            128 => Some(Self::Wide),
            _ => None,
        }
    }

    /// Returns the number of bytes in a request.
    #[inline(always)]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Narrow => 64,
            Self::Wide => 128,
        }
    }

    /// Returns how many inline bytes fit.
    pub const fn max_inline(self) -> usize {
        match self {
            Self::Narrow => TX_DESC_INLINE_MAX_SIZE,
            Self::Wide => TX_DESC_INLINE_MAX_SIZE_128,
        }
    }
}

/// How many bits of a request id the completion returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestIds {
    /// 16 (API version 0).
    Bits16,
    /// 64 (API version 1 and the host providers).
    Bits64,
}

/// The format of a send queue's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Size of a request.
    pub wqe_size: WqeSize,
    /// Inline bytes that the queue allows, at most [`WqeSize::max_inline`].
    pub max_inline: u32,
    /// Request ids.
    pub request_ids: RequestIds,
}

impl Geometry {
    /// API version 0: 64 bytes, 16-bit ids.
    pub const V0: Self = Self { request_ids: RequestIds::Bits16, ..Self::NARROW };
    /// API version 1, 64 bytes.
    pub const NARROW: Self = Self { wqe_size: WqeSize::Narrow, max_inline: 32, request_ids: RequestIds::Bits64 };
    /// API version 1, 128 bytes.
    pub const WIDE: Self = Self { wqe_size: WqeSize::Wide, max_inline: 80, request_ids: RequestIds::Bits64 };

    /// Returns the geometry with 64-bit ids that a send queue's `wr_ctx` describes; `None` if the card has no such
    /// requests.
    pub fn from_wr_ctx(wr_ctx: &WrCtxV0) -> Option<Self> {
        let wqe_size = WqeSize::from_bytes(wr_ctx.wqe_size as usize)?;
        let geometry = Self { wqe_size, max_inline: wr_ctx.max_inline_data, request_ids: RequestIds::Bits64 };
        let fits = wr_ctx.max_inline_data as usize <= wqe_size.max_inline();
        (fits && *wr_ctx == WrCtxV0 { max_rdma_sges: wr_ctx.max_rdma_sges, ..geometry.wr_ctx() }).then_some(geometry)
    }

    /// Returns the `wr_ctx` of a send queue with these requests.
    pub const fn wr_ctx(&self) -> WrCtxV0 {
        match self.wqe_size {
            WqeSize::Narrow => WrCtxV0::narrow(self.max_inline, 1),
            WqeSize::Wide => WrCtxV0::wide(self.max_inline, 1),
        }
    }
}

/// The peer's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Destination {
    /// Address handle number.
    pub ah: u16,
    /// Queue pair number.
    pub qpn: u16,
    /// Queue key.
    pub qkey: u32,
}

/// A place in the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RemoteMem {
    /// Address of the first byte, as the peer's key maps it.
    pub addr: u64,
    /// Remote key.
    pub rkey: u32,
}

/// A local buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub length: u32,
    /// Local key, of which 24 bits are sent.
    pub lkey: u32,
}

impl From<Sge> for TxBufDesc {
    #[inline(always)]
    fn from(sge: Sge) -> Self {
        Self::new(sge.addr, sge.length, sge.lkey)
    }
}

impl From<TxBufDesc> for Sge {
    fn from(desc: TxBufDesc) -> Self {
        Self { addr: desc.addr(), length: desc.length, lkey: desc.lkey.lkey() }
    }
}

impl RemoteMem {
    /// Returns the descriptor for `length` bytes at this place.
    #[inline(always)]
    pub const fn desc(self, length: u32) -> RemoteMemAddr {
        RemoteMemAddr::new(self.addr, length, self.rkey)
    }
}

/// Data carried inside a request.
#[derive(Clone, Copy)]
pub struct Inline {
    length: u8,
    bytes: [u8; TX_DESC_INLINE_MAX_SIZE_128],
}

impl Inline {
    /// Copies the data; `None` if no request can carry this much.
    pub fn new(data: &[u8]) -> Option<Self> {
        let mut bytes = [0; TX_DESC_INLINE_MAX_SIZE_128];
        bytes.get_mut(..data.len())?.copy_from_slice(data);
        Some(Self { length: data.len() as u8, bytes })
    }

    /// Returns the bytes.
    pub fn data(&self) -> &[u8] {
        &self.bytes[..self.length as usize]
    }
}

impl PartialEq for Inline {
    fn eq(&self, other: &Self) -> bool {
        self.data() == other.data()
    }
}

impl Eq for Inline {}

impl core::fmt::Debug for Inline {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Inline({:02x?})", self.data())
    }
}

/// The data of a send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendData {
    /// Nothing.
    Empty,
    /// One buffer.
    One(Sge),
    /// Two buffers, one after the other.
    Two(Sge, Sge),
    /// Data in the request.
    Inline(Inline),
}

/// The data of an RDMA write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteData {
    /// Nothing: there is no local buffer.
    Empty,
    /// One buffer.
    One(Sge),
    /// Data in the request; 128-byte requests only.
    Inline(Inline),
}

impl SendData {
    /// Returns the number of bytes in the message.
    pub fn len(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::One(sge) => sge.length.into(),
            Self::Two(a, b) => u64::from(a.length) + u64::from(b.length),
            Self::Inline(data) => data.data().len() as u64,
        }
    }

    /// Returns whether the message has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl WriteData {
    /// Returns the number of bytes written.
    pub fn len(&self) -> u32 {
        match self {
            Self::Empty => 0,
            Self::One(sge) => sge.length,
            Self::Inline(data) => data.data().len() as u32,
        }
    }

    /// Returns whether no bytes are written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Two-sided send.
    Send {
        /// The message.
        data: SendData,
        /// Immediate data for the peer's completion.
        imm: Option<u32>,
    },
    /// One-sided write.
    Write {
        /// The target.
        remote: RemoteMem,
        /// The data.
        data: WriteData,
        /// Immediate data, which causes a completion at the peer.
        imm: Option<u32>,
    },
    /// One-sided read.
    Read {
        /// The source.
        remote: RemoteMem,
        /// The local buffer, or `None` to read no bytes.
        into: Option<Sge>,
    },
}

impl Operation {
    /// Returns the operation code.
    pub const fn op(&self) -> SendOp {
        match self {
            Self::Send { .. } => SendOp::Send,
            Self::Write { .. } => SendOp::RdmaWrite,
            Self::Read { .. } => SendOp::RdmaRead,
        }
    }

    /// Returns the immediate data, if any.
    pub const fn imm(&self) -> Option<u32> {
        match self {
            Self::Send { imm, .. } | Self::Write { imm, .. } => *imm,
            Self::Read { .. } => None,
        }
    }
}

/// Processing hints: two bits, of which one is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Hints(u8);

impl Hints {
    /// No hint.
    pub const NONE: Self = Self(0);
    /// The burst's packet rate matters more than its latency.
    pub const BURST_PPS_SENSITIVE: Self = Self(ProcessingHint::BurstPpsSensitive.raw());

    /// Returns the known hints in a word of the device API. Like the API, it drops other bits.
    #[inline(always)]
    pub const fn from_api(hints: u32) -> Self {
        Self(hints as u8 & Self::BURST_PPS_SENSITIVE.0)
    }

    /// Returns the bits in the request.
    #[inline(always)]
    pub const fn bits(self) -> u8 {
        self.0
    }
}

/// A work request of a send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendWqe {
    /// Request id, which the completion carries back; only 16 bits of it on queues with 16-bit ids.
    pub wr_id: u64,
    /// Phase of the lap it's written in.
    pub phase: bool,
    /// Peer.
    pub dest: Destination,
    /// The operation.
    pub op: Operation,
    /// Hints.
    pub hints: Hints,
    /// Whether the completion queue gets an entry.
    pub completion: bool,
}

impl SendWqe {
    /// Creates a request with phase 0, without hints, with a completion, like every known poster.
    pub const fn new(wr_id: u64, dest: Destination, op: Operation) -> Self {
        Self { wr_id, phase: false, dest, op, hints: Hints::NONE, completion: true }
    }
}
