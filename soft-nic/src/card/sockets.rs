//! Who is connected: opening, accepting and losing connections.

use std::os::fd::{AsRawFd, BorrowedFd};

use efa_dp_direct::wire::CompStatus;
use nix::sys::epoll::{EpollEvent, EpollFlags, EpollTimeout};

use super::connection::{Connection, Greeting, Link};
use super::core::Core;
use super::qp::Token;
use crate::wire::shm::{self, ShmError};

/// The listening socket among the events.
pub(crate) const LISTENER: u64 = u64::MAX;

/// A card that owes answers and has said nothing for this long does not respond.
const SILENCE_US: u64 = 5_000_000;

impl Core {
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, data: u64) {
        // Without the event a death is noticed by silence.
        let _ = self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, data));
    }

    /// The connection that leads to a handle's card, opened if need be.
    pub(crate) fn route(&mut self, ah: u16) -> Result<u32, CompStatus> {
        let gid = self.handles.get(u32::from(ah)).ok_or(CompStatus::LocalInvalidAh)?.gid;
        let peer = self.peers.entry(gid).or_default();
        if let Some(at) = peer.connection {
            return Ok(at);
        }
        if let Some(status) = peer.dead {
            return Err(status);
        }
        if !self.same_host(&gid) {
            return self.dial_message(gid);
        }
        let mut connection = Connection::dialing(gid, self.clock_us);
        connection.known = true;
        let at = self.connections.insert(connection);
        self.peers.entry(gid).or_default().connection = Some(at);
        self.dial(at);
        self.peers.get(&gid).and_then(|p| p.connection).ok_or(CompStatus::LocalUnreachableRemote)
    }

    fn dial(&mut self, at: u32) {
        let Some(peer) = self.connections.get(at).and_then(|c| c.peer) else { return };
        match shm::Link::connect(&self.gid, &peer) {
            Ok(Some(link)) => self.attach(at, link),
            Ok(None) => {}
            Err(error) => self.fail(at, &error),
        }
    }

    fn attach(&mut self, at: u32, link: shm::Link) {
        self.watch(link.fd(), u64::from(at));
        if let Some(connection) = self.connections.get_mut(at) {
            connection.link = Link::Shm(Box::new(link));
        }
    }

    /// Looks after sockets. True when something happened.
    pub(crate) fn poll_sockets(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); 32];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                LISTENER => self.accept(),
                at => self.attend(at as u32),
            }
        }
        let mut silent = Vec::new();
        for at in 0..self.connections.bound() {
            let Some(connection) = self.connections.get(at) else { continue };
            if matches!(connection.link, Link::Dialing) {
                self.dial(at);
            } else if matches!(connection.link, Link::Message { greeting: Greeting::Due, .. }) {
                self.greet(at);
            } else if connection.waiting > 0 && self.clock_us.saturating_sub(connection.heard_us) > SILENCE_US {
                silent.push(at);
            }
        }
        for at in silent {
            let responsive = self.connections.get(at).is_some_and(|c| c.responsive);
            let status =
                if responsive { CompStatus::LocalUnresponsiveRemote } else { CompStatus::LocalUnreachableRemote };
            self.lose(at, status, "it owes answers and says nothing");
        }
        count > 0
    }

    fn accept(&mut self) {
        while let Some(accepting) = self.listener.as_ref().and_then(|l| l.accept()) {
            let at = self.connections.insert(Connection::accepting(accepting, self.clock_us));
            if let Some(Link::Accepting(accepting)) = self.connections.get(at).map(|c| &c.link)
                && let Some(fd) = accepting.fd()
            {
                self.watch(fd, u64::from(at));
            }
            self.attend(at);
        }
    }

    fn attend(&mut self, at: u32) {
        let own = self.gid;
        let Some(connection) = self.connections.get_mut(at) else { return };
        match &mut connection.link {
            Link::Loopback | Link::Dialing | Link::Message { .. } => {}
            Link::Accepting(accepting) => match accepting.proceed(&own) {
                Ok(None) => {}
                Ok(Some((peer, link))) => {
                    let known = self.handle_of.contains_key(&peer);
                    if let Some(connection) = self.connections.get_mut(at) {
                        (connection.peer, connection.known) = (Some(peer), known);
                        connection.link = Link::Shm(Box::new(link));
                    }
                }
                Err(error) => self.fail(at, &error),
            },
            Link::Shm(link) => {
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
            // What it answered before it went counts.
            while self.poll_connection(at) {}
            self.lose(at, status, &error.to_string());
        }
    }

    /// A connection ends badly: its requests complete with `status`.
    pub(crate) fn lose(&mut self, at: u32, status: CompStatus, why: &str) {
        let Some(connection) = self.connections.get(at) else { return };
        let (peer, waiting) = (connection.peer, connection.waiting);
        match peer {
            Some(gid) if waiting == 0 => self.say(format_args!("card {gid} cannot be reached: {why}")),
            Some(gid) => self.say(format_args!("lost card {gid}: {why}; {waiting} requests fail: {status}")),
            None => self.say(format_args!("refused a connection: {why}")),
        }
        self.drop_connection(at, status);
    }

    pub(crate) fn drop_connection(&mut self, at: u32, status: CompStatus) {
        let Some(connection) = self.connections.remove(at) else { return };
        if let Some(gid) = connection.peer
            && let Some(peer) = self.peers.get_mut(&gid)
            && peer.connection == Some(at)
        {
            // A card's name is never used again, so its successor has another.
            (peer.connection, peer.dead) = (None, Some(status));
        }
        match &connection.link {
            Link::Shm(link) => {
                let _ = self.epoll.delete(link.fd());
            }
            Link::Accepting(accepting) => {
                let _ = accepting.fd().map(|fd| self.epoll.delete(fd));
            }
            Link::Message { peer, .. } => {
                self.connection_of.remove(peer);
                match &mut self.messages {
                    Some(wire) => wire.forget(*peer),
                    // In the middle of its poll.
                    None => self.forgotten.push(*peer),
                }
            }
            Link::Loopback | Link::Dialing => {}
        }
        let lost: Vec<Token> = self.qps.iter().flat_map(|(_, qp)| qp.tokens_on(at)).collect();
        for token in lost {
            if let Some(entry) = self.outstanding(token) {
                // The number may be given to another connection before a held completion is written.
                entry.connection = None;
            }
            self.finish(token, status.raw());
        }
    }

    /// Says on every connection that the engine is about to sleep; false when something is there to do after all.
    pub(crate) fn doze(&mut self) -> bool {
        (0..self.connections.bound()).all(|at| match self.connections.get_mut(at).map(|c| &mut c.link) {
            Some(Link::Shm(link)) => link.rx.sleep(),
            _ => true,
        })
    }

    /// The engine is awake.
    pub(crate) fn wake(&mut self) {
        for at in 0..self.connections.bound() {
            if let Some(Link::Shm(link)) = self.connections.get_mut(at).map(|c| &mut c.link) {
                link.rx.wake();
            }
        }
    }
}

/// Descriptors are compared by number in messages.
impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Link::Loopback => f.write_str("Loopback"),
            Link::Dialing => f.write_str("Dialing"),
            Link::Accepting(accepting) => write!(f, "Accepting({:?})", accepting.fd()),
            Link::Message { peer, greeting } => write!(f, "Message({peer:?}, {greeting:?})"),
            Link::Shm(link) => write!(f, "Shm({})", link.fd().as_raw_fd()),
        }
    }
}
