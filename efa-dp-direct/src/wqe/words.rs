//! Requests as 64-bit words in memory order, built in registers for the posting path: the phase bit is 0 until
//! [`crate::sq::place`] or [`with_phase`] sets it. The bytes are those that [`super::SendWqe::emit`] writes.
//!
//! Nothing is checked here; what a queue allows is settled when it is made.

use super::{Destination, Hints, RemoteMem, Sge};
use crate::wire::{Ctrl1, Ctrl2, Ctrl3, ReqIdEx, SendOp, TxBufDesc, TxMetaDesc};

/// Words of a 64-byte request.
pub const NARROW: usize = 8;
/// Words of a 128-byte request.
pub const WIDE: usize = 16;

/// Where the phase bit is in a request's first word.
const PHASE: u64 = (Ctrl2::PHASE as u64) << 24;

/// What every request says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Request id; its upper 48 bits must be 0 on a queue with 16-bit ids.
    pub wr_id: u64,
    /// Peer.
    pub dest: Destination,
    /// Immediate data, if any.
    pub imm: Option<u32>,
    /// Hints.
    pub hints: Hints,
}

impl Head {
    /// A head without immediate data and hints.
    #[inline(always)]
    pub const fn new(wr_id: u64, dest: Destination) -> Self {
        Self { wr_id, dest, imm: None, hints: Hints::NONE }
    }

    #[inline(always)]
    const fn words(self, op: SendOp, inline: bool, length: u16) -> [u64; 4] {
        let ctrl1 = Ctrl1(0).with_meta_desc(true).with_op_type(op.raw()).with_inline_msg(inline);
        let (has_imm, immediate_data) = match self.imm {
            Some(imm) => (true, imm),
            None => (false, 0),
        };
        let meta = TxMetaDesc {
            req_id: self.wr_id as u16,
            ctrl1: ctrl1.with_has_imm(has_imm),
            ctrl2: Ctrl2(0).with_first(true).with_last(true).with_comp_req(true),
            dest_qp_num: self.dest.qpn,
            length,
            immediate_data,
            ah: self.dest.ah,
            ctrl3: Ctrl3(0).with_processing_hints(self.hints.bits()),
            reserved: 0,
            qkey: self.dest.qkey,
            reserved2: [0; 6],
            req_id_ex: ReqIdEx::from_wr_id(self.wr_id),
        };
        meta.to_words()
    }
}

/// Meta descriptor, remote side, local side: 64 bytes, then zeros.
#[inline(always)]
const fn rdma<const N: usize>(meta: [u64; 4], remote: [u64; 2], local: [u64; 2]) -> [u64; N] {
    let mut words = [0; N];
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

/// An RDMA write of one buffer; `N` is [`NARROW`] or [`WIDE`].
#[inline(always)]
pub const fn write<const N: usize>(head: Head, remote: RemoteMem, from: Sge) -> [u64; N] {
    let meta = head.words(SendOp::RdmaWrite, false, 1);
    let local = TxBufDesc::new(from.addr, from.length, from.lkey);
    rdma(meta, remote.desc(from.length).to_words(), local.to_words())
}

/// An RDMA write that names no buffer and carries no bytes.
#[inline(always)]
pub const fn write_nothing<const N: usize>(head: Head, remote: RemoteMem) -> [u64; N] {
    rdma(head.words(SendOp::RdmaWrite, false, 0), remote.desc(0).to_words(), [0; 2])
}

/// An RDMA write of the low `length` bytes of `value`, at most 8, inside a 128-byte request.
#[inline(always)]
pub const fn write_value(head: Head, remote: RemoteMem, value: u64, length: u8) -> [u64; WIDE] {
    let kept = if length >= 8 { value } else { value & ((1 << (length * 8)) - 1) };
    let length = if length >= 8 { 8 } else { length };
    let meta = head.words(SendOp::RdmaWrite, true, length as u16);
    rdma(meta, remote.desc(length as u32).to_words(), [kept, 0])
}

/// An RDMA read into one buffer.
#[inline(always)]
pub const fn read<const N: usize>(head: Head, remote: RemoteMem, into: Sge) -> [u64; N] {
    let meta = head.words(SendOp::RdmaRead, false, 1);
    let local = TxBufDesc::new(into.addr, into.length, into.lkey);
    rdma(meta, remote.desc(into.length).to_words(), local.to_words())
}

/// A send of one buffer.
#[inline(always)]
pub const fn send<const N: usize>(head: Head, from: Sge) -> [u64; N] {
    let meta = head.words(SendOp::Send, false, 1);
    rdma(meta, TxBufDesc::new(from.addr, from.length, from.lkey).to_words(), [0; 2])
}

/// The request's first word in the phase of its lap.
#[inline(always)]
pub const fn with_phase(first_word: u64, phase: bool) -> u64 {
    (first_word & !PHASE) | (phase as u64 * PHASE)
}

/// The phase in a request's first word.
#[inline(always)]
pub const fn phase_of(first_word: u64) -> bool {
    first_word & PHASE != 0
}
