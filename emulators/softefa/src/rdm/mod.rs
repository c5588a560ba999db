//! The data path of the `efa` fabric: messages of any length, in order, with tags, over the card's sends and reads.
//!
//! A short message travels in one packet and is copied on both sides. For a longer one, the sender registers and
//! announces its buffers; the receiver reads them into its own memory and then sends a receipt. Messages and receipts
//! from one endpoint to another are numbered, because the card does not keep their order. The protocol progresses when
//! the application posts or reads a queue or a counter.

mod matching;
mod packet;
mod pool;
mod receiving;
mod rma;
mod sending;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ffi::c_void;
use std::time::{Duration, Instant};

use efa_dp_direct::cq::{Cqe, RawCqe, SendCqe, Sender};
use efa_dp_direct::wire::RxDesc;
use efa_dp_direct::wqe::{Destination, Operation, RemoteMem, RequestIds, SendData, Sge};
use ferrogin_libfabric::bindings as fi;

use super::bindings::{Bindings, destination};
use super::completion::{Entry, Failure};
use super::guard::Code;
use super::queue_pair::{QueuePair, RingReader};
#[cfg(feature = "fuzzing")]
pub use packet::check_packet;
use soft_nic::address::{Address, Gid};
use soft_nic::card::region::Keys;
use soft_nic::card::{Core, Slab};

use matching::Space;
use packet::{HEAD_LEN, Head, Kind};
use pool::{BUFFER_LEN, Pool};
use receiving::{Early, Fetch, Multi};
use rma::Rma;
use sending::Send;

/// How many receives are always posted.
pub(super) const RECEIVES: u16 = 256;
/// Maximum number of packets in flight.
const PACKETS: u16 = 256;
/// Number of entries in the send queue.
pub(super) const REQUESTS: u32 = 1024;
/// Number of entries in the completion ring: one for each request and receive, the others for peers' writes with data.
pub(super) const RING: u32 = 4096;
/// How many requests and buffers the protocol withholds from the application's calls.
const RESERVE: usize = 8;
/// How many entries one poll takes from the ring.
const BURST: usize = 256;
/// Time between two pings of a peer that still has to read a message.
const PING_EVERY: Duration = Duration::from_secs(1);

/// The purpose of a request to the card.
#[derive(Debug)]
enum Request {
    Packet {
        buffer: u16,
        peer: u32,
        send: Option<u32>,
    },
    /// Part of a [`Fetch`].
    Fetch(u32),
    /// Part of an [`Rma`].
    Rma(u32),
}

/// The protocol's work that waits for room in the send queue.
#[derive(Debug)]
enum Job {
    Packet { peer: u32, head: Head },
    Fetch { peer: u32, fetch: u32, from: RemoteMem, into: Sge },
}

/// Another endpoint.
#[derive(Debug)]
struct Peer {
    address: Address,
    ahn: u16,
    /// Numbers of the next message or receipt to the peer, and of the next from it.
    next_to: u32,
    next_from: u32,
    /// Messages and receipts from the peer that arrived out of order.
    early: BTreeMap<u32, Early>,
}

/// The parts of an [`Rdm`].
pub(super) struct Parts {
    pub queue_pair: QueuePair<()>,
    pub ring: RingReader,
    /// The ring's number on the card.
    pub ring_id: u32,
}

pub(super) struct Rdm {
    queue_pair: QueuePair<Request>,
    ring: Option<RingReader>,
    ring_id: u32,
    packets: Pool,
    receives: Pool,
    peers: Slab<Peer>,
    peer_of: HashMap<Address, u32>,
    /// The peers' cards, by address handle.
    card_of: HashMap<u16, Gid>,
    jobs: VecDeque<Job>,
    spaces: [Space; 2],
    /// Messages that the application claimed and may receive later.
    claimed: Vec<(*mut c_void, matching::Waiting)>,
    sends: Slab<Send>,
    fetches: Slab<Fetch>,
    multis: Slab<Multi>,
    rmas: Slab<Rma>,
    /// How much room a multi-receive buffer needs to take another message.
    pub(super) min_multi_recv: usize,
    next_ping: Instant,
}

// SAFETY: the application's pointers are followed only while their operations are outstanding, under the data path's
// lock.
unsafe impl std::marker::Send for Rdm {}

impl Rdm {
    /// # Errors
    /// `ENOMEM` if there is no memory.
    pub(super) fn new(bindings: &Bindings, parts: Parts) -> Result<Self, Code> {
        let mut rdm = Self {
            queue_pair: parts.queue_pair.with_requests(),
            ring: Some(parts.ring),
            ring_id: parts.ring_id,
            packets: Pool::new(&bindings.card, bindings.pd, PACKETS)?,
            receives: Pool::new(&bindings.card, bindings.pd, RECEIVES)?,
            peers: Slab::default(),
            peer_of: HashMap::new(),
            card_of: HashMap::new(),
            jobs: VecDeque::new(),
            spaces: Default::default(),
            claimed: Vec::new(),
            sends: Slab::default(),
            fetches: Slab::default(),
            multis: Slab::default(),
            rmas: Slab::default(),
            min_multi_recv: 64,
            next_ping: Instant::now() + PING_EVERY,
        };
        while let Some(buffer) = rdm.receives.take() {
            rdm.post_receive(buffer);
        }
        rdm.queue_pair.ring_receives();
        Ok(rdm)
    }

    fn post_receive(&mut self, buffer: u16) {
        let (at, lkey) = (self.receives.at(buffer) as u64, self.receives.lkey());
        self.queue_pair.post_receive(&[RxDesc::single(buffer, at, BUFFER_LEN as u16, lkey)]);
    }

    /// Returns the peer at a packet's or a call's address, adding it if it is new.
    fn peer(&mut self, bindings: &Bindings, address: Address) -> Result<u32, Code> {
        if let Some(peer) = self.peer_of.get(&address) {
            return Ok(*peer);
        }
        let ahn = bindings.card.lock().open_handle(bindings.pd, address.gid)?;
        let peer = Peer { address, ahn, next_to: 0, next_from: 0, early: BTreeMap::new() };
        let peer = self.peers.insert(peer);
        self.peer_of.insert(address, peer);
        self.card_of.insert(ahn, address.gid);
        Ok(peer)
    }

    /// Returns the card that sent a packet.
    fn sender_card(&self, bindings: &Bindings, sender: &Sender) -> Option<Gid> {
        match *sender {
            Sender::Ah(ahn) => self.card_of.get(&ahn).copied().or_else(|| bindings.card.lock().card_of(ahn)),
            Sender::Gid(gid) => Gid::from_bytes(gid?).ok(),
        }
    }

    fn destination(&self, peer: u32) -> Destination {
        self.peers.get(peer).map_or(Destination::default(), |peer| destination(&peer.address, peer.ahn))
    }

    /// Returns how many requests the application may post now.
    fn room(&mut self, bindings: &Bindings) -> usize {
        let room = |rdm: &Self| {
            let room = rdm.queue_pair.room().min(rdm.packets.free()).saturating_sub(RESERVE);
            if rdm.jobs.is_empty() { room } else { 0 }
        };
        if room(self) == 0 {
            bindings.card.poll();
            self.progress(bindings);
        }
        room(self)
    }

    /// Sends a packet whose payload `fill` writes; [`QueuePair::ring`] gives it to the card. Returns false if there is
    /// no room.
    fn send_packet(
        &mut self,
        peer: u32,
        head: &Head,
        payload: usize,
        send: Option<u32>,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        if self.queue_pair.room() == 0 {
            return false;
        }
        let Some(buffer) = self.packets.take() else { return false };
        // SAFETY: the buffer was just taken from the free ones, so the card does not read it.
        let bytes = unsafe { self.packets.fill(buffer, HEAD_LEN + payload) };
        let (front, rest) = bytes.split_at_mut(HEAD_LEN);
        front.copy_from_slice(&head.to_bytes());
        fill(rest);
        let sge = Sge {
            addr: self.packets.at(buffer) as u64,
            length: (HEAD_LEN + payload) as u32,
            lkey: self.packets.lkey(),
        };
        let op = Operation::Send { data: SendData::One(sge), imm: None };
        let to = self.destination(peer);
        if self.queue_pair.post(to, op, Request::Packet { buffer, peer, send }).is_none() {
            self.packets.give(buffer);
            return false;
        }
        true
    }

    /// Takes the card's completions and continues all operations.
    pub(super) fn progress(&mut self, bindings: &Bindings) {
        let mut reposted = false;
        for _ in 0..BURST {
            let Some(raw) = self.ring.as_mut().and_then(RingReader::next) else { break };
            reposted |= self.complete(bindings, &raw);
        }
        if reposted {
            self.queue_pair.ring_receives();
        }
        self.run_jobs();
        self.ping(bindings);
    }

    /// Handles one entry of the ring. Returns true if a receive was reposted.
    fn complete(&mut self, bindings: &Bindings, raw: &RawCqe) -> bool {
        match Cqe::parse(raw, RequestIds::Bits64) {
            Ok(Cqe::Send(cqe)) => {
                self.sent(bindings, &cqe);
                false
            }
            Ok(Cqe::Recv(cqe)) => self.received(bindings, &cqe),
            Err(_) => false,
        }
    }

    fn sent(&mut self, bindings: &Bindings, cqe: &SendCqe) {
        let failure = (!cqe.status.is_ok()).then(|| Failure::of_status(cqe.status.raw()));
        match self.queue_pair.complete(cqe.wr_id) {
            Some(Request::Packet { buffer, peer, send }) => {
                self.packets.give(buffer);
                match send {
                    Some(send) => self.packet_sent(bindings, send, failure),
                    None => {
                        if let Some(failure) = failure {
                            self.peer_failed(bindings, peer, failure);
                        }
                    }
                }
            }
            Some(Request::Fetch(fetch)) => self.fetched(bindings, fetch, failure),
            Some(Request::Rma(rma)) => self.rma_done(bindings, rma, failure),
            None => {}
        }
    }

    fn run_jobs(&mut self) {
        while let Some(job) = self.jobs.pop_front() {
            if self.queue_pair.room() == 0 {
                self.jobs.push_front(job);
                break;
            }
            match job {
                Job::Packet { peer, head } => {
                    if !self.send_packet(peer, &head, 0, None, |_| {}) {
                        self.jobs.push_front(Job::Packet { peer, head });
                        break;
                    }
                }
                Job::Fetch { peer, fetch, from, into } => {
                    let op = Operation::Read { remote: from, into: Some(into) };
                    let to = self.destination(peer);
                    // There is room, as checked, and a read always fits into a request.
                    let _ = self.queue_pair.post(to, op, Request::Fetch(fetch));
                }
            }
        }
        self.queue_pair.ring();
    }

    /// Returns the number of the next message or receipt to a peer.
    fn next_number(&mut self, peer: u32) -> Option<u32> {
        let peer = self.peers.get_mut(peer)?;
        peer.next_to = peer.next_to.wrapping_add(1);
        Some(peer.next_to.wrapping_sub(1))
    }

    /// Sends one of the protocol's control packets.
    fn tell(&mut self, bindings: &Bindings, peer: u32, kind: Kind, id: u64, data: u64) {
        let seq = if kind == Kind::Done { self.next_number(peer).unwrap_or(0) } else { 0 };
        let head = Head { kind, flags: 0, seq, from: bindings.address, len: 0, tag: 0, data, id };
        self.jobs.push_back(Job::Packet { peer, head });
    }

    /// Pings the peers that still have to read a message. The ping of a dead peer fails.
    fn ping(&mut self, bindings: &Bindings) {
        if self.sends.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.next_ping {
            return;
        }
        self.next_ping = now + PING_EVERY;
        let mut peers: Vec<u32> = self.sends.iter().filter(|(_, s)| s.awaits_receipt()).map(|(_, s)| s.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        for peer in peers {
            self.tell(bindings, peer, Kind::Ping, 0, 0);
        }
        self.run_jobs();
    }

    /// Cancels a receive.
    pub(super) fn cancel(&mut self, bindings: &Bindings, context: *mut c_void) -> Result<(), Code> {
        let cancelled = self.spaces.iter_mut().enumerate().find_map(|(i, space)| Some((i, space.cancel(context)?)));
        let (space, receive) = cancelled.ok_or(Code(fi::FI_ENOENT))?;
        let kind = if space == 1 { fi::FI_TAGGED } else { fi::FI_MSG };
        let released = if receive.multi.is_some_and(|multi| self.close_multi(multi)) { fi::FI_MULTI_RECV } else { 0 };
        let failure = Some(Failure::of_code(fi::FI_ECANCELED));
        let entry = Entry { tag: receive.tag, failure, ..Entry::new(context, fi::FI_RECV | kind | released) };
        bindings.report_received(true, entry);
        Ok(())
    }

    /// Whether every packet that a peer waits for has been sent.
    pub(super) fn is_quiet(&self) -> bool {
        self.queue_pair.outstanding() == 0 && self.jobs.is_empty()
    }

    /// Stops polling the ring, and releases the address handles.
    pub(super) fn close(&mut self, bindings: &Bindings) {
        self.ring = None;
        let handles: Vec<u16> = self.peers.iter().map(|(_, peer)| peer.ahn).collect();
        let mut core = bindings.card.lock();
        for ahn in handles {
            core.close_handle(ahn);
        }
    }

    /// Frees this endpoint's objects on the card after its queue pair is closed.
    pub(super) fn free(&mut self, bindings: &Bindings) {
        let mut keys = vec![self.packets.keys(), self.receives.keys()];
        keys.extend(self.sends.iter().flat_map(|(_, send)| send.keys.iter().copied()));
        keys.extend(self.fetches.iter().flat_map(|(_, fetch)| fetch.keys.iter().copied()));
        keys.extend(self.rmas.iter().flat_map(|(_, rma)| rma.keys.iter().copied()));
        self.release(bindings, &keys);
        // A closed queue pair uses no ring.
        let _ = bindings.card.lock().close_cq(self.ring_id);
    }

    fn release(&self, bindings: &Bindings, keys: &[Keys]) {
        pool::deregister(bindings, keys);
    }
}

/// Creates a completion ring for one endpoint on the card.
///
/// # Errors
/// `ENOMEM` if there is no memory.
pub(super) fn open_ring(
    core: &mut Core,
    signals: Vec<std::sync::Arc<soft_nic::card::signal::Signal>>,
) -> Result<(u32, RingReader), Code> {
    let mut ring = soft_nic::card::queue::CompletionRing::new(RING)?;
    ring.signals = signals;
    // SAFETY: the ring stays on the card until `Rdm::free`, which comes after the reader is dropped in `Rdm::close`.
    let reader = unsafe { RingReader::new(ring.buffer(), RING) };
    Ok((core.cqs.insert(ring), reader))
}
