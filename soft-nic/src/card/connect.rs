//! Opening, accepting and losing connections to other cards.

use std::os::fd::AsRawFd;

use efa_dp_direct::wire::CompStatus;
use nix::sys::epoll::{EpollEvent, EpollTimeout};

use super::connection::{Connection, Handshake, Transport};
use super::core::{Core, LISTENER};
use super::qp::Token;
use crate::wire::shm::{self, ShmError};

/// A card that owes answers and has sent no packet for this long does not respond.
const SILENCE_US: u64 = 5_000_000;

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
        if !self.same_host(&gid) {
            return self.connect_datagram(gid);
        }
        let mut connection = Connection::connecting(gid, self.clock_us);
        connection.has_handle = true;
        let at = self.connections.insert(connection);
        self.remote_cards.entry(gid).or_default().connection = Some(at);
        self.connect(at);
        self.remote_cards.get(&gid).and_then(|p| p.connection).ok_or(CompStatus::LocalUnreachableRemote)
    }

    fn connect(&mut self, at: u32) {
        let Some(peer) = self.connections.get(at).and_then(|c| c.peer) else { return };
        match shm::RingPair::connect(&self.gid, &peer) {
            Ok(Some(link)) => self.attach(at, link),
            Ok(None) => {}
            Err(error) => self.fail(at, &error),
        }
    }

    fn attach(&mut self, at: u32, rings: shm::RingPair) {
        self.watch(rings.fd(), u64::from(at));
        if let Some(connection) = self.connections.get_mut(at) {
            connection.transport = Transport::Shm(Box::new(rings));
        }
    }

    /// Handles the events of the sockets, and peers that have become silent. True when there was an event.
    pub(crate) fn poll_sockets(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); 32];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                LISTENER => self.accept(),
                at => self.poll_socket(at as u32),
            }
        }
        let mut silent = Vec::new();
        for at in 0..self.connections.bound() {
            let Some(connection) = self.connections.get(at) else { continue };
            if matches!(connection.transport, Transport::Connecting) {
                self.connect(at);
            } else if matches!(connection.transport, Transport::Datagram { handshake: Handshake::Pending, .. }) {
                self.send_hello(at);
            } else if connection.waiting > 0 && self.clock_us.saturating_sub(connection.heard_us) > SILENCE_US {
                silent.push(at);
            }
        }
        for at in silent {
            let responsive = self.connections.get(at).is_some_and(|c| c.responsive);
            let status =
                if responsive { CompStatus::LocalUnresponsiveRemote } else { CompStatus::LocalUnreachableRemote };
            self.lose(at, status, "it owes answers and has sent no packet for 5 s");
        }
        count > 0
    }

    fn accept(&mut self) {
        while let Some(accepting) = self.listener.as_ref().and_then(|l| l.accept()) {
            let at = self.connections.insert(Connection::accepting(accepting, self.clock_us));
            if let Some(Transport::Accepting(accepting)) = self.connections.get(at).map(|c| &c.transport)
                && let Some(fd) = accepting.fd()
            {
                self.watch(fd, u64::from(at));
            }
            self.poll_socket(at);
        }
    }

    fn poll_socket(&mut self, at: u32) {
        let own = self.gid;
        let Some(connection) = self.connections.get_mut(at) else { return };
        match &mut connection.transport {
            Transport::Loopback | Transport::Connecting | Transport::Datagram { .. } => {}
            Transport::Accepting(accepting) => match accepting.proceed(&own) {
                Ok(None) => {}
                Ok(Some((peer, link))) => {
                    let known = self.handle_of.contains_key(&peer);
                    if let Some(connection) = self.connections.get_mut(at) {
                        (connection.peer, connection.has_handle) = (Some(peer), known);
                        connection.transport = Transport::Shm(Box::new(link));
                    }
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
        let Some(connection) = self.connections.get(at) else { return };
        let status = match error {
            ShmError::Disagreement(_) => CompStatus::RemoteFeatureMismatch,
            ShmError::Absent | ShmError::Foreign => CompStatus::LocalUnreachableRemote,
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
            None => self.log(format_args!("refused a connection: {why}")),
        }
        self.drop_connection(at, status);
    }

    pub(crate) fn drop_connection(&mut self, at: u32, status: CompStatus) {
        let Some(connection) = self.connections.remove(at) else { return };
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
            Transport::Connecting => f.write_str("Dialing"),
            Transport::Accepting(accepting) => write!(f, "Accepting({:?})", accepting.fd()),
            Transport::Datagram { peer, handshake } => write!(f, "Message({peer:?}, {handshake:?})"),
            Transport::Shm(link) => write!(f, "Shm({})", link.fd().as_raw_fd()),
        }
    }
}
