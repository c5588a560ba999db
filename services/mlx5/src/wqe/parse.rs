//! Parses the bytes of a send queue's work request, as a card does.

use super::{
    ATOMIC, AtomicResult, CONTROL, DATAGRAM, Data, Destination, Op, Parsed, REMOTE, Remote, Sge, Umr, UmrKind, With,
};
use crate::wire::{
    AddressVector, AtomicSeg, CtrlSeg, DataSeg, Fence, FmCeSe, INLINE_FLAG, InlineHeader, KlmSeg, MAX_DS, MkeyContext,
    Opcode, RaddrSeg, SEGMENT, UmrCtrlSeg,
};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// The transport of a queue pair, which determines the segments after the control segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable datagram.
    Ud,
}

/// A valid work request, parsed from bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wqe {
    /// Index of the first block.
    pub index: u16,
    /// The queue pair number in the work request.
    pub qpn: u32,
    /// Size in 16-byte units.
    pub ds: u8,
    /// The fence mode.
    pub fence: Fence,
    /// Whether the work request gets a completion.
    pub signaled: bool,
    /// Whether the peer's completion raises an event.
    pub solicited: bool,
    /// The operation.
    pub op: Parsed,
}

/// Why bytes are not a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The bytes end before the work request does.
    #[error("the work request has {ds} segments of 16 bytes, but only {bytes} bytes are available")]
    Short {
        /// The size in the work request.
        ds: u8,
        /// The available bytes.
        bytes: usize,
    },
    /// No work request of this operation has this size.
    #[error("{ds} segments are too few or too many for operation {opcode:#04x}")]
    Size {
        /// The size in the work request.
        ds: u8,
        /// The operation code.
        opcode: u8,
    },
    /// The queue pair's transport lacks the operation.
    #[error("the transport of this queue pair lacks operation {opcode:#04x} with modifier {opmod:#04x}")]
    Opcode {
        /// The operation code.
        opcode: u8,
        /// The modifier.
        opmod: u8,
    },
    /// A data segment is empty, or inline data is not alone or extends beyond the end of the work request.
    #[error("the data segments are malformed")]
    Data,
    /// The address vector of a datagram does not have the 48-byte form.
    #[error("the address vector lacks the extended flag")]
    AddressVector,
}

fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8], index: usize) -> Option<T> {
    T::read_from_prefix(bytes.get(index * SEGMENT..)?).ok().map(|(value, _)| value)
}

/// Parses the work request at the start of `bytes`, which may be longer. The caller must first join a work request that
/// crosses the end of a ring.
pub fn parse(bytes: &[u8], transport: Transport) -> Result<Wqe, ParseError> {
    let ctrl: CtrlSeg = read(bytes, 0).ok_or(ParseError::Short { ds: 1, bytes: bytes.len() })?;
    let (ds, opcode) = (ctrl.ds(), ctrl.opcode());
    let bad_size = ParseError::Size { ds, opcode };
    if ds == 0 || ds as usize > MAX_DS {
        return Err(bad_size);
    }
    let whole = bytes.get(..ds as usize * SEGMENT).ok_or(ParseError::Short { ds, bytes: bytes.len() })?;
    let bad_opcode = ParseError::Opcode { opcode, opmod: ctrl.opmod() };
    if ctrl.opmod() != 0 {
        return Err(bad_opcode);
    }
    let imm = ctrl.imm.get();
    let remote = || {
        let raddr: RaddrSeg = read(whole, CONTROL).ok_or(bad_size)?;
        Ok(Remote { addr: raddr.raddr.get(), rkey: raddr.rkey.get() })
    };
    let op = match (Opcode::from_code(opcode), transport) {
        (Opcode::Nop, _) => Op::Nop,
        (Opcode::Send, Transport::Rc) => Op::Send { data: data(whole, CONTROL)?, with: With::Nothing },
        (Opcode::SendImm, Transport::Rc) => Op::Send { data: data(whole, CONTROL)?, with: With::Imm(imm) },
        (Opcode::SendInval, Transport::Rc) => Op::Send { data: data(whole, CONTROL)?, with: With::Invalidate(imm) },
        (Opcode::Send, Transport::Ud) => datagram(whole, None, bad_size)?,
        (Opcode::SendImm, Transport::Ud) => datagram(whole, Some(imm), bad_size)?,
        (Opcode::RdmaWrite, Transport::Rc) => Op::Write { remote: remote()?, data: data(whole, REMOTE)?, imm: None },
        (Opcode::RdmaWriteImm, Transport::Rc) => {
            Op::Write { remote: remote()?, data: data(whole, REMOTE)?, imm: Some(imm) }
        }
        (Opcode::RdmaRead, Transport::Rc) => match data(whole, REMOTE)? {
            Data::Sges(into) => Op::Read { remote: remote()?, into },
            Data::Inline(_) => return Err(ParseError::Data),
        },
        (Opcode::AtomicCs, Transport::Rc) => {
            let (operands, into) = atomic(whole, bad_size)?;
            Op::CompareSwap { remote: remote()?, compare: operands.compare.get(), swap: operands.swap_add.get(), into }
        }
        (Opcode::AtomicFa, Transport::Rc) => {
            let (operands, into) = atomic(whole, bad_size)?;
            Op::FetchAdd { remote: remote()?, add: operands.swap_add.get(), into }
        }
        (Opcode::Umr, Transport::Rc) => umr(whole, imm, bad_size)?,
        _ => return Err(bad_opcode),
    };
    Ok(Wqe {
        index: ctrl.index(),
        qpn: ctrl.qpn(),
        ds,
        fence: ctrl.fm_ce_se.fence(),
        signaled: ctrl.fm_ce_se.has(FmCeSe::CQ_UPDATE),
        solicited: ctrl.fm_ce_se.has(FmCeSe::SOLICITED),
        op,
    })
}

/// Returns the data from segment `at` to the end of the work request: buffers, or inline bytes alone.
fn data(whole: &[u8], at: usize) -> Result<Data<Vec<Sge>, Vec<u8>>, ParseError> {
    let rest = whole.get(at * SEGMENT..).ok_or(ParseError::Data)?;
    if let Ok((header, bytes)) = InlineHeader::read_from_prefix(rest)
        && header.byte_count.get() & INLINE_FLAG != 0
    {
        let length = (header.byte_count.get() & !INLINE_FLAG) as usize;
        let data = bytes.get(..length).ok_or(ParseError::Data)?;
        let padding = bytes.len() - length;
        return if padding < SEGMENT { Ok(Data::Inline(data.to_vec())) } else { Err(ParseError::Data) };
    }
    let mut sges = Vec::with_capacity(rest.len() / SEGMENT);
    for segment in rest.chunks_exact(SEGMENT) {
        let segment = DataSeg::read_from_bytes(segment).map_err(|_| ParseError::Data)?;
        let length = segment.byte_count.get();
        if length == 0 || length & INLINE_FLAG != 0 {
            return Err(ParseError::Data);
        }
        sges.push(Sge { addr: segment.addr.get(), length, lkey: segment.lkey.get() });
    }
    Ok(Data::Sges(sges))
}

fn datagram(whole: &[u8], imm: Option<u32>, bad_size: ParseError) -> Result<Parsed, ParseError> {
    let mut av: AddressVector = read(whole, CONTROL).ok_or(bad_size)?;
    let (qkey, number) = (av.qkey.get(), av.dqp_dct.get());
    if number & AddressVector::EXTENDED == 0 {
        return Err(ParseError::AddressVector);
    }
    av.qkey = 0.into();
    av.dqp_dct = 0.into();
    let to = Destination { av, qpn: number & !AddressVector::EXTENDED, qkey };
    Ok(Op::Datagram { to, data: data(whole, DATAGRAM)?, imm })
}

fn atomic(whole: &[u8], bad_size: ParseError) -> Result<(AtomicSeg, AtomicResult), ParseError> {
    let operands = read(whole, REMOTE).ok_or(bad_size)?;
    match data(whole, ATOMIC)? {
        Data::Sges(sges) => match sges[..] {
            [Sge { addr, length: 8, lkey }] => Ok((operands, AtomicResult { addr, lkey })),
            _ => Err(ParseError::Data),
        },
        Data::Inline(_) => Err(ParseError::Data),
    }
}

/// Reads the segments without further checks: the card checks them, and ignores some errors silently.
fn umr(whole: &[u8], key: u32, bad_size: ParseError) -> Result<Parsed, ParseError> {
    let ctrl: UmrCtrlSeg = read(whole, super::umr::CTRL_AT).ok_or(bad_size)?;
    let mkey: MkeyContext = read(whole, super::umr::MKEY_AT).ok_or(bad_size)?;
    let klm: Option<KlmSeg> = match whole.len() / SEGMENT {
        Umr::FREE_SEGMENTS => None,
        Umr::BIND_SEGMENTS => read(whole, super::umr::KLM_AT),
        _ => return Err(bad_size),
    };
    let kind = if mkey.free & MkeyContext::FREE != 0 { UmrKind::LocalInv } else { UmrKind::Bind };
    Ok(Op::Umr { umr: Umr { key, ctrl, mkey, klm }, kind })
}
