//! Channels with endpoints that had a channel before, and with new endpoints at the address of one that is gone.
//!
//! Tags and address are those of the earlier channel, and messages of the earlier channel may still arrive. So the ids of the new channel
//! begin far from those of the earlier one, in both directions: a message with an id of the earlier channel is stale and is dropped. Any
//! peer can write any name into a hello, and a hello may arrive late. So the engine challenges the named endpoint before it ends the
//! earlier channel.

use std::sync::Arc;

use super::Engine;
use crate::proto::channel_state::ChannelState;
use crate::proto::hello::{PathChallenge, PendingHello, PriorChannel};
use crate::proto::operation::NO_CHANNEL;
use crate::proto::secret::secret;
use crate::proto::wire::{Control, Kind};
use crate::{ChannelError, Reason};

/// Hellos that may wait for a path response.
const MAX_PENDING_HELLOS: usize = 1024;
/// Challenges that are sent for one hello. A challenge may be lost with the connection to an earlier endpoint of that name.
const MAX_CHALLENGES: u32 = 10;

impl Engine {
    /// Queues a hello from an endpoint name that had a channel before.
    pub(super) fn queue_hello(&mut self, hello: PendingHello) {
        if self.pending_hellos.iter().any(|pending| (pending.addr, pending.remote) == (hello.addr, hello.remote)) {
            // The same hello again.
            return;
        }
        if self.pending_hellos.len() >= MAX_PENDING_HELLOS {
            self.pending_hellos.pop_front();
        }
        self.pending_hellos.push_back(hello);
        self.challenge_pending_hellos();
    }

    /// Sends the first challenge for queued hellos. What a peer wrote before it closed is read first.
    pub(super) fn challenge_pending_hellos(&mut self) {
        for at in 0..self.pending_hellos.len() {
            let hello = &self.pending_hellos[at];
            let Some(prior) = self.by_name.get(&hello.name).filter(|_| hello.challenge.is_none()) else { continue };
            let state = self.channels.get(prior.channel as usize).and_then(Option::as_deref);
            let state = state.filter(|state| state.is_live());
            if state.is_some_and(ChannelState::has_unread) {
                continue;
            }
            let (_, read) = state.map_or(prior.next(), |state| PriorChannel::of(state, prior.channel).next());
            let challenge = PathChallenge { nonce: secret(), last_sent: self.now, times_sent: 0 };
            let hello = &mut self.pending_hellos[at];
            (hello.challenge, hello.read) = (Some(challenge), read);
            self.send_challenge(at);
        }
    }

    /// Sends challenges without a response once more.
    pub(super) fn repeat_challenges(&mut self) {
        for at in 0..self.pending_hellos.len() {
            let is_due = |challenge: &PathChallenge| {
                challenge.times_sent < MAX_CHALLENGES
                    && self.now.duration_since(challenge.last_sent) >= self.config.ping_after
            };
            if self.pending_hellos[at].challenge.as_ref().is_some_and(is_due) {
                self.send_challenge(at);
            }
        }
    }

    fn send_challenge(&mut self, at: usize) {
        let hello = &mut self.pending_hellos[at];
        let Some(challenge) = &mut hello.challenge else { return };
        (challenge.last_sent, challenge.times_sent) = (self.now, challenge.times_sent + 1);
        let message = Control {
            sender_secret: challenge.nonce,
            id: hello.read,
            ..Control::new(Kind::PathChallenge, hello.remote.id, hello.remote.secret)
        };
        let addr = hello.addr;
        self.send_control_to(addr, NO_CHANNEL, &message, &[]);
    }

    /// The listener has an earlier channel with this endpoint name, and challenges the hello of `channel`.
    pub(super) fn path_challenge(&mut self, channel: u32, message: &Control) {
        let Some(state) = self.state_of(channel) else { return };
        state.outgoing.start_at(message.id);
        state.incoming.follows_prior = true;
        let addr = state.addr;
        let response = Control { from: channel, ..Control::new(Kind::PathResponse, 0, message.sender_secret) };
        self.send_control_to(addr, channel, &response, &[]);
    }

    /// The sender of a hello answered the challenge. An earlier channel that is still open was with an endpoint that is gone.
    pub(super) fn path_response(&mut self, message: &Control) {
        let is = |challenge: &PathChallenge| challenge.nonce == message.secret;
        let found = self.pending_hellos.iter().position(|hello| hello.challenge.as_ref().is_some_and(is));
        let Some(mut hello) = found.and_then(|at| self.pending_hellos.remove(at)) else { return };
        let Some(prior) = self.by_name.get(&hello.name).map(|prior| prior.channel) else { return };
        if let Some(state) = self.state_of(prior).filter(|state| state.is_live()) {
            let replaced = ChannelError::Aborted { peer: Arc::clone(&state.peer), reason: Reason::Replaced };
            let error = if state.remote_close.is_some() { state.closed_by_remote() } else { replaced };
            self.end(prior, error);
        }
        if let Some(prior) = self.by_name.get(&hello.name).filter(|_| hello.write == 0) {
            (hello.write, _) = prior.next();
        }
        if let Some(channel) = self.admit(&hello)
            && let Some(state) = self.state_of(channel)
        {
            state.incoming.follows_prior = true;
            self.peek_payload(channel);
        }
    }
}
