//! Every rule that the request parser checks, broken by one change to a legal request; and both kinds of request ids in
//! completions.

use efa_dp_direct::cq::{Cqe, CqeError, RawCqe, SendCqe, Status};
use efa_dp_direct::wire::{CompStatus, SendOp};
use efa_dp_direct::wqe::{
    Destination, Geometry, Inline, Operation, RemoteMem, RequestIds, SendData, SendWqe, Sge, WqeError, WriteData, parse,
};

const REMOTE: RemoteMem = RemoteMem { addr: 0x7f00_1234_5678, rkey: 0xabcd };
const SGE: Sge = Sge { addr: 0x5500_8765_4321, length: 4096, lkey: 0x12_3456 };

fn bytes(op: Operation, geometry: &Geometry) -> Vec<u8> {
    let mut out = vec![0xa5; geometry.wqe_size.bytes()];
    let dest = Destination { ah: 1, qpn: 2, qkey: 3 };
    SendWqe::new(0x77, dest, op).emit(geometry, &mut out).expect("a legal request");
    out
}

fn send(data: SendData) -> Operation {
    Operation::Send { data, imm: None }
}

fn write(data: WriteData) -> Operation {
    Operation::Write { remote: REMOTE, data, imm: None }
}

const READ: Operation = Operation::Read { remote: REMOTE, into: Some(SGE) };

/// Returns the error that `change` causes in a legal request.
fn broken(op: Operation, geometry: &Geometry, change: impl Fn(&mut [u8])) -> WqeError {
    let mut wqe = bytes(op, geometry);
    parse(&wqe, geometry).expect("legal before the change");
    change(&mut wqe);
    parse(&wqe, geometry).expect_err("illegal after the change")
}

#[test]
fn request_that_breaks_rule_is_refused() {
    let write_one = write(WriteData::One(SGE));
    for geometry in [Geometry::V0, Geometry::NARROW, Geometry::WIDE] {
        let g = &geometry;
        assert_eq!(broken(write_one, g, |w| w[2] &= !0x80), WqeError::NotMeta);
        assert_eq!(broken(write_one, g, |w| w[2] |= 0x40), WqeError::MetaExtension);
        assert_eq!(broken(write_one, g, |w| w[3] &= !0x04), WqeError::NotSingle);
        assert_eq!(broken(write_one, g, |w| w[3] &= !0x08), WqeError::NotSingle);
        for (at, bit) in [(3, 0x02), (3, 0x20), (3, 0x80), (14, 0x04), (14, 0x80), (15, 1), (20, 1), (25, 0x80)] {
            assert_eq!(broken(write_one, g, |w| w[at] |= bit), WqeError::Reserved, "byte {at}");
        }
        assert_eq!(broken(write_one, g, |w| w[55] = 1), WqeError::Reserved, "local key");
        assert_eq!(broken(READ, g, |w| w[55] = 1), WqeError::Reserved, "local key");
        assert_eq!(broken(send(SendData::One(SGE)), g, |w| w[39] = 1), WqeError::Reserved, "local key");
        assert_eq!(broken(send(SendData::Two(SGE, SGE)), g, |w| w[55] = 1), WqeError::Reserved, "second local key");
        for op in 5..16 {
            assert_eq!(broken(write_one, g, |w| w[2] = w[2] & 0xf0 | op), WqeError::UnknownOp(op));
        }
        assert_eq!(broken(write_one, g, |w| w[2] = w[2] & 0xf0 | 3), WqeError::UnsupportedOp(SendOp::FastReg));
        assert_eq!(broken(write_one, g, |w| w[2] = w[2] & 0xf0 | 4), WqeError::UnsupportedOp(SendOp::FastInv));
        assert_eq!(broken(READ, g, |w| w[2] |= 0x10), WqeError::ImmediateInRead);
        assert_eq!(broken(READ, g, |w| w[2] |= 0x20), WqeError::InlineNotPossible(SendOp::RdmaRead));
        assert_eq!(broken(write_one, g, |w| w[6] = 2), WqeError::TooManyBuffers(2));
        assert_eq!(broken(READ, g, |w| w[7] = 1), WqeError::TooManyBuffers(257));
        assert_eq!(broken(send(SendData::One(SGE)), g, |w| w[6] = 3), WqeError::TooManyBuffers(3));
        let longer = WqeError::LengthMismatch { local: 4096, remote: 4097 };
        assert_eq!(broken(write_one, g, |w| w[32] = 1), longer);
        assert_eq!(broken(READ, g, |w| w[32] = 1), longer);
        let some = WqeError::LengthMismatch { local: 0, remote: 1 };
        assert_eq!(broken(write(WriteData::Empty), g, |w| w[32] = 1), some);
        assert_eq!(parse(&bytes(write_one, g)[1..], g), Err(WqeError::Size(g.wqe_size.bytes() - 1)));
    }
    let ids = broken(write_one, &Geometry::V0, |w| w[26] = 1);
    assert_eq!(ids, WqeError::Reserved, "queues with 16-bit ids reserve the other bits");
}

#[test]
fn request_with_illegal_inline_data_is_refused() {
    let data = Inline::new(&[7; 8]).expect("8 bytes");
    let narrow_write = broken(write(WriteData::One(SGE)), &Geometry::NARROW, |w| w[2] |= 0x20);
    assert_eq!(narrow_write, WqeError::InlineNotPossible(SendOp::RdmaWrite));
    let short = |geometry: Geometry| Geometry { max_inline: 8, ..geometry };
    for geometry in [short(Geometry::NARROW), short(Geometry::WIDE)] {
        let longer = broken(send(SendData::Inline(data)), &geometry, |w| w[6] = 9);
        assert_eq!(longer, WqeError::InlineTooLong(9), "the queue's limit");
    }
    let wide_write = write(WriteData::Inline(data));
    let set_length = |w: &mut [u8], n: u8| (w[6], w[32]) = (n, n);
    assert_eq!(broken(wide_write, &short(Geometry::WIDE), |w| set_length(w, 9)), WqeError::InlineTooLong(9));
    assert_eq!(broken(wide_write, &Geometry::WIDE, |w| set_length(w, 81)), WqeError::InlineTooLong(81));
    let differ = WqeError::LengthMismatch { local: 8, remote: 7 };
    assert_eq!(broken(wide_write, &Geometry::WIDE, |w| w[32] = 7), differ);
    let narrow = broken(send(SendData::Inline(data)), &Geometry::NARROW, |w| w[7] = 1);
    assert_eq!(narrow, WqeError::InlineTooLong(264));
}

#[test]
fn parse_errors_have_status_of_card() {
    assert_eq!(WqeError::NotMeta.status(), CompStatus::LocalQpInternalError);
    assert_eq!(WqeError::UnknownOp(9).status(), CompStatus::LocalUnsupportedOp);
    assert_eq!(WqeError::TooManyBuffers(2).status(), CompStatus::LocalBadLength);
}

#[test]
fn completions_have_request_ids_of_their_queue() {
    let op = Ok(SendOp::RdmaWrite);
    let sent = SendCqe { qp_num: 9, wr_id: 0x1122_3344_5566_7788, op, status: Status::Known(CompStatus::Ok) };
    let raw = Cqe::Send(sent).emit(true);
    assert_eq!(Cqe::parse(&raw, RequestIds::Bits64), Ok(Cqe::Send(sent)));
    assert_eq!(Cqe::parse(&raw, RequestIds::Bits16), Ok(Cqe::Send(SendCqe { wr_id: 0x7788, ..sent })));
    let mut unknown_queue = RawCqe::ZERO;
    unknown_queue.0[3] = 0x06;
    assert_eq!(Cqe::parse(&unknown_queue, RequestIds::Bits64), Err(CqeError::QueueType(3)));
}
