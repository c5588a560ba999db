//! A card with arbitrary bytes in its rings, doorbells and wire.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use efa_dp_direct::wire::RxDesc;
use efa_dp_direct::wqe::{Destination, Geometry, Inline, Operation, RemoteMem, SendData, SendWqe, Sge, WriteData};

use ferrogin_test_support::Input;
use soft_nic::address::Gid;
use soft_nic::card::Core;
use soft_nic::card::counter::{Counter, EVENTS, Event, Word};
use soft_nic::card::queue::CompletionRing;
use soft_nic::card::region::{Access, Keys, Memory};
use soft_nic::config::Config;
use soft_nic::fault::Faults;
use soft_nic::fuzzing::{Accepting, Header, Input as Arrived, Kind, Listener, RingPair};
use soft_nic::location::Location;
use soft_nic::random::Random;

const PD: u32 = 1;
/// The size of a region, and of the guard on each side of it, in bytes.
const LEN: usize = 4096;
const GUARD: u8 = 0xa5;

const FAULTS: [&str; 6] = [
    "sq_size=16,max_batch=4",
    "sq_size=16,max_batch=16,seed=1,reorder=8",
    "sq_size=8,max_batch=2,cntr_start=2147483640",
    "sq_size=16,seed=3,reread=0.5,delay_us=0..90",
    "sq_size=32,error_every=3",
    "sq_size=16,die_after=9",
];

/// A region's memory, with a guard on each side.
struct Guarded {
    bytes: Box<[u8]>,
    keys: Keys,
    /// Nobody may write the bytes, so they must not change.
    constant: bool,
}

impl Guarded {
    fn new(core: &mut Core, pd: u32, access: Access) -> Self {
        let mut bytes = vec![GUARD; 3 * LEN].into_boxed_slice();
        bytes[LEN..2 * LEN].fill(1);
        let at = bytes.as_mut_ptr().wrapping_add(LEN);
        let memory = Memory { base: at as u64, len: LEN as u64, at: Location::Host(at), _map: None };
        let mut random = Random::seeded(u64::from(pd));
        let keys = core.regions.insert(pd, access, memory, &mut random).expect("keys");
        Self { bytes, keys, constant: !access.local_write && !access.remote_write }
    }

    fn base(&self) -> u64 {
        self.bytes.as_ptr() as u64 + LEN as u64
    }

    fn check(&self) {
        let (before, rest) = self.bytes.split_at(LEN);
        let (own, after) = rest.split_at(LEN);
        // Compares whole slices, because a loop over bytes would take most of a fuzzer's time.
        assert!(before == [GUARD; LEN] && after == [GUARD; LEN], "a guard was written");
        assert!(!self.constant || own == [1; LEN], "memory without the right was written");
    }
}

struct TestCard {
    core: Core,
    qps: Vec<u16>,
    /// The producer indices of each queue pair's send and receive queues.
    produced: Vec<(u32, u32)>,
    regions: Vec<Guarded>,
    handle: u16,
    now: Instant,
}

impl TestCard {
    fn new(input: &mut Input<'_>, gid: Gid, listener: Option<Listener>, peer: Gid) -> Self {
        let faults = Faults::parse(input.of(&FAULTS)).expect("well-formed");
        let config = Config { nics: 1, faults, ..Config::default() };
        let mut core = Core::silent(gid, config, listener).expect("a card");
        let all = Access { local_write: true, remote_read: true, remote_write: true };
        let regions = vec![
            Guarded::new(&mut core, PD, all),
            Guarded::new(&mut core, PD, Access::default()),
            Guarded::new(&mut core, PD, Access { remote_read: true, ..Access::default() }),
            // In the other domain, so no queue pair of this one may use it.
            Guarded::new(&mut core, PD + 1, all),
        ];
        let handle = core.open_handle(PD, peer).expect("a handle");
        let start = u64::from(core.config.faults.cntr_start);
        let (mut qps, mut produced) = (Vec::new(), Vec::new());
        for wide in [false, true] {
            let sq = core.config.faults.sq_size;
            let qpn = core.open_qp(PD, if wide { 128 } else { 64 }, sq, 8).expect("a queue pair");
            let cq = core.cqs.insert(CompletionRing::new(16).expect("a ring"));
            let word = || Word::own(start);
            let counter = Counter { completions: word(), errors: word(), attached: 0 };
            let counter = core.open_counter(counter).expect("a counter");
            let mut counters: [Vec<u32>; EVENTS] = Default::default();
            counters[Event::Write as usize].push(counter);
            counters[Event::RemoteWrite as usize].push(counter);
            core.enable_qp(qpn, cq, Some(cq), counters).expect("enabled");
            qps.push(qpn);
            produced.push((core.config.faults.cntr_start, 0));
        }
        Self { core, qps, produced, regions, handle, now: Instant::now() }
    }

    fn sge(&self, input: &mut Input<'_>) -> Sge {
        let region = &self.regions[usize::from(input.u8()) % self.regions.len()];
        let (shift, flip) = (input.u16(), input.u8());
        Sge {
            addr: region.base().wrapping_add(u64::from(shift)).wrapping_sub(16),
            length: u32::from(input.u16()) % (2 * LEN as u32),
            lkey: region.keys.lkey ^ u32::from(flip == 7) << 20,
        }
    }

    fn remote(&self, input: &mut Input<'_>) -> RemoteMem {
        let region = &self.regions[usize::from(input.u8()) % self.regions.len()];
        let (shift, flip) = (input.u16(), input.u8());
        RemoteMem {
            addr: region.base().wrapping_add(u64::from(shift)).wrapping_sub(16),
            rkey: region.keys.rkey ^ u32::from(flip == 7) << 20,
        }
    }

    /// A well-formed request with arbitrary keys and ranges.
    fn request(&mut self, which: usize, input: &mut Input<'_>) -> Vec<u8> {
        let target = self.qps[usize::from(input.u8()) % self.qps.len()];
        let qkey = self.core.qp(target).map_or(0, |qp| qp.qkey);
        let dest = Destination { ah: self.handle, qpn: target, qkey };
        let imm = (input.u8() & 1 == 1).then_some(7);
        let inline = |input: &mut Input<'_>| Inline::new(&[7; 80][..usize::from(input.u8() % 81)]);
        let op = match input.u8() % 6 {
            0 => Operation::Send { data: SendData::One(self.sge(input)), imm },
            1 => Operation::Send { data: SendData::Two(self.sge(input), self.sge(input)), imm },
            2 => Operation::Send { data: inline(input).map_or(SendData::Empty, SendData::Inline), imm },
            3 => Operation::Read { remote: self.remote(input), into: Some(self.sge(input)) },
            4 => {
                let data = inline(input).map_or(WriteData::Empty, WriteData::Inline);
                Operation::Write { remote: self.remote(input), data, imm }
            }
            _ => Operation::Write { remote: self.remote(input), data: WriteData::One(self.sge(input)), imm },
        };
        let (index, wide) = (self.produced[which].0, which == 1);
        let geometry = if wide { Geometry::WIDE } else { Geometry::NARROW };
        let mut wqe = SendWqe::new(u64::from(index), dest, op);
        wqe.phase = self.core.qp(self.qps[which]).is_some_and(|qp| qp.sq.phase_of(index) == 1);
        let mut bytes = vec![0; geometry.wqe_size.bytes()];
        // Data that doesn't fit is left out, so that request has no payload.
        let _ = wqe.emit(&geometry, &mut bytes);
        bytes
    }

    fn place(&mut self, which: usize, bytes: &[u8]) {
        let index = self.produced[which].0;
        self.produced[which].0 = index.wrapping_add(1);
        let Some(qp) = self.core.qp(self.qps[which]) else { return };
        let slot = (qp.sq.slot_of(index) * qp.sq.entry_size) as usize;
        let len = bytes.len().min(qp.sq.entry_size as usize);
        // SAFETY: the slot lies in the ring and holds the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), qp.sq.buffer().wrapping_add(slot), len) };
    }

    fn ring(&mut self, which: usize, receive: bool, value: u32) {
        let Some(qp) = self.core.qp(self.qps[which]) else { return };
        if receive { qp.rq.ring(value) } else { qp.sq.ring(value) }
    }

    fn post_receive(&mut self, which: usize, input: &mut Input<'_>) {
        let sge = self.sge(input);
        let mut desc = RxDesc::single(input.u16(), sge.addr, sge.length as u16, sge.lkey);
        let control = input.u8();
        let lkey_ctrl = desc.lkey_ctrl.with_first(control & 1 == 0).with_last(control & 2 == 0);
        desc.lkey_ctrl = lkey_ctrl;
        desc.lkey_ctrl.0 |= u32::from(control == 0x44) << 29;
        let index = self.produced[which].1;
        self.produced[which].1 = index.wrapping_add(1);
        if let Some(qp) = self.core.qp(self.qps[which]) {
            let slot = (qp.rq.slot_of(index) * 16) as usize;
            let words = desc.to_words();
            // SAFETY: the slot lies in the ring and has 16 bytes.
            unsafe { std::ptr::copy_nonoverlapping(words.as_ptr().cast(), qp.rq.buffer().wrapping_add(slot), 16) };
        }
        self.ring(which, true, self.produced[which].1);
    }

    fn poll(&mut self, times: u8) {
        for _ in 0..=times {
            self.now += Duration::from_micros(30);
            self.core.pass(self.now);
        }
        self.check();
    }

    fn check(&mut self) {
        self.regions.iter().for_each(Guarded::check);
        let other = &self.regions[3];
        assert!(other.bytes[LEN..2 * LEN] == [1; LEN], "another domain's memory was written");
        for qpn in self.qps.clone() {
            if let Some(qp) = self.core.qp(qpn) {
                assert!(qp.outstanding <= qp.sq.entries, "more outstanding than the ring holds");
            }
        }
    }

    /// Does what software does with its queues.
    fn software(&mut self, input: &mut Input<'_>) {
        let which = usize::from(input.u8()) % 2;
        match input.u8() % 9 {
            0..=2 => {
                let bytes = self.request(which, input);
                self.place(which, &bytes);
                self.ring(which, false, self.produced[which].0);
            }
            3 => {
                let mut bytes = self.request(which, input);
                let (at, value) = (usize::from(input.u8()) % bytes.len(), input.u8());
                bytes[at] = value;
                self.place(which, &bytes);
                self.ring(which, false, self.produced[which].0);
            }
            4 => {
                let bytes = input.bytes(128);
                self.place(which, bytes);
            }
            5 => {
                let value = if input.u8() & 1 == 0 {
                    self.produced[which].0.wrapping_add(input.u8().into())
                } else {
                    input.u32()
                };
                self.ring(which, false, value);
            }
            6 => self.post_receive(which, input),
            7 => {
                let value = input.u32();
                self.ring(which, true, value);
            }
            _ => match input.u8() % 8 {
                0 => self.core.close_qp(self.qps[which]),
                1 => {
                    let keys = self.regions[usize::from(input.u8()) % self.regions.len()].keys;
                    let _ = self.core.regions.remove(keys);
                }
                2 => self.core.close_handle(self.handle),
                _ => {}
            },
        }
    }
}

/// A GID that no other card on this machine has.
fn gid(card: u32, side: u32) -> Gid {
    let number = u64::from(std::process::id()) << 32 | u64::from(card.rotate_left(1) ^ side);
    Gid { address: None, secret: number.to_be_bytes() }
}

/// Rings and doorbells of a card that talks to itself.
pub fn rings(data: &[u8]) {
    let mut input = Input(data);
    let own = gid(0, 0);
    let mut card = TestCard::new(&mut input, own, None, own);
    while !input.is_empty() {
        card.software(&mut input);
        card.poll(input.u8() % 4);
    }
    card.poll(40);
}

/// The peer at the other end of the wire, which sends arbitrary bytes.
struct MaliciousPeer {
    /// Connections that the peer or the card opened.
    links: Vec<RingPair>,
    accepting: Vec<Accepting>,
    listener: Listener,
}

impl MaliciousPeer {
    fn progress(&mut self, own: &Gid) {
        self.accepting.extend(self.listener.accept().ok().flatten());
        for accepting in &mut self.accepting {
            if let Ok(Some((_, link))) = accepting.proceed(own) {
                self.links.push(link);
            }
        }
        self.links.retain_mut(|link| link.proceed().is_ok());
        for link in &mut self.links {
            // The peer reads everything, or else the card would run out of room.
            while link.rx.packets_arrived()
                && let Ok(Some((header, _))) = link.rx.peek()
            {
                link.rx.pop(header.len);
            }
        }
    }

    fn say(&mut self, card: &mut TestCard, input: &mut Input<'_>) {
        let count = self.links.len().max(1);
        let at = usize::from(input.u8()) % count;
        let header = packet(card, input);
        let payload = [9u8; 256];
        let Some(link) = self.links.get_mut(at) else { return };
        match input.u8() % 8 {
            0 => {
                // A word with an arbitrary value, anywhere, including the cursors.
                let (memory, len) = link.memory();
                let (area, shift, value) = (input.u8(), input.u16(), input.u64());
                let at = match area % 4 {
                    0 => usize::from(shift) % (2 * 4096),
                    1 => (usize::from(shift) % 512) & !63,
                    _ => 2 * 4096 + usize::from(shift) * 8 % (len - 2 * 4096),
                } & !7;
                // SAFETY: the word lies in the connection's mapping.
                unsafe { soft_nic::memory::store_release(memory.wrapping_add(at).cast(), value) };
            }
            1 => drop(self.links.swap_remove(at)),
            // SAFETY: `payload` holds as many bytes as the longest packet.
            _ => drop(unsafe { link.tx.push(&header, payload.as_ptr()) }),
        }
        if let Some(link) = self.links.get_mut(at) {
            link.flush();
        }
    }
}

/// A packet that may name one of the card's queues or requests.
fn packet(card: &mut TestCard, input: &mut Input<'_>) -> Header {
    let target = card.qps[usize::from(input.u8()) % card.qps.len()];
    let qkey = card.core.qp(target).map_or(0, |qp| qp.qkey);
    let kinds = [Kind::Write, Kind::Write, Kind::Ack, Kind::Read, Kind::Data, Kind::Abort, Kind::Send];
    let kind = input.of(&kinds);
    let remote = card.remote(input);
    let tokens: Vec<u64> = card.qps.iter().flat_map(|qpn| card.core.waiting(*qpn)).collect();
    let pick = usize::from(input.u8());
    let token = tokens.get(pick % tokens.len().max(1)).copied().filter(|_| pick < 200).unwrap_or(pick as u64);
    let (total, offset, len) = (input.u16(), input.u16(), input.u8());
    let mut header = Header {
        src_qpn: input.u16(),
        dst_qpn: target,
        flags: u16::from(input.u8()),
        qkey,
        rkey: remote.rkey,
        addr: remote.addr,
        total: total.into(),
        offset: offset.into(),
        len: len.into(),
        imm: 3,
        status: input.u8() % 20,
        ..Header::new(kind, token)
    };
    match input.u8() % 4 {
        0 => {}
        1 => (header.offset, header.total) = (0, header.len),
        2 => (header.offset, header.len) = (0, 0),
        _ => header.offset %= header.total.saturating_sub(header.len).max(1),
    }
    header
}

/// A card with a malicious peer, over shared memory and with packets from a stream.
pub fn wires(data: &[u8]) {
    static BENCHES: AtomicU32 = AtomicU32::new(1);
    let number = BENCHES.fetch_add(1, Ordering::Relaxed);
    let (own, peer) = (gid(number, 0), gid(number, 1 << 31));
    let mut input = Input(data);
    let (Ok(listener), Ok(theirs)) = (Listener::bind(&own), Listener::bind(&peer)) else { return };
    let mut card = TestCard::new(&mut input, own, Some(listener), peer);
    let links = RingPair::connect(&peer, &own).ok().flatten().into_iter().collect();
    let mut peer_side = MaliciousPeer { links, accepting: Vec::new(), listener: theirs };
    card.poll(0);
    while !input.is_empty() {
        match input.u8() % 4 {
            0 => card.software(&mut input),
            1 => {
                let header = packet(&mut card, &mut input);
                let bytes = input.bytes(usize::from(input.0.first().copied().unwrap_or_default()));
                let arrived = Arrived::with(&[&header.to_bytes()[..], bytes].concat());
                if let Ok(Some((header, _))) = arrived.peek() {
                    card.core.arrive(u32::from(input.u8() % 4), &header, &bytes[..header.len as usize]);
                }
            }
            _ => peer_side.say(&mut card, &mut input),
        }
        card.poll(input.u8() % 4);
        peer_side.progress(&peer);
    }
    drop(peer_side);
    card.poll(20);
}
