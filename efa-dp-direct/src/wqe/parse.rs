//! Reads a request as a card does. Anything that the interface doesn't define is an error.

use super::{
    Destination, Geometry, Hints, Inline, Operation, RemoteMem, RequestIds, SendData, SendWqe, Sge, WqeSize, WriteData,
};
use crate::wire::{
    CompStatus, Ctrl1, Ctrl2, Ctrl3, Lkey, ReqIdEx, SendOp, TX_DESC_NUM_BUFS, TxBufDesc, TxWqe, TxWqe128,
};

/// Why bytes aren't a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WqeError {
    /// The queue's requests don't have this many bytes.
    Size(usize),
    /// The meta descriptor bit is clear: the slot was probably never written.
    NotMeta,
    /// The request claims an extended descriptor, which no card supports.
    MetaExtension,
    /// The descriptor isn't both the first and the last of its request.
    NotSingle,
    /// A bit or byte that must be zero is set.
    Reserved,
    /// Operation code that no release names.
    UnknownOp(u8),
    /// Operation that user queues don't support.
    UnsupportedOp(SendOp),
    /// A read with immediate data.
    ImmediateInRead,
    /// Inline data in a read, or in a 64-byte write.
    InlineNotPossible(SendOp),
    /// More inline bytes than the queue allows.
    InlineTooLong(u16),
    /// More buffers than the operation takes.
    TooManyBuffers(u16),
    /// The local and remote sides differ in length.
    LengthMismatch {
        /// Bytes of the local side.
        local: u32,
        /// Bytes of the remote side.
        remote: u32,
    },
}

impl WqeError {
    /// Returns the status with which a card completes such a request.
    pub const fn status(self) -> CompStatus {
        match self {
            Self::UnknownOp(_) | Self::UnsupportedOp(_) | Self::ImmediateInRead | Self::InlineNotPossible(_) => {
                CompStatus::LocalUnsupportedOp
            }
            Self::InlineTooLong(_) | Self::TooManyBuffers(_) | Self::LengthMismatch { .. } => {
                CompStatus::LocalBadLength
            }
            Self::Size(_) | Self::NotMeta | Self::MetaExtension | Self::NotSingle | Self::Reserved => {
                CompStatus::LocalQpInternalError
            }
        }
    }
}

impl core::fmt::Display for WqeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Size(n) => write!(f, "{n} bytes is not a valid request size of this queue"),
            Self::NotMeta => f.write_str("the meta descriptor bit is clear (was the slot written?)"),
            Self::MetaExtension => f.write_str("the meta extension bit is set"),
            Self::NotSingle => f.write_str("the first and last bits are not both set"),
            Self::Reserved => f.write_str("a reserved bit is set"),
            Self::UnknownOp(op) => write!(f, "operation code {op} does not exist"),
            Self::UnsupportedOp(op) => write!(f, "{op:?} is not for user queues"),
            Self::ImmediateInRead => f.write_str("an RDMA read has no immediate data"),
            Self::InlineNotPossible(op) => write!(f, "{op:?} has no inline data in requests of this size"),
            Self::InlineTooLong(n) => write!(f, "{n} inline bytes are more than the queue allows"),
            Self::TooManyBuffers(n) => write!(f, "{n} buffers are more than the operation takes"),
            Self::LengthMismatch { local, remote } => {
                write!(f, "{local} bytes at the local side but {remote} at the remote side")
            }
        }
    }
}

impl core::error::Error for WqeError {}

/// Parses the request in `bytes`. The caller has copied them out of the ring, which may change meanwhile.
///
/// Bytes after the payload are ignored, because some posters leave old bytes there.
///
/// # Errors
/// The first rule that the bytes break. Never panics.
pub fn parse(bytes: &[u8], geometry: &Geometry) -> Result<SendWqe, WqeError> {
    let size = || WqeError::Size(bytes.len());
    match geometry.wqe_size {
        WqeSize::Narrow => {
            let wqe = TxWqe::from_bytes(bytes.try_into().map_err(|_| size())?);
            let request = wqe.data.rdma_req();
            let body = Body {
                sgl: wqe.data.sgl(),
                remote: request.remote_mem,
                local: request.local_mem[0],
                send_inline: wqe.data.inline_data(),
                write_inline: None,
            };
            body.parse(&wqe.meta, geometry)
        }
        WqeSize::Wide => {
            let wqe = TxWqe128::from_bytes(bytes.try_into().map_err(|_| size())?);
            let request = wqe.data.rdma_req();
            let body = Body {
                sgl: wqe.data.sgl(),
                remote: request.remote_mem,
                local: request.local_mem()[0],
                send_inline: &wqe.data.inline_data(),
                write_inline: Some(&request.inline_data()),
            };
            body.parse(&wqe.meta, geometry)
        }
    }
}

/// A request's union, read as each of its members.
struct Body<'a> {
    sgl: [TxBufDesc; TX_DESC_NUM_BUFS],
    remote: crate::wire::RemoteMemAddr,
    local: TxBufDesc,
    send_inline: &'a [u8],
    write_inline: Option<&'a [u8]>,
}

impl Body<'_> {
    fn parse(&self, meta: &crate::wire::TxMetaDesc, geometry: &Geometry) -> Result<SendWqe, WqeError> {
        let (ctrl1, ctrl2, ctrl3) = (meta.ctrl1, meta.ctrl2, meta.ctrl3);
        if !ctrl1.meta_desc() {
            return Err(WqeError::NotMeta);
        }
        if ctrl1.meta_extension() {
            return Err(WqeError::MetaExtension);
        }
        if !(ctrl2.first() && ctrl2.last()) {
            return Err(WqeError::NotSingle);
        }
        let ids_reserved = geometry.request_ids == RequestIds::Bits16 && meta.req_id_ex != ReqIdEx::ZERO;
        let flags_reserved = ctrl1.0 & Ctrl1::RESERVED | ctrl2.0 & Ctrl2::RESERVED | ctrl3.0 & Ctrl3::RESERVED;
        if ids_reserved || flags_reserved != 0 || meta.reserved != 0 || meta.reserved2 != [0; 6] {
            return Err(WqeError::Reserved);
        }
        let imm = ctrl1.has_imm().then_some(meta.immediate_data);
        let op = match SendOp::from_raw(ctrl1.op_type()) {
            None => return Err(WqeError::UnknownOp(ctrl1.op_type())),
            Some(SendOp::Send) => Operation::Send { data: self.send_data(ctrl1, meta.length, geometry)?, imm },
            Some(SendOp::RdmaWrite) => {
                Operation::Write { remote: self.remote(), data: self.write_data(ctrl1, meta.length, geometry)?, imm }
            }
            Some(SendOp::RdmaRead) if imm.is_some() => return Err(WqeError::ImmediateInRead),
            Some(SendOp::RdmaRead) if ctrl1.inline_msg() => {
                return Err(WqeError::InlineNotPossible(SendOp::RdmaRead));
            }
            Some(SendOp::RdmaRead) => Operation::Read { remote: self.remote(), into: self.local(meta.length)? },
            Some(op @ (SendOp::FastReg | SendOp::FastInv)) => return Err(WqeError::UnsupportedOp(op)),
        };
        Ok(SendWqe {
            wr_id: meta.req_id_ex.wr_id(meta.req_id),
            phase: ctrl2.phase(),
            dest: Destination { ah: meta.ah, qpn: meta.dest_qp_num, qkey: meta.qkey },
            op,
            hints: Hints(ctrl3.processing_hints()),
            completion: ctrl2.comp_req(),
        })
    }

    fn send_data(&self, ctrl1: Ctrl1, length: u16, geometry: &Geometry) -> Result<SendData, WqeError> {
        if ctrl1.inline_msg() {
            return Ok(SendData::Inline(inline(self.send_inline, length, geometry)?));
        }
        match length {
            0 => Ok(SendData::Empty),
            1 => Ok(SendData::One(sge(self.sgl[0])?)),
            2 => Ok(SendData::Two(sge(self.sgl[0])?, sge(self.sgl[1])?)),
            n => Err(WqeError::TooManyBuffers(n)),
        }
    }

    fn write_data(&self, ctrl1: Ctrl1, length: u16, geometry: &Geometry) -> Result<WriteData, WqeError> {
        if ctrl1.inline_msg() {
            let Some(room) = self.write_inline else {
                return Err(WqeError::InlineNotPossible(SendOp::RdmaWrite));
            };
            let data = inline(room, length, geometry)?;
            self.same_length(length.into())?;
            return Ok(WriteData::Inline(data));
        }
        Ok(self.local(length)?.map_or(WriteData::Empty, WriteData::One))
    }

    /// Returns the local side of an RDMA operation with `count` buffers.
    fn local(&self, count: u16) -> Result<Option<Sge>, WqeError> {
        match count {
            0 => {
                self.same_length(0)?;
                Ok(None)
            }
            1 => {
                self.same_length(self.local.length)?;
                sge(self.local).map(Some)
            }
            n => Err(WqeError::TooManyBuffers(n)),
        }
    }

    fn same_length(&self, local: u32) -> Result<(), WqeError> {
        if self.remote.length == local {
            Ok(())
        } else {
            Err(WqeError::LengthMismatch { local, remote: self.remote.length })
        }
    }

    fn remote(&self) -> RemoteMem {
        RemoteMem { addr: self.remote.addr(), rkey: self.remote.rkey }
    }
}

fn sge(desc: TxBufDesc) -> Result<Sge, WqeError> {
    if desc.lkey.0 & Lkey::RESERVED != 0 { Err(WqeError::Reserved) } else { Ok(desc.into()) }
}

fn inline(room: &[u8], length: u16, geometry: &Geometry) -> Result<Inline, WqeError> {
    let data = room.get(..length as usize).filter(|data| data.len() <= geometry.max_inline as usize);
    data.and_then(Inline::new).ok_or(WqeError::InlineTooLong(length))
}
