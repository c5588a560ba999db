//! Connections over the datagram wire, which has no connection set-up of its own: the cards shake hands by datagrams.
//!
//! A message's datagram gets no answer and leaves nothing behind, unless it is a hello that proves knowledge of this card's
//! GID. Of two hellos that cross, the one of the card with the smaller GID counts.

use std::time::{Duration, Instant};

use efa_dp_direct::wire::CompStatus;
use ferrogin_datagram::{Peer, Unadmitted};
use zerocopy::IntoBytes;

use super::connection::{Connection, HandshakeMessage, Stage, Transport};
use super::core::Core;
use crate::address::Gid;
use crate::config::WireChoice;
use crate::random;
use crate::wire::datagram::{self, Arrival, Wire};
use crate::wire::handshake::{self, BadSeal, Disagreement, HELLO_LEN, Initiator, Response};
use crate::wire::packet::{Acknowledgement, Header, Kind};
use crate::wire::window::NotInOrder;

/// Cards at once that sent a good hello and are not proven.
const MAX_UNPROVEN: usize = 256;

impl Core {
    /// Opens a connection to a card of another host.
    pub(crate) fn connect_datagram(&mut self, gid: Gid) -> Result<u32, CompStatus> {
        let unreachable = CompStatus::LocalUnreachableRemote;
        if self.datagrams.is_none() || gid.port == 0 {
            let whose = if gid.port == 0 { "it" } else { "this card" };
            self.log(format_args!("card {gid} is not on this host, and {whose} has no wire to other hosts"));
            return Err(unreachable);
        }
        // The other card may have called a moment ago. Requests wait for its proof then.
        let called = self.datagram_connection(&gid);
        let at = match called {
            Some(at) => at,
            None => self.call(gid).map_err(|error| {
                self.log(format_args!("card {gid} cannot be called: {error}"));
                unreachable
            })?,
        };
        self.remote_cards.entry(gid).or_default().connection = Some(at);
        self.send_hello(at);
        Ok(at)
    }

    /// A new connection to a card, whose hello is to be sent.
    fn call(&mut self, gid: Gid) -> std::io::Result<u32> {
        let nonce = random::secret()?;
        let Some(wire) = &mut self.datagrams else { return Err(std::io::ErrorKind::NotConnected.into()) };
        let peer = wire.peer(&gid).map_err(std::io::Error::other)?;
        let stage = Stage::Pending(Initiator::new(self.gid, gid, nonce));
        let mut connection = Connection::datagram(gid, peer, stage, self.clock_us);
        connection.has_handle = true;
        let at = self.connections.insert(connection);
        self.connection_of.insert(peer, at);
        Ok(at)
    }

    /// The connection to a card over this wire, proven or not.
    fn datagram_connection(&self, gid: &Gid) -> Option<u32> {
        let found = self.connections.iter().find(|(_, connection)| {
            connection.peer == Some(*gid) && matches!(connection.transport, Transport::Datagram { .. })
        });
        found.map(|(at, _)| at)
    }

    /// Sends the hello, if it is still to be sent and the wire has room.
    pub(crate) fn send_hello(&mut self, at: u32) {
        let Some(Transport::Datagram { peer, stage }) = self.connections.get_mut(at).map(|c| &mut c.transport) else {
            return;
        };
        if let Stage::Pending(initiator) = stage
            && let Some(wire) = &mut self.datagrams
            && send_handshake(wire, *peer, Kind::Hello, initiator.hello().as_bytes())
        {
            *stage = Stage::HelloSent(initiator.clone());
        }
    }

    /// Handles the arrivals on the datagram wire. True when there was one.
    pub(crate) fn poll_datagrams(&mut self) -> bool {
        let Some(mut wire) = self.datagrams.take() else { return false };
        let polled = wire.poll(|arrival| self.arrived(arrival));
        // The callback cannot use the wire, so removals and handshakes follow here.
        for peer in std::mem::take(&mut self.forgotten) {
            wire.forget(peer);
        }
        for (peer, welcome) in std::mem::take(&mut self.welcomes) {
            if !send_handshake(&mut wire, peer, Kind::Welcome, welcome.as_bytes()) {
                self.welcomes.push((peer, welcome));
            }
        }
        self.datagrams = Some(wire);
        for message in std::mem::take(&mut self.handshake_messages) {
            if message.is_hello { self.receive_hello(&message) } else { self.receive_welcome(&message) }
        }
        match polled {
            Ok(moved) => moved,
            Err(error) => {
                self.log(format_args!("the wire to other hosts failed: {error}"));
                self.close_datagrams();
                true
            }
        }
    }

    /// Closes the failed wire and all of its connections.
    fn close_datagrams(&mut self) {
        self.datagrams = None;
        for at in 0..self.connections.bound() {
            if self.connections.get(at).is_some_and(|c| matches!(c.transport, Transport::Datagram { .. })) {
                self.lose(at, CompStatus::LocalUnresponsiveRemote, "the wire failed");
            }
        }
    }

    fn arrived(&mut self, arrival: Arrival<'_>) {
        match arrival {
            Arrival::Packet { from, header, rest } => self.packet_arrived(from, header, rest),
            Arrival::Unadmitted(message) => self.keep_handshake_message(&message),
            Arrival::Lost { peer, why } => {
                let Some(at) = self.connection_of.get(&peer).copied() else {
                    self.forgotten.push(peer);
                    return;
                };
                let (waiting, responsive) = self.connections.get(at).map_or((0, true), |c| (c.waiting, c.responsive));
                if waiting == 0 {
                    self.drop_connection(at, CompStatus::LocalUnresponsiveRemote);
                } else if responsive {
                    self.lose(at, CompStatus::LocalUnresponsiveRemote, &why);
                } else {
                    self.lose(at, CompStatus::LocalUnreachableRemote, &why);
                }
            }
        }
    }

    /// Keeps a message of an unknown endpoint if it may belong to a handshake.
    fn keep_handshake_message(&mut self, message: &Unadmitted<'_>) {
        let kind = Header::read(message.header).and_then(|header| header.kind());
        let is_hello = kind == Some(Kind::Hello);
        if (is_hello || kind == Some(Kind::Welcome)) && message.payload.len() <= HELLO_LEN {
            let (address, bytes) = (message.address.to_vec(), message.payload.to_vec());
            self.handshake_messages.push(HandshakeMessage { is_hello, address, number: message.number, bytes });
        }
    }

    /// Handles a datagram in the name of a peer.
    pub(crate) fn packet_arrived(&mut self, from: Peer, header: &[u8], rest: &[u8]) {
        let Some(at) = self.connection_of.get(&from).copied() else { return };
        let Some(connection) = self.connections.get_mut(at) else { return };
        let Transport::Datagram { stage, .. } = &mut connection.transport else { return };
        let Stage::Agreed { session, proven } = stage else { return };
        let newly_proven = !*proven;
        let body = match datagram::open(header, rest, session) {
            Ok(body) => body,
            Err(why @ BadSeal::NotInOrder(NotInOrder::Missing)) => {
                self.lose(at, CompStatus::LocalUnresponsiveRemote, &why.to_string());
                return;
            }
            // Hellos that crossed, and what others send in the peer's name: the peer's own packets still arrive.
            Err(why) => {
                let kind = Header::read(header).and_then(|header| header.kind());
                if !matches!(kind, Some(Kind::Hello | Kind::Welcome)) {
                    self.log_refusal(format_args!("dropped a packet of the wire to other hosts: {why}"));
                }
                return;
            }
        };
        *proven = true;
        (connection.heard_us, connection.responsive) = (self.clock_us, true);
        if newly_proven && let Some(gid) = connection.peer {
            // From now on requests may go this way.
            let card = self.remote_cards.entry(gid).or_default();
            if card.connection.is_none() && card.dead.is_none() {
                card.connection = Some(at);
            }
        }
        match datagram::parse(header, body) {
            Some((header, payload, acks)) => self.packet(at, &header, payload, acks),
            None => self.lose(at, CompStatus::LocalUnresponsiveRemote, "it sent a corrupt packet"),
        }
    }

    /// Handles a packet of a connection, and the acknowledgements behind it.
    pub(crate) fn packet(&mut self, at: u32, header: &Header, payload: &[u8], acks: &[Acknowledgement]) {
        for ack in acks {
            self.receive_ack(at, *ack);
        }
        self.receive(at, header, payload.as_ptr());
    }

    /// Handles a hello.
    fn receive_hello(&mut self, hello: &HandshakeMessage) {
        let nonce = match random::secret() {
            Ok(nonce) => nonce,
            Err(error) => return self.log_refusal(format_args!("refused a connection: getrandom: {error}")),
        };
        let Response { peer: gid, welcome, session } = match handshake::respond(&hello.bytes, &self.gid, nonce) {
            Ok(accepted) => accepted,
            Err(why) => return self.log_refusal(format_args!("refused a connection: {why}")),
        };
        if let Err(why) = self.check_peer(&gid, &hello.address) {
            return self.log_refusal(format_args!("refused a connection of card {gid}: {why}"));
        }
        let existing = self.datagram_connection(&gid);
        let stage = existing.and_then(|at| self.connections.get(at)).map(|connection| &connection.transport);
        let crossed = matches!(stage, Some(Transport::Datagram { stage: Stage::Pending(_) | Stage::HelloSent(_), .. }));
        if existing.is_some() && !(crossed && gid.to_bytes() < self.gid.to_bytes()) {
            return;
        }
        let Some(wire) = &mut self.datagrams else { return };
        let peer = match wire.admit(&gid, hello.number) {
            Ok(peer) => peer,
            Err(error) => return self.log_refusal(format_args!("refused a connection of card {gid}: {error}")),
        };
        if !send_handshake(wire, peer, Kind::Welcome, welcome.as_bytes()) {
            self.welcomes.push((peer, welcome));
        }
        let transport =
            Transport::Datagram { peer, stage: Stage::Agreed { session: Box::new(session), proven: false } };
        match existing.and_then(|at| Some((at, self.connections.get_mut(at)?))) {
            Some((at, connection)) => {
                connection.transport = transport;
                self.connection_of.insert(peer, at);
            }
            None => {
                let mut connection = Connection::new(Some(gid), transport, self.clock_us);
                connection.has_handle = self.has_handle(&gid);
                let at = self.connections.insert(connection);
                self.connection_of.insert(peer, at);
            }
        }
    }

    /// Whether a card that knows this card's GID may be `gid` and connect over this wire.
    fn check_peer(&self, gid: &Gid, address: &[u8]) -> Result<(), &'static str> {
        let dead = self.remote_cards.get(gid).is_some_and(|card| card.dead.is_some());
        if address != datagram::address_of(gid) {
            Err("it came from another address than the card's")
        } else if self.config.wire == WireChoice::Auto && gid.ip == self.gid.ip {
            Err("a card of this host connects by shared memory")
        } else if dead {
            Err("the connection to that card failed before")
        } else if self.connections.iter().filter(|(_, connection)| connection.is_unproven()).count() >= MAX_UNPROVEN {
            Err("too many others sent a hello and did not prove to be cards")
        } else {
            Ok(())
        }
    }

    /// Handles the answer to a hello.
    fn receive_welcome(&mut self, welcome: &HandshakeMessage) {
        let called =
            self.connections.iter().find_map(|(at, connection)| match (&connection.transport, connection.peer) {
                (Transport::Datagram { stage: Stage::HelloSent(initiator), .. }, Some(gid)) => {
                    (datagram::address_of(&gid) == *welcome.address).then_some((at, gid, initiator))
                }
                _ => None,
            });
        let Some((at, gid, initiator)) = called else { return };
        let session = match initiator.welcomed(&welcome.bytes) {
            Ok(session) => session,
            Err(why @ (Disagreement::Version(_) | Disagreement::Refused)) => {
                self.lose(at, CompStatus::RemoteFeatureMismatch, &why.to_string());
                return;
            }
            Err(why) => return self.log_refusal(format_args!("dropped an answer in the name of card {gid}: {why}")),
        };
        let Some(Ok(peer)) = self.datagrams.as_mut().map(|wire| wire.admit(&gid, welcome.number)) else { return };
        let now = self.clock_us;
        let Some(connection) = self.connections.get_mut(at) else { return };
        connection.transport =
            Transport::Datagram { peer, stage: Stage::Agreed { session: Box::new(session), proven: true } };
        (connection.heard_us, connection.responsive) = (now, true);
        self.connection_of.insert(peer, at);
        // The first sealed packet proves this card to the other, which may have requests and this card none.
        self.answer(at, Header::new(Kind::Acks, 0));
    }

    /// Sends the queued answers before the card closes.
    pub(crate) fn drain(&mut self) {
        if self.dead_since.is_some() {
            return;
        }
        // A peer's finished request would fail without its acknowledgement.
        self.polls = self.polls.wrapping_add(super::egress::MOST_POLLS);
        let start = Instant::now();
        loop {
            for at in 0..self.connections.bound() {
                self.pump(at);
            }
            let owed = self.connections.iter().any(|(_, c)| c.is_open() && !c.answers.is_empty());
            if !owed || start.elapsed() >= DRAIN_LIMIT {
                break;
            }
            self.poll_datagrams();
            std::thread::yield_now();
        }
        if let Some(mut wire) = self.datagrams.take()
            && !self.connection_of.is_empty()
        {
            wire.shutdown(DRAIN_LIMIT);
        }
    }
}

/// Time that a closing card has to send its answers.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// Sends a packet of the handshake; false when the wire has no room now.
fn send_handshake(wire: &mut Wire, to: Peer, kind: Kind, bytes: &[u8]) -> bool {
    let len = bytes.len() as u32;
    let header = Header { total: len, len, ..Header::new(kind, 0) };
    wire.send_control(to, &header, bytes)
}
