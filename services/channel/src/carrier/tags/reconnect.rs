//! Channels with endpoints that had one before, and with new endpoints at the address of one that is gone.
//!
//! Tags and address are those of the earlier channel, whose messages may still arrive. So the new channel's ids begin
//! far from the earlier ones, in both directions: a message with an id of the earlier channel is stale and is dropped.
//! Any peer can write any name into a hello, and a hello may arrive late. So the carrier challenges the named endpoint
//! before it delivers the hello.

use super::endpoint::Endpoint;
use super::{LastIds, PendingHello, SentHello, Tags, of_peer};
use crate::proto::carrier::{Carrier, Event, Hello};
use crate::proto::wire::{self, Control, Kind};

/// Distance between the ids of consecutive channels with one endpoint. Multiples of it, modulo 2^32, stay far apart.
const ID_DISTANCE: u32 = 0x9e37_79b1;
/// How many hellos may wait for a path response.
const MAX_PENDING_HELLOS: usize = 1024;
/// How many challenges are sent for one hello. One may be lost with the connection to an earlier endpoint of that name.
const MAX_CHALLENGES: u32 = 10;

impl LastIds {
    /// Ids of the first messages that the next channel writes and reads. Never 0, which stands for any id.
    pub(super) fn next(self) -> Self {
        let far = |id: u32| id.wrapping_add(ID_DISTANCE).max(1);
        Self { write: far(self.write), read: far(self.read) }
    }
}

impl<E: Endpoint> Tags<E> {
    /// Delivers a hello from an endpoint that had no channel yet. Any other is challenged.
    pub(super) fn hello(&mut self, message: Control, name: &[u8]) {
        if self.secrets.get(&message.to) != Some(&message.secret) {
            // No answer: the sender may have written any endpoint's name into the hello.
            log::debug!("a hello without the secret of a listener was dropped");
            return;
        }
        let peer = match self.insert(name) {
            Ok(peer) => peer,
            Err(error) => {
                log::warn!("a hello from {} cannot be answered: {error}", wire::label(name));
                return;
            }
        };
        let hello = Hello { peer, name: name.into(), listener: message.to, message };
        let open = of_peer(&mut self.peers, peer).map(|session| session.last_ids());
        match open.or(self.prior(peer)) {
            None => self.events.push(Event::Hello(hello)),
            Some(last) => self.challenge(hello, last.next()),
        }
    }

    fn challenge(&mut self, mut hello: Hello, next: LastIds) {
        let key = |hello: &Hello| (hello.peer, hello.message.from, hello.message.sender_secret);
        if self.pending_hellos.iter().any(|pending| key(&pending.hello) == key(&hello)) {
            // A duplicate.
            return;
        }
        if self.pending_hellos.len() >= MAX_PENDING_HELLOS {
            self.pending_hellos.pop_front();
        }
        hello.message.id = next.read;
        let (nonce, last_sent) = (wire::secret(), self.now);
        self.pending_hellos.push_back(PendingHello { hello, nonce, last_sent, times_sent: 0 });
        self.send_challenge(self.pending_hellos.len() - 1);
    }

    /// Repeats challenges that got no response.
    pub(super) fn repeat_challenges(&mut self) {
        for at in 0..self.pending_hellos.len() {
            let PendingHello { last_sent, times_sent, .. } = self.pending_hellos[at];
            if times_sent < MAX_CHALLENGES && self.now.duration_since(last_sent) >= self.ping_after {
                self.send_challenge(at);
            }
        }
    }

    fn send_challenge(&mut self, at: usize) {
        let pending = &mut self.pending_hellos[at];
        (pending.last_sent, pending.times_sent) = (self.now, pending.times_sent + 1);
        let Hello { peer, message: Control { from, sender_secret, id, .. }, .. } = pending.hello;
        let challenge =
            Control { sender_secret: pending.nonce, id, ..Control::new(Kind::PathChallenge, from, sender_secret) };
        self.send_control(peer, challenge);
    }

    /// Answers the challenge to a hello of this end: the listener had an earlier channel with this endpoint's name.
    pub(super) fn path_challenge(&mut self, message: &Control) {
        let key = (message.to, message.secret);
        let challenged = self.sent_hellos.iter().find(|hello| (hello.channel, hello.secret) == key);
        let Some(&SentHello { to, channel, .. }) = challenged else { return };
        let Some(session) = of_peer(&mut self.peers, to) else { return };
        session.outgoing.start_at(message.id);
        session.incoming.follows_prior = true;
        let response = Control { from: channel, ..Control::new(Kind::PathResponse, 0, message.sender_secret) };
        self.send_control(to, response);
    }

    /// Handles the answer to a challenge: the hello came from the endpoint that it names.
    pub(super) fn path_response(&mut self, message: &Control) {
        let found = self.pending_hellos.iter().position(|pending| pending.nonce == message.secret);
        if let Some(PendingHello { hello, .. }) = found.and_then(|at| self.pending_hellos.remove(at)) {
            self.events.push(Event::Hello(hello));
        }
    }
}
