//! The trace of scripted runs (SOFTEFA_TRACE).
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block)]

use std::path::PathBuf;

use efa_dp_direct::wire::{CompStatus, RxDesc, SendOp, TxMetaDesc};
use efa_dp_direct::wqe::{Inline, Operation, SendData, Sge, WriteData};
use ferrogin_libfabric::bindings as fi;
use soft_nic::trace::{Kind, NO_OPERATION, RECORD_LEN, Record, flags};
use softefa_rig::*;

/// The second control byte of a request, and its bit that asks for a completion entry.
const COMP_REQ: (usize, u8) = (3, 0x10);

fn path(test: &str) -> PathBuf {
    std::env::temp_dir().join(format!("softefa-{test}-{}", std::process::id()))
}

#[test]
fn trace_of_a_run_has_its_requests_and_completions() {
    let test = "trace_of_a_run_has_its_requests_and_completions";
    let file = path(test);
    child::run(test, &[("SOFTEFA_TRACE", file.to_str().unwrap())], || {
        let rig = Rig::open();
        let (mut a, mut b) = (End::open(&rig), End::open(&rig));
        let (source, target) = (rig.buffer(64), rig.buffer(64));
        let to = a.connect(&b.name());
        let (remote, sge) = (target.remote(0), source.sge(0, 8));
        let with_imm = Operation::Write { remote, data: WriteData::One(sge), imm: Some(0x77) };
        b.post_receives(&[RxDesc::single(0x55, target.at as u64, 64, target.region.lkey)]);
        let hello = Operation::Send { data: SendData::Inline(Inline::new(b"hello").unwrap()), imm: None };
        let refused = write(remote, Sge { lkey: sge.lkey ^ 1, ..sge });
        for (n, operation) in [write(remote, sge), read(remote, sge), refused, with_imm, hello].into_iter().enumerate()
        {
            a.post(to, operation);
            a.wait_done(n as u64 + 1);
        }
        // Only a counter shows that this one completed.
        let mut silent = a.bytes(to, write(remote, sge));
        silent[COMP_REQ.0] &= !COMP_REQ.1;
        a.place(&silent);
        a.ring();
        a.wait_done(6);
        let qpns = (b.connect(&a.name()).qpn, to.qpn);
        drop((a, b, source, target, rig));
        check(qpns, &silent);
    });
    let _ = std::fs::remove_file(file);
}

/// Compares the file with the script.
fn check((a, b): (u16, u16), silent: &[u8]) {
    let bytes = std::fs::read(std::env::var_os("SOFTEFA_TRACE").unwrap()).unwrap();
    let records: Vec<Record> = bytes.chunks(RECORD_LEN).map(|chunk| Record::parse(chunk).unwrap()).collect();
    let short = |record: &Record| {
        let kind = Kind::from_raw(record.kind).unwrap();
        (kind, record.qpn.get(), record.index.get(), record.op, record.status, record.flags)
    };
    let found: Vec<_> = records.iter().map(short).collect();
    let [send, read, write] = [SendOp::Send, SendOp::RdmaRead, SendOp::RdmaWrite].map(SendOp::raw);
    let (none, both, counted) = (NO_OPERATION, flags::ENTRY | flags::COUNTED, flags::COUNTED);
    let lkey = CompStatus::LocalInvalidLkey.raw();
    let expected = [
        (Kind::Card, 0, 0, none, 0, 0),
        (Kind::Request, a, 0, write, 0, 0),
        (Kind::Counted, b, 0, write, 0, counted),
        (Kind::Completion, a, 0, write, 0, both),
        (Kind::Request, a, 1, read, 0, 0),
        (Kind::Completion, a, 1, read, 0, both),
        (Kind::Request, a, 2, write, 0, 0),
        (Kind::Completion, a, 2, write, lkey, both),
        (Kind::Request, a, 3, write, 0, 0),
        (Kind::Received, b, 0, write, 0, both | flags::IMM),
        (Kind::Completion, a, 3, write, 0, both),
        (Kind::Request, a, 4, send, 0, 0),
        (Kind::Receive, b, 0, none, 0, 0),
        (Kind::Received, b, 0, send, 0, flags::ENTRY),
        (Kind::Completion, a, 4, send, 0, both),
        (Kind::Request, a, 5, write, 0, 0),
        (Kind::Counted, b, 0, write, 0, counted),
        (Kind::Completion, a, 5, write, 0, counted),
        (Kind::Closed, a, 0, none, 0, 0),
        (Kind::Closed, b, 0, none, 0, 0),
    ];
    assert_eq!(found, expected);
    assert_eq!(records[9].imm.get(), 0x77);
    assert_eq!((records[12].request_id.get(), records[13].request_id.get(), records[13].length.get()), (0x55, 0x55, 5));
    assert_eq!(records[15].valid_bytes(), silent);
    assert!(records[17].valid_bytes().is_empty());
    let own = records[0].peer.get();
    for record in records.iter().filter(|record| record.kind == Kind::Request as u8) {
        let meta = TxMetaDesc::from_bytes(record.valid_bytes()[..32].try_into().unwrap());
        assert_eq!((record.peer.get(), record.peer_qpn.get(), record.ah.get()), (own, b, meta.ah));
        assert_eq!(record.request_id.get(), u64::from(record.index.get()), "the script counts them");
    }
}

#[test]
fn trace_that_cannot_be_written_fails_the_open_of_a_card() {
    let test = "trace_that_cannot_be_written_fails_the_open_of_a_card";
    let lines = child::run(test, &[("SOFTEFA_TRACE", "/nonexistent/trace")], || {
        let provider = softefa_fi::fi_prov_ini();
        let info = getinfo(|_| {}).unwrap();
        let (mut fabric, mut domain) = (std::ptr::null_mut(), std::ptr::null_mut());
        let none = std::ptr::null_mut();
        let open = unsafe { (*provider).fabric.unwrap() };
        assert_eq!(unsafe { open(info.fabric_attr, &raw mut fabric, none) }, 0);
        let fabric_ops: *mut fi::fi_ops_fabric = unsafe { (*fabric).ops };
        let open = unsafe { (*fabric_ops).domain.unwrap() };
        assert_eq!(unsafe { open(fabric, info.as_ptr(), &raw mut domain, none) }, -2, "no such file");
        assert_eq!(close(fabric), 0);
    });
    if let Some(lines) = lines {
        let wanted = "softefa0: SOFTEFA_TRACE=/nonexistent/trace cannot be written: No such file or directory";
        assert!(lines.contains(wanted) && lines.contains("unset the variable"), "{lines}");
    }
}
