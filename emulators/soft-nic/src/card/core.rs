//! The card's state, behind one lock: the engine works on it, set-up changes it.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use efa_dp_direct::wire::CompStatus;
use gin_check::event::{self, Log};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::connection::{Connection, Transport};
use super::counter::{Counter, Event};
use super::qp::{Qp, Token};
use super::queue::{CompletionRing, Watch};
use super::region::Regions;
use super::reorder::ReorderBuffer;
use super::slab::Slab;
use super::statistics::Statistics;
use crate::address::Gid;
use crate::config::{Config, WireChoice};
use crate::random::Random;
use crate::trace;
use crate::wire::{shm, tcp};

/// An address handle: names a card that a protection domain's requests go to.
#[derive(Debug)]
pub(crate) struct Handle {
    pub pd: u32,
    pub gid: Gid,
    pub uses: u32,
}

/// Another card, by its GID.
#[derive(Debug, Default)]
pub(crate) struct RemoteCard {
    /// The connection that carries requests to the card.
    pub connection: Option<u32>,
    /// Set when the card is gone for good. Requests to it complete with this status.
    pub dead: Option<CompStatus>,
    /// How many address handles this card has for it.
    pub handles: u32,
}

/// Where other cards reach this one: from its own host, and from other hosts.
#[derive(Default)]
pub(crate) struct Listeners {
    pub shm: Option<shm::Listener>,
    pub tcp: Option<tcp::Listener>,
}

/// The state of a card.
pub struct Core {
    pub(crate) card: u32,
    /// The card's name.
    pub gid: Gid,
    /// The GID of the parent process's card that this one stands for.
    pub(crate) inherited_gid: Option<Gid>,
    /// The card's settings.
    pub config: Config,
    /// Source of keys.
    pub random: Random,
    pub(crate) qps: Slab<Box<Qp>>,
    /// The queue pairs whose doorbells the card reads.
    pub(crate) active: Vec<Watch>,
    /// Completion queues.
    pub cqs: Slab<CompletionRing>,
    /// Completion counters.
    pub counters: Slab<Counter>,
    /// Registered memory.
    pub regions: Regions,
    pub(crate) handles: Slab<Handle>,
    /// Address handles by protection domain and card.
    pub(crate) handle_of: HashMap<(u32, Gid), u32>,
    pub(crate) remote_cards: HashMap<Gid, RemoteCard>,
    pub(crate) connections: Slab<Connection>,
    pub(crate) listeners: Listeners,
    /// The port for other hosts accepts connections.
    pub(crate) listens: bool,
    /// When to accept connections again after descriptors ran out, by the card's clock.
    pub(crate) accept_after: Option<u64>,
    /// The log already says that descriptors ran out.
    exhausted: bool,
    refusals: u32,
    pub(crate) epoll: Epoll,
    /// Sends whose peer had no receive, with the time of the next attempt.
    pub(crate) unready: Vec<(u64, Token)>,
    /// A copy of the GPU memory that is being sent.
    pub(crate) staging: Vec<u8>,
    /// Requests that faults delay or reorder; `None` without such faults.
    pub(crate) reorder_buffer: Option<ReorderBuffer>,
    /// Microseconds that the process has run, without the time it was stopped.
    pub(crate) clock_us: u64,
    /// Time of the latest poll.
    pub(crate) polled_at: Instant,
    /// Requests that the card has taken, over all queue pairs.
    pub(crate) requests: u64,
    /// The card's statistics.
    pub statistics: Statistics,
    /// Number of polls.
    pub(crate) polls: u32,
    /// How many of the latest polls in a row found nothing to do.
    pub(crate) idle_polls: u32,
    /// The card's clock when the card stopped responding (fault `die_after`, or a failure of the engine).
    pub(crate) dead_since: Option<u64>,
    pub(super) lines: u32,
    /// The trace; `None` without `SOFTEFA_TRACE`, or after its file failed.
    pub(crate) trace: Option<trace::Writer>,
    /// The records for `ferrogin check`; `None` without `GIN_CHECK`.
    pub(crate) check: Option<Log>,
}

/// Epoll data of the listening sockets.
pub(crate) const SHM_LISTENER: u64 = u64::MAX;
pub(crate) const TCP_LISTENER: u64 = u64::MAX - 1;
/// Connection 0 leads to the card itself.
pub(crate) const LOOPBACK: u32 = 0;
/// Maximum number of log lines per card: a broken program can violate one rule a million times.
const MAX_LINES: u32 = 200;
/// Maximum number of lines about one queue pair's requests that broke the same rule.
const MAX_QP_LINES: u32 = 4;
/// Maximum number of lines about one queue pair's requests, whatever rules they broke.
const MAX_QP_LINES_IN_ALL: u32 = 8;
/// Maximum number of lines about refused connections and packets: a peer can cause as many as it likes.
const MAX_REFUSALS: u32 = 20;

/// Opens the trace. If that fails, the program that asked for it is told at once.
fn open_trace(path: &Path, card: u32, gid: &Gid) -> std::io::Result<trace::Writer> {
    trace::Writer::open(path, card, gid).inspect_err(|error| {
        let path = path.display();
        crate::log::line(format_args!(
            "softefa{card}: SOFTEFA_TRACE={path} cannot be written: {error}. Name a new file in a directory that this user may write, \
             or unset the variable"
        ));
    })
}

/// Returns how many of a queue pair's lines are the first about a rule.
fn first_lines(qp: &Qp) -> u32 {
    qp.lines.iter().map(|(_, times)| (*times).min(MAX_QP_LINES)).sum()
}

/// Opens this process's file of records.
fn open_records() -> std::io::Result<Option<Log>> {
    let Some(directory) = event::directory() else { return Ok(None) };
    Log::create(&directory, "card").map(Some).inspect_err(|error| {
        let directory = directory.display();
        crate::log::line(format_args!(
            "softefa: GIN_CHECK={directory} cannot be written: {error}. Name a directory that this user may write, or unset the variable"
        ));
    })
}

impl Core {
    pub(crate) fn new(card: u32, gid: Gid, config: Config, listeners: Listeners) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let trace = config.trace.as_deref().map(|path| open_trace(path, card, &gid)).transpose()?;
        let reorder_buffer = config.faults.hold().then(|| ReorderBuffer::new(&config.faults, card));
        let mut core = Self {
            card,
            gid,
            inherited_gid: None,
            qps: if config.faults.old_qpns { Slab::default() } else { Slab::newest_first() },
            config,
            random: Random::from_system(),
            active: Vec::new(),
            cqs: Slab::default(),
            counters: Slab::default(),
            regions: Regions::default(),
            handles: Slab::default(),
            handle_of: HashMap::new(),
            remote_cards: HashMap::new(),
            connections: Slab::default(),
            listeners,
            listens: false,
            accept_after: None,
            exhausted: false,
            refusals: 0,
            epoll,
            unready: Vec::new(),
            staging: Vec::new(),
            reorder_buffer,
            clock_us: 0,
            polled_at: Instant::now(),
            requests: 0,
            statistics: Statistics::default(),
            polls: 0,
            idle_polls: 0,
            dead_since: None,
            lines: 0,
            trace,
            check: open_records()?,
        };
        core.check_card();
        core.connections.insert(Connection::loopback(gid));
        core.remote_cards.insert(gid, RemoteCard { connection: Some(LOOPBACK), ..RemoteCard::default() });
        core.watch_listeners();
        Ok(core)
    }

    /// Adds the listening sockets to the epoll set.
    pub(crate) fn watch_listeners(&self) {
        if let Some(listener) = &self.listeners.shm {
            self.watch(listener.fd(), SHM_LISTENER);
        }
        if let Some(listener) = self.listeners.tcp.as_ref().filter(|_| self.listens) {
            self.watch(listener.fd(), TCP_LISTENER);
        }
    }

    /// Adds a socket to the epoll set.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, data: u64) {
        // Without the event, the card still detects a dead peer by its silence.
        let _ = self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, data));
    }

    /// Returns a descriptor that becomes readable when one of the card's sockets has an event.
    pub(crate) fn socket_events(&self) -> std::io::Result<OwnedFd> {
        self.epoll.0.as_fd().try_clone_to_owned()
    }

    /// Logs one line about a violated rule or a wire.
    pub(crate) fn log(&mut self, what: fmt::Arguments<'_>) {
        self.lines = self.lines.saturating_add(1);
        if self.lines <= MAX_LINES {
            crate::log::line(format_args!("softefa{}: {what}", self.card));
        }
        if self.lines == MAX_LINES {
            crate::log::line(format_args!("softefa{}: no more lines from this card", self.card));
        }
    }

    /// Logs a line about a request from or for a queue pair that broke `rule`. Only the first lines are printed; how
    /// many were left out is logged when the queue pair is closed.
    pub(crate) fn log_of(&mut self, qpn: u16, rule: &str, what: fmt::Arguments<'_>) {
        let is_printed = self.qp(qpn).is_none_or(|qp| {
            let times = qp.count_line(rule);
            times <= MAX_QP_LINES && first_lines(qp) <= MAX_QP_LINES_IN_ALL
        });
        if is_printed {
            self.log(what);
        }
    }

    /// Logs how many lines [`Core::log_of`] left out.
    pub(crate) fn log_rest_of(&mut self, qp: &Qp) {
        let all = qp.lines.iter().fold(0, |sum: u32, (_, times)| sum.saturating_add(*times));
        let more = all - first_lines(qp).min(MAX_QP_LINES_IN_ALL);
        if more > 0 {
            self.log(format_args!("QP {}: {more} more requests failed like those above", qp.qpn));
        }
    }

    /// Logs one line about a connection or a packet that was not accepted.
    pub(crate) fn log_refusal(&mut self, what: fmt::Arguments<'_>) {
        self.refusals = self.refusals.saturating_add(1);
        if self.refusals <= MAX_REFUSALS {
            self.log(what);
        }
        if self.refusals == MAX_REFUSALS {
            self.log(format_args!("no more lines about what this card refuses"));
        }
    }

    /// Logs, once, that the card ran out of sockets.
    pub(crate) fn log_exhaustion(&mut self, what: fmt::Arguments<'_>) {
        if !std::mem::replace(&mut self.exhausted, true) {
            self.log(what);
        }
    }

    /// Stops logging.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn mute_log(&mut self) {
        self.lines = MAX_LINES + 1;
    }

    /// Whether packets may arrive on a socket.
    pub(crate) fn has_streams(&self) -> bool {
        self.connections.iter().any(|(_, connection)| matches!(connection.transport, Transport::Tcp(_)))
    }

    /// Whether this card looks for others on its own host first.
    pub(crate) fn has_shared_memory(&self) -> bool {
        !matches!(self.config.wire, WireChoice::Tcp)
    }

    /// Whether a card that is not found on this host may be on another one.
    pub(crate) fn may_be_elsewhere(&self, peer: &Gid) -> bool {
        match &self.config.wire {
            // A card with this host's address is here, or nowhere.
            WireChoice::Auto => peer.ip().is_some_and(|ip| self.gid.ip() != Some(ip)),
            WireChoice::Shm => false,
            WireChoice::Tcp => true,
        }
    }

    /// Returns a queue pair by its number.
    pub fn qp(&mut self, qpn: u16) -> Option<&mut Qp> {
        if qpn == 0 {
            return None;
        }
        self.qps.get_mut(u32::from(qpn)).map(|qp| &mut **qp)
    }

    /// Increments the counters of `event`.
    pub(crate) fn tick(&mut self, qpn: u16, event: Event, failed: bool) {
        let Some(qp) = self.qps.get(u32::from(qpn)) else { return };
        for id in &qp.counters[event as usize] {
            if let Some(counter) = self.counters.get_mut(*id) {
                let word = if failed { &mut counter.errors } else { &mut counter.completions };
                word.add(1);
            }
        }
    }

    /// Returns a request if it is still outstanding.
    pub(crate) fn outstanding(&mut self, token: Token) -> Option<&mut super::qp::Outstanding> {
        self.qp(token.qpn())?.get(token)
    }
}
