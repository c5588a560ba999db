//! Requests as 64-bit words in memory order, built in registers for the posting path. The phase bit is 0 until
//! [`crate::sq::place`] or [`with_phase`] sets it. The bytes are the same as [`super::SendWqe::emit`] writes.
//!
//! This module checks nothing: a queue's limits are checked when it's created.

use super::{Destination, Hints, RemoteMem, Sge};
use crate::wire::{Ctrl1, Ctrl2, Ctrl3, ReqIdEx, SendOp, TxMetaDesc};

/// Words of a 64-byte request.
pub const NARROW: usize = 8;
/// Words of a 128-byte request.
pub const WIDE: usize = 16;

/// Number of bytes in [`WqeTemplate::send_inline`]: what fits in a 64-byte request.
pub const SEND_BYTES: usize = 32;

/// The phase bit in a request's first word.
const PHASE: u64 = (Ctrl2::PHASE as u64) << 24;
/// The inline data bit in a request's first word.
const INLINE: u64 = first_word(SendOp::RdmaWrite, false, 0) ^ first_word(SendOp::RdmaWrite, true, 0);
/// A length of one in a request's first word: one buffer, or one byte of inline data.
const LENGTH: u64 = first_word(SendOp::RdmaWrite, false, 0) ^ first_word(SendOp::RdmaWrite, false, 1);
/// The immediate data bit in a request's first word.
const HAS_IMM: u64 = (Ctrl1::HAS_IMM as u64) << 16;

/// Returns the first half of a request with a completion, without immediate data.
#[inline(always)]
const fn meta_words(wr_id: u16, dest: Destination, hints: Hints, op: SendOp, inline: bool, length: u16) -> [u64; 4] {
    let meta = TxMetaDesc {
        req_id: wr_id,
        ctrl1: Ctrl1(0).with_meta_desc(true).with_op_type(op.raw()).with_inline_msg(inline),
        ctrl2: Ctrl2(0).with_first(true).with_last(true).with_comp_req(true),
        dest_qp_num: dest.qpn,
        length,
        immediate_data: 0,
        ah: dest.ah,
        ctrl3: Ctrl3(0).with_processing_hints(hints.bits()),
        reserved: 0,
        qkey: dest.qkey,
        reserved2: [0; 6],
        req_id_ex: ReqIdEx::ZERO,
    };
    meta.to_words()
}

/// Joins meta descriptor, remote side and local side. Compiled to PTX, an array literal would take more instructions.
#[inline(always)]
const fn rdma(meta: [u64; 4], remote: [u64; 2], local: [u64; 2]) -> [u64; NARROW] {
    let mut words = [0; NARROW];
    words[0] = meta[0];
    words[1] = meta[1];
    words[2] = meta[2];
    words[3] = meta[3];
    words[4] = remote[0];
    words[5] = remote[1];
    words[6] = local[0];
    words[7] = local[1];
    words
}

/// What all requests from one poster to one peer have in common, made once so that a post only copies it: the request
/// id (16 bits), the address and the hints. Requests made from it carry no immediate data unless [`with_imm`] adds it.
/// Local keys must fit in 24 bits, as the card's do, because they aren't masked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WqeTemplate {
    /// First word of a write of one buffer.
    pub head: u64,
    /// Upper half of the second word; the lower half is the immediate, which is 0.
    pub second: u32,
    /// Lower half of the third word; the upper half is reserved.
    pub third: u32,
}

impl WqeTemplate {
    /// Difference (XOR) between the first words of a write and of an inline send of [`SEND_BYTES`].
    const SEND: u64 = first_word(SendOp::RdmaWrite, false, 1) ^ first_word(SendOp::Send, true, SEND_BYTES as u16);
    /// Difference (XOR) between the first words of a write and of a read.
    const READ: u64 = first_word(SendOp::RdmaWrite, false, 0) ^ first_word(SendOp::RdmaRead, false, 0);

    /// Creates the template for requests with that id to that peer.
    pub const fn new(wr_id: u16, dest: Destination, hints: Hints) -> Self {
        let [head, second, third, _] = meta_words(wr_id, dest, hints, SendOp::RdmaWrite, false, 1);
        Self { head, second: (second >> 32) as u32, third: third as u32 }
    }

    /// Returns the first half of a write of one buffer.
    #[inline(always)]
    pub const fn write_meta(self) -> [u64; 4] {
        self.meta(self.head)
    }

    /// Returns the first half of a read into one buffer.
    #[inline(always)]
    const fn read_meta(self) -> [u64; 4] {
        self.meta(self.head ^ Self::READ)
    }

    /// Returns the first half of a write of an inline value.
    #[inline(always)]
    const fn value_meta(self, size: ValueSize) -> [u64; 4] {
        self.meta((self.head & !LENGTH | (size.bytes as u64) << LENGTH.trailing_zeros()) + INLINE)
    }

    #[inline(always)]
    const fn meta(self, head: u64) -> [u64; 4] {
        [head, (self.second as u64) << 32, self.third as u64, 0]
    }

    /// Returns a write of one buffer.
    #[inline(always)]
    pub const fn write(self, remote: RemoteMem, from: Sge) -> [u64; NARROW] {
        rdma(self.write_meta(), remote_words(remote, from.length), local_words(from))
    }

    /// Returns a read into one buffer.
    #[inline(always)]
    pub const fn read(self, remote: RemoteMem, into: Sge) -> [u64; NARROW] {
        rdma(self.read_meta(), remote_words(remote, into.length), local_words(into))
    }

    /// Returns an inline send of [`SEND_BYTES`].
    #[inline(always)]
    pub const fn send_inline(self, data: [u64; SEND_BYTES / 8]) -> [u64; NARROW] {
        let [first, second, third, fourth] = data;
        rdma(self.meta(self.head ^ Self::SEND), [first, second], [third, fourth])
    }

    /// Returns the first half of a 128-byte write of the low bytes of `value`; the other half is zeros. The request
    /// also holds the higher bytes of `value`, but the card doesn't send them.
    #[inline(always)]
    pub const fn write_value(self, remote: RemoteMem, value: u64, size: ValueSize) -> [u64; NARROW] {
        rdma(self.value_meta(size), remote_words(remote, size.bytes), [value, 0])
    }
}

/// The size of a value: 1, 2, 4 or 8 bytes. The default means no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ValueSize {
    bytes: u32,
}

impl ValueSize {
    /// Returns the size with that many bytes; `None` if values can't have it.
    #[inline(always)]
    pub const fn new(bytes: u32) -> Option<Self> {
        let others = bytes.wrapping_sub(1);
        if others < 8 && bytes & others == 0 { Some(Self { bytes }) } else { None }
    }

    /// Returns the number of bytes.
    #[inline(always)]
    pub const fn bytes(self) -> u32 {
        self.bytes
    }
}

/// Returns the remote side of a request made from a [`WqeTemplate`].
#[inline(always)]
const fn remote_words(remote: RemoteMem, length: u32) -> [u64; 2] {
    remote.desc(length).to_words()
}

/// Returns the local side of a request made from a [`WqeTemplate`].
#[inline(always)]
const fn local_words(sge: Sge) -> [u64; 2] {
    [sge.length as u64 | (sge.lkey as u64) << 32, sge.addr]
}

/// Adds immediate data to a request made from a [`WqeTemplate`], or to its first half.
#[inline(always)]
pub const fn with_imm<const N: usize>(mut request: [u64; N], imm: u32) -> [u64; N] {
    request[0] |= HAS_IMM;
    request[1] |= imm as u64;
    request
}

const fn first_word(op: SendOp, inline: bool, length: u16) -> u64 {
    meta_words(0, Destination { ah: 0, qpn: 0, qkey: 0 }, Hints::NONE, op, inline, length)[0]
}

/// Returns the factor that turns the phase bit of a request's number (`number & entries`) into the phase bit of its
/// first word. `entries` is a power of two, at most 2^24.
pub const fn phase_scale(entries: u32) -> u32 {
    PHASE as u32 / entries
}

/// Returns the request's first word with its lap's phase.
#[inline(always)]
pub const fn with_phase(first_word: u64, phase: bool) -> u64 {
    (first_word & !PHASE) | (phase as u64 * PHASE)
}

/// Returns the phase in a request's first word.
#[inline(always)]
pub const fn phase_of(first_word: u64) -> bool {
    first_word & PHASE != 0
}
