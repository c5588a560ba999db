//! Opening, accepting and losing connections to other cards.

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use efa_dp_direct::wire::CompStatus;
use ferrogin_rendezvous::proof::ProofError;
use nix::sys::epoll::{EpollEvent, EpollTimeout};
use nix::sys::socket::Shutdown;

use super::connection::{Connection, Transport};
use super::core::{Core, Listeners, SHM_LISTENER, TCP_LISTENER};
use super::egress::MAX_POLLS;
use super::qp::Token;
use crate::address::Gid;
use crate::config::WireChoice;
use crate::wire::tcp::Progress;
use crate::wire::{WireError, shm, tcp};

/// Maximum number of connections without a valid hello. A card sends its own at once, so the oldest one without is
/// least likely a card.
const MAX_SILENT: usize = 64;
/// Connections accepted before the card does other work.
const ACCEPTS: usize = 64;
/// How long the card stops accepting when it is out of file descriptors.
const ACCEPT_PAUSE_US: u64 = 100_000;
/// Pause before connecting again to a card that closed the connection.
const RETRY_US: u64 = 10_000;
/// How long a closing card may take to send its answers.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

impl Core {
    /// Returns the connection to an address handle's card, opening one if there is none.
    pub(crate) fn route(&mut self, ah: u16) -> Result<u32, CompStatus> {
        let gid = self.handles.get(u32::from(ah)).ok_or(CompStatus::LocalInvalidAh)?.gid;
        let peer = self.remote_cards.entry(gid).or_default();
        if let Some(at) = peer.connection {
            return Ok(at);
        }
        if let Some(status) = peer.dead {
            return Err(status);
        }
        let mut connection = Connection::connecting(gid, self.clock_us);
        connection.has_handle = true;
        let at = self.connections.insert(connection);
        self.remote_cards.entry(gid).or_default().connection = Some(at);
        self.pair(at);
        self.connect(at);
        self.remote_cards.get(&gid).and_then(|p| p.connection).ok_or(CompStatus::LocalUnreachableRemote)
    }

    /// Pairs a connection with the one that the other side opened between the same two cards, if there is one.
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

    /// Connects to a connection's card.
    fn connect(&mut self, at: u32) {
        let Some(peer) = self.connections.get(at).and_then(|c| c.peer) else { return };
        // The card is on this host if its name is found: names reach exactly as far as shared memory can be set up.
        if self.has_shared_memory() {
            match shm::RingPair::connect(&self.gid, &peer) {
                Err(WireError::Absent) if self.may_be_elsewhere(&peer) => {}
                Err(WireError::Absent) if self.gid.address.is_none() || peer.address.is_none() => {
                    return self.connected(at, Err(WireError::NotHere));
                }
                rings => return self.connected(at, rings.map(|rings| Some(Transport::Shm(Box::new(rings?))))),
            }
        }
        // This card has already welcomed the other card's own connection.
        let is_welcome = self.connections.iter().any(|(_, other)| other.is_welcome(&peer));
        let stream = if is_welcome {
            Ok(None)
        } else {
            tcp::Stream::connect(&self.gid, &peer).map(|stream| Some(Transport::Tcp(Box::new(stream))))
        };
        self.connected(at, stream);
    }

    /// Handles the result of a connect.
    fn connected(&mut self, at: u32, transport: Result<Option<Transport>, WireError>) {
        match transport {
            Ok(Some(transport)) => self.set_transport(at, transport),
            Ok(None) => {}
            // Retried until the request has waited too long.
            Err(error) if error.is_exhaustion() => {
                self.log_exhaustion(format_args!("cannot connect to another card now: {error}"));
            }
            Err(error) => self.fail(at, &error),
        }
    }

    /// Replaces a connection's transport and watches the new one.
    fn set_transport(&mut self, at: u32, transport: Transport) {
        let Some(connection) = self.connections.get_mut(at) else { return };
        let old = std::mem::replace(&mut connection.transport, transport);
        if let Some(fd) = old.fd() {
            let _ = self.epoll.delete(fd);
        }
        if let Some(fd) = self.connections.get(at).and_then(|connection| connection.transport.fd()) {
            self.watch(fd, u64::from(at));
        }
    }

    /// Handles socket events. Returns true if there were any.
    pub(crate) fn poll_sockets(&mut self) -> bool {
        let mut events = [EpollEvent::empty(); 32];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            match event.data() {
                SHM_LISTENER | TCP_LISTENER => self.accept(event.data()),
                at => self.poll_socket(at as u32),
            }
        }
        count > 0
    }

    /// Retries connects that are due, and gives up on silent peers.
    pub(crate) fn check_connections(&mut self) {
        if self.accept_after.is_some_and(|after| after <= self.clock_us) {
            self.accept_after = None;
            self.watch_listeners();
        }
        let mut late = Vec::new();
        for at in 0..self.connections.bound() {
            let Some(connection) = self.connections.get(at) else { continue };
            if connection.is_late(self.clock_us) {
                late.push(at);
            } else if matches!(connection.transport, Transport::Connecting) && connection.retry_us <= self.clock_us {
                self.connect(at);
            }
        }
        for at in late {
            match self.connections.get(at) {
                Some(connection) if connection.waiting == 0 => {
                    self.refuse(at, "no valid handshake within 5 s: the peer is not a software card, or is stopped");
                }
                Some(connection) => {
                    let status = if connection.responsive {
                        CompStatus::LocalUnresponsiveRemote
                    } else {
                        CompStatus::LocalUnreachableRemote
                    };
                    self.lose(at, status, "it has not answered, and has sent no packet for 5 s");
                }
                None => {}
            }
        }
    }

    /// Accepts the next connection on one of the listeners.
    fn next_accepted(&self, listener: u64) -> Result<Option<Transport>, WireError> {
        let Listeners { shm, tcp } = &self.listeners;
        match (listener, shm, tcp) {
            (SHM_LISTENER, Some(listener), _) => Ok(listener.accept()?.map(Transport::Accepting)),
            (TCP_LISTENER, _, Some(listener)) => Ok(listener.accept()?.map(|s| Transport::Tcp(Box::new(s)))),
            _ => Ok(None),
        }
    }

    fn accept(&mut self, listener: u64) {
        for _ in 0..ACCEPTS {
            match self.next_accepted(listener) {
                Ok(None) => return,
                Ok(Some(transport)) => {
                    let at = self.connections.insert(Connection::accepting(transport, self.clock_us));
                    if let Some(fd) = self.connections.get(at).and_then(|connection| connection.transport.fd()) {
                        self.watch(fd, u64::from(at));
                    }
                    self.poll_socket(at);
                    self.limit_silent(MAX_SILENT);
                }
                Err(error) if error.is_exhaustion() => {
                    if !self.limit_silent(0) {
                        self.log_exhaustion(format_args!("accepts no connections for now: {error}"));
                        let Listeners { shm, tcp } = &self.listeners;
                        let both =
                            [shm.as_ref().map(|listener| listener.fd()), tcp.as_ref().map(|listener| listener.fd())];
                        for fd in both.into_iter().flatten() {
                            let _ = self.epoll.delete(fd);
                        }
                        self.accept_after = Some(self.clock_us + ACCEPT_PAUSE_US);
                        return;
                    }
                }
                Err(error) => self.log_refusal(format_args!("refused a connection: {error}")),
            }
        }
    }

    /// Closes the oldest connection without a valid hello, if there are more than `limit`. After a valid hello, both
    /// cards hold a stream.
    fn limit_silent(&mut self, limit: usize) -> bool {
        let silent = || self.connections.iter().filter(|(_, connection)| connection.is_silent());
        let oldest = silent().min_by_key(|(_, connection)| connection.heard_us).filter(|_| silent().count() > limit);
        let Some((at, _)) = oldest else { return false };
        self.refuse(at, "too many connections have not proven to be cards");
        true
    }

    /// Closes a connection whose other end has not proven to be a card.
    fn refuse(&mut self, at: u32, why: &str) {
        self.log_refusal(format_args!("refused a connection: {why}"));
        self.drop_connection(at, CompStatus::LocalUnreachableRemote);
    }

    pub(crate) fn poll_socket(&mut self, at: u32) {
        let own = self.gid;
        let Some(connection) = self.connections.get_mut(at) else { return };
        match &mut connection.transport {
            Transport::Loopback | Transport::Connecting => {}
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
            Transport::Tcp(stream) => match stream.proceed(&own) {
                Ok(Progress::Nothing) => {}
                Ok(Progress::Hello { peer, from, welcome }) => self.answer_hello(at, &peer, from, &welcome),
                Ok(Progress::Proven(caller)) => self.proven(at, caller),
                Err(error) => self.fail(at, &error),
            },
        }
    }

    /// Answers a valid hello on a stream. If two cards call each other at once, the call from the card with the smaller
    /// GID wins.
    ///
    /// The welcome is a promise: this card doesn't call the other one while the other's call may still succeed.
    fn answer_hello(&mut self, at: u32, peer: &Gid, from: IpAddr, welcome: &[u8]) {
        let card = self.remote_cards.get(peer);
        let dead = card.is_some_and(|card| card.dead.is_some());
        let own = card.and_then(|card| card.connection).and_then(|own| self.connections.get(own));
        let crossed = own.is_some_and(|own| match &own.transport {
            Transport::Connecting => false,
            Transport::Tcp(stream) if stream.is_calling() => self.gid.to_bytes() < peer.to_bytes(),
            _ => true,
        });
        let refused = if Some(from) != peer.ip().map(IpAddr::V4) {
            Some("it came from another address than the card's")
        } else if self.config.wire == WireChoice::Auto && peer.ip() == self.gid.ip() {
            Some("a card of this host connects by shared memory")
        } else if dead {
            Some("an earlier connection to that card failed")
        } else {
            None
        };
        let Some(Transport::Tcp(stream)) = self.connections.get_mut(at).map(|c| &mut c.transport) else { return };
        if let Some(why) = refused {
            stream.refuse();
            self.refuse(at, &format!("card {peer}: {why}"));
        } else if crossed {
            self.drop_connection(at, CompStatus::LocalUnreachableRemote);
        } else if let Err(error) = stream.send(welcome) {
            self.fail(at, &error);
        }
    }

    /// Starts using a stream whose ends are proven. It carries the requests waiting for its card.
    fn proven(&mut self, at: u32, caller: Option<Gid>) {
        let now = self.clock_us;
        let mut carrier = at;
        if let Some(peer) = caller {
            let has_handle = self.has_handle(&peer);
            let card = self.remote_cards.entry(peer).or_default();
            if let Some(status) = card.dead {
                return self.drop_connection(at, status);
            }
            carrier = *card.connection.get_or_insert(at);
            if carrier == at {
                let Some(connection) = self.connections.get_mut(at) else { return };
                (connection.peer, connection.has_handle) = (Some(peer), has_handle);
            } else if let Some(accepted) = self.connections.remove(at) {
                let _ = accepted.transport.fd().map(|fd| self.epoll.delete(fd));
                self.set_transport(carrier, accepted.transport);
            }
        }
        if let Some(connection) = self.connections.get_mut(carrier) {
            (connection.heard_us, connection.responsive) = (now, true);
        }
    }

    pub(crate) fn fail(&mut self, at: u32, error: &WireError) {
        let Some(connection) = self.connections.get_mut(at) else { return };
        if matches!(error, WireError::Gone) && !connection.is_open() && connection.waiting > 0 {
            // The other card closed the connection without reading it: it may have too many, or be calling this one.
            connection.retry_us = self.clock_us + RETRY_US;
            self.set_transport(at, Transport::Connecting);
            return;
        }
        let status = match error {
            WireError::Proof(ProofError::Version { .. }) => CompStatus::RemoteFeatureMismatch,
            WireError::Proof(_)
            | WireError::Absent
            | WireError::NotHere
            | WireError::NoAddress
            | WireError::Foreign(_) => CompStatus::LocalUnreachableRemote,
            _ if !connection.responsive && connection.waiting > 0 => CompStatus::LocalUnreachableRemote,
            _ => CompStatus::LocalUnresponsiveRemote,
        };
        let quiet = matches!(error, WireError::Gone) && connection.waiting == 0;
        // What the other card sent before it went still counts.
        self.take_arrived_on(at);
        if quiet {
            self.drop_connection(at, status);
        } else {
            self.lose(at, status, &error.to_string());
        }
    }

    /// Closes a failed connection. Its requests complete with `status`.
    pub(crate) fn lose(&mut self, at: u32, status: CompStatus, why: &str) {
        let Some(connection) = self.connections.get(at) else { return };
        let (peer, waiting) = (connection.peer, connection.waiting);
        let fix = peer.map(|gid| address_fix(&gid, status)).unwrap_or_default();
        match peer {
            Some(gid) if waiting == 0 => self.log(format_args!("card {gid} cannot be reached: {why}{fix}")),
            Some(gid) => {
                let requests = if waiting == 1 { "request" } else { "requests" };
                self.log(format_args!("lost card {gid}: {why}; {waiting} {requests} failed: {status}{fix}"));
            }
            None => self.log_refusal(format_args!("refused a connection: {why}")),
        }
        self.drop_connection(at, status);
    }

    pub(crate) fn drop_connection(&mut self, at: u32, status: CompStatus) {
        self.complete_answered_on(at);
        let Some(connection) = self.connections.remove(at) else { return };
        if let Some(opposite) = connection.opposite.and_then(|opposite| self.connections.get_mut(opposite)) {
            opposite.opposite = None;
        }
        if let Some(gid) = connection.peer
            && let Some(peer) = self.remote_cards.get_mut(&gid)
            && peer.connection == Some(at)
        {
            // A card's GID is never reused: the next card gets a new one.
            (peer.connection, peer.dead) = (None, Some(status));
        }
        if let Some(fd) = connection.transport.fd() {
            let _ = self.epoll.delete(fd);
        }
        let lost: Vec<Token> = self.qps.iter().flat_map(|(_, qp)| qp.tokens_on(at)).collect();
        for token in lost {
            if let Some(entry) = self.outstanding(token) {
                // A new connection may get this number before a delayed completion is written.
                entry.connection = None;
            }
            self.conclude(token, status);
        }
    }

    /// Handles what has arrived, as hardware would have by now, and sends the answers. Slow peers get [`DRAIN_LIMIT`].
    pub(crate) fn answer_arrived(&mut self) {
        if self.dead_since.is_none() {
            self.take_arrived();
            self.send_answers(Instant::now());
        }
    }

    /// Closes the connections once their answers are sent. Slow peers get [`DRAIN_LIMIT`].
    pub(crate) fn drain(&mut self) {
        if self.dead_since.is_some() {
            return;
        }
        let start = Instant::now();
        self.send_answers(start);
        while !self.end_streams() && start.elapsed() < DRAIN_LIMIT {
            std::thread::yield_now();
        }
        // A forked child that inherited the sockets would keep them open.
        let connections = self.connections.iter().filter_map(|(_, connection)| connection.transport.fd());
        let Listeners { shm, tcp } = &self.listeners;
        let listeners = [shm.as_ref().map(|listener| listener.fd()), tcp.as_ref().map(|listener| listener.fd())];
        for fd in connections.chain(listeners.into_iter().flatten()) {
            let _ = nix::sys::socket::shutdown(fd.as_raw_fd(), Shutdown::Both);
        }
    }

    /// Ends the streams. Returns true once the other cards have ended theirs too.
    fn end_streams(&mut self) -> bool {
        let mut ended = true;
        for at in 0..self.connections.bound() {
            if let Some(Transport::Tcp(stream)) = self.connections.get_mut(at).map(|c| &mut c.transport) {
                ended &= !stream.is_open() || stream.end();
            }
        }
        ended
    }

    /// Sends the queued answers. A peer's finished request would fail without its acknowledgement.
    fn send_answers(&mut self, start: Instant) {
        loop {
            // Those collected for later requests go now.
            self.polls = self.polls.wrapping_add(MAX_POLLS);
            self.pump_all();
            let owed = self.connections.iter().any(|(_, connection)| connection.owes());
            if !owed || start.elapsed() >= DRAIN_LIMIT {
                break;
            }
            std::thread::yield_now();
        }
    }

    /// Tells every shared-memory peer that the engine is about to sleep. Returns false if a packet has arrived
    /// meanwhile.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        (0..self.connections.bound()).all(|at| match self.connections.get_mut(at).map(|c| &mut c.transport) {
            Some(Transport::Shm(link)) => link.rx.sleep(),
            _ => true,
        })
    }

    /// Tells every shared-memory peer that the engine is awake.
    pub(crate) fn finish_sleep(&mut self) {
        for at in 0..self.connections.bound() {
            if let Some(Transport::Shm(link)) = self.connections.get_mut(at).map(|c| &mut c.transport) {
                link.rx.wake();
            }
        }
    }
}

/// Shows each socket as its descriptor number.
impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Transport::Loopback => f.write_str("Loopback"),
            Transport::Connecting => f.write_str("Connecting"),
            Transport::Accepting(accepting) => write!(f, "Accepting({:?})", accepting.fd()),
            Transport::Shm(link) => write!(f, "Shm({})", link.fd().as_raw_fd()),
            Transport::Tcp(stream) => write!(f, "Tcp({})", stream.fd().as_raw_fd()),
        }
    }
}

/// Returns what to check if a card couldn't be reached at its address: every host may have the same link-local or
/// bridge address.
fn address_fix(peer: &Gid, status: CompStatus) -> String {
    match peer.ip().filter(|_| status == CompStatus::LocalUnreachableRemote) {
        Some(ip) => format!("; if {ip} is not that host's address for this one, set SOFTEFA_IFADDR there"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_card_of_another_host_names_the_setting_of_its_address() {
        let here = Gid { address: None, secret: [7; 8] };
        let there = Gid { address: "169.254.0.1:80".parse().ok(), ..here };
        let fix = address_fix(&there, CompStatus::LocalUnreachableRemote);
        assert!(fix.contains("169.254.0.1") && fix.contains("SOFTEFA_IFADDR"), "{fix}");
        assert_eq!(address_fix(&here, CompStatus::LocalUnreachableRemote), "");
        assert_eq!(address_fix(&there, CompStatus::RemoteFeatureMismatch), "");
    }
}
