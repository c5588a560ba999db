//! Writes a request's bytes.

use super::{Geometry, Operation, RequestIds, SendData, SendWqe, WqeSize, WriteData};
use crate::wire::{Ctrl1, Ctrl2, Ctrl3, RemoteMemAddr, ReqIdEx, TxBufDesc, TxMetaDesc};

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
    /// Writes carry inline data only in 128-byte requests.
    InlineWrite,
}

impl core::fmt::Display for PayloadError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::InlineTooLong { length, max } => write!(f, "{length} inline bytes, the queue allows {max}"),
            Self::InlineWrite => f.write_str("inline data in an RDMA write needs a queue of 128-byte requests"),
        }
    }
}

impl core::error::Error for PayloadError {}

/// Offset of the body.
const BODY: usize = TxMetaDesc::SIZE;
/// Offset of the local side of an RDMA operation.
const LOCAL: usize = BODY + RemoteMemAddr::SIZE;

impl SendWqe {
    /// Writes the request to `out`, filling all of it.
    ///
    /// # Errors
    /// The payload doesn't fit in requests of this geometry; `out` then holds the request without it.
    ///
    /// # Panics
    /// If `out` isn't [`WqeSize::bytes`] long.
    pub fn emit(&self, geometry: &Geometry, out: &mut [u8]) -> Result<(), PayloadError> {
        assert_eq!(out.len(), geometry.wqe_size.bytes(), "the buffer must have the request's size");
        out.fill(0);
        let fits = self.op.check_payload(geometry);
        let inline = self.op.inline_data().filter(|_| fits.is_ok());
        let sges = match self.op {
            Operation::Send { data: SendData::One(sge), .. }
            | Operation::Write { data: WriteData::One(sge), .. }
            | Operation::Read { into: Some(sge), .. } => [Some(sge), None],
            Operation::Send { data: SendData::Two(first, second), .. } => [Some(first), Some(second)],
            _ => [None, None],
        };
        let meta = TxMetaDesc {
            req_id: self.wr_id as u16,
            ctrl1: Ctrl1(0)
                .with_meta_desc(true)
                .with_op_type(self.op.op().raw())
                .with_has_imm(self.op.imm().is_some())
                .with_inline_msg(inline.is_some()),
            ctrl2: Ctrl2(0).with_first(true).with_last(true).with_comp_req(self.completion).with_phase(self.phase),
            dest_qp_num: self.dest.qpn,
            length: inline.map_or(sges.iter().flatten().count(), <[u8]>::len) as u16,
            immediate_data: self.op.imm().unwrap_or(0),
            ah: self.dest.ah,
            ctrl3: Ctrl3(0).with_processing_hints(self.hints.bits()),
            qkey: self.dest.qkey,
            req_id_ex: match geometry.request_ids {
                RequestIds::Bits16 => ReqIdEx::ZERO,
                RequestIds::Bits64 => ReqIdEx::from_wr_id(self.wr_id),
            },
            ..TxMetaDesc::ZERO
        };
        out[..BODY].copy_from_slice(&meta.to_bytes());
        let mut at = BODY;
        if let Operation::Write { remote, .. } | Operation::Read { remote, .. } = self.op {
            let length = inline.map_or(sges[0].map_or(0, |sge| sge.length), |data| data.len() as u32);
            out[BODY..LOCAL].copy_from_slice(&remote.desc(length).to_bytes());
            at = LOCAL;
        }
        for sge in sges.into_iter().flatten() {
            out[at..at + TxBufDesc::SIZE].copy_from_slice(&TxBufDesc::from(sge).to_bytes());
            at += TxBufDesc::SIZE;
        }
        if let Some(data) = inline {
            out[at..at + data.len()].copy_from_slice(data);
        }
        fits
    }
}

impl Operation {
    /// Returns the inline data, if any.
    fn inline_data(&self) -> Option<&[u8]> {
        match self {
            Self::Send { data: SendData::Inline(data), .. } | Self::Write { data: WriteData::Inline(data), .. } => {
                Some(data.data())
            }
            _ => None,
        }
    }

    /// Returns whether requests of this geometry can carry the payload.
    fn check_payload(&self, geometry: &Geometry) -> Result<(), PayloadError> {
        let Some(data) = self.inline_data() else { return Ok(()) };
        let max = geometry.max_inline.min(geometry.wqe_size.max_inline() as u32);
        if data.len() > max as usize {
            Err(PayloadError::InlineTooLong { length: data.len(), max })
        } else if matches!(self, Self::Write { .. }) && geometry.wqe_size == WqeSize::Narrow {
            Err(PayloadError::InlineWrite)
        } else {
            Ok(())
        }
    }
}
