//! The rows of the table in docs/software-card-rules.md: the completion of a request that breaks the rule, and the log
//! line with queue pair, slot, rule and bytes.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use efa_dp_direct::wire::{CompStatus, RxDesc};
use efa_dp_direct::wqe::{Destination, Inline, Operation, RemoteMem, SendData, Sge, WriteData};
use ferrogin_libfabric::bindings as fi;
use softefa_rig::child::run;
use softefa_rig::*;

/// A card that talks to itself: `a` posts to `b`.
struct World {
    a: End,
    b: End,
    to: Destination,
    /// Both endpoints' memory.
    buffer: Buffer,
    foreign: Buffer,
    /// Readable by requests, writable by nobody.
    source: Region,
    /// Writable by peers, not readable.
    target: Region,
    in_error: Option<End>,
    rig: Rig,
    /// The same card again, in another protection domain.
    _other: Rig,
}

impl World {
    fn open(inject: usize) -> Self {
        let rig = Rig::with_inject(inject);
        let other = Rig::open();
        let (a, b) = (End::open(&rig), End::open(&rig));
        let to = a.connect(&b.name());
        let (buffer, foreign) = (rig.buffer(64), other.buffer(64));
        let source = rig.register(buffer.at, 64, fi::FI_WRITE | fi::FI_SEND).unwrap();
        let target = rig.register(buffer.at, 64, fi::FI_REMOTE_WRITE).unwrap();
        Self { a, b, to, buffer, foreign, source, target, in_error: None, rig, _other: other }
    }

    fn sge(&self) -> Sge {
        self.buffer.sge(0, 8)
    }

    fn remote(&self) -> RemoteMem {
        self.buffer.remote(8)
    }

    fn write(&self) -> Vec<u8> {
        self.a.bytes(self.to, write(self.remote(), self.sge()))
    }

    fn read(&self) -> Vec<u8> {
        self.a.bytes(self.to, read(self.remote(), self.sge()))
    }

    fn send(&self, data: SendData) -> Vec<u8> {
        self.a.bytes(self.to, Operation::Send { data, imm: None })
    }

    /// Returns a write to and from other places than usual.
    fn between(&self, remote: RemoteMem, sge: Sge) -> Vec<u8> {
        self.a.bytes(self.to, write(remote, sge))
    }

    fn to_other(&self, to: Destination) -> Vec<u8> {
        self.a.bytes(to, write(self.remote(), self.sge()))
    }
}

fn changed(mut bytes: Vec<u8>, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    change(&mut bytes);
    bytes
}

/// A row of the table: its name, the request, the status of its completion, and a part of the log line.
type Row = (&'static str, fn(&mut World) -> Vec<u8>, CompStatus, &'static str);

use CompStatus::{
    LocalBadLength, LocalInvalidAh, LocalInvalidLkey, LocalQpInternalError, LocalUnsupportedOp, RemoteBadAddress,
    RemoteBadDestQpn,
};

/// Requests after which the queue pair keeps working.
const REFUSED: &[Row] = &[
    (
        "unknown operation",
        |w| changed(w.write(), |b| b[2] |= 0xf),
        LocalUnsupportedOp,
        "operation code 15 does not exist",
    ),
    (
        "privileged operation",
        |w| changed(w.write(), |b| b[2] = b[2] & 0xf0 | 3),
        LocalUnsupportedOp,
        "is not for user queues",
    ),
    (
        "immediate in a read",
        |w| changed(w.read(), |b| b[2] |= 0x10),
        LocalUnsupportedOp,
        "an RDMA read has no immediate data",
    ),
    ("inline in a read", |w| changed(w.read(), |b| b[2] |= 0x20), LocalUnsupportedOp, "RdmaRead has no inline data"),
    (
        "inline in a narrow write",
        |w| changed(w.write(), |b| b[2] |= 0x20),
        LocalUnsupportedOp,
        "RdmaWrite has no inline data",
    ),
    (
        "too much inline data",
        |w| {
            let data = SendData::Inline(Inline::new(&[1; 32]).unwrap());
            changed(w.send(data), |b| b[6] = 33)
        },
        LocalBadLength,
        "33 inline bytes are more than the queue allows",
    ),
    (
        "too many buffers: send",
        |w| changed(w.send(SendData::One(w.sge())), |b| b[6] = 3),
        LocalBadLength,
        "3 buffers are more than",
    ),
    ("too many buffers: write", |w| changed(w.write(), |b| b[6] = 2), LocalBadLength, "2 buffers are more than"),
    ("too many buffers: read", |w| changed(w.read(), |b| b[6] = 2), LocalBadLength, "2 buffers are more than"),
    (
        "lengths differ: write",
        |w| changed(w.write(), |b| b[32] = 9),
        LocalBadLength,
        "8 bytes at the local side but 9 at",
    ),
    (
        "lengths differ: read",
        |w| changed(w.read(), |b| b[32] = 7),
        LocalBadLength,
        "8 bytes at the local side but 7 at",
    ),
    (
        "lengths differ: empty",
        |w| changed(w.write(), |b| b[6] = 0),
        LocalBadLength,
        "0 bytes at the local side but 8 at",
    ),
    (
        "longer than max_rdma_size",
        |w| w.between(w.remote(), Sge { length: (1 << 30) + 1, ..w.sge() }),
        LocalBadLength,
        "more than max_rdma_size (1 GiB)",
    ),
    (
        "send longer than a packet",
        |w| w.send(SendData::One(Sge { length: 8929, ..w.sge() })),
        LocalBadLength,
        "a send of more than one packet (8928 bytes)",
    ),
    (
        "address handle 0",
        |w| w.to_other(Destination { ah: 0, ..w.to }),
        LocalInvalidAh,
        "no address handle has this number",
    ),
    (
        "address handle unknown",
        |w| w.to_other(Destination { ah: 999, ..w.to }),
        LocalInvalidAh,
        "no address handle has this number",
    ),
    (
        "lkey unknown",
        |w| w.between(w.remote(), Sge { lkey: w.sge().lkey ^ 1 << 20, ..w.sge() }),
        LocalInvalidLkey,
        "local buffer: no region has this key",
    ),
    (
        "lkey of a closed region",
        |w| {
            let lkey = w.rig.register(w.buffer.at, 64, ALL).unwrap().lkey;
            w.between(w.remote(), Sge { lkey, ..w.sge() })
        },
        LocalInvalidLkey,
        "local buffer: no region has this key",
    ),
    (
        "lkey of another domain",
        |w| w.between(w.remote(), w.foreign.sge(0, 8)),
        LocalInvalidLkey,
        "local buffer: the region belongs to another protection domain",
    ),
    (
        "local buffer beyond its region",
        |w| w.between(w.remote(), Sge { addr: w.sge().addr + 57, ..w.sge() }),
        LocalInvalidLkey,
        "local buffer: the range is not within the region",
    ),
    (
        "local buffer before its region",
        |w| w.between(w.remote(), Sge { addr: w.sge().addr - 1, ..w.sge() }),
        LocalInvalidLkey,
        "local buffer: the range is not within the region",
    ),
    (
        "read into a region without local write",
        |w| w.a.bytes(w.to, read(w.remote(), Sge { lkey: w.source.lkey, ..w.sge() })),
        LocalInvalidLkey,
        "local buffer: the region was not registered for this",
    ),
    (
        "second buffer of a send",
        |w| w.send(SendData::Two(w.sge(), Sge { lkey: 0, ..w.sge() })),
        LocalInvalidLkey,
        "local buffer: no region has this key",
    ),
    (
        "queue pair 0",
        |w| w.to_other(Destination { qpn: 0, ..w.to }),
        RemoteBadDestQpn,
        "no open queue pair has that number",
    ),
    (
        "queue pair unknown",
        |w| w.to_other(Destination { qpn: 999, ..w.to }),
        RemoteBadDestQpn,
        "no open queue pair has that number",
    ),
    (
        "queue pair destroyed",
        |w| {
            let third = End::open(&w.rig);
            let to = w.a.connect(&third.name());
            drop(third);
            w.to_other(to)
        },
        RemoteBadDestQpn,
        "no open queue pair has that number",
    ),
    (
        "queue pair in error",
        |w| {
            let mut third = End::open(&w.rig);
            let to = w.a.connect(&third.name());
            third.ring_receives(5000);
            third.doorbell().store(u32::MAX, Ordering::Release);
            assert_eq!(third.next_status().1, LocalQpInternalError);
            let bytes = w.to_other(to);
            w.in_error = Some(third);
            bytes
        },
        RemoteBadDestQpn,
        "the queue pair is in the error state",
    ),
    (
        "QKey wrong",
        |w| w.to_other(Destination { qkey: w.to.qkey ^ 2, ..w.to }),
        RemoteBadDestQpn,
        "the queue pair has another QKey",
    ),
    (
        "QKey wrong: send",
        |w| {
            let op = Operation::Send { data: SendData::One(w.sge()), imm: None };
            w.a.bytes(Destination { qkey: w.to.qkey ^ 2, ..w.to }, op)
        },
        RemoteBadDestQpn,
        "the queue pair has another QKey",
    ),
    (
        "rkey unknown",
        |w| w.between(RemoteMem { rkey: w.remote().rkey ^ 1 << 30, ..w.remote() }, w.sge()),
        RemoteBadAddress,
        "no region has this key",
    ),
    (
        "rkey unknown: no bytes",
        |w| w.a.bytes(w.to, write_nothing(RemoteMem { rkey: w.remote().rkey ^ 1 << 30, ..w.remote() })),
        RemoteBadAddress,
        "no region has this key",
    ),
    (
        "rkey of a closed region",
        |w| {
            let rkey = w.rig.register(w.buffer.at, 64, ALL).unwrap().rkey;
            w.between(RemoteMem { rkey, ..w.remote() }, w.sge())
        },
        RemoteBadAddress,
        "no region has this key",
    ),
    (
        "rkey of another domain",
        |w| w.between(w.foreign.remote(0), w.sge()),
        RemoteBadAddress,
        "the region belongs to another protection domain",
    ),
    (
        "remote range beyond its region",
        |w| w.between(w.buffer.remote(57), w.sge()),
        RemoteBadAddress,
        "the range is not within the region",
    ),
    (
        "remote range before its region",
        |w| w.between(RemoteMem { addr: w.buffer.at as u64 - 1, ..w.remote() }, w.sge()),
        RemoteBadAddress,
        "the range is not within the region",
    ),
    (
        "remote range wraps",
        |w| w.between(RemoteMem { addr: u64::MAX - 3, ..w.remote() }, w.sge()),
        RemoteBadAddress,
        "the range is not within the region",
    ),
    (
        "write without the right",
        |w| w.between(RemoteMem { rkey: w.source.rkey, ..w.remote() }, w.sge()),
        RemoteBadAddress,
        "the region was not registered for this",
    ),
    (
        "read without the right",
        |w| w.a.bytes(w.to, read(RemoteMem { rkey: w.target.rkey, ..w.remote() }, w.sge())),
        RemoteBadAddress,
        "the region was not registered for this",
    ),
];

/// The same for a queue with 128-byte requests.
const REFUSED_WIDE: &[Row] = &[
    (
        "too much inline data: wide write",
        |w| {
            let bytes = w.a.bytes(w.to, write_inline(w.remote(), &[1; 80]));
            changed(bytes, |b| (b[6], b[32]) = (81, 81))
        },
        LocalBadLength,
        "81 inline bytes are more than the queue allows",
    ),
    (
        "too much inline data: wide send",
        |w| {
            let data = SendData::Inline(Inline::new(&[1; 80]).unwrap());
            changed(w.send(data), |b| b[6] = 81)
        },
        LocalBadLength,
        "81 inline bytes are more than the queue allows",
    ),
    (
        "lengths differ: inline",
        |w| changed(w.a.bytes(w.to, write_inline(w.remote(), &[1; 8])), |b| b[32] = 7),
        LocalBadLength,
        "8 bytes at the local side but 7 at",
    ),
    ("two buffers in a wide write", |w| changed(w.write(), |b| b[6] = 2), LocalBadLength, "2 buffers are more than"),
];

/// Requests after which the queue pair is dead.
const FATAL: &[Row] = &[
    ("phase", |w| changed(w.write(), |b| b[3] ^= 1), LocalQpInternalError, "the phase bit is not this lap's"),
    ("unwritten slot", |w| vec![0; w.write().len()], LocalQpInternalError, "the meta descriptor bit is clear"),
    ("meta extension", |w| changed(w.write(), |b| b[2] |= 0x40), LocalQpInternalError, "the meta extension bit is set"),
    (
        "first bit",
        |w| changed(w.write(), |b| b[3] &= !4),
        LocalQpInternalError,
        "the first and last bits are not both set",
    ),
    (
        "last bit",
        |w| changed(w.write(), |b| b[3] &= !8),
        LocalQpInternalError,
        "the first and last bits are not both set",
    ),
    (
        "reserved bits: second control byte",
        |w| changed(w.write(), |b| b[3] |= 2),
        LocalQpInternalError,
        "a reserved bit is set",
    ),
    (
        "reserved bits: third control byte",
        |w| changed(w.write(), |b| b[14] |= 4),
        LocalQpInternalError,
        "a reserved bit is set",
    ),
    ("reserved bits: byte 15", |w| changed(w.write(), |b| b[15] = 0x80), LocalQpInternalError, "a reserved bit is set"),
    (
        "reserved bits: bytes 20 to 25",
        |w| changed(w.write(), |b| b[25] = 1),
        LocalQpInternalError,
        "a reserved bit is set",
    ),
    ("reserved bits: lkey", |w| changed(w.write(), |b| b[55] = 1), LocalQpInternalError, "a reserved bit is set"),
];

/// A violation of a receive queue's rule: its name, the receives to post, the completion's status, and a part of the
/// log line.
type Receive = (&'static str, fn(&World) -> Vec<RxDesc>, CompStatus, &'static str);

const RECEIVES: &[Receive] = &[
    (
        "receive: reserved bits",
        |w| {
            let mut desc = receive(w, 64);
            desc.lkey_ctrl.0 |= 1 << 29;
            vec![desc]
        },
        RemoteBadDestQpn,
        "a reserved bit of the receive is set",
    ),
    (
        "receive: begins in the middle",
        |w| {
            let mut desc = receive(w, 64);
            desc.lkey_ctrl = desc.lkey_ctrl.with_first(false);
            vec![desc]
        },
        RemoteBadDestQpn,
        "a receive begins in the middle of another",
    ),
    (
        "receive: no last buffer",
        |w| {
            let mut desc = receive(w, 64);
            desc.lkey_ctrl = desc.lkey_ctrl.with_last(false);
            vec![desc]
        },
        RemoteBadDestQpn,
        "the receive has no last buffer",
    ),
    (
        "receive: too many buffers",
        |w| {
            let (mut first, mut next) = (receive(w, 8), receive(w, 8));
            first.lkey_ctrl = first.lkey_ctrl.with_last(false);
            next.lkey_ctrl = next.lkey_ctrl.with_first(false).with_last(false);
            vec![first, next, next]
        },
        RemoteBadDestQpn,
        "a receive of more than 2 buffers",
    ),
    (
        "receive: too short",
        |w| vec![receive(w, 7)],
        CompStatus::RemoteBadLength,
        "cannot be written to the buffers of its receive",
    ),
    (
        "receive: key",
        |w| {
            let mut desc = receive(w, 64);
            desc.lkey_ctrl = desc.lkey_ctrl.with_lkey(w.source.lkey);
            vec![desc]
        },
        CompStatus::RemoteAbort,
        "cannot be written to the buffers of its receive",
    ),
];

/// Rows that tests in other files cover.
const ELSEWHERE: &[&str] = &[
    "address handle of another domain",
    "doorbell back",
    "doorbell too far",
    "ring overflow",
    "max_batch",
    "receive: doorbell",
    "receive not ready",
    "unknown peer",
    "dead peer",
    "missing card",
];

fn receive(w: &World, length: u16) -> RxDesc {
    RxDesc::single(77, w.buffer.at as u64, length, w.buffer.region.lkey)
}

/// Runs `body` in a process of its own and checks each row's log line.
fn check(name: &str, rows: &[(&str, &str)], body: impl FnOnce()) {
    let Some(errors) = run(name, &[], body) else { return };
    let mut lines: Vec<&str> = errors.lines().filter(|l| l.starts_with("softefa")).collect();
    for (row, line) in rows {
        // Each row has lines of its own, in the table's order.
        let at = lines.iter().position(|l| l.contains(line));
        let at = at.unwrap_or_else(|| panic!("{row}: {line:?} is not among\n{}", lines.join("\n")));
        lines.remove(at);
    }
}

fn names(rows: &[Row]) -> Vec<(&'static str, &'static str)> {
    rows.iter().map(|(name, _, _, line)| (*name, *line)).collect()
}

fn refused(test: &str, rows: &[Row], inject: usize) {
    check(test, &names(rows), || {
        // A card logs no more than eight lines about a queue pair.
        for rows in rows.chunks(8) {
            let mut world = World::open(inject);
            world.buffer.word(1).store(7, Ordering::Relaxed);
            for (n, (name, make, expected, _)) in rows.iter().enumerate() {
                let bytes = make(&mut world);
                world.a.place(&bytes);
                world.a.ring();
                let (common, status) = world.a.next_status();
                assert_eq!((status, common.qp_num), (*expected, own_number(&world.a)), "{name}");
                wait_until("error counter", || world.a.errors() == n as u64 + 1);
            }
            assert_eq!((world.a.local(), world.b.remote()), (0, 0), "nothing was done");
            assert_eq!(world.buffer.word(1).load(Ordering::Relaxed), 7, "nothing was written");
            world.a.post(world.to, write(world.remote(), world.sge()));
            wait_until("good request afterwards", || world.b.remote() == 1 && world.a.local() == 1);
        }
    });
}

fn own_number(end: &End) -> u16 {
    let name = end.name();
    u16::from_ne_bytes([name[16], name[17]])
}

#[test]
fn refused_requests_complete_in_error() {
    refused("refused_requests_complete_in_error", REFUSED, 0);
}

#[test]
fn refused_wide_requests_complete_in_error() {
    refused("refused_wide_requests_complete_in_error", REFUSED_WIDE, 80);
}

#[test]
fn malformed_requests_put_queue_pair_in_error() {
    check("malformed_requests_put_queue_pair_in_error", &names(FATAL), || {
        for (name, make, expected, _) in FATAL {
            let mut world = World::open(0);
            let bytes = make(&mut world);
            world.a.place(&bytes);
            world.a.ring();
            assert_eq!(world.a.next_status().1, *expected, "{name}");
            wait_until("error counter", || world.a.errors() == 1);
            world.a.post(world.to, write(world.remote(), world.sge()));
            assert_eq!(world.a.next_status().1, CompStatus::Flushed, "{name}");
            wait_until("error counter", || world.a.errors() == 2);
            assert_eq!((world.a.local(), world.b.remote()), (0, 0), "{name}: nothing was done");
        }
    });
}

#[test]
fn malformed_receives_fail_send() {
    let rows: Vec<(&str, &str)> = RECEIVES.iter().map(|(name, _, _, line)| (*name, *line)).collect();
    check("malformed_receives_fail_send", &rows, || {
        for (name, make, expected, _) in RECEIVES {
            let mut world = World::open(0);
            let descs = make(&world);
            world.b.post_receives(&descs);
            let bytes = world.send(SendData::One(world.sge()));
            world.a.place(&bytes);
            world.a.ring();
            assert_eq!(world.a.next_status().1, *expected, "{name}");
            let (common, status) = world.b.next_status();
            assert_ne!(status, CompStatus::Ok, "{name}");
            assert_eq!(common.req_id, 77, "{name}");
        }
    });
}

#[test]
fn malformed_receive_puts_queue_pair_in_error() {
    check("malformed_receive_puts_queue_pair_in_error", &[], || {
        let mut world = World::open(0);
        let mut broken = receive(&world, 64);
        broken.lkey_ctrl.0 |= 1 << 29;
        let good = RxDesc::single(78, world.buffer.at as u64 + 32, 8, world.buffer.region.lkey);
        world.b.post_receives(&[broken, good]);
        for _ in 0..2 {
            let bytes = world.send(SendData::One(world.sge()));
            world.a.place(&bytes);
            world.a.ring();
            assert_eq!(world.a.next_status().1, RemoteBadDestQpn);
        }
        assert_eq!(world.b.next_status().1, LocalQpInternalError);
        let (common, status) = world.b.next_status();
        assert_eq!((common.req_id, status), (78, CompStatus::Flushed));
    });
}

#[test]
fn receive_doorbell_beyond_ring_is_refused() {
    check(
        "receive_doorbell_beyond_ring_is_refused",
        &[("receive: doorbell", "the receive doorbell went from 0 to 100000")],
        || {
            let mut world = World::open(0);
            world.b.ring_receives(100_000);
            let bytes = world.send(SendData::One(world.sge()));
            world.a.place(&bytes);
            world.a.ring();
            assert_eq!(world.a.next_status().1, RemoteBadDestQpn);
            assert_eq!(world.b.next_status().1, LocalQpInternalError);
        },
    );
}

#[test]
fn send_waits_for_receive() {
    check("send_waits_for_receive", &[], || {
        let mut world = World::open(0);
        world.buffer.word(0).store(99, Ordering::Relaxed);
        let send = world.send(SendData::One(world.sge()));
        world.a.place(&send);
        world.a.ring();
        // A write posted after the send overtakes it.
        world.a.post(world.to, write(world.remote(), world.sge()));
        assert_eq!(world.a.next_status().0.req_id, 1);
        assert!(world.a.poll_cq().is_none() && world.b.poll_cq().is_none(), "the send still waits");
        let desc = RxDesc::single(5, world.buffer.at as u64 + 32, 8, world.buffer.region.lkey);
        world.b.post_receives(&[desc]);
        assert_eq!(world.a.next_status().1, CompStatus::Ok);
        let (common, status) = world.b.next_status();
        assert_eq!((common.req_id, status), (5, CompStatus::Ok));
        assert_eq!(world.buffer.word(4).load(Ordering::Relaxed), 99);
    });
}

/// The bit of the third control byte that requests a completion.
const COMP_REQ: u8 = 0x10;

#[test]
fn unsignaled_requests_complete_only_in_error() {
    check("unsignaled_requests_complete_only_in_error", &[], || {
        let mut world = World::open(0);
        let silent = |bytes: Vec<u8>| changed(bytes, |b| b[3] &= !COMP_REQ);
        let number = world.a.pc as u16;
        let bytes = silent(world.write());
        world.a.place(&bytes);
        world.a.ring();
        wait_until("silent one", || world.a.local() == 1);
        let bytes = world.write();
        world.a.place(&bytes);
        world.a.ring();
        let (common, status) = world.a.next_status();
        assert_eq!((common.req_id, status), (number + 1, CompStatus::Ok), "the first had none");
        let to_nobody = RemoteMem { rkey: 0x7777, ..world.remote() };
        let bytes = silent(world.between(to_nobody, world.sge()));
        world.a.place(&bytes);
        world.a.ring();
        let (common, status) = world.a.next_status();
        assert_eq!((common.req_id, status), (number + 2, RemoteBadAddress));
    });
}

/// `FI_OPT_EFA_RNR_RETRY` sets the number of retries.
#[test]
fn rnr_send_fails_after_its_retries() {
    check("rnr_send_fails_after_its_retries", &[], || {
        let mut world = World::open(0);
        for times in [0, 1, 6] {
            let mut end = End::open_after(&world.rig, |ep| {
                assert_eq!(ep.set_retries(8), -fi::FI_EINVAL, "seven means forever");
                assert_eq!(ep.set_retries(times), 0);
            });
            assert_eq!(end.set_retries(7), -fi::FI_EINVAL, "it is enabled");
            let to = end.connect(&world.b.name());
            end.post(to, Operation::Send { data: SendData::One(world.sge()), imm: None });
            assert_eq!(end.next_status().1, CompStatus::RemoteRnr, "{times} retries");
            wait_until("error counter", || end.errors() == 1);
            assert!(world.b.poll_cq().is_none(), "nothing was received");
            // The queue pair keeps working.
            end.post(to, write(world.remote(), world.sge()));
            wait_until("write", || end.local() == 1);
        }
        assert_eq!(world.b.remote(), 3);
    });
}

/// The table and the tests name the same rules.
#[test]
fn documented_rules_are_all_tested() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/software-card-rules.md");
    let page = std::fs::read_to_string(page).unwrap();
    let table = page.split("<!-- rules -->").nth(1).expect("the table of rules");
    let cell = |line: &str| line.split('|').nth(1).map(|cell| cell.trim().to_owned());
    let documented: BTreeSet<String> =
        table.lines().skip_while(|l| !l.starts_with("|---")).skip(1).filter_map(cell).collect();
    let tested = [REFUSED, REFUSED_WIDE, FATAL].into_iter().flatten().map(|(name, ..)| *name);
    let tested = tested.chain(RECEIVES.iter().map(|(name, ..)| *name)).chain(ELSEWHERE.iter().copied());
    let tested: BTreeSet<String> = tested.map(str::to_owned).collect();
    assert_eq!(documented, tested);
}

/// The rules do not reject inline data that fits, or accesses with only the needed rights.
#[test]
fn well_formed_requests_succeed() {
    check("well_formed_requests_succeed", &[], || {
        let mut world = World::open(80);
        world.a.post(world.to, write_inline(world.buffer.remote(0), &[9; 64]));
        wait_until("write", || world.b.remote() == 1);
        assert_eq!(world.buffer.word(7).load(Ordering::Relaxed), 0x0909_0909_0909_0909);
        let data = WriteData::One(Sge { lkey: world.source.lkey, ..world.sge() });
        let remote = RemoteMem { rkey: world.target.rkey, ..world.remote() };
        world.a.post(world.to, Operation::Write { remote, data, imm: None });
        world.a.wait_done(2);
        assert_eq!((world.a.local(), world.a.errors()), (2, 0), "the rights that are needed are enough");
    });
}
