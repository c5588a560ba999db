//! Reads an entry field by field like each release's device API (`efa_cuda_wc_read_*`) and the host providers. Like
//! theirs, these functions return a result for any bytes; [`super::Cqe::parse`] rejects bytes that aren't an entry.

use super::{RawCqe, Status};
use crate::wire::{CompStatus, QueueType, SendOp, UNKNOWN_AH, WcOpcode};
use crate::wqe::RequestIds;

/// What the device-side readers return. A field that the entry doesn't have holds the bytes in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceWc {
    /// The operation.
    pub opcode: WcOpcode,
    /// Whether no receive was consumed.
    pub unsolicited: bool,
    /// Request id: 16 bits in API version 0; always 64 in version 1, even for receives, where the upper 48 belong to
    /// other fields.
    pub req_id: u64,
    /// Raw status.
    pub vendor_err: u32,
    /// Whether there is immediate data.
    pub has_imm: bool,
    /// Immediate data.
    pub imm_data: u32,
    /// Length of a receive in bytes; otherwise 0.
    pub byte_len: u32,
    /// Local queue pair number.
    pub qp_num: u32,
    /// The sender's queue pair number.
    pub src_qp: u32,
    /// The sender's address handle.
    pub slid: u32,
}

/// Reads an entry like the device API: [`RequestIds::Bits16`] for version 0, [`RequestIds::Bits64`] for version 1.
///
/// For the length of a write with immediate data, the reference reads past the end of a 16-byte entry into the next
/// one. A caller that needs the same result passes those bytes as the second half.
pub fn device(raw: &RawCqe, request_ids: RequestIds) -> DeviceWc {
    let entry = raw.rx();
    let common = entry.base.common;
    DeviceWc {
        opcode: opcode(raw),
        unsolicited: common.flags.unsolicited(),
        req_id: match request_ids {
            RequestIds::Bits16 => common.req_id.into(),
            RequestIds::Bits64 => raw.tx().req_id_ex.wr_id(common.req_id),
        },
        vendor_err: common.status.into(),
        has_imm: common.flags.has_imm(),
        imm_data: entry.base.imm,
        byte_len: if common.flags.q_type() == QueueType::Recv.raw() { recv_length(raw) } else { 0 },
        qp_num: common.qp_num.into(),
        src_qp: entry.base.src_qp_num.into(),
        slid: entry.base.ah.into(),
    }
}

fn opcode(raw: &RawCqe) -> WcOpcode {
    let flags = raw.common().flags;
    let op = SendOp::from_raw(flags.op_type());
    if flags.q_type() == QueueType::Send.raw() {
        match op {
            Some(SendOp::RdmaWrite) => WcOpcode::RdmaWrite,
            Some(SendOp::RdmaRead) => WcOpcode::RdmaRead,
            _ => WcOpcode::Send,
        }
    } else if op == Some(SendOp::RdmaWrite) {
        WcOpcode::RecvRdmaWithImm
    } else {
        WcOpcode::Recv
    }
}

fn recv_length(raw: &RawCqe) -> u32 {
    let entry = raw.rx();
    let length_hi = match SendOp::from_raw(entry.base.common.flags.op_type()) {
        Some(SendOp::RdmaWrite) => entry.extra.rdma_write().length_hi,
        _ => 0,
    };
    u32::from(length_hi) << 16 | u32::from(entry.base.length)
}

/// `ibv_wc_status`: the status that host providers report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WcStatus {
    /// Done.
    Success,
    /// Too long.
    LocLenErr,
    /// Broken queue pair, operation or address handle.
    LocQpOpErr,
    /// Bad local key.
    LocProtErr,
    /// Flushed.
    WrFlushErr,
    /// Unexpected response.
    BadRespErr,
    /// The peer's receive is too short, or the peer lacks a feature.
    RemInvReqErr,
    /// Bad remote key or address.
    RemAccessErr,
    /// The peer doesn't know this card.
    RemOpErr,
    /// The peer has no receive posted.
    RnrRetryExcErr,
    /// Bad queue pair at the peer.
    RemInvRdReqErr,
    /// The peer reset the connection.
    RemAbortErr,
    /// The peer doesn't respond.
    RespTimeoutErr,
    /// Anything else.
    GeneralErr,
}

impl WcStatus {
    /// Returns the status that the host providers report for a card's status.
    pub const fn from_status(status: Status) -> Self {
        let Status::Known(status) = status else { return Self::GeneralErr };
        match status {
            CompStatus::Ok => Self::Success,
            CompStatus::Flushed => Self::WrFlushErr,
            CompStatus::LocalQpInternalError | CompStatus::LocalUnsupportedOp | CompStatus::LocalInvalidAh => {
                Self::LocQpOpErr
            }
            CompStatus::LocalInvalidLkey => Self::LocProtErr,
            CompStatus::LocalBadLength => Self::LocLenErr,
            CompStatus::RemoteBadAddress => Self::RemAccessErr,
            CompStatus::RemoteAbort => Self::RemAbortErr,
            CompStatus::RemoteBadDestQpn => Self::RemInvRdReqErr,
            CompStatus::RemoteRnr => Self::RnrRetryExcErr,
            CompStatus::RemoteBadLength | CompStatus::RemoteFeatureMismatch => Self::RemInvReqErr,
            CompStatus::RemoteBadStatus => Self::BadRespErr,
            CompStatus::LocalUnresponsiveRemote | CompStatus::LocalUnreachableRemote => Self::RespTimeoutErr,
            CompStatus::RemoteUnknownPeer => Self::RemOpErr,
        }
    }

    /// Returns the name, without `IBV_WC_` and in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::LocLenErr => "loc_len_err",
            Self::LocQpOpErr => "loc_qp_op_err",
            Self::LocProtErr => "loc_prot_err",
            Self::WrFlushErr => "wr_flush_err",
            Self::BadRespErr => "bad_resp_err",
            Self::RemInvReqErr => "rem_inv_req_err",
            Self::RemAccessErr => "rem_access_err",
            Self::RemOpErr => "rem_op_err",
            Self::RnrRetryExcErr => "rnr_retry_exc_err",
            Self::RemInvRdReqErr => "rem_inv_rd_req_err",
            Self::RemAbortErr => "rem_abort_err",
            Self::RespTimeoutErr => "resp_timeout_err",
            Self::GeneralErr => "general_err",
        }
    }
}

/// The fields that only one kind of completion has, as the host providers report them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostDetail {
    /// From a send queue.
    Send {
        /// Request id, 64 bits.
        wr_id: u64,
    },
    /// From a receive queue.
    Recv {
        /// Length in bytes.
        byte_len: u32,
        /// The sender's queue pair number.
        src_qp: u32,
        /// The sender's address handle.
        slid: u32,
        /// Immediate data, if any.
        imm_data: Option<u32>,
        /// Whether no receive was consumed.
        unsolicited: bool,
        /// GID of a sender without an address handle.
        src_addr: Option<[u8; 16]>,
    },
}

/// An entry as the host providers report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostWc {
    /// The status.
    pub status: WcStatus,
    /// The operation; a read is reported as a send.
    pub opcode: WcOpcode,
    /// Raw status.
    pub vendor_err: u32,
    /// The other fields.
    pub detail: HostDetail,
}

/// Reads a 32-byte entry like the host providers.
pub fn host(raw: &RawCqe) -> HostWc {
    let entry = raw.rx();
    let common = entry.base.common;
    let is_send = common.flags.q_type() == QueueType::Send.raw();
    HostWc {
        status: WcStatus::from_status(Status::from_raw(common.status)),
        opcode: match opcode(raw) {
            WcOpcode::RdmaRead => WcOpcode::Send,
            other => other,
        },
        vendor_err: common.status.into(),
        detail: if is_send {
            HostDetail::Send { wr_id: raw.tx().req_id_ex.wr_id(common.req_id) }
        } else {
            HostDetail::Recv {
                byte_len: recv_length(raw),
                src_qp: entry.base.src_qp_num.into(),
                slid: entry.base.ah.into(),
                imm_data: common.flags.has_imm().then_some(entry.base.imm),
                unsolicited: common.flags.unsolicited(),
                src_addr: (entry.base.ah == UNKNOWN_AH).then_some(*entry.extra.src_addr()),
            }
        },
    }
}
