//! Channels with endpoints that had one before, and with new endpoints at the address of one that is gone.
//!
//! Tags and address are those of the earlier channel, whose messages may still arrive. So the new channel's ids begin far from the earlier
//! ones, in both directions: a message with an id of the earlier channel is stale and is dropped. Any peer can write any name into a hello,
//! and a hello may arrive late. So the engine challenges the named endpoint before it ends the earlier channel.

use std::sync::Arc;

use super::Engine;
use crate::proto::channel_state::ChannelState;
use crate::proto::hello::{PathChallenge, PendingHello, PriorChannel};
use crate::proto::operation::NO_CHANNEL;
use crate::proto::secret::secret;
use crate::proto::wire::{Control, Kind};
use crate::{ChannelError, Reason};

/// How many hellos may wait for a path response.
const MAX_PENDING_HELLOS: usize = 1024;
/// How many challenges are sent for one hello. One may be lost with the connection to an earlier endpoint of that name.
const MAX_CHALLENGES: u32 = 10;

impl Engine {
    /// Queues a hello from an endpoint name that had a channel before.
    pub(super) fn queue_hello(&mut self, hello: PendingHello) {
        if self.pending_hellos.iter().any(|pending| (pending.addr, pending.remote) == (hello.addr, hello.remote)) {
            // A duplicate.
            return;
        }
        if self.pending_hellos.len() >= MAX_PENDING_HELLOS {
            self.pending_hellos.pop_front();
        }
        self.pending_hellos.push_back(hello);
        self.challenge_pending_hellos();
    }

    /// Sends the first challenge for queued hellos, but only after reading what the peer wrote before it closed.
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

    /// Repeats challenges that got no response.
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

    /// Answers the challenge to the hello of `channel`: the listener had an earlier channel with this endpoint name.
    pub(super) fn path_challenge(&mut self, channel: u32, message: &Control) {
        let Some(state) = self.state_of(channel) else { return };
        state.outgoing.start_at(message.id);
        state.incoming.follows_prior = true;
        let addr = state.addr;
        let response = Control { from: channel, ..Control::new(Kind::PathResponse, 0, message.sender_secret) };
        self.send_control_to(addr, channel, &response, &[]);
    }

    /// Handles the answer to a challenge. If an earlier channel is still open, the endpoint it was with is gone.
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
