//! The trace of scripted requests.

use std::path::PathBuf;

use super::{Kind as PacketKind, *};
use crate::trace::{Kind, RECORD_LEN, Record, flags};

struct Trace(PathBuf);

impl Trace {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("soft-nic-traced-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }

    fn world(&self, faults: &str) -> World {
        let faults = Faults::parse(faults).unwrap();
        World::of(Config { faults, trace: Some(self.0.clone()), ..Config::default() })
    }

    /// Returns what follows the card's record in the file, which must start with that record.
    fn records(&self, world: &mut World) -> Vec<Record> {
        world.core.flush_trace();
        let bytes = std::fs::read(&self.0).unwrap();
        let mut records: Vec<Record> = bytes.chunks(RECORD_LEN).map(|chunk| Record::parse(chunk).unwrap()).collect();
        let card = records.remove(0);
        assert_eq!((card.kind, card.peer.get()), (Kind::Card as u8, gid(1).short()));
        assert!(String::from_utf8_lossy(card.valid_bytes()).starts_with("soft_nic"));
        records
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Kind, index, request id, operation, status and flags.
type Short = (Kind, u32, u64, u8, u8, u8);

fn short(record: &Record) -> Short {
    let kind = Kind::from_raw(record.kind).unwrap();
    (kind, record.index.get(), record.request_id.get(), record.op, record.status, record.flags)
}

const WRITE: u8 = 2;
const READ: u8 = 1;
const BOTH: u8 = flags::ENTRY | flags::COUNTED;

#[test]
fn trace_has_each_request_and_completion() {
    let trace = Trace::new("requests");
    let mut world = trace.world("cntr_start=14");
    world.posted = 14;
    let write = world.write(world.sge());
    let answer = |world: &mut World, token: Token| {
        world.arrives(world.asked, Header { status: OK, ..Header::new(PacketKind::Ack, token.0) });
    };
    world.post(write, false).unwrap();
    world.post(write, false).unwrap();
    let [first, second] = world.awaited()[..] else { panic!("two requests") };
    answer(&mut world, second);
    answer(&mut world, first);
    let read = world.read();
    let third = world.post(read, false).unwrap();
    world.arrives(world.asked, Header { total: 8, len: 8, ..Header::new(PacketKind::Data, third.0) });
    let refused = world.write(Sge { lkey: 0x7777, ..world.sge() });
    world.post(refused, false);
    world.post(write, true);
    world.post(write, false);
    let records = trace.records(&mut world);
    let found: Vec<Short> = records.iter().map(short).collect();
    let lkey = CompStatus::LocalInvalidLkey.raw();
    let internal = CompStatus::LocalQpInternalError.raw();
    let expected = [
        (Kind::Request, 14, 14, WRITE, 0, 0),
        (Kind::Request, 15, 15, WRITE, 0, 0),
        (Kind::Completion, 15, 15, WRITE, 0, BOTH),
        (Kind::Completion, 14, 14, WRITE, 0, BOTH),
        (Kind::Request, 16, 16, READ, 0, 0),
        (Kind::Completion, 16, 16, READ, 0, BOTH),
        (Kind::Request, 17, 17, WRITE, 0, 0),
        (Kind::Completion, 17, 17, WRITE, lkey, BOTH),
        (Kind::Request, 18, 18, WRITE, 0, 0),
        (Kind::Completion, 18, 18, WRITE, internal, BOTH),
        (Kind::Request, 19, 19, WRITE, 0, 0),
        (Kind::Completion, 19, 19, WRITE, CompStatus::Flushed.raw(), BOTH),
    ];
    assert_eq!(found, expected);
    let qpn = world.qpn;
    assert!(records.iter().all(|record| record.qpn.get() == qpn && record.process.get() == std::process::id()));
    assert!(records.is_sorted_by_key(|record| record.time_ns.get()));
    let (request, done) = (&records[1], &records[2]);
    assert_eq!((request.slot.get(), request.peer.get(), request.peer_qpn.get()), (15, gid(2).short(), 7));
    let mut bytes = [0; 128];
    world.core.qp(qpn).unwrap().sq.fetch(15, &mut bytes);
    assert_eq!(request.valid_bytes(), &bytes[..64]);
    assert_eq!((done.length.get(), done.size.get(), records[7].length.get()), (8, 16, 0));
    let mut entry = RawCqe::ZERO;
    entry.0[..16].copy_from_slice(done.valid_bytes());
    assert!(entry.phase(), "of the first lap");
    let Ok(Cqe::Send(entry)) = Cqe::parse(&entry, RequestIds::Bits64) else { panic!("a send") };
    assert_eq!((entry.wr_id, entry.qp_num), (15, qpn));
}

#[test]
fn trace_has_receives_counts_and_closed_queue_pairs() {
    let trace = Trace::new("receives");
    let mut world = trace.world("seed=1");
    let (qpn, keys, at) = (world.qpn, world.keys, world.bytes.as_ptr() as u64);
    let qp = world.core.qp(qpn).unwrap();
    let qkey = qp.qkey;
    let desc = RxDesc::single(0x21, at, 8, keys.lkey);
    qp.rq.store(0, desc.to_words().as_bytes());
    qp.rq.ring(1);
    let to = Header {
        src_qpn: 9,
        dst_qpn: qpn,
        qkey,
        rkey: keys.rkey,
        addr: at,
        total: 8,
        ..Header::new(PacketKind::Send, 5)
    };
    world.arrives(world.other, Header { len: 8, ..to });
    // A queue pair that does not count peers' writes gets no record of one.
    world.arrives(LOOPBACK, Header { len: 8, ..Header { kind: PacketKind::Write as u8, ..to } });
    world.arrives(LOOPBACK, Header { kind: PacketKind::Read as u8, ..to });
    assert!(world.core.pump(LOOPBACK));
    let write = world.write(world.sge());
    world.post(write, false).unwrap();
    world.core.close_qp(qpn);
    let records = trace.records(&mut world);
    let found: Vec<Short> = records.iter().map(short).collect();
    let expected = [
        (Kind::Receive, 0, 0x21, crate::trace::NO_OPERATION, 0, 0),
        (Kind::Received, 0, 0x21, 0, 0, 0),
        (Kind::Counted, 0, 0, READ, 0, flags::COUNTED),
        (Kind::Request, 0, 0, WRITE, 0, 0),
        (Kind::Closed, 0, 0, crate::trace::NO_OPERATION, 0, 0),
    ];
    assert_eq!(found, expected);
    assert_eq!(records[0].valid_bytes(), desc.to_words().map(u64::to_le).as_bytes());
    let received = &records[1];
    assert_eq!((received.length.get(), received.peer_qpn.get(), received.peer.get()), (8, 9, gid(3).short()));
    assert_eq!((records[2].length.get(), records[2].peer.get()), (8, gid(1).short()));
}

#[test]
fn receive_of_unknown_sender_shows_no_secret() {
    let trace = Trace::new("secret");
    let mut world = trace.world("seed=1");
    let (qpn, at, lkey) = (world.qpn, world.bytes.as_ptr() as u64, world.keys.lkey);
    let cq = world.cq;
    let qp = world.core.qp(qpn).unwrap();
    qp.recv_cq = Some(cq);
    let qkey = qp.qkey;
    qp.rq.store(0, RxDesc::single(1, at, 8, lkey).to_words().as_bytes());
    qp.rq.ring(1);
    let send = Header { dst_qpn: qpn, qkey, total: 8, len: 8, ..Header::new(PacketKind::Send, 5) };
    world.arrives(world.other, send);
    let records = trace.records(&mut world);
    let received = records.last().unwrap();
    assert_eq!((received.flags, received.size.get()), (flags::ENTRY, 32));
    let (sender, secret) = (gid(3).to_bytes(), [0; 8]);
    assert_eq!(received.valid_bytes()[16..], [&sender[..8], &secret].concat());
}

#[test]
fn failing_file_ends_the_trace_and_not_the_card() {
    let trace = Trace::new("limit");
    let run = || {
        let mut world = trace.world("seed=1");
        let limit = RECORD_LEN as u64 + 100;
        // SAFETY: the call changes how this child process handles a signal, and no other test runs in it.
        unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGXFSZ, nix::sys::signal::SigHandler::SigIgn) }
            .unwrap();
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_FSIZE, limit, limit).unwrap();
        for _ in 0..3 {
            let write = world.write(world.sge());
            world.post(write, false).unwrap();
            world.core.flush_trace();
        }
        assert!(world.core.trace.is_none());
        assert_eq!(world.awaited().len(), 3, "the card takes requests");
        assert_eq!(std::fs::metadata(&trace.0).unwrap().len(), limit, "the last record is cut off");
    };
    ferrogin_test_support::child::run("failing_file_ends_the_trace_and_not_the_card", &[], run);
}
