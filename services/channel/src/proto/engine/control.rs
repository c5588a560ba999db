//! Control messages: opening, watching and closing channels.

use std::sync::Arc;

use super::{Engine, find};
use crate::proto::channel_state::{ChannelState, Phase, RemoteChannel};
use crate::proto::hello::PendingHello;
use crate::proto::operation::{NO_CHANNEL, Operation, token};
use crate::proto::tags::CONTROL;
use crate::proto::transport::{Addr, SendResult};
use crate::proto::wire::{self, Carrier, Control, Kind, SHARED_LISTENER, VERSION};
use crate::{ChannelError, Reason};

/// How many channels may wait to be accepted at one listener.
const BACKLOG: usize = 1024;
/// How many refusals an endpoint sends. Further refused peers run into their time limit.
const MAX_REFUSALS: u32 = 4096;

impl Engine {
    /// Sends a control message to an endpoint, now or once the transport takes it.
    pub(super) fn send_control_to(&mut self, to: Addr, channel: u32, control: &Control, name: &[u8]) {
        let tag = CONTROL | control.kind as u64;
        let token = token(Operation::SendControl, channel, control.kind as u32);
        let message = (to, tag, control.emit(name).into(), token);
        // The new message replaces an unsent one of the same kind to the same peer, so a peer that sends pings but receives no answers
        // doesn't fill up memory.
        match self.unsent_control.iter_mut().find(|(of, _, _, same)| (*of, *same) == (to, token)) {
            Some(waiting) => *waiting = message,
            None => self.unsent_control.push_back(message),
        }
        self.retry_control();
    }

    /// Offers unsent control messages to the transport.
    pub(super) fn retry_control(&mut self) {
        for _ in 0..self.unsent_control.len() {
            let Some((to, tag, body, token)) = self.unsent_control.pop_front() else { return };
            match self.transport.send(to, tag, body, token, false) {
                SendResult::Posted => self.control_in_flight += 1,
                SendResult::Done(_) => {}
                SendResult::Retry(body) => self.unsent_control.push_back((to, tag, body, token)),
                // An open channel with that peer ends later, when the peer stays silent.
                SendResult::Failed(_, source) => self.unreachable(to, source),
            }
        }
    }

    /// Sends a control message to the peer of an open channel.
    pub(super) fn send_control(&mut self, channel: u32, kind: Kind, value: u64, id: u32) {
        let Some(state) = self.state_of(channel) else { return };
        let (addr, remote) = (state.addr, state.remote);
        let sender_secret = if kind == Kind::Welcome { state.secret } else { 0 };
        let message =
            Control { from: channel, sender_secret, value, id, ..Control::new(kind, remote.id, remote.secret) };
        self.send_control_to(addr, channel, &message, &[]);
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

    /// Handles a control message from `from`, if the transport knows the sender; false if the bytes aren't one.
    pub(super) fn control(&mut self, bytes: &[u8], from: Option<Addr>) -> bool {
        let Some((message, name)) = Control::parse(bytes) else { return false };
        if message.kind == Kind::Hello {
            self.hello(&message, name, from);
            return true;
        }
        if message.kind == Kind::PathResponse {
            self.path_response(&message);
            return true;
        }
        let (now, channel) = (self.now, message.to);
        let Some(state) = self.state_of(channel).filter(|state| state.secret == message.secret && state.is_live())
        else {
            log::debug!("a {:?} for a channel that does not exist or has ended was dropped", message.kind);
            return true;
        };
        (state.last_heard, state.pinged_at) = (now, None);
        let peer = Arc::clone(&state.peer);
        let connecting = matches!(state.phase, Phase::Connecting { .. });
        let reason = Reason::of(message.value);
        match message.kind {
            Kind::Welcome if connecting && message.version != VERSION => {
                self.end(channel, ChannelError::Refused { peer, reason: Reason::Version });
            }
            Kind::Welcome if connecting => self.welcome(channel, &message),
            Kind::PathChallenge if connecting => self.path_challenge(channel, &message),
            Kind::Refuse if connecting => self.end(channel, ChannelError::Refused { peer, reason }),
            Kind::Abort => self.end(channel, ChannelError::Aborted { peer, reason }),
            Kind::Ping if !connecting => self.send_control(channel, Kind::Pong, 0, 0),
            Kind::Read if !connecting => {
                state.outgoing.peer_read_to(message.id);
                self.schedule(channel);
            }
            Kind::Close if !connecting => self.closed_by_peer(channel, message.id, message.value as u32),
            Kind::CloseAck if state.closing.as_ref().is_some_and(|closing| closing.announced) => {
                let error = state.closed_locally();
                self.end(channel, error);
            }
            _ => {}
        }
        true
    }

    fn welcome(&mut self, channel: u32, message: &Control) {
        let max = self.transport.properties().max_message;
        let Some(state) = self.state_of(channel) else { return };
        state.remote = RemoteChannel { id: message.from, secret: message.sender_secret };
        state.max_write = usize::try_from(message.value).unwrap_or(usize::MAX).min(max);
        state.incoming.start_at(message.id);
        if let Phase::Connecting { done, .. } = std::mem::replace(&mut state.phase, Phase::Open) {
            self.opened(channel, done);
        }
        if self.state_of(channel).is_some_and(|state| state.incoming.follows_prior) {
            self.peek_payload(channel);
        }
    }

    /// Handles the peer's close: it wrote every message before `end`, and read every message of this end before `unread`.
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
        state.outgoing.end_at(unread, error.clone(), &mut self.callbacks);
        state.incoming.end_at(end, &error, &mut self.callbacks);
    }

    fn hello(&mut self, message: &Control, name: &[u8], from: Option<Addr>) {
        let to = if message.to == SHARED_LISTENER { self.shared_listener() } else { Some(message.to) };
        let Some(listener) = to.filter(|to| self.secrets.get(*to as usize) == Some(&message.secret)) else {
            // No answer: the sender may have written any endpoint's name into the hello.
            log::debug!("a hello without the secret of a listener was dropped");
            return;
        };
        let (addr, name) = match self.transport.identify(from, name) {
            Ok(sender) => sender,
            Err(error) => {
                log::warn!("a hello from {} cannot be answered: {error}", wire::label(name));
                return;
            }
        };
        let is_tcp = self.transport.properties().carrier == Carrier::Tcp;
        if is_tcp && self.by_addr.contains_key(&addr) {
            log::debug!("a second hello on one connection was dropped");
            return;
        }
        let listening = self.listeners.get(listener as usize).and_then(Option::as_ref);
        let refused = if message.version != VERSION {
            Some(Reason::Version)
        } else if let Some(listening) = listening {
            let new = !self.by_name.contains_key(&name);
            let busy = listening.arrived.len() >= BACKLOG || new && self.by_addr.len() >= self.config.max_peers;
            if name == self.transport.properties().name {
                Some(Reason::PairInUse)
            } else {
                busy.then_some(Reason::Busy)
            }
        } else {
            Some(Reason::NotListening)
        };
        if refused.is_some() {
            self.refusals += 1;
            if self.refusals > MAX_REFUSALS {
                return;
            }
        }
        let hello = PendingHello::new(addr, listener, message, &name);
        if let Some(reason) = refused {
            self.refuse(&hello, reason);
        } else if self.by_name.contains_key(&name) {
            self.queue_hello(hello);
        } else {
            self.admit(&hello);
        }
    }

    fn refuse(&mut self, hello: &PendingHello, reason: Reason) {
        log::debug!("refused {}: {reason}", wire::label(&hello.name));
        let refusal =
            Control { value: reason as u64, ..Control::new(Kind::Refuse, hello.remote.id, hello.remote.secret) };
        self.send_control_to(hello.addr, NO_CHANNEL, &refusal, &[]);
    }

    /// Opens a channel to the sender of a hello and returns its number.
    pub(super) fn admit(&mut self, hello: &PendingHello) -> Option<u32> {
        if self.listening(hello.listener).is_none() {
            self.refuse(hello, Reason::NotListening);
            return None;
        }
        let start = if hello.write == 0 { self.config.start_id } else { hello.write };
        let channel = self.add_channel(hello.addr, &hello.name, start)?;
        let (max, value) = (self.transport.properties().max_message, self.max_read() as u64);
        if let Some(state) = self.state_of(channel) {
            state.remote = hello.remote;
            state.max_write = usize::try_from(hello.max).unwrap_or(usize::MAX).min(max);
            state.incoming.start_at(hello.read);
        }
        self.send_control(channel, Kind::Welcome, value, start);
        let listening = self.listening(hello.listener)?;
        match listening.waiting.pop_front() {
            None => listening.arrived.push_back(channel),
            Some((_, done)) => self.opened(channel, done),
        }
        Some(channel)
    }
}
