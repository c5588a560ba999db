//! The card's state, behind one lock: the engine works on it, set-up changes it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use efa_dp_direct::wire::CompStatus;
use nix::sys::epoll::{Epoll, EpollCreateFlags};

use super::connection::Connection;
use super::counter::{Counter, EVENTS, Event};
use super::hold::Holds;
use super::qp::{Qp, Token};
use super::queue::{CompletionRing, Watch, WorkQueue};
use super::region::Regions;
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::random::Random;
use crate::wire::hello::WELCOME_LEN;
use crate::wire::message::Wire;
use crate::wire::shm::Listener;

/// Entries that can be numbered and given back.
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<Option<T>>,
    free: VecDeque<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: VecDeque::new() }
    }
}

impl<T> Slab<T> {
    /// Numbers are reused oldest first, so that a stale one is noticed.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(at) = self.free.pop_front() {
            self.entries[at as usize] = Some(value);
            return at;
        }
        self.entries.push(Some(value));
        self.entries.len() as u32 - 1
    }

    /// Takes an entry out.
    pub fn remove(&mut self, at: u32) -> Option<T> {
        let value = self.entries.get_mut(at as usize)?.take()?;
        self.free.push_back(at);
        Some(value)
    }

    /// The entry with this number.
    pub fn get(&self, at: u32) -> Option<&T> {
        self.entries.get(at as usize)?.as_ref()
    }

    /// The entry with this number.
    pub fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.entries.get_mut(at as usize)?.as_mut()
    }

    /// All entries with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries.iter().enumerate().filter_map(|(at, e)| Some((at as u32, e.as_ref()?)))
    }

    /// One more than the greatest number in use.
    pub fn bound(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

/// An address handle: a card that may be talked to.
#[derive(Debug)]
pub(crate) struct Handle {
    pub gid: Gid,
    pub uses: u32,
}

/// What is known of another card.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    /// Where requests to it go.
    pub connection: Option<u32>,
    /// It is gone for good; requests complete so.
    pub dead: Option<CompStatus>,
}

/// Set-up that the card refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Every queue pair number is in use.
    #[error("the card has no queue pairs left")]
    QueuePairs,
    /// Every address handle number is in use.
    #[error("the card has no address handles left")]
    Handles,
    /// As many counters as the card has are in use.
    #[error("the card has {0} completion counters, all in use")]
    Counters(u32),
    /// The system gives no memory for a ring.
    #[error("no memory")]
    Memory,
    /// Something that is open still uses the object.
    #[error("still in use")]
    Busy,
}

/// What a card can be reached by.
pub(crate) struct Wires {
    pub listener: Option<Listener>,
    pub messages: Option<Wire>,
}

/// The state of a card.
pub struct Core {
    pub(crate) card: u32,
    /// The name of the card.
    pub gid: Gid,
    /// Settings of the card.
    pub config: Config,
    /// Source of keys.
    pub random: Random,
    pub(crate) qps: Slab<Box<Qp>>,
    /// Queue pairs whose doorbells are read.
    pub(crate) active: Vec<Watch>,
    /// Completion queues.
    pub cqs: Slab<CompletionRing>,
    /// Completion counters.
    pub counters: Slab<Counter>,
    /// Registered memory.
    pub regions: Regions,
    pub(crate) handles: Slab<Handle>,
    pub(crate) handle_of: HashMap<Gid, u32>,
    pub(crate) peers: HashMap<Gid, Peer>,
    pub(crate) connections: Slab<Connection>,
    pub(crate) listener: Option<Listener>,
    /// The wire to other hosts.
    pub(crate) messages: Option<Wire>,
    /// Its connections.
    pub(crate) connection_of: HashMap<ferrogin_datagram::Peer, u32>,
    /// Peers of the wire that are to be forgotten, and hellos that are to be answered, when it can be spoken to.
    pub(crate) forgotten: Vec<ferrogin_datagram::Peer>,
    pub(crate) welcomes: Vec<(ferrogin_datagram::Peer, [u8; WELCOME_LEN])>,
    pub(crate) epoll: Epoll,
    /// Sends whose peer had no receive, and when they are tried again.
    pub(crate) unready: Vec<(u64, Token)>,
    /// Bytes of a GPU on their way out.
    pub(crate) staging: Vec<u8>,
    /// Kept back by faults; `None` when nothing ever is.
    pub(crate) holds: Option<Holds>,
    /// Microseconds that this process has been awake, as far as the engine saw.
    pub(crate) clock_us: u64,
    /// When everything was last looked at.
    pub(crate) looked_at: Instant,
    /// Requests taken by the whole card.
    pub(crate) requests: u64,
    /// Looks of the engine, and the latest of them in a row that found nothing to do.
    pub(crate) looks: u32,
    pub(crate) quiet_looks: u32,
    /// The card stopped answering (`die_after`).
    pub(crate) dead: bool,
    lines: u32,
}

/// Connection 0 is the card itself.
pub const LOOPBACK: u32 = 0;
/// Queue pair and handle numbers are 16 bits; 0 is none, 0xffff is no handle.
const MAX_NUMBER: u32 = 0xfffe;
/// After this many lines a card is quiet: a broken program breaks the same rule a million times.
const MAX_LINES: u32 = 200;

impl Core {
    pub(crate) fn new(card: u32, gid: Gid, config: Config, wires: Wires) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let holds = config.faults.hold().then(|| Holds::new(&config.faults, card));
        let mut core = Self {
            card,
            gid,
            config,
            random: Random::from_system(),
            qps: Slab::default(),
            active: Vec::new(),
            cqs: Slab::default(),
            counters: Slab::default(),
            regions: Regions::default(),
            handles: Slab::default(),
            handle_of: HashMap::new(),
            peers: HashMap::new(),
            connections: Slab::default(),
            listener: None,
            messages: None,
            connection_of: HashMap::new(),
            forgotten: Vec::new(),
            welcomes: Vec::new(),
            epoll,
            unready: Vec::new(),
            staging: Vec::new(),
            holds,
            clock_us: 0,
            looked_at: Instant::now(),
            requests: 0,
            looks: 0,
            quiet_looks: 0,
            dead: false,
            lines: 0,
        };
        core.connections.insert(Connection::loopback(gid));
        core.peers.insert(gid, Peer { connection: Some(LOOPBACK), dead: None });
        if let Some(listener) = &wires.listener {
            core.watch(listener.fd(), super::sockets::LISTENER);
        }
        (core.listener, core.messages) = (wires.listener, wires.messages);
        Ok(core)
    }

    /// The descriptor that becomes readable when a socket wants attention.
    pub(crate) fn socket_events(&self) -> std::io::Result<OwnedFd> {
        self.epoll.0.as_fd().try_clone_to_owned()
    }

    /// One line for people; `level` of a broken rule or of the wire.
    pub(crate) fn say(&mut self, what: fmt::Arguments<'_>) {
        self.lines = self.lines.saturating_add(1);
        if self.lines <= MAX_LINES {
            crate::log::line(format_args!("softefa{}: {what}", self.card));
        }
        if self.lines == MAX_LINES {
            crate::log::line(format_args!("softefa{}: no more lines from this card", self.card));
        }
    }

    /// Says nothing from now on.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn hush(&mut self) {
        self.lines = MAX_LINES + 1;
    }

    /// Which wire leads to `peer`.
    pub(crate) fn same_host(&self, peer: &Gid) -> bool {
        match &self.config.wire {
            WireChoice::Auto => peer.host == self.gid.host,
            WireChoice::Shm => true,
            WireChoice::Provider(_) => false,
        }
    }

    /// A queue pair that takes nothing yet.
    pub fn open_qp(&mut self, pd: u32, entry_size: u32, sq: u32, rq: u32) -> Result<u16, SetupError> {
        if self.qps.len() as u32 >= MAX_NUMBER {
            return Err(SetupError::QueuePairs);
        }
        if self.qps.bound() == 0 {
            // Number 0 stays taken by nobody.
            let queue = || WorkQueue::new(64, 1, 0).map(Arc::new).map_err(|_| SetupError::Memory);
            let nobody = Qp::new(0, 0, u32::MAX, (queue()?, queue()?), 0);
            self.qps.insert(Box::new(nobody));
        }
        let number = self.qps.bound() as u16;
        let queue = |size, n| WorkQueue::new(size, n, number).map(Arc::new).map_err(|_| SetupError::Memory);
        let queues = (queue(entry_size, sq)?, queue(super::queue::RQ_ENTRY_LEN, rq)?);
        let mut qp = Box::new(Qp::new(0, self.random.next_u32() | 1, pd, queues, self.random.next_u32()));
        qp.max_batch = self.config.faults.max_batch.min(sq);
        qp.taken = self.config.faults.cntr_start;
        qp.sq.preset(qp.taken);
        let qpn = self.qps.insert(qp) as u16;
        if let Some(qp) = self.qps.get_mut(u32::from(qpn)) {
            qp.qpn = qpn;
        }
        Ok(qpn)
    }

    /// A queue pair by its number.
    pub fn qp(&mut self, qpn: u16) -> Option<&mut Qp> {
        if qpn == 0 {
            return None;
        }
        self.qps.get_mut(u32::from(qpn)).map(|qp| &mut **qp)
    }

    /// From now on the queue pair's doorbell is read.
    pub fn enable_qp(
        &mut self,
        qpn: u16,
        send_cq: u32,
        recv_cq: Option<u32>,
        counters: [Vec<u32>; EVENTS],
    ) -> Result<(), SetupError> {
        for id in counters.iter().flatten() {
            self.counters.get_mut(*id).ok_or(SetupError::Busy)?.attached += 1;
        }
        for cq in [Some(send_cq), recv_cq].into_iter().flatten() {
            self.cqs.get_mut(cq).ok_or(SetupError::Busy)?.bound += 1;
        }
        let qp = self.qp(qpn).ok_or(SetupError::QueuePairs)?;
        (qp.send_cq, qp.recv_cq, qp.counters) = (send_cq, recv_cq, counters);
        qp.enabled = true;
        let watch = Watch::new(qpn, qp.sq.clone(), qp.taken);
        self.active.push(watch);
        Ok(())
    }

    /// The queue pair is gone: nothing it asked for is answered, nothing arrives for it.
    pub fn close_qp(&mut self, qpn: u16) {
        if qpn == 0 {
            return;
        }
        self.active.retain(|watch| watch.qpn != qpn);
        for at in 0..self.connections.bound() {
            self.abort_on(at, qpn);
        }
        if let Some(holds) = &mut self.holds {
            holds.forget(qpn);
        }
        let Some(qp) = self.qps.remove(u32::from(qpn)) else { return };
        if !qp.enabled {
            return;
        }
        for id in qp.counters.iter().flatten() {
            if let Some(counter) = self.counters.get_mut(*id) {
                counter.attached -= 1;
            }
        }
        for cq in [Some(qp.send_cq), qp.recv_cq].into_iter().flatten() {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.bound -= 1;
            }
        }
    }

    /// Adds a counter.
    ///
    /// # Errors
    /// As many counters as the card has are in use.
    pub fn open_counter(&mut self, counter: Counter) -> Result<u32, SetupError> {
        let budget = self.config.faults.cntr_budget;
        if self.counters.len() as u32 >= budget {
            return Err(SetupError::Counters(budget));
        }
        Ok(self.counters.insert(counter))
    }

    /// Takes a counter out.
    ///
    /// # Errors
    /// A queue pair still uses it.
    pub fn close_counter(&mut self, id: u32) -> Result<Option<Counter>, SetupError> {
        match self.counters.get(id) {
            Some(counter) if counter.attached > 0 => Err(SetupError::Busy),
            _ => Ok(self.counters.remove(id)),
        }
    }

    /// Takes a completion queue out.
    ///
    /// # Errors
    /// A queue pair still uses it.
    pub fn close_cq(&mut self, id: u32) -> Result<Option<CompletionRing>, SetupError> {
        match self.cqs.get(id) {
            Some(cq) if cq.bound > 0 => Err(SetupError::Busy),
            _ => Ok(self.cqs.remove(id)),
        }
    }

    /// The handle of a card, made if there is none.
    pub fn open_handle(&mut self, gid: Gid) -> Result<u16, SetupError> {
        if let Some(ahn) = self.handle_of.get(&gid) {
            if let Some(handle) = self.handles.get_mut(*ahn) {
                handle.uses += 1;
            }
            return Ok(*ahn as u16);
        }
        if self.handles.bound() == 0 {
            // Number 0 stays nobody's: a target table's empty entry must not lead anywhere.
            self.handles.insert(Handle { gid, uses: 0 });
        }
        if self.handles.len() as u32 > MAX_NUMBER {
            return Err(SetupError::Handles);
        }
        let ahn = self.handles.insert(Handle { gid, uses: 1 });
        self.handle_of.insert(gid, ahn);
        self.acquaint(&gid, true);
        Ok(ahn as u16)
    }

    /// Gives an address handle back; the last user removes it.
    pub fn close_handle(&mut self, ahn: u16) {
        let Some(handle) = self.handles.get_mut(u32::from(ahn)) else { return };
        handle.uses = handle.uses.saturating_sub(1);
        if handle.uses == 0 && ahn != 0 {
            let gid = handle.gid;
            self.handles.remove(u32::from(ahn));
            self.handle_of.remove(&gid);
            self.acquaint(&gid, false);
        }
    }

    /// RDMA from a card needs a handle for it here, as on hardware.
    fn acquaint(&mut self, gid: &Gid, known: bool) {
        for at in 0..self.connections.bound() {
            if let Some(connection) = self.connections.get_mut(at).filter(|c| c.peer == Some(*gid)) {
                connection.known = known;
            }
        }
    }

    /// Ticks the counters of `event`.
    pub(crate) fn tick(&mut self, qpn: u16, event: Event, failed: bool) {
        let Some(qp) = self.qps.get(u32::from(qpn)) else { return };
        for id in &qp.counters[event as usize] {
            if let Some(counter) = self.counters.get_mut(*id) {
                let word = if failed { &mut counter.errors } else { &mut counter.completions };
                word.add(1);
            }
        }
    }

    /// A request, if it is still outstanding.
    pub(crate) fn outstanding(&mut self, token: Token) -> Option<&mut super::qp::Outstanding> {
        self.qp(token.qpn())?.get(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slab_numbers_return_oldest_first() {
        let mut slab = Slab::default();
        assert_eq!((slab.insert('a'), slab.insert('b'), slab.insert('c')), (0, 1, 2));
        assert_eq!(slab.remove(1), Some('b'));
        assert_eq!(slab.remove(1), None);
        slab.remove(0);
        assert_eq!(slab.len(), 1);
        assert_eq!((slab.insert('d'), slab.insert('e'), slab.insert('f')), (1, 0, 3));
        assert_eq!(slab.iter().count(), 4);
    }
}
