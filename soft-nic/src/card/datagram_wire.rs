//! Connections over the datagram wire, which has no connection set-up of its own: both cards exchange a hello and an answer.

use std::time::{Duration, Instant};

use efa_dp_direct::wire::CompStatus;
use ferrogin_datagram::Peer;
use zerocopy::IntoBytes;

use super::connection::{Connection, Handshake, Transport};
use super::core::Core;
use crate::address::Gid;
use crate::wire::datagram::{Arrival, Wire};
use crate::wire::hello::{Hello, Welcome};
use crate::wire::packet::{Acknowledgement, Header, Kind};

impl Core {
    /// Opens a connection to a card of another host.
    pub(crate) fn connect_datagram(&mut self, gid: Gid) -> Result<u32, CompStatus> {
        let unreachable = CompStatus::LocalUnreachableRemote;
        let Some(wire) = &mut self.datagrams else {
            self.log(format_args!("card {gid} is not on this host, and this card has no wire to other hosts"));
            return Err(unreachable);
        };
        if gid.port == 0 {
            self.log(format_args!("card {gid} has no wire to other hosts"));
            return Err(unreachable);
        }
        match wire.peer(&gid) {
            Ok(peer) => {
                let mut connection = Connection::datagram(gid, peer, Handshake::Pending, self.clock_us);
                connection.has_handle = true;
                let at = self.connections.insert(connection);
                self.connection_of.insert(peer, at);
                self.remote_cards.entry(gid).or_default().connection = Some(at);
                self.send_hello(at);
                Ok(at)
            }
            Err(error) => {
                self.log(format_args!("card {gid} cannot be addressed: {error}"));
                Err(unreachable)
            }
        }
    }

    /// Sends the hello, if it is still to be sent and the wire has room.
    pub(crate) fn send_hello(&mut self, at: u32) {
        let own = self.gid;
        let Some(connection) = self.connections.get_mut(at) else { return };
        let (Transport::Datagram { peer, handshake }, Some(gid)) = (&mut connection.transport, connection.peer) else {
            return;
        };
        if *handshake == Handshake::Pending
            && let Some(wire) = &mut self.datagrams
            && send_handshake(wire, *peer, Kind::Hello, Hello::new(&own, &gid).as_bytes())
        {
            *handshake = Handshake::HelloSent;
        }
    }

    /// Handles the arrivals on the datagram wire. True when there was one.
    pub(crate) fn poll_datagrams(&mut self) -> bool {
        let Some(mut wire) = self.datagrams.take() else { return false };
        let polled = wire.poll(|arrival| self.arrived(arrival));
        // The callback cannot use the wire, so removals and answers to hellos follow here.
        for peer in std::mem::take(&mut self.forgotten) {
            wire.forget(peer);
        }
        for (peer, verdict) in std::mem::take(&mut self.welcomes) {
            if !send_handshake(&mut wire, peer, Kind::Welcome, verdict.as_bytes()) {
                self.welcomes.push((peer, verdict));
            }
        }
        self.datagrams = Some(wire);
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
            Arrival::Packet { from, header, payload, acks } => self.packet_arrived(from, &header, payload, acks),
            Arrival::Malformed { from } => {
                if let Some(at) = self.connection_of.get(&from).copied() {
                    self.lose(at, CompStatus::LocalUnresponsiveRemote, "it sent a corrupt packet");
                } else {
                    self.forgotten.push(from);
                }
            }
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

    fn packet_arrived(&mut self, from: Peer, header: &Header, payload: &[u8], acks: &[Acknowledgement]) {
        if header.kind() == Some(Kind::Hello) {
            self.receive_hello(from, payload);
            return;
        }
        // Packets of a peer without a hello are dropped.
        let Some(at) = self.connection_of.get(&from).copied() else { return };
        let now = self.clock_us;
        let Some(connection) = self.connections.get_mut(at) else { return };
        (connection.heard_us, connection.responsive) = (now, true);
        if header.kind() == Some(Kind::Welcome) {
            match (Welcome::check(payload), &mut connection.transport) {
                (Ok(()), Transport::Datagram { handshake, .. }) => *handshake = Handshake::Done,
                (Ok(()), _) => {}
                (Err(why), _) => self.lose(at, CompStatus::RemoteFeatureMismatch, &why.to_string()),
            }
            return;
        }
        self.packet(at, header, payload, acks);
    }

    /// Handles a packet of a connection, and the acknowledgements behind it.
    pub(crate) fn packet(&mut self, at: u32, header: &Header, payload: &[u8], acks: &[Acknowledgement]) {
        for ack in acks {
            self.receive_ack(at, *ack);
        }
        self.receive(at, header, payload.as_ptr());
    }

    /// Handles the hello of a peer.
    fn receive_hello(&mut self, from: Peer, bytes: &[u8]) {
        let verdict = Hello::check(bytes, &self.gid);
        self.welcomes.push((from, Welcome::new(verdict.map(drop))));
        let gid = match verdict {
            Ok(gid) => gid,
            Err(why) => {
                self.log(format_args!("refused a connection: {why}"));
                return;
            }
        };
        if let Some(at) = self.connection_of.get(&from).copied() {
            // Both cards sent a hello at the same time: both agree.
            if let Some(Transport::Datagram { handshake, .. }) = self.connections.get_mut(at).map(|c| &mut c.transport)
            {
                *handshake = Handshake::Done;
            }
            return;
        }
        let mut connection = Connection::datagram(gid, from, Handshake::Done, self.clock_us);
        connection.has_handle = self.handle_of.contains_key(&gid);
        connection.responsive = true;
        let at = self.connections.insert(connection);
        self.connection_of.insert(from, at);
        let peer = self.remote_cards.entry(gid).or_default();
        if peer.connection.is_none() && peer.dead.is_none() {
            peer.connection = Some(at);
        }
    }

    /// Sends the queued answers before the card closes.
    pub(crate) fn drain(&mut self) {
        if self.dead {
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
