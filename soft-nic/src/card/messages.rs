//! Connections over the message wire: both sides say hello, because it carries no handshake of its own.

use std::time::{Duration, Instant};

use efa_dp_direct::wire::CompStatus;
use ferrogin_datagram::Peer;

use super::connection::{Connection, Greeting, Link};
use super::core::Core;
use crate::address::Gid;
use crate::wire::hello::{self, Hello};
use crate::wire::message::{Arrival, Wire};
use crate::wire::packet::{Acknowledgement, AcknowledgementBytes, Header, Kind};

impl Core {
    /// A connection to a card that shared memory does not lead to.
    pub(crate) fn dial_message(&mut self, gid: Gid) -> Result<u32, CompStatus> {
        let unreachable = CompStatus::LocalUnreachableRemote;
        let Some(wire) = &mut self.messages else {
            self.say(format_args!("card {gid} is not on this host, and this card has no wire to other hosts"));
            return Err(unreachable);
        };
        if gid.port == 0 {
            self.say(format_args!("card {gid} has no wire to other hosts"));
            return Err(unreachable);
        }
        match wire.peer(&gid) {
            Ok(peer) => {
                let mut connection = Connection::message(gid, peer, Greeting::Due, self.clock_us);
                connection.known = true;
                let at = self.connections.insert(connection);
                self.connection_of.insert(peer, at);
                self.peers.entry(gid).or_default().connection = Some(at);
                self.greet(at);
                Ok(at)
            }
            Err(error) => {
                self.say(format_args!("card {gid} cannot be addressed: {error}"));
                Err(unreachable)
            }
        }
    }

    /// Says hello, if that is still to be done and there is room.
    pub(crate) fn greet(&mut self, at: u32) {
        let own = self.gid;
        let Some(connection) = self.connections.get_mut(at) else { return };
        let (Link::Message { peer, greeting }, Some(gid)) = (&mut connection.link, connection.peer) else { return };
        if *greeting == Greeting::Due
            && let Some(wire) = &mut self.messages
            && speak(wire, *peer, Kind::Hello, &Hello::new(&own, &gid).to_bytes())
        {
            *greeting = Greeting::Said;
        }
    }

    /// Takes what the message wire has. True when there was something.
    pub(crate) fn poll_messages(&mut self) -> bool {
        let Some(mut wire) = self.messages.take() else { return false };
        let polled = wire.poll(|arrival| self.arrived(arrival));
        // What the callback lost is forgotten and what it was greeted by answered here: it has no wire.
        for peer in std::mem::take(&mut self.forgotten) {
            wire.forget(peer);
        }
        for (peer, verdict) in std::mem::take(&mut self.welcomes) {
            if !speak(&mut wire, peer, Kind::Welcome, &verdict) {
                self.welcomes.push((peer, verdict));
            }
        }
        self.messages = Some(wire);
        match polled {
            Ok(moved) => moved,
            Err(error) => {
                self.say(format_args!("the wire to other hosts failed: {error}"));
                self.close_messages();
                true
            }
        }
    }

    /// The wire is gone, and with it all its connections.
    fn close_messages(&mut self) {
        self.messages = None;
        for at in 0..self.connections.bound() {
            if self.connections.get(at).is_some_and(|c| matches!(c.link, Link::Message { .. })) {
                self.lose(at, CompStatus::LocalUnresponsiveRemote, "the wire failed");
            }
        }
    }

    fn arrived(&mut self, arrival: Arrival<'_>) {
        match arrival {
            Arrival::Packet { from, header, payload, acks } => self.packet_arrived(from, &header, payload, acks),
            Arrival::Nonsense { from } => {
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

    fn packet_arrived(&mut self, from: Peer, header: &Header, payload: &[u8], acks: &[AcknowledgementBytes]) {
        if header.kind() == Some(Kind::Hello) {
            self.greeted(from, payload);
            return;
        }
        // Others than those who said hello are not listened to.
        let Some(at) = self.connection_of.get(&from).copied() else { return };
        let now = self.clock_us;
        let Some(connection) = self.connections.get_mut(at) else { return };
        (connection.heard_us, connection.responsive) = (now, true);
        if header.kind() == Some(Kind::Welcome) {
            match (hello::check_welcome(payload), &mut connection.link) {
                (Ok(()), Link::Message { greeting, .. }) => *greeting = Greeting::Done,
                (Ok(()), _) => {}
                (Err(why), _) => self.lose(at, CompStatus::RemoteFeatureMismatch, &why.to_string()),
            }
            return;
        }
        self.packet(at, header, payload, acks);
    }

    /// A packet of a connection, with what rides behind it.
    pub(crate) fn packet(&mut self, at: u32, header: &Header, payload: &[u8], acks: &[AcknowledgementBytes]) {
        for ack in acks {
            self.receive_ack(at, Acknowledgement::from_bytes(ack));
        }
        self.receive(at, header, payload.as_ptr());
    }

    /// Somebody says hello.
    fn greeted(&mut self, from: Peer, bytes: &[u8]) {
        let verdict = Hello::check(bytes, &self.gid);
        self.welcomes.push((from, hello::welcome(verdict.map(drop))));
        let gid = match verdict {
            Ok(gid) => gid,
            Err(why) => {
                self.say(format_args!("refused a connection: {why}"));
                return;
            }
        };
        if let Some(at) = self.connection_of.get(&from).copied() {
            // Both said hello at the same time: that is agreement enough.
            if let Some(Link::Message { greeting, .. }) = self.connections.get_mut(at).map(|c| &mut c.link) {
                *greeting = Greeting::Done;
            }
            return;
        }
        let mut connection = Connection::message(gid, from, Greeting::Done, self.clock_us);
        connection.known = self.handle_of.contains_key(&gid);
        connection.responsive = true;
        let at = self.connections.insert(connection);
        self.connection_of.insert(from, at);
        let peer = self.peers.entry(gid).or_default();
        if peer.connection.is_none() && peer.dead.is_none() {
            peer.connection = Some(at);
        }
    }

    /// Lets what is under way go out before the card is gone.
    pub(crate) fn leave(&mut self) {
        if self.dead {
            return;
        }
        // Acknowledgements that wait for company, or for room, would leave their requests in doubt.
        self.looks = self.looks.wrapping_add(super::transmit::MOST_LOOKS);
        let start = Instant::now();
        loop {
            for at in 0..self.connections.bound() {
                self.pump(at);
            }
            let owed = self.connections.iter().any(|(_, c)| c.is_open() && !c.answers.is_empty());
            if !owed || start.elapsed() >= GOODBYE {
                break;
            }
            self.poll_messages();
            std::thread::yield_now();
        }
        if let Some(mut wire) = self.messages.take()
            && !self.connection_of.is_empty()
        {
            wire.shutdown(GOODBYE);
        }
    }
}

/// How long a card that is closed waits for what it still has to send.
const GOODBYE: Duration = Duration::from_millis(500);

/// Sends words of the handshake; false when there is no room now.
fn speak(wire: &mut Wire, to: Peer, kind: Kind, words: &[u8]) -> bool {
    let len = words.len() as u32;
    let header = Header { total: len, len, ..Header::new(kind, 0) };
    wire.say(to, &header, words)
}
