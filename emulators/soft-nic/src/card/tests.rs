//! The card's tables without an engine or a wire: the tests pass packets to the card as they would arrive.

use std::net::Ipv4Addr;

use efa_dp_direct::cq::{Cqe, RawCqe, Status};
use efa_dp_direct::wire::{CompStatus, LkeyCtrl, RxDesc};
use efa_dp_direct::wqe::{Destination, Geometry, Operation, RemoteMem, RequestIds, SendData, SendWqe, Sge, WriteData};
use zerocopy::IntoBytes;

use super::complete::OK;
use super::connection::{Connection, SILENCE_US, Transport};
use super::core::{LOOPBACK, Listeners, RemoteCard};
use super::counter::{Counter, EVENTS, Event, Word};
use super::qp::Token;
use super::queue::CompletionRing;
use super::recv_queue::NOT_READY;
use super::region::{Access, Keys, Memory};
use super::request::MAX_SEND_SIZE;
use super::{Core, SetupError};
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::fault::Faults;
use crate::location::Location;
use crate::memory;
use crate::random::Random;
use crate::wire::packet::{Header, Kind};

mod checked;
mod closing;
mod order;
mod streams;
mod traced;

const PD: u32 = 1;

fn gid(card: u8) -> Gid {
    Gid { address: None, secret: [card; 8] }
}

/// A card with one queue pair, eight bytes of memory, and connections to two other cards.
struct World {
    core: Core,
    qpn: u16,
    cq: u32,
    bytes: Box<[u8; 8]>,
    keys: Keys,
    to: Destination,
    /// Connections to the card that requests go to, and to another.
    asked: u32,
    other: u32,
    posted: u32,
    /// Counters of sends, of writes, of reads, of sends and writes, and of peers' reads.
    counters: [u32; 5],
}

impl World {
    fn open() -> Self {
        Self::with(Faults::default())
    }

    fn with(faults: Faults) -> Self {
        Self::of(Config { faults, ..Config::default() })
    }

    fn of(config: Config) -> Self {
        let mut core = Core::new(0, gid(1), config, Listeners::default()).unwrap();
        core.mute_log();
        let mut bytes = Box::new([0; 8]);
        let at = bytes.as_mut_ptr();
        let memory = Memory { base: at as u64, len: 8, at: Location::Host(at), _map: None };
        let access = Access { local_write: true, remote_read: true, remote_write: true };
        let keys = core.regions.insert(PD, access, memory, &mut Random::seeded(1)).unwrap();
        let [asked, other] = [2, 3].map(|card| {
            let at = core.connections.insert(Connection::connecting(gid(card), 0));
            core.remote_cards.insert(gid(card), RemoteCard { connection: Some(at), ..RemoteCard::default() });
            at
        });
        let ah = core.open_handle(PD, gid(2)).unwrap();
        let qpn = core.open_qp(PD, 64, 16, 16).unwrap();
        let cq = core.cqs.insert(CompletionRing::new(16).unwrap());
        let counters = [(); 5].map(|()| {
            let word = || Word::own(0);
            core.open_counter(Counter { completions: word(), errors: word(), attached: 0 }).unwrap()
        });
        let mut attached: [Vec<u32>; EVENTS] = Default::default();
        attached[Event::Send as usize] = vec![counters[0], counters[3]];
        attached[Event::Write as usize] = vec![counters[1], counters[3]];
        attached[Event::Read as usize] = vec![counters[2]];
        attached[Event::RemoteRead as usize] = vec![counters[4]];
        core.enable_qp(qpn, cq, None, attached).unwrap();
        let to = Destination { ah, qpn: 7, qkey: 7 };
        Self { core, qpn, cq, bytes, keys, to, asked, other, posted: 0, counters }
    }

    fn sge(&self) -> Sge {
        Sge { addr: self.bytes.as_ptr() as u64, length: 8, lkey: self.keys.lkey }
    }

    fn read(&self) -> Operation {
        Operation::Read { remote: RemoteMem::default(), into: Some(self.sge()) }
    }

    fn write(&self, from: Sge) -> Operation {
        Operation::Write { remote: RemoteMem::default(), data: WriteData::One(from), imm: None }
    }

    /// Posts a request, with the other lap's phase bit if `broken`, and lets the card take it.
    fn post(&mut self, operation: Operation, broken: bool) -> Option<Token> {
        self.place(operation, broken);
        let qp = self.core.qp(self.qpn).unwrap();
        qp.sq.preset(self.posted);
        assert_eq!(self.core.take_rung(self.qpn), self.posted);
        self.awaited().first().copied()
    }

    /// Writes a request without ringing.
    fn place(&mut self, operation: Operation, broken: bool) {
        self.place_with_id(u64::from(self.posted), operation, broken);
    }

    fn place_with_id(&mut self, id: u64, operation: Operation, broken: bool) {
        let mut wqe = SendWqe::new(id, self.to, operation);
        let qp = self.core.qp(self.qpn).unwrap();
        wqe.phase = (qp.sq.phase_of(self.posted) == 1) != broken;
        let mut bytes = [0; 64];
        wqe.emit(&Geometry::NARROW, &mut bytes).unwrap();
        let slot = qp.sq.buffer().wrapping_add((qp.sq.slot_of(self.posted) * 64) as usize);
        // SAFETY: the slot lies in the ring and has that many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot, bytes.len()) };
        self.posted += 1;
    }

    /// Returns the requests that the target card has not answered.
    fn awaited(&mut self) -> Vec<Token> {
        let asked = self.asked;
        self.core.qp(self.qpn).unwrap().tokens_on(asked)
    }

    /// Returns how many answers a connection owes by its count.
    fn waiting(&mut self, at: u32) -> u32 {
        self.core.connections.get(at).unwrap().waiting
    }

    fn arrives(&mut self, at: u32, header: Header) {
        self.core.receive(at, &header, [9; 8].as_ptr());
    }

    /// Returns the counters' completions and errors.
    fn counts(&mut self) -> [(u64, u64); 5] {
        // SAFETY: the words belong to the counters, which are open.
        let load = |word: &Word| unsafe { memory::load_acquire(word.address()) };
        self.counters.map(|id| self.core.counters.get(id).map(|c| (load(&c.completions), load(&c.errors))).unwrap())
    }
}

#[test]
fn answer_of_another_card_is_ignored() {
    let mut world = World::open();
    let operation = world.read();
    let token = world.post(operation, false).unwrap();
    let refused = CompStatus::RemoteAbort.raw();
    let data = Header { total: 8, len: 8, ..Header::new(Kind::Data, token.0) };
    for at in [world.other, LOOPBACK] {
        world.arrives(at, data);
        world.arrives(at, Header { len: 0, status: refused, ..data });
        world.arrives(at, Header { status: refused, ..Header::new(Kind::Ack, token.0) });
        assert_eq!((world.awaited(), *world.bytes), (vec![token], [0; 8]), "from connection {at}");
    }
    world.arrives(world.asked, data);
    assert_eq!((world.awaited(), *world.bytes), (vec![], [9; 8]));
    assert_eq!(world.counts()[2], (1, 0));

    let operation = world.write(world.sge());
    let token = world.post(operation, false).unwrap();
    world.arrives(world.other, Header { status: OK, ..Header::new(Kind::Ack, token.0) });
    assert_eq!((world.awaited(), world.waiting(world.asked)), (vec![token], 1));
    world.arrives(world.asked, Header { status: OK, ..Header::new(Kind::Ack, token.0) });
    assert_eq!((world.awaited(), world.waiting(world.asked), world.counts()[1]), (vec![], 0, (1, 0)));
}

#[test]
fn every_counter_of_dead_queue_pair_counts_error() {
    let mut world = World::open();
    let operation = world.write(Sge { lkey: 0x7777, ..world.sge() });
    assert_eq!(world.post(operation, false), None);
    assert_eq!(world.counts(), [(0, 0), (0, 1), (0, 0), (0, 1), (0, 0)], "a refused write is one of writes");
    let operation = world.write(world.sge());
    assert_eq!(world.post(operation, true), None);
    assert_eq!(
        world.counts(),
        [(0, 1), (0, 2), (0, 1), (0, 2), (0, 0)],
        "a broken one may be anything, and counts once"
    );
    let operation = world.read();
    assert_eq!(world.post(operation, false), None);
    assert_eq!(world.counts(), [(0, 2), (0, 3), (0, 2), (0, 3), (0, 0)], "flushed requests count too");
}

#[test]
fn dead_card_fails_its_requests_after_5_s() {
    let mut world = World::with(Faults { die_after: 1, ..Faults::default() });
    let operation = world.write(world.sge());
    assert!(world.post(operation, false).is_some());
    let ring = |world: &mut World, more: u32| {
        (0..more).for_each(|_| world.place(operation, false));
        let (qpn, posted) = (world.qpn, world.posted);
        world.core.qp(qpn).unwrap().sq.preset(posted);
    };
    ring(&mut world, 2);
    assert_eq!(world.core.take_rung(world.qpn), 1, "the card takes none of them");
    let since = world.core.dead_since.unwrap();
    for (clock_us, errors) in [(SILENCE_US - 1, 0), (SILENCE_US, 3), (SILENCE_US + 1, 3)] {
        world.core.clock_us = since + clock_us;
        world.core.poll_dead(since);
        assert_eq!(world.counts()[3], (0, errors), "after {clock_us} µs");
    }
    assert_eq!(world.counts()[1], (0, 3));
    ring(&mut world, 1);
    world.core.poll_dead(since);
    assert_eq!(world.counts()[3], (0, 4), "a later request fails at once");
}

#[test]
fn closed_queue_pair_aborts_partly_sent_requests() {
    let mut world = World::open();
    let operation = world.write(world.sge());
    let whole = world.post(operation, false).unwrap();
    world.core.outstanding(whole).unwrap().awaiting = true;
    let operation = world.write(world.sge());
    world.post(operation, false).unwrap();
    let [_, partly] = world.awaited()[..] else { panic!("two requests") };
    for token in [whole, partly] {
        world.core.outstanding(token).unwrap().sent = 4;
    }
    assert_eq!(world.waiting(world.asked), 2);
    world.core.close_qp(world.qpn);
    assert_eq!(world.waiting(world.asked), 0);
    let answers = &world.core.connections.get(world.asked).unwrap().answers;
    assert_eq!(answers.iter().copied().collect::<Vec<_>>(), [Header::new(Kind::Abort, partly.0)]);
}

#[test]
fn closed_queue_pair_leaves_reorder_buffer() {
    let mut world = World::with(Faults::parse("seed=1,reorder=8").unwrap());
    let operation = world.write(world.sge());
    assert_eq!(world.post(operation, false), None, "it is kept back");
    assert!(world.core.reorder_buffer.as_ref().is_some_and(|holds| !holds.is_empty()));
    world.core.close_qp(world.qpn);
    assert!(world.core.reorder_buffer.as_ref().is_some_and(|holds| holds.is_empty()));
}

#[test]
fn read_of_deregistered_memory_ends() {
    let mut world = World::open();
    let qkey = world.core.qp(world.qpn).unwrap().qkey;
    let asked = Header {
        dst_qpn: world.qpn,
        qkey,
        rkey: world.keys.rkey,
        addr: world.bytes.as_ptr() as u64,
        total: 8,
        ..Header::new(Kind::Read, 7)
    };
    world.arrives(LOOPBACK, asked);
    assert!(world.core.pump(LOOPBACK));
    assert_eq!(world.counts()[4], (1, 0));
    world.arrives(LOOPBACK, asked);
    assert!(world.core.regions.remove(world.keys).is_some());
    assert!(world.core.pump(LOOPBACK));
    assert_eq!(world.counts()[4], (1, 0), "nothing was read");
    assert!(world.core.connections.get(LOOPBACK).unwrap().serving.is_empty());
}

#[test]
fn request_rung_before_its_memory_is_deregistered_is_taken() {
    let mut world = World::open();
    let operation = world.write(world.sge());
    world.place(operation, false);
    world.core.qp(world.qpn).unwrap().sq.preset(1);
    assert!(world.core.close_region(world.keys).is_some());
    assert_eq!((world.awaited().len(), world.counts()[1]), (1, (0, 0)));
}

#[test]
fn delayed_completion_does_not_touch_later_connection() {
    let mut world = World::with(Faults::parse("seed=1,reorder=8").unwrap());
    let operation = world.write(world.sge());
    world.post(operation, false);
    let held = world
        .core
        .reorder_buffer
        .as_mut()
        .unwrap()
        .pop(super::reorder::Moment { us: 1_000_000, poll: 1_000_000 }, |_| 1);
    let (token, _) = held.unwrap();
    world.core.send(token);
    assert_eq!(world.awaited(), [token]);
    world.core.lose(world.asked, CompStatus::LocalUnresponsiveRemote, "test");
    let successor = world.core.connections.insert(Connection::connecting(gid(4), 0));
    assert_eq!(successor, world.asked, "numbers are used again");
    world.core.connections.get_mut(successor).unwrap().waiting = 1;
    world.core.retire(token, CompStatus::LocalUnresponsiveRemote.raw());
    assert_eq!((world.waiting(successor), world.counts()[1]), (1, (0, 1)));
    assert_eq!(world.core.remote_cards[&gid(2)].dead, Some(CompStatus::LocalUnresponsiveRemote));
}

#[test]
fn dead_queue_pair_is_not_checked() {
    let mut world = World::with(Faults::parse("sq_size=16,max_batch=2").unwrap());
    let operation = world.write(world.sge());
    world.post(operation, true);
    let dead = world.counts();
    world.core.active[0].seen = world.posted;
    for _ in 0..4 {
        let operation = world.write(world.sge());
        world.place(operation, false);
    }
    world.core.check_batches();
    assert_eq!(world.counts(), dead);
}

#[test]
fn aborted_write_is_forgotten() {
    let mut world = World::open();
    let (dst_qpn, qkey) = (world.qpn, world.core.qp(world.qpn).unwrap().qkey);
    let (rkey, addr) = (world.keys.rkey, world.bytes.as_ptr() as u64);
    let write = Header { dst_qpn, qkey, rkey, addr, total: 8, len: 4, ..Header::new(Kind::Write, 7) };
    let begun = |world: &World| world.core.connections.get(world.asked).unwrap().partials.len();
    world.arrives(world.asked, write);
    assert_eq!((begun(&world), *world.bytes), (1, [9, 9, 9, 9, 0, 0, 0, 0]));
    world.arrives(world.asked, Header::new(Kind::Abort, 7));
    assert_eq!(begun(&world), 0);
    // The next write with this token needs all of its bytes.
    world.arrives(world.asked, Header { offset: 4, ..write });
    assert_eq!(begun(&world), 1);
    world.arrives(world.asked, write);
    assert_eq!((begun(&world), *world.bytes), (0, [9; 8]));
    let answers = &world.core.connections.get(world.asked).unwrap().answers;
    assert_eq!(answers.iter().copied().collect::<Vec<_>>(), [Header { status: OK, ..Header::new(Kind::Ack, 7) }]);
}

#[test]
fn bound_objects_cannot_be_closed() {
    let mut world = World::open();
    let unused = world.core.open_qp(PD, 64, 16, 16).unwrap();
    world.core.close_qp(unused);
    let (cq, counter) = (world.cq, world.counters[0]);
    assert_eq!(world.core.close_cq(cq).err(), Some(SetupError::Busy));
    assert_eq!(world.core.close_counter(counter).err(), Some(SetupError::Busy));
    world.core.close_qp(world.qpn);
    assert!(world.core.close_cq(cq).is_ok_and(|cq| cq.is_some()));
    assert!(world.core.close_counter(counter).is_ok_and(|counter| counter.is_some()));
}

#[test]
fn peer_has_handle_until_last_user_closes() {
    let mut world = World::open();
    let known = |world: &World| world.core.connections.get(world.asked).unwrap().has_handle;
    assert_eq!(world.core.open_handle(PD, gid(2)), Ok(world.to.ah));
    let of_another_domain = world.core.open_handle(PD + 1, gid(2)).unwrap();
    assert_ne!(of_another_domain, world.to.ah);
    world.core.close_handle(world.to.ah);
    world.core.close_handle(of_another_domain);
    assert!(known(&world), "one is left");
    world.core.close_handle(world.to.ah);
    assert!(!known(&world) && world.core.handles.get(u32::from(world.to.ah)).is_none());
}

#[test]
fn rnr_send_is_retried_in_full() {
    let mut world = World::open();
    let operation = Operation::Send { data: SendData::One(world.sge()), imm: None };
    let token = world.post(operation, false).unwrap();
    world.core.qp(world.qpn).unwrap().rnr_retry = 1;
    world.core.connections.get_mut(world.asked).unwrap().requests.clear();
    let entry = world.core.outstanding(token).unwrap();
    (entry.sent, entry.awaiting) = (8, true);
    world.arrives(world.asked, Header { status: NOT_READY, ..Header::new(Kind::Ack, token.0) });
    let entry = world.core.outstanding(token).unwrap();
    assert_eq!((entry.sent, entry.awaiting, entry.retries), (0, false, 1));
    assert!(!world.core.poll_unready(), "not at once");
    world.core.clock_us += 1_000_000;
    assert!(world.core.poll_unready());
    assert_eq!(world.core.connections.get(world.asked).unwrap().requests, [token]);
    world.arrives(world.asked, Header { status: NOT_READY, ..Header::new(Kind::Ack, token.0) });
    assert_eq!((world.awaited(), world.counts()[0]), (vec![], (0, 1)), "once more was all");
}

#[test]
fn keys_of_closed_region_close_no_other_region() {
    let mut world = World::open();
    let old = world.keys;
    let memory = world.core.regions.remove(old).unwrap();
    let keys = world.core.regions.insert(PD, Access::default(), memory, &mut Random::seeded(2)).unwrap();
    assert!(world.core.regions.remove(old).is_none());
    assert!(world.core.regions.remove(keys).is_some());
}

/// Returns the errors counted for sends, which include every request of a queue pair in error.
fn failed(world: &mut World) -> u64 {
    world.counts()[0].1
}

/// The card cannot tell a doorbell that went backwards from one far ahead. Half the counter's range is the limit.
#[test]
fn doorbell_half_the_range_ahead_flushes_a_ring_of_requests() {
    for (advance, errors) in [(i32::MAX as u32, 1 + 16), (1 << 31, 1), (u32::MAX, 1)] {
        let mut world = World::open();
        world.core.qp(world.qpn).unwrap().sq.preset(advance);
        assert_eq!(world.core.take_rung(world.qpn), advance);
        assert_eq!(failed(&mut world), errors, "{advance:#x} requests at once");
    }
}

#[test]
fn doorbell_past_the_ring_fails_each_rung_request_once() {
    let mut world = World::open();
    for _ in 0..10 {
        let operation = world.write(world.sge());
        world.post(operation, false);
    }
    for _ in 0..7 {
        let operation = world.write(world.sge());
        world.place(operation, false);
    }
    world.core.qp(world.qpn).unwrap().sq.preset(world.posted);
    world.core.take_rung(world.qpn);
    assert_eq!(failed(&mut world), 7, "7 are rung while 10 of 16 slots are taken");
}

#[test]
fn unrung_requests_beyond_the_batch_fail_the_queue() {
    for (unrung, errors) in [(2, 0), (3, 1)] {
        let mut world = World::with(Faults::parse("sq_size=16,max_batch=2").unwrap());
        for _ in 0..unrung {
            let operation = world.write(world.sge());
            world.place(operation, false);
        }
        world.core.check_batches();
        assert_eq!(failed(&mut world), errors, "{unrung} requests are written and not rung");
    }
    // The doorbell may be rung while the card looks at the slot.
    let mut world = World::with(Faults::parse("sq_size=16,max_batch=2").unwrap());
    for _ in 0..3 {
        let operation = world.write(world.sge());
        world.place(operation, false);
    }
    world.core.qp(world.qpn).unwrap().sq.preset(3);
    world.core.check_batches();
    assert_eq!(failed(&mut world), 0);
}

#[test]
fn token_names_one_request_and_no_later_one_of_its_entry() {
    let mut world = World::open();
    let operation = world.write(world.sge());
    let old = world.post(operation, false).unwrap();
    let taken = |world: &mut World, token| world.core.qp(world.qpn).unwrap().take(token).is_some();
    assert!(taken(&mut world, old) && !taken(&mut world, old));
    let operation = world.write(world.sge());
    let new = world.post(operation, false).unwrap();
    assert_eq!(new.entry(), old.entry(), "the entry is used again");
    assert!(!taken(&mut world, old) && taken(&mut world, new));
}

/// On a card without the capability for 64-bit request ids, the bits above the low 16 are reserved.
#[test]
fn request_ids_have_the_bits_that_the_card_offers() {
    for (caps, id, errors) in [(0, 0xffff, 0), (0, 0x1_0000, 1), (1, 0x1_0000, 0)] {
        let mut world = World::with(Faults { qp_caps: caps, ..Faults::default() });
        let operation = world.write(world.sge());
        world.place_with_id(id, operation, false);
        world.core.qp(world.qpn).unwrap().sq.preset(1);
        world.core.take_rung(world.qpn);
        assert_eq!(failed(&mut world), errors, "id {id:#x} with capabilities {caps}");
    }
}

#[test]
fn queue_pairs_of_128_byte_requests_are_wide() {
    let mut world = World::open();
    for (bytes, wide) in [(64, false), (128, true)] {
        let qpn = world.core.open_qp(PD, bytes, 16, 16).unwrap();
        assert_eq!(world.core.qp(qpn).unwrap().is_wide(), wide);
    }
}

/// A receiving queue pair.
struct Receiver {
    world: World,
    qpn: u16,
    qkey: u32,
}

impl Receiver {
    fn open() -> Self {
        let mut world = World::open();
        let qpn = world.core.open_qp(PD, 64, 16, 16).unwrap();
        let mut attached: [Vec<u32>; EVENTS] = Default::default();
        attached[Event::Recv as usize] = vec![world.counters[4]];
        world.core.enable_qp(qpn, world.cq, Some(world.cq), attached).unwrap();
        let qkey = world.core.qp(qpn).unwrap().qkey;
        Self { world, qpn, qkey }
    }

    /// Posts descriptors, each with a length and control bits, for consecutive parts of the memory.
    fn post(&mut self, descs: &[(u16, LkeyCtrl)]) {
        let (mut at, lkey) = (self.world.bytes.as_ptr() as u64, self.world.keys.lkey);
        let qp = self.world.core.qp(self.qpn).unwrap();
        let rung = qp.rq.rung();
        for (n, (length, control)) in descs.iter().enumerate() {
            let desc = RxDesc { lkey_ctrl: control.with_lkey(lkey), ..RxDesc::single(40, at, *length, 0) };
            at += u64::from(*length);
            let slot = qp.rq.slot_of(rung + n as u32) as usize;
            // SAFETY: the slot lies in the ring and has that many bytes.
            unsafe { qp.rq.buffer().cast::<[u64; 2]>().wrapping_add(slot).write(desc.to_words()) };
        }
        qp.rq.preset(rung + descs.len() as u32);
    }

    /// Delivers a send of `total` bytes and returns the answer.
    fn send(&mut self, total: u32) -> Option<CompStatus> {
        let send =
            Header { dst_qpn: self.qpn, qkey: self.qkey, total, len: total.min(8), ..Header::new(Kind::Send, 7) };
        let asked = self.world.asked;
        self.world.arrives(asked, send);
        let answer = self.world.core.connections.get_mut(asked).unwrap().answers.pop_back();
        answer.and_then(|answer| CompStatus::from_raw(answer.status))
    }

    /// Returns the request id and status of the completions so far.
    fn completions(&mut self) -> Vec<(u16, Status)> {
        let ring = self.world.core.cqs.get_mut(self.world.cq).unwrap();
        // SAFETY: the ring has 16 entries of 32 bytes.
        let entries = unsafe { ring.buffer().cast::<[[u8; 32]; 16]>().read() };
        let entries = entries.into_iter().map(RawCqe).filter(|entry| entry.phase());
        let meaning = entries.map(|entry| Cqe::parse(&entry, RequestIds::Bits16).expect("a completion"));
        meaning.filter_map(|cqe| if let Cqe::Recv(cqe) = cqe { Some((cqe.req_id, cqe.status)) } else { None }).collect()
    }
}

const FIRST: LkeyCtrl = LkeyCtrl(0).with_first(true);
const LAST: LkeyCtrl = LkeyCtrl(0).with_last(true);
const WHOLE: LkeyCtrl = FIRST.with_last(true);

#[test]
fn send_fills_the_buffers_of_the_next_receive() {
    for (descs, len, filled) in [
        (&[(8, WHOLE)][..], 8, [9; 8]),
        (&[(3, FIRST), (5, LAST)], 8, [9; 8]),
        (&[(3, FIRST), (5, LAST)], 5, [9, 9, 9, 9, 9, 0, 0, 0]),
        (&[(3, FIRST), (5, LAST)], 3, [9, 9, 9, 0, 0, 0, 0, 0]),
        (&[(8, WHOLE)], 1, [9, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        let mut receiver = Receiver::open();
        assert_eq!(receiver.send(len), Some(CompStatus::RemoteRnr), "before a receive is posted");
        receiver.post(descs);
        let lines = receiver.world.core.lines;
        assert_eq!(receiver.send(len), Some(CompStatus::Ok));
        assert_eq!(receiver.world.core.lines, lines, "nothing to log");
        assert_eq!(*receiver.world.bytes, filled);
        assert_eq!(receiver.completions(), [(40, Status::Known(CompStatus::Ok))]);
        assert_eq!(receiver.world.counts()[4], (1, 0));
        assert_eq!(receiver.send(len), Some(CompStatus::RemoteRnr), "the receive is used");
    }
}

#[test]
fn malformed_receives_fail_the_queue_pair() {
    for (name, descs) in [
        ("no last buffer", &[(4, FIRST)][..]),
        ("three buffers", &[(2, FIRST), (2, LkeyCtrl(0)), (2, LAST)]),
        ("no first buffer", &[(8, LAST)]),
        ("two first buffers", &[(4, FIRST), (4, WHOLE)]),
        ("a reserved bit", &[(8, LkeyCtrl(WHOLE.0 | 1 << 29))]),
    ] {
        let mut receiver = Receiver::open();
        receiver.post(descs);
        assert_eq!(receiver.send(8), Some(CompStatus::RemoteBadDestQpn), "{name}");
        assert_eq!(receiver.world.counts()[4].0, 0, "{name}");
        let first = receiver.completions()[0];
        assert_eq!(first, (40, Status::Known(CompStatus::LocalQpInternalError)), "{name}");
        assert_eq!(*receiver.world.bytes, [0; 8], "{name}");
    }
}

#[test]
fn send_longer_than_a_packet_or_its_receive_is_refused() {
    let mut receiver = Receiver::open();
    assert_eq!(receiver.send(MAX_SEND_SIZE), Some(CompStatus::RemoteRnr));
    assert_eq!(receiver.send(MAX_SEND_SIZE + 1), Some(CompStatus::RemoteBadLength));
    assert_eq!(receiver.send(u32::MAX), Some(CompStatus::RemoteBadLength));
    receiver.post(&[(7, WHOLE)]);
    let lines = receiver.world.core.lines;
    assert_eq!(receiver.send(8), Some(CompStatus::RemoteBadLength));
    assert_eq!(receiver.world.core.lines, lines + 1, "the receiver's log says so");
    assert_eq!(receiver.completions(), [(40, Status::Known(CompStatus::LocalBadLength))]);
    assert_eq!((*receiver.world.bytes, receiver.world.counts()[4]), ([0; 8], (0, 1)));
}

#[test]
fn lines_about_a_rule_are_counted_whatever_their_numbers() {
    let mut world = World::open();
    let qpn = world.qpn;
    let qp = world.core.qp(qpn).unwrap();
    let counts =
        ["slot 3 is full", "slot 14 is full", "slot 14 is empty", "slot 3 is full"].map(|rule| qp.count_line(rule));
    assert_eq!(counts, [1, 2, 1, 3]);
}

#[test]
fn lines_about_a_queue_pair_are_limited_whatever_the_rules() {
    let mut world = World::open();
    let (qpn, before) = (world.qpn, world.core.lines);
    for rule in ('a'..='z').map(|letter| letter.to_string()) {
        world.core.log_of(qpn, &rule, format_args!("rule {rule}"));
    }
    assert_eq!(world.core.lines - before, 8);
}

#[test]
fn card_stays_connected_to_itself_while_requests_wait_for_receives() {
    let of_itself = Connection { waiting: 1, ..Connection::loopback(gid(1)) };
    let of_another = Connection { waiting: 1, ..Connection::connecting(gid(2), 0) };
    assert!(!of_itself.is_late(u64::MAX) && of_another.is_late(u64::MAX));
}

#[test]
fn rnr_retries_wait_twice_as_long_each_time_up_to_a_bound() {
    let mut world = World::open();
    let operation = Operation::Send { data: SendData::One(world.sge()), imm: None };
    let token = world.post(operation, false).unwrap();
    for delay in [20, 40, 80, 160, 320, 640, 1280, 1280, 1280] {
        assert!(world.core.retry_send(token));
        world.core.clock_us += delay - 1;
        assert!(!world.core.poll_unready(), "not before {delay} us");
        world.core.clock_us += 1;
        assert!(world.core.poll_unready(), "after {delay} us");
    }
}

#[test]
fn bounded_rnr_retries_span_the_same_time() {
    for (retries, delays) in [(1, &[40_960][..]), (3, &[160, 2560, 40_960]), (6, &[40, 160, 640, 2560, 10_240, 40_960])]
    {
        let mut world = World::open();
        let operation = Operation::Send { data: SendData::One(world.sge()), imm: None };
        let token = world.post(operation, false).unwrap();
        let qpn = world.qpn;
        world.core.qp(qpn).unwrap().rnr_retry = retries;
        for delay in delays {
            assert!(world.core.retry_send(token));
            world.core.clock_us += delay - 1;
            assert!(!world.core.poll_unready(), "not before {delay} us");
            world.core.clock_us += 1;
            assert!(world.core.poll_unready(), "after {delay} us");
        }
        assert!(!world.core.retry_send(token), "{retries} retries are used up");
    }
}
