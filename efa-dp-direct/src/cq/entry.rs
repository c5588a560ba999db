//! What a completion queue entry means.

use crate::wire::{
    CdescCommon, CdescFlags, CompStatus, QueueType, ReqIdEx, RxCdesc, RxCdescEx, RxCdescRdmaWrite, RxExtra, SendOp,
    TxCdesc, UNKNOWN_AH,
};
use crate::wqe::RequestIds;

/// The bytes of an entry, copied out of the ring; the second half of a 16-byte entry is zero. Aligned so that it is
/// copied word by word.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawCqe(pub [u8; 32]);

impl RawCqe {
    /// All bytes zero.
    pub const ZERO: Self = Self([0; 32]);

    /// Returns the entry that these words of memory hold.
    #[inline(always)]
    pub fn from_words(words: [u64; 4]) -> Self {
        let mut bytes = [0; 32];
        for (chunk, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Self(bytes)
    }

    /// Returns the entry read as a receive queue's; every bit pattern is valid.
    #[inline(always)]
    pub fn rx(&self) -> RxCdescEx {
        RxCdescEx::from_bytes(&self.0)
    }

    /// Returns the entry read as a send queue's; every bit pattern is valid.
    #[inline(always)]
    pub fn tx(&self) -> TxCdesc {
        let mut bytes = [0; TxCdesc::SIZE];
        bytes.copy_from_slice(&self.0[..TxCdesc::SIZE]);
        TxCdesc::from_bytes(&bytes)
    }

    /// Returns the head that all entries share.
    #[inline(always)]
    pub fn common(&self) -> CdescCommon {
        self.rx().base.common
    }

    /// Returns the phase bit.
    #[inline(always)]
    pub fn phase(&self) -> bool {
        self.common().flags.phase()
    }
}

/// The status of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// A status that a release names.
    Known(CompStatus),
    /// A status that no release names: an error with this number.
    Unknown(u8),
}

impl Status {
    /// Returns the status for a raw code.
    pub const fn from_raw(raw: u8) -> Self {
        match CompStatus::from_raw(raw) {
            Some(status) => Self::Known(status),
            None => Self::Unknown(raw),
        }
    }

    /// Returns the number on the wire.
    pub const fn raw(self) -> u8 {
        match self {
            Self::Known(status) => status.raw(),
            Self::Unknown(raw) => raw,
        }
    }

    /// Returns whether the request succeeded.
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Known(CompStatus::Ok))
    }
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Known(status) => write!(f, "{status} (status {})", status.raw()),
            Self::Unknown(raw) => write!(f, "status {raw}, which no release names"),
        }
    }
}

/// Completion of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendCqe {
    /// Local queue pair number.
    pub qp_num: u16,
    /// The request's id; only 16 bits of it on queues with 16-bit ids.
    pub wr_id: u64,
    /// The operation; a code that no release names is kept as the number.
    pub op: Result<SendOp, u8>,
    /// The status.
    pub status: Status,
}

/// The sender of a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sender {
    /// A peer with an address handle here.
    Ah(u16),
    /// Another peer, and its GID. A write with immediate has its length where the GID would be, so the GID is then
    /// unknown.
    Gid(Option<[u8; 16]>),
}

/// Completion of a receive, or of a peer's write with immediate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvCqe {
    /// Local queue pair number.
    pub qp_num: u16,
    /// The receive's id; meaningless if `unsolicited`.
    pub req_id: u16,
    /// [`SendOp::RdmaWrite`] for a peer's write with immediate; a code that no release names is kept as the number.
    pub op: Result<SendOp, u8>,
    /// The status.
    pub status: Status,
    /// Length in bytes.
    pub length: u32,
    /// Immediate data, if any.
    pub imm: Option<u32>,
    /// Whether no receive was consumed.
    pub unsolicited: bool,
    /// The sender's queue pair number.
    pub src_qp_num: u16,
    /// The sender.
    pub sender: Sender,
}

/// A completion queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cqe {
    /// From a send queue.
    Send(SendCqe),
    /// From a receive queue.
    Recv(RecvCqe),
}

/// Why bytes aren't a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqeError {
    /// The queue type is neither send nor receive.
    QueueType(u8),
}

impl core::fmt::Display for CqeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self::QueueType(raw) = self;
        write!(f, "completion for queue type {raw}, which does not exist")
    }
}

impl core::error::Error for CqeError {}

const fn op(flags: CdescFlags) -> Result<SendOp, u8> {
    match SendOp::from_raw(flags.op_type()) {
        Some(op) => Ok(op),
        None => Err(flags.op_type()),
    }
}

const fn op_raw(op: Result<SendOp, u8>) -> u8 {
    match op {
        Ok(op) => op.raw(),
        Err(raw) => raw,
    }
}

impl Cqe {
    /// Returns what an entry means. `request_ids` is the kind of the send queues that complete here.
    ///
    /// # Errors
    /// The queue type doesn't exist. Never panics.
    pub fn parse(raw: &RawCqe, request_ids: RequestIds) -> Result<Self, CqeError> {
        let common = raw.common();
        let (flags, status) = (common.flags, Status::from_raw(common.status));
        match QueueType::from_raw(flags.q_type()) {
            Some(QueueType::Send) => Ok(Self::Send(SendCqe {
                qp_num: common.qp_num,
                wr_id: match request_ids {
                    RequestIds::Bits16 => common.req_id.into(),
                    RequestIds::Bits64 => raw.tx().req_id_ex.wr_id(common.req_id),
                },
                op: op(flags),
                status,
            })),
            Some(QueueType::Recv) => {
                let RxCdescEx { base, extra } = raw.rx();
                let is_write = op(flags) == Ok(SendOp::RdmaWrite);
                let length_hi = if is_write { extra.rdma_write().length_hi } else { 0 };
                Ok(Self::Recv(RecvCqe {
                    qp_num: common.qp_num,
                    req_id: common.req_id,
                    op: op(flags),
                    status,
                    length: u32::from(length_hi) << 16 | u32::from(base.length),
                    imm: flags.has_imm().then_some(base.imm),
                    unsolicited: flags.unsolicited(),
                    src_qp_num: base.src_qp_num,
                    sender: match base.ah {
                        UNKNOWN_AH => Sender::Gid((!is_write).then_some(*extra.src_addr())),
                        ah => Sender::Ah(ah),
                    },
                }))
            }
            None => Err(CqeError::QueueType(flags.q_type())),
        }
    }

    /// Returns the entry's bytes with a lap's phase; a 16-byte ring takes the first half. A send's entry has a 64-bit
    /// id.
    pub fn emit(&self, phase: bool) -> RawCqe {
        match self {
            Self::Send(send) => send.emit(phase),
            Self::Recv(recv) => recv.emit(phase),
        }
    }
}

impl SendCqe {
    /// Returns the entry's bytes with a lap's phase.
    pub fn emit(&self, phase: bool) -> RawCqe {
        let flags = CdescFlags(0).with_q_type(QueueType::Send.raw()).with_op_type(op_raw(self.op)).with_phase(phase);
        let common = CdescCommon { req_id: self.wr_id as u16, status: self.status.raw(), flags, qp_num: self.qp_num };
        let entry = TxCdesc { common, req_id_ex: ReqIdEx::from_wr_id(self.wr_id), reserved: [0; 4] };
        let mut raw = RawCqe::ZERO;
        raw.0[..TxCdesc::SIZE].copy_from_slice(&entry.to_bytes());
        raw
    }
}

impl RecvCqe {
    /// Returns the entry's bytes with a lap's phase.
    pub fn emit(&self, phase: bool) -> RawCqe {
        let flags = CdescFlags(0)
            .with_q_type(QueueType::Recv.raw())
            .with_op_type(op_raw(self.op))
            .with_has_imm(self.imm.is_some())
            .with_unsolicited(self.unsolicited)
            .with_phase(phase);
        let (ah, gid) = match self.sender {
            Sender::Ah(ah) => (ah, None),
            Sender::Gid(gid) => (UNKNOWN_AH, gid),
        };
        let base = RxCdesc {
            common: CdescCommon { req_id: self.req_id, status: self.status.raw(), flags, qp_num: self.qp_num },
            length: self.length as u16,
            ah,
            src_qp_num: self.src_qp_num,
            imm: self.imm.unwrap_or(0),
        };
        let extra = match (self.op, gid) {
            (Ok(SendOp::RdmaWrite), _) => RxCdescRdmaWrite { length_hi: (self.length >> 16) as u16 }.into(),
            (_, Some(gid)) => RxExtra { bytes: gid },
            (_, None) => RxExtra::ZERO,
        };
        RawCqe(RxCdescEx { base, extra }.to_bytes())
    }
}
