//! Fills a buffer with a request step by step, like the device API (`EfaCudaWrBuilder` in efa-dp-direct).

use super::{Destination, Geometry, Hints, Operation, RemoteMem, RequestIds, Sge, WqeSize};
use crate::wire::{Ctrl1, Ctrl2, Ctrl3, RemoteMemAddr, ReqIdEx, SendOp, TxBufDesc, TxMetaDesc};

/// Why a payload can't be attached. The device API returns -22 (invalid argument) for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadError {
    /// More inline bytes than the queue allows.
    InlineTooLong {
        /// Bytes given.
        length: usize,
        /// Bytes allowed.
        max: u32,
    },
    /// This operation can't carry inline data: a read never does, a write only in 128-byte requests.
    InlineNotPossible(SendOp),
    /// Only sends gather two buffers.
    OneBufferOnly(SendOp),
}

impl core::fmt::Display for PayloadError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::InlineTooLong { length, max } => write!(f, "{length} inline bytes, the queue allows {max}"),
            Self::InlineNotPossible(SendOp::RdmaWrite) => {
                f.write_str("inline data in an RDMA write needs a queue of 128-byte requests")
            }
            Self::InlineNotPossible(op) => write!(f, "{op:?} has no inline data"),
            Self::OneBufferOnly(op) => write!(f, "{op:?} takes one buffer"),
        }
    }
}

impl core::error::Error for PayloadError {}

/// A request under construction in a caller's buffer.
#[derive(Debug)]
pub struct Builder<'a> {
    geometry: Geometry,
    op: SendOp,
    remote: Option<RemoteMem>,
    meta: TxMetaDesc,
    out: &'a mut [u8],
}

/// Offset of the body.
const BODY: usize = TxMetaDesc::SIZE;
/// Offset of the local side of an RDMA operation.
const LOCAL: usize = BODY + RemoteMemAddr::SIZE;

impl<'a> Builder<'a> {
    /// Starts the request for `op` without its payload, filling all of `out`. The destination is zero, the phase is 0, and a completion is
    /// requested.
    ///
    /// # Panics
    /// If `out` isn't [`WqeSize::bytes`] long.
    pub fn new(geometry: &Geometry, out: &'a mut [u8], op: &Operation, wr_id: u64) -> Self {
        assert_eq!(out.len(), geometry.wqe_size.bytes(), "the buffer must have the request's size");
        out.fill(0);
        let remote = match op {
            Operation::Send { .. } => None,
            Operation::Write { remote, .. } | Operation::Read { remote, .. } => Some(*remote),
        };
        let meta = TxMetaDesc {
            req_id: wr_id as u16,
            req_id_ex: match geometry.request_ids {
                RequestIds::Bits16 => ReqIdEx::ZERO,
                RequestIds::Bits64 => ReqIdEx::from_wr_id(wr_id),
            },
            ctrl1: Ctrl1(0).with_meta_desc(true).with_op_type(op.op().raw()).with_has_imm(op.imm().is_some()),
            ctrl2: Ctrl2(0).with_first(true).with_last(true).with_comp_req(true),
            immediate_data: op.imm().unwrap_or(0),
            ..TxMetaDesc::ZERO
        };
        let mut builder = Self { geometry: *geometry, op: op.op(), remote, meta, out };
        builder.put_meta();
        builder.put_remote(0);
        builder
    }

    fn put_meta(&mut self) -> &mut Self {
        self.out[..BODY].copy_from_slice(&self.meta.to_bytes());
        self
    }

    fn put_remote(&mut self, length: u32) {
        if let Some(remote) = self.remote {
            self.out[BODY..LOCAL].copy_from_slice(&remote.desc(length).to_bytes());
        }
    }

    /// Sets the peer.
    pub fn set_destination(&mut self, dest: Destination) -> &mut Self {
        self.meta.ah = dest.ah;
        self.meta.dest_qp_num = dest.qpn;
        self.meta.qkey = dest.qkey;
        self.put_meta()
    }

    /// Sets the hints.
    pub fn set_hints(&mut self, hints: Hints) -> &mut Self {
        self.meta.ctrl3 = Ctrl3(0).with_processing_hints(hints.bits());
        self.put_meta()
    }

    /// Sets the phase bit.
    pub fn set_phase(&mut self, phase: bool) -> &mut Self {
        self.meta.ctrl2 = self.meta.ctrl2.with_phase(phase);
        self.put_meta()
    }

    /// Requests a completion, or none.
    pub fn set_completion(&mut self, completion: bool) -> &mut Self {
        self.meta.ctrl2 = self.meta.ctrl2.with_comp_req(completion);
        self.put_meta()
    }

    /// Attaches one buffer.
    ///
    /// # Errors
    /// None today; the return type matches the other payload functions.
    pub fn set_sge(&mut self, sge: Sge) -> Result<(), PayloadError> {
        self.meta.length = 1;
        self.put_meta();
        self.put_remote(sge.length);
        let at = if self.remote.is_some() { LOCAL } else { BODY };
        self.out[at..at + TxBufDesc::SIZE].copy_from_slice(&TxBufDesc::from(sge).to_bytes());
        Ok(())
    }

    /// Attaches two buffers to a send.
    ///
    /// # Errors
    /// [`PayloadError::OneBufferOnly`] for an RDMA operation; the request stays unchanged.
    pub fn set_sges(&mut self, first: Sge, second: Sge) -> Result<(), PayloadError> {
        if self.op != SendOp::Send {
            return Err(PayloadError::OneBufferOnly(self.op));
        }
        self.meta.length = 2;
        self.put_meta();
        let second_at = BODY + TxBufDesc::SIZE;
        self.out[BODY..second_at].copy_from_slice(&TxBufDesc::from(first).to_bytes());
        self.out[second_at..second_at + TxBufDesc::SIZE].copy_from_slice(&TxBufDesc::from(second).to_bytes());
        Ok(())
    }

    /// Attaches data inside the request.
    ///
    /// # Errors
    /// Too much data for the queue, or an operation that can't carry any; the request stays unchanged.
    pub fn set_inline(&mut self, data: &[u8]) -> Result<(), PayloadError> {
        let max = self.geometry.max_inline.min(self.geometry.wqe_size.max_inline() as u32);
        if data.len() > max as usize {
            return Err(PayloadError::InlineTooLong { length: data.len(), max });
        }
        let at = match (self.op, self.geometry.wqe_size) {
            (SendOp::Send, _) => BODY,
            (SendOp::RdmaWrite, WqeSize::Wide) => LOCAL,
            (op, _) => return Err(PayloadError::InlineNotPossible(op)),
        };
        self.meta.ctrl1 = self.meta.ctrl1.with_inline_msg(true);
        self.meta.length = data.len() as u16;
        self.put_meta();
        self.put_remote(data.len() as u32);
        self.out[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
}
