//! Opening, accepting and losing connections to other cards.

use std::os::fd::AsRawFd;

use efa_dp_direct::wire::CompStatus;
use nix::sys::epoll::{EpollEvent, EpollTimeout};

use super::connection::{Connection, Stage, Transport};
use super::core::{Core, LISTENER};
use super::qp::Token;
use crate::wire::shm::{self, ShmError};

/// Connections without a good hello at most. A card sends its hello at once, so the oldest is the least likely to be one.
const MAX_UNPROVEN: usize = 64;
/// Connections that are accepted before the card does other work.
const ACCEPTS: usize = 64;
/// Without descriptors the card accepts nothing for this long.
const ACCEPT_PAUSE_US: u64 = 100_000;

impl Core {
    /// The connection to the card of an address handle, opened if there is none.
    pub(crate) fn route(&mut self, ah: u16) -> Result<u32, CompStatus> {
        let gid = self.handles.get(u32::from(ah)).ok_or(CompStatus::LocalInvalidAh)?.gid;
        let peer = self.remote_cards.entry(gid).or_default();
        if let Some(at) = peer.connection {
            return Ok(at);
        }
        if let Some(status) = peer.dead {
            return Err(status);
        }
        if !self.has_shared_memory() {
            return self.connect_datagram(gid);
        }
        // A card is on this host if its name is: names reach as far as shared memory can be agreed on.
        let rings = shm::RingPair::connect(&self.gid, &gid);
        if matches!(rings, Err(ShmError::Absent)) && self.may_be_elsewhere(&gid) {
            return self.connect_datagram(gid);
        }
        let mut connection = Connection::connecting(gid, self.clock_us);
        connection.has_handle = true;
        let at = self.connections.insert(connection);
        self.remote_cards.entry(gid).or_default().connection = Some(at);
        self.pair(at);
        self.connected(at, rings);
        self.remote_cards.get(&gid).and_then(|p| p.connection).ok_or(CompStatus::LocalUnreachableRemote)
    }

    /// Pairs a connection with the one between the same cards that the other side made, if there is one.
    fn pair(&mut self, at: u32) {
        let Some(connection) = self.connections.get(at) else { return };
        let opposite = |(_, other): &(u32, &Connection)| {
            other.peer == connection.peer && other.accepted != connection.accepted && other.opposite.is_none()
        };
        let Some((other, _)) = self.connections.iter().find(opposite) else { return };
        for (one, opposite) in [(at, other), (other, at)] {
            if let Some(connection) = self.connections.get_mut(one) {
                connection.opposite = Some(opposite);
            }
        }
    }

    fn connect(&mut self, at: u32) {
        let Some(peer) = self.connections.get(at).and_then(|c| c.peer) else { return };
        self.connected(at, shm::RingPair::connect(&self.gid, &peer));
    }

    /// Takes the result of a connect.
    fn connected(&mut self, at: u32, rings: Result<Option<shm::RingPair>, ShmError>) {
        match rings {
            Ok(Some(rings)) => {
                self.watch(rings.fd(), u64::from(at));
                if let Some(connection) = self.connections.get_mut(at) {
                    connection.transport = Transport::Shm(Box::new(rings));
                }
            }
            Ok(None) => {}
            // Tried again until the request has waited too long.
            Err(error) if error.is_exhaustion() => {
                self.log_exhaustion(format_args!("cannot connect to another card now: {error}"));
            }
            Err(error) => self.fail(at, &error),
        }
    }

    /// Handles the events of the sockets, and peers that have become silent. True when there was an event.
    pub(crate) fn poll_sockets(&mut self) -> bool {
        if self.accept_after.is_some_and(|after| after <= self.clock_us) {
            self.accept_after = None;
            if let Some(listener) = &self.listener {
                self.watch(listener.fd(), LISTENER);
            }
        }
        let mut events = [EpollEvent::empty(); 32];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                LISTENER => self.accept(),
                at => self.poll_socket(at as u32),
            }
        }
        let mut late = Vec::new();
        for at in 0..self.connections.bound() {
            let Some(connection) = self.connections.get(at) else { continue };
            if connection.is_late(self.clock_us) {
                late.push(at);
            } else if matches!(connection.transport, Transport::Connecting) {
                self.connect(at);
            } else if matches!(connection.transport, Transport::Datagram { stage: Stage::Pending(_), .. }) {
                self.send_hello(at);
            }
        }
        for at in late {
            match self.connections.get(at) {
                Some(connection) if connection.waiting == 0 => {
                    self.refuse(at, "it did not prove to be a card within 5 s");
                }
                Some(connection) => {
                    let status = match connection.responsive {
                        true => CompStatus::LocalUnresponsiveRemote,
                        false => CompStatus::LocalUnreachableRemote,
                    };
                    self.lose(at, status, "it owes answers and has sent no packet for 5 s");
                }
                None => {}
            }
        }
        count > 0
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok(None) => return,
                Ok(Some(accepting)) => {
                    let at = self.connections.insert(Connection::accepting(accepting, self.clock_us));
                    if let Some(Transport::Accepting(accepting)) = self.connections.get(at).map(|c| &c.transport)
                        && let Some(fd) = accepting.fd()
                    {
                        self.watch(fd, u64::from(at));
                    }
                    self.poll_socket(at);
                    self.limit_unproven(MAX_UNPROVEN);
                }
                Err(error) if error.is_exhaustion() => {
                    if !self.limit_unproven(0) {
                        self.log_exhaustion(format_args!("accepts no connections for now: {error}"));
                        if let Some(listener) = &self.listener {
                            let _ = self.epoll.delete(listener.fd());
                        }
                        self.accept_after = Some(self.clock_us + ACCEPT_PAUSE_US);
                        return;
                    }
                }
                Err(error) => self.log_refusal(format_args!("refused a connection: {error}")),
            }
        }
    }

    /// Closes the oldest connection without a good hello, if there are more than `limit`.
    pub(crate) fn limit_unproven(&mut self, limit: usize) -> bool {
        let unproven = || self.connections.iter().filter(|(_, connection)| connection.is_silent());
        if unproven().count() <= limit {
            return false;
        }
        let Some((at, _)) = unproven().min_by_key(|(_, connection)| connection.heard_us) else { return false };
        self.refuse(at, "too many others connect and do not prove to be cards");
        true
    }

    /// Closes a connection whose other end is not proven.
    fn refuse(&mut self, at: u32, why: &str) {
        self.log_refusal(format_args!("refused a connection: {why}"));
        self.drop_connection(at, CompStatus::LocalUnreachableRemote);
    }

    fn poll_socket(&mut self, at: u32) {
        let own = self.gid;
        let Some(connection) = self.connections.get_mut(at) else { return };
        match &mut connection.transport {
            Transport::Loopback | Transport::Connecting | Transport::Datagram { .. } => {}
            Transport::Accepting(accepting) => match accepting.proceed(&own) {
                Ok(None) => {}
                Ok(Some((peer, link))) => {
                    let known = self.has_handle(&peer);
                    if let Some(connection) = self.connections.get_mut(at) {
                        (connection.peer, connection.has_handle) = (Some(peer), known);
                        connection.transport = Transport::Shm(Box::new(link));
                    }
                    self.pair(at);
                }
                Err(error) => self.fail(at, &error),
            },
            Transport::Shm(link) => {
                if let Err(error) = link.proceed() {
                    self.fail(at, &error);
                }
            }
        }
    }

    fn fail(&mut self, at: u32, error: &ShmError) {
        let Some(connection) = self.connections.get_mut(at) else { return };
        if let (ShmError::Gone, Transport::Shm(rings)) = (error, &connection.transport)
            && !rings.is_open()
            && connection.waiting > 0
        {
            // The other card closed the connection unread: it may have had too many.
            let _ = self.epoll.delete(rings.fd());
            connection.transport = Transport::Connecting;
            return;
        }
        let status = match error {
            ShmError::Disagreement(_) => CompStatus::RemoteFeatureMismatch,
            ShmError::Absent | ShmError::Foreign(_) => CompStatus::LocalUnreachableRemote,
            _ if !connection.responsive && connection.waiting > 0 => CompStatus::LocalUnreachableRemote,
            _ => CompStatus::LocalUnresponsiveRemote,
        };
        let quiet = matches!(error, ShmError::Gone) && connection.waiting == 0;
        if quiet {
            self.drop_connection(at, status);
        } else {
            // The answers that the peer sent before it died still count.
            while self.poll_connection(at) {}
            self.lose(at, status, &error.to_string());
        }
    }

    /// Closes a connection that failed: its requests complete with `status`.
    pub(crate) fn lose(&mut self, at: u32, status: CompStatus, why: &str) {
        let Some(connection) = self.connections.get(at) else { return };
        let (peer, waiting) = (connection.peer, connection.waiting);
        match peer {
            Some(gid) if waiting == 0 => self.log(format_args!("card {gid} cannot be reached: {why}")),
            Some(gid) => self.log(format_args!("lost card {gid}: {why}; {waiting} requests fail: {status}")),
            None => self.log_refusal(format_args!("refused a connection: {why}")),
        }
        self.drop_connection(at, status);
    }

    pub(crate) fn drop_connection(&mut self, at: u32, status: CompStatus) {
        let Some(connection) = self.connections.remove(at) else { return };
        if let Some(opposite) = connection.opposite.and_then(|opposite| self.connections.get_mut(opposite)) {
            opposite.opposite = None;
        }
        if let Some(gid) = connection.peer
            && let Some(peer) = self.remote_cards.get_mut(&gid)
            && peer.connection == Some(at)
        {
            // A card's GID is never used again: the next card has another one.
            (peer.connection, peer.dead) = (None, Some(status));
        }
        match &connection.transport {
            Transport::Shm(link) => {
                let _ = self.epoll.delete(link.fd());
            }
            Transport::Accepting(accepting) => {
                let _ = accepting.fd().map(|fd| self.epoll.delete(fd));
            }
            Transport::Datagram { peer, .. } => {
                self.connection_of.remove(peer);
                match &mut self.datagrams {
                    Some(wire) => wire.forget(*peer),
                    // The wire is being polled.
                    None => self.forgotten.push(*peer),
                }
            }
            Transport::Loopback | Transport::Connecting => {}
        }
        let lost: Vec<Token> = self.qps.iter().flat_map(|(_, qp)| qp.tokens_on(at)).collect();
        for token in lost {
            if let Some(entry) = self.outstanding(token) {
                // Another connection may get the number before a delayed completion is written.
                entry.connection = None;
            }
            self.finish(token, status.raw());
        }
    }

    /// Tells every peer in shared memory that the engine is about to sleep; false when a packet is there after all.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        (0..self.connections.bound()).all(|at| match self.connections.get_mut(at).map(|c| &mut c.transport) {
            Some(Transport::Shm(link)) => link.rx.sleep(),
            _ => true,
        })
    }

    /// Tells every peer in shared memory that the engine is awake.
    pub(crate) fn finish_sleep(&mut self) {
        for at in 0..self.connections.bound() {
            if let Some(Transport::Shm(link)) = self.connections.get_mut(at).map(|c| &mut c.transport) {
                link.rx.wake();
            }
        }
    }
}

/// Descriptors are compared by number in messages.
impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Transport::Loopback => f.write_str("Loopback"),
            Transport::Connecting => f.write_str("Connecting"),
            Transport::Accepting(accepting) => write!(f, "Accepting({:?})", accepting.fd()),
            Transport::Datagram { peer, stage } => write!(f, "Datagram({peer:?}, {stage:?})"),
            Transport::Shm(link) => write!(f, "Shm({})", link.fd().as_raw_fd()),
        }
    }
}
