//! The card's tables without an engine and without a wire: packets are handed to them as they would arrive.

use std::net::Ipv4Addr;

use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::{Destination, Geometry, Operation, RemoteMem, SendWqe, Sge, WriteData};

use super::complete::OK;
use super::connection::Connection;
use super::core::{LOOPBACK, Peer};
use super::counter::{Counter, EVENTS, Event, Word};
use super::qp::Token;
use super::queue::CompletionRing;
use super::region::{Access, Keys, Memory};
use super::{Core, Wires};
use crate::address::Gid;
use crate::config::Config;
use crate::memory;
use crate::place::Place;
use crate::random::Random;
use crate::wire::packet::{Header, Kind};

const PD: u32 = 1;

fn gid(nonce: u32) -> Gid {
    Gid { host: 1, ip: Ipv4Addr::LOCALHOST, port: 0, nonce }
}

/// A card with one queue pair, eight bytes of memory, and connections to two other cards.
struct World {
    core: Core,
    qpn: u16,
    bytes: Box<[u8; 8]>,
    keys: Keys,
    to: Destination,
    /// Connection to the card that requests go to, and to another.
    asked: u32,
    other: u32,
    posted: u32,
    /// Counters of sends, writes, reads, and one of sends and writes.
    counters: [u32; 4],
}

impl World {
    fn open() -> Self {
        let wires = Wires { listener: None, messages: None };
        let mut core = Core::new(0, gid(1), Config::default(), wires).unwrap();
        core.hush();
        let mut bytes = Box::new([0; 8]);
        let at = bytes.as_mut_ptr();
        let memory = Memory { base: at as u64, len: 8, at: Place::Host(at), _map: None };
        let access = Access { local_write: true, remote_read: true, remote_write: true };
        let keys = core.regions.insert(PD, access, memory, &mut Random::seeded(1)).unwrap();
        let [asked, other] = [2, 3].map(|nonce| {
            let at = core.connections.insert(Connection::dialing(gid(nonce), 0));
            core.peers.insert(gid(nonce), Peer { connection: Some(at), dead: None });
            at
        });
        let ah = core.open_handle(gid(2)).unwrap();
        let qpn = core.open_qp(PD, 64, 16, 16).unwrap();
        let cq = core.cqs.insert(CompletionRing::new(16).unwrap());
        let counters = [(); 4].map(|()| {
            let word = || Word::own(0).unwrap();
            core.open_counter(Counter { completions: word(), errors: word(), attached: 0 }).unwrap()
        });
        let mut attached: [Vec<u32>; EVENTS] = Default::default();
        attached[Event::Send as usize] = vec![counters[0], counters[3]];
        attached[Event::Write as usize] = vec![counters[1], counters[3]];
        attached[Event::Read as usize] = vec![counters[2]];
        core.enable_qp(qpn, cq, None, attached).unwrap();
        let to = Destination { ah, qpn: 7, qkey: 7 };
        Self { core, qpn, bytes, keys, to, asked, other, posted: 0, counters }
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

    /// Posts a request, with the phase bit of the other lap if it is to be broken; the card takes it.
    fn post(&mut self, operation: Operation, broken: bool) -> Option<Token> {
        let mut wqe = SendWqe::new(u64::from(self.posted), self.to, operation);
        let qp = self.core.qp(self.qpn).unwrap();
        wqe.phase = (qp.sq.phase_of(self.posted) == 1) != broken;
        let mut bytes = [0; 64];
        wqe.emit(&Geometry::NARROW, &mut bytes).unwrap();
        let slot = qp.sq.buffer().wrapping_add((qp.sq.slot_of(self.posted) * 64) as usize);
        // SAFETY: the slot lies in the ring and has as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot, bytes.len()) };
        self.posted += 1;
        qp.sq.preset(self.posted);
        assert_eq!(self.core.take_rung(self.qpn), self.posted);
        self.awaited().first().copied()
    }

    /// Requests that the card which was asked has not answered.
    fn awaited(&mut self) -> Vec<Token> {
        let asked = self.asked;
        self.core.qp(self.qpn).unwrap().tokens_on(asked)
    }

    fn arrives(&mut self, at: u32, header: Header) {
        self.core.receive(at, &header, [9; 8].as_ptr());
    }

    /// Completions and errors of the counters.
    fn counts(&mut self) -> [(u64, u64); 4] {
        // SAFETY: the words are the counters' own and alive.
        let load = |word: &Word| unsafe { memory::load_acquire(word.address()) };
        self.counters.map(|id| self.core.counters.get(id).map(|c| (load(&c.completions), load(&c.errors))).unwrap())
    }
}

#[test]
fn only_the_card_that_was_asked_answers() {
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
    assert_eq!(world.awaited(), [token]);
    world.arrives(world.asked, Header { status: OK, ..Header::new(Kind::Ack, token.0) });
    assert_eq!((world.awaited(), world.counts()[1]), (vec![], (1, 0)));
}

#[test]
fn every_counter_of_the_queue_pair_learns_that_it_is_dead() {
    let mut world = World::open();
    let operation = world.write(Sge { lkey: 0x7777, ..world.sge() });
    assert_eq!(world.post(operation, false), None);
    assert_eq!(world.counts(), [(0, 0), (0, 1), (0, 0), (0, 1)], "a refused write is one of writes");
    let operation = world.write(world.sge());
    assert_eq!(world.post(operation, true), None);
    assert_eq!(world.counts(), [(0, 1), (0, 2), (0, 1), (0, 2)], "a broken one may be anything, and counts once");
    let operation = world.read();
    assert_eq!(world.post(operation, false), None);
    assert_eq!(world.counts(), [(0, 2), (0, 3), (0, 2), (0, 3)], "what is flushed too");
}
