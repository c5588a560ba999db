//! A work request as the card executes it, or the rule that it violates.

use efa_dp_direct::wire::{CompStatus, TX_DESC_INLINE_MAX_SIZE_128, TxMetaDesc};
use efa_dp_direct::wqe::{self, Geometry, RemoteMem, SendData, SendWqe, Sge, WriteData};

/// Maximum size of an RDMA operation in bytes.
pub const MAX_RDMA_SIZE: u32 = 1 << 30;
/// Maximum size of a send in bytes: one packet.
pub const MAX_SEND_SIZE: u32 = 8928;

/// A request's operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Send,
    Write,
    Read,
}

/// Where a request's local bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Local {
    /// In the request.
    Inline([u8; TX_DESC_INLINE_MAX_SIZE_128]),
    /// In registered memory.
    Region { addr: u64, lkey: u32 },
    /// In two buffers of registered memory, one after the other.
    Two([Sge; 2]),
}

/// A well-formed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub operation: Operation,
    pub meta: TxMetaDesc,
    pub local: Local,
    pub remote_addr: u64,
    pub rkey: u32,
    /// Immediate data for the peer.
    pub imm: Option<u32>,
    /// Bytes to transfer.
    pub len: u32,
}

impl Request {
    /// Returns the registered local memory that the request names.
    pub(crate) fn buffers(&self) -> [Sge; 2] {
        let none = Sge::default();
        match self.local {
            Local::Inline(_) => [none; 2],
            Local::Region { addr, lkey } => [Sge { addr, length: self.len, lkey }, none],
            Local::Two(pair) => pair,
        }
    }
}

/// A rule that a request violates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub rule: String,
    pub status: CompStatus,
    /// The queue pair goes to the error state, because the bytes do not make a request.
    pub fatal: bool,
}

impl Violation {
    pub(crate) fn refused(rule: impl Into<String>, status: CompStatus) -> Self {
        Self { rule: rule.into(), status, fatal: false }
    }

    pub(crate) fn malformed(rule: impl Into<String>) -> Self {
        Self { rule: rule.into(), status: CompStatus::LocalQpInternalError, fatal: true }
    }
}

/// Returns the descriptor at the start of a slot's bytes, unchecked.
pub(crate) fn meta_of(bytes: &[u8; 128]) -> TxMetaDesc {
    let mut head = [0; TxMetaDesc::SIZE];
    head.copy_from_slice(&bytes[..TxMetaDesc::SIZE]);
    TxMetaDesc::from_bytes(&head)
}

/// Decodes a request from the first bytes of its slot, as many as requests of this geometry have.
pub(crate) fn decode(bytes: &[u8; 128], geometry: &Geometry) -> Result<Request, Violation> {
    let wqe = wqe::parse(&bytes[..geometry.wqe_size.bytes()], geometry).map_err(|error| {
        let status = error.status();
        Violation { rule: error.to_string(), status, fatal: status == CompStatus::LocalQpInternalError }
    })?;
    flatten(meta_of(bytes), &wqe)
}

fn flatten(meta: TxMetaDesc, wqe: &SendWqe) -> Result<Request, Violation> {
    const NOWHERE: Sge = Sge { addr: 0, length: 0, lkey: 0 };
    let region = |sge: Sge| (Local::Region { addr: sge.addr, lkey: sge.lkey }, u64::from(sge.length));
    let carried = |inline: wqe::Inline| {
        let mut data = [0; TX_DESC_INLINE_MAX_SIZE_128];
        data[..inline.data().len()].copy_from_slice(inline.data());
        (Local::Inline(data), inline.data().len() as u64)
    };
    let (operation, remote, (local, len), imm) = match wqe.op {
        wqe::Operation::Send { data, imm } => {
            let local = match data {
                SendData::Empty => region(NOWHERE),
                SendData::One(sge) => region(sge),
                SendData::Two(first, second) => (Local::Two([first, second]), data.len()),
                SendData::Inline(inline) => carried(inline),
            };
            (Operation::Send, RemoteMem::default(), local, imm)
        }
        wqe::Operation::Write { remote, data, imm } => {
            let local = match data {
                WriteData::Empty => region(NOWHERE),
                WriteData::One(sge) => region(sge),
                WriteData::Inline(inline) => carried(inline),
            };
            (Operation::Write, remote, local, imm)
        }
        wqe::Operation::Read { remote, into } => (Operation::Read, remote, region(into.unwrap_or(NOWHERE)), None),
    };
    let (limit, rule) = match operation {
        Operation::Send => (MAX_SEND_SIZE, "a send of more than one packet (8928 bytes)"),
        Operation::Write | Operation::Read => (MAX_RDMA_SIZE, "more than max_rdma_size (1 GiB)"),
    };
    match u32::try_from(len) {
        Ok(len) if len <= limit => {
            Ok(Request { operation, meta, local, remote_addr: remote.addr, rkey: remote.rkey, imm, len })
        }
        _ => Err(Violation::refused(rule, CompStatus::LocalBadLength)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use efa_dp_direct::wqe::{Destination, Inline, Operation as Op};

    const DEST: Destination = Destination { ah: 3, qpn: 4, qkey: 5 };
    const REMOTE: RemoteMem = RemoteMem { addr: 0x1000, rkey: 0xabcd };

    fn bytes(op: Op, geometry: &Geometry) -> [u8; 128] {
        let mut bytes = [0; 128];
        SendWqe::new(7, DEST, op).emit(geometry, &mut bytes[..geometry.wqe_size.bytes()]).unwrap();
        bytes
    }

    fn sge(length: u32) -> Sge {
        Sge { addr: 0x2000, length, lkey: 9 }
    }

    fn write(length: u32) -> [u8; 128] {
        bytes(Op::Write { remote: REMOTE, data: WriteData::One(sge(length)), imm: None }, &Geometry::NARROW)
    }

    #[test]
    fn well_formed_requests_are_decoded() {
        let request = decode(&write(8), &Geometry::NARROW).unwrap();
        assert_eq!(request.operation, Operation::Write);
        assert_eq!(request.local, Local::Region { addr: 0x2000, lkey: 9 });
        assert_eq!((request.remote_addr, request.rkey, request.len), (0x1000, 0xabcd, 8));
        assert_eq!((request.meta.req_id, request.meta.ah, request.meta.dest_qp_num, request.meta.qkey), (7, 3, 4, 5));
        let read = bytes(Op::Read { remote: REMOTE, into: Some(sge(64)) }, &Geometry::NARROW);
        let read = decode(&read, &Geometry::NARROW).unwrap();
        assert_eq!((read.operation, read.len), (Operation::Read, 64));
        let data = WriteData::Inline(Inline::new(b"12345678").unwrap());
        let wide = bytes(Op::Write { remote: REMOTE, data, imm: None }, &Geometry::WIDE);
        let request = decode(&wide, &Geometry::WIDE).unwrap();
        assert!(matches!(request.local, Local::Inline(data) if data[..8] == *b"12345678"));
        let empty = bytes(Op::Write { remote: REMOTE, data: WriteData::Empty, imm: None }, &Geometry::NARROW);
        assert_eq!(decode(&empty, &Geometry::NARROW).unwrap().len, 0);
    }

    #[test]
    fn sends_carry_inline_data_or_up_to_two_buffers() {
        let send = |data| bytes(Op::Send { data, imm: Some(9) }, &Geometry::NARROW);
        let request = decode(&send(SendData::Inline(Inline::new(b"hello").unwrap())), &Geometry::NARROW).unwrap();
        assert_eq!((request.operation, request.len, request.imm), (Operation::Send, 5, Some(9)));
        let request = decode(&send(SendData::Two(sge(8), sge(100))), &Geometry::NARROW).unwrap();
        assert_eq!((request.local, request.len), (Local::Two([sge(8), sge(100)]), 108));
        assert_eq!(decode(&send(SendData::Empty), &Geometry::NARROW).unwrap().len, 0);
        assert_eq!(decode(&send(SendData::One(sge(MAX_SEND_SIZE))), &Geometry::NARROW).unwrap().len, MAX_SEND_SIZE);
        let long = SendData::Two(sge(MAX_SEND_SIZE), sge(1));
        let broken = decode(&send(long), &Geometry::NARROW).unwrap_err();
        assert!(broken.rule.contains("one packet"), "{broken:?}");
        assert_eq!((broken.status, broken.fatal), (CompStatus::LocalBadLength, false));
        assert!(decode(&send(SendData::Two(sge(u32::MAX), sge(u32::MAX))), &Geometry::NARROW).is_err());
    }

    #[test]
    fn unsupported_requests_are_refused_with_their_status() {
        let mut inline = write(8);
        inline[2] |= 0x20;
        assert_eq!(decode(&inline, &Geometry::NARROW).unwrap_err().status, CompStatus::LocalUnsupportedOp);
        assert_eq!(
            decode(&write(MAX_RDMA_SIZE + 1), &Geometry::NARROW).unwrap_err().status,
            CompStatus::LocalBadLength
        );
        assert!(decode(&write(MAX_RDMA_SIZE), &Geometry::NARROW).is_ok());
    }

    #[test]
    fn sixteen_bit_queues_refuse_longer_request_ids() {
        let mut bytes = [0; 128];
        let wqe =
            |wr_id| SendWqe::new(wr_id, DEST, Op::Write { remote: REMOTE, data: WriteData::One(sge(8)), imm: None });
        wqe(0x1_0000).emit(&Geometry::NARROW, &mut bytes[..64]).unwrap();
        assert!(decode(&bytes, &Geometry::NARROW).is_ok());
        let broken = decode(&bytes, &Geometry::V0).unwrap_err();
        assert_eq!((broken.status, broken.fatal), (CompStatus::LocalQpInternalError, true));
        wqe(0xffff).emit(&Geometry::NARROW, &mut bytes[..64]).unwrap();
        assert!(decode(&bytes, &Geometry::V0).is_ok());
    }

    #[test]
    fn malformed_requests_are_fatal() {
        let mut reserved = write(8);
        reserved[15] = 1;
        for bytes in [reserved, [0; 128], [0xff; 128]] {
            let broken = decode(&bytes, &Geometry::NARROW).unwrap_err();
            assert_eq!((broken.status, broken.fatal), (CompStatus::LocalQpInternalError, true), "{broken:?}");
        }
    }
}
