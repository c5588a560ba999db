//! Control messages: opening, watching and closing channels.

use std::sync::Arc;

use super::{Engine, find};
use crate::proto::carrier::Hello;
use crate::proto::channel_state::{ChannelState, Phase, RemoteChannel};
use crate::proto::wire::{self, Control, Kind, VERSION};
use crate::{ChannelError, Reason};

/// How many channels may wait to be accepted at one listener.
const BACKLOG: usize = 1024;
/// How many refusals an endpoint sends. Further refused peers run into their time limit.
const MAX_REFUSALS: u32 = 4096;

impl Engine {
    /// Sends a control message to the peer of an open channel.
    pub(super) fn send_control(&mut self, channel: u32, kind: Kind, value: u64, id: u32) {
        let Some(state) = self.state_of(channel) else { return };
        let (addr, remote) = (state.addr, state.remote);
        let sender_secret = if kind == Kind::Welcome { state.secret } else { 0 };
        let message =
            Control { from: channel, sender_secret, value, id, ..Control::new(kind, remote.id, remote.secret) };
        self.carrier.send_control(addr, message);
    }

    /// Sends an abort to the peer of an open channel. A peer that has closed it needs none, and may be gone.
    pub(super) fn send_abort(&mut self, channel: u32, reason: Reason) {
        let is_open = |state: &mut ChannelState| matches!(state.phase, Phase::Open) && state.remote_close.is_none();
        if self.state_of(channel).is_some_and(is_open) {
            self.send_control(channel, Kind::Abort, reason as u64, 0);
        }
    }

    /// Sends a closing channel's close, once everything that was written is out.
    pub(super) fn send_close_when_idle(&mut self, channel: u32) {
        let Some(state) = self.state_of(channel) else { return };
        let idle = state.outgoing.is_idle();
        let (id, unread) = (state.outgoing.next_id(), state.incoming.next_id());
        if let Some(closing) = &mut state.closing
            && idle
            && !closing.announced
        {
            closing.announced = true;
            self.send_control(channel, Kind::Close, u64::from(unread), id);
        }
    }

    /// Handles a control message other than a hello.
    pub(super) fn control(&mut self, message: &Control) {
        let (now, channel) = (self.now, message.to);
        let Some(state) = self.state_of(channel).filter(|state| state.secret == message.secret && state.is_live())
        else {
            log::debug!("a {:?} for a channel that does not exist or has ended was dropped", message.kind);
            return;
        };
        (state.last_heard, state.pinged_at) = (now, None);
        let peer = Arc::clone(&state.peer);
        let connecting = matches!(state.phase, Phase::Connecting { .. });
        let reason = Reason::of(message.value);
        match message.kind {
            Kind::Welcome if connecting && message.version != VERSION => {
                self.end(channel, ChannelError::Refused { peer, reason: Reason::Version });
            }
            Kind::Welcome if connecting => {
                if let Some((_, Phase::Connecting { done, .. })) = self.begin(channel, message) {
                    self.opened(channel, done);
                }
            }
            Kind::Refuse if connecting => self.end(channel, ChannelError::Refused { peer, reason }),
            Kind::Abort => self.end(channel, ChannelError::Aborted { peer, reason }),
            Kind::Ping if !connecting => self.send_control(channel, Kind::Pong, 0, 0),
            Kind::Read if !connecting => {
                state.outgoing.peer_read_to(message.id, message.value == 1);
                self.schedule(channel);
            }
            Kind::Offer if !connecting => {
                state.incoming.offer(message.id);
                self.schedule(channel);
            }
            Kind::Close if !connecting => self.closed_by_peer(channel, message.id, message.value as u32),
            Kind::CloseAck if state.closing.as_ref().is_some_and(|closing| closing.announced) => {
                let error = state.closed_locally();
                self.end(channel, error);
            }
            _ => {}
        }
    }

    /// Begins a channel whose peer sent `greeting`, a hello or a welcome. Returns the id of the first message to write,
    /// and the callback of a connect.
    fn begin(&mut self, channel: u32, greeting: &Control) -> Option<(u32, Phase)> {
        let state = find(&mut self.channels, channel)?;
        let ids = self.carrier.open(state.addr, greeting);
        state.outgoing.start_at(ids.write);
        state.incoming.start_at(ids.read);
        state.remote = RemoteChannel { id: greeting.from, secret: greeting.sender_secret };
        state.max_write = self.carrier.properties().max_message.min(greeting.value.try_into().unwrap_or(usize::MAX));
        Some((ids.write, std::mem::replace(&mut state.phase, Phase::Open)))
    }

    /// Handles the peer's close: it wrote every message before `end`, and read every message of this end before
    /// `unread`.
    fn closed_by_peer(&mut self, channel: u32, end: u32, unread: u32) {
        let now = self.now;
        self.send_control(channel, Kind::CloseAck, 0, 0);
        let Some(state) = find(&mut self.channels, channel) else { return };
        let error = state.closed_by_remote();
        if state.closing.is_some() {
            // Both sides are closing, and neither reads any more.
            let error = if state.outgoing.is_idle() { state.closed_locally() } else { error };
            self.end(channel, error);
            return;
        }
        state.remote_close = Some((end, now));
        self.carrier.stop_sending(state.addr);
        state.outgoing.end_at(unread, error.clone(), &mut self.callbacks);
        state.incoming.end_at(end, &error, &mut self.callbacks);
    }

    /// Answers a hello, but only once what the peer wrote before it closed an earlier channel has been read.
    pub(super) fn hello(&mut self, hello: Hello) {
        let prior = self.channel_of(hello.peer);
        let listening = self.listeners.get(hello.listener as usize).and_then(Option::as_ref);
        let refused = if hello.message.version != VERSION {
            Some(Reason::Version)
        } else if let Some(listening) = listening {
            let is_full = prior.is_none() && self.peers >= self.config.max_peers;
            if hello.name == self.carrier.properties().name {
                Some(Reason::PairInUse)
            } else {
                (listening.arrived.len() >= BACKLOG || is_full).then_some(Reason::Busy)
            }
        } else {
            Some(Reason::NotListening)
        };
        if let Some(reason) = refused {
            return self.refuse(&hello, reason);
        }
        let state = prior.and_then(|prior| self.state_of(prior)).filter(|state| state.is_live());
        if let (Some(prior), Some(state)) = (prior, state) {
            if state.has_unread() {
                self.hellos.retain(|waiting| waiting.peer != hello.peer);
                return self.hellos.push(hello);
            }
            // The endpoint that it was with is gone, or has ended it.
            let replaced = ChannelError::Aborted { peer: Arc::clone(&state.peer), reason: Reason::Replaced };
            let error = if state.remote_close.is_some() { state.closed_by_remote() } else { replaced };
            self.end(prior, error);
        }
        self.admit(&hello);
    }

    fn refuse(&mut self, hello: &Hello, reason: Reason) {
        self.refusals += 1;
        if self.refusals > MAX_REFUSALS {
            return;
        }
        log::debug!("refused {}: {reason}", wire::label(&hello.name));
        let Control { from, sender_secret, .. } = hello.message;
        let refusal = Control { value: reason as u64, ..Control::new(Kind::Refuse, from, sender_secret) };
        self.carrier.send_control(hello.peer, refusal);
    }

    /// Opens a channel to the sender of a hello.
    fn admit(&mut self, hello: &Hello) {
        let Hello { peer, name, listener, message } = hello;
        let Some(channel) = self.add_channel(*peer, name) else { return };
        let Some((first, _)) = self.begin(channel, message) else { return };
        self.send_control(channel, Kind::Welcome, self.max_read() as u64, first);
        let Some(listening) = self.listening(*listener) else { return };
        match listening.waiting.pop_front() {
            None => listening.arrived.push_back(channel),
            Some((_, done)) => self.opened(channel, done),
        }
    }
}
