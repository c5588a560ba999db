//! All channels of one endpoint: user requests and events of the carrier go in, frames and callbacks come out.

mod control;
mod liveness;
mod requests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use super::Callback;
use super::carrier::{Carrier, Event, Hello, Loss, Peer, Wait};
use super::channel_state::{ChannelState, Listening, Phase};
use super::wire::{Kind, Transport};
use crate::{ChannelError, Config, Reason, Violation};

/// The longest limit: longer than any process lives, yet short enough to add to any time.
const MAX_LIMIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// All channels of one endpoint.
pub(crate) struct Engine {
    carrier: Box<dyn Carrier>,
    pub(crate) config: Config,
    channels: Vec<Option<Box<ChannelState>>>,
    listeners: Vec<Option<Listening>>,
    /// The open listener that uses [`Config::secret`].
    shared_listener: Option<u32>,
    /// The last channel with each peer of the carrier, and how many peers have one.
    by_peer: Vec<Option<u32>>,
    peers: usize,
    /// Hellos that haven't been answered: of this poll, and of peers whose earlier channel has messages to read.
    hellos: Vec<Hello>,
    /// Channels to pump.
    scheduled: Vec<u32>,
    events: Vec<Event>,
    callbacks: Vec<Callback>,
    now: Instant,
    /// When the timers last ran.
    last_timers: Instant,
    refusals: u32,
    /// The error with which the endpoint failed or was stopped.
    pub(crate) ended: Option<ChannelError>,
}

/// Finds a channel's state while other fields of the engine are borrowed.
fn find(channels: &mut [Option<Box<ChannelState>>], channel: u32) -> Option<&mut ChannelState> {
    channels.get_mut(channel as usize)?.as_deref_mut()
}

impl Engine {
    pub fn new(carrier: Box<dyn Carrier>, config: Config, now: Instant) -> Self {
        let config = Config { depth: config.depth.max(1), lost_after: config.lost_after.min(MAX_LIMIT), ..config };
        Self {
            carrier,
            config,
            channels: Vec::new(),
            listeners: Vec::new(),
            shared_listener: None,
            by_peer: Vec::new(),
            peers: 0,
            hellos: Vec::new(),
            scheduled: Vec::new(),
            events: Vec::new(),
            callbacks: Vec::new(),
            now,
            last_timers: now,
            refusals: 0,
            ended: None,
        }
    }

    #[cfg(test)]
    pub fn carrier(&self) -> &dyn Carrier {
        &*self.carrier
    }

    /// Takes the callbacks that are due, in order.
    pub fn take_callbacks(&mut self, into: &mut Vec<Callback>) {
        into.append(&mut self.callbacks);
    }

    pub(crate) fn state_of(&mut self, channel: u32) -> Option<&mut ChannelState> {
        find(&mut self.channels, channel)
    }

    /// Returns the last channel with a peer.
    fn channel_of(&self, peer: Peer) -> Option<u32> {
        self.by_peer.get(peer.0 as usize).copied().flatten()
    }

    fn set_channel_of(&mut self, peer: Peer, channel: Option<u32>) {
        let at = peer.0 as usize;
        if self.by_peer.len() <= at {
            self.by_peer.resize(at + 1, None);
        }
        let before = std::mem::replace(&mut self.by_peer[at], channel);
        self.peers = self.peers + usize::from(channel.is_some()) - usize::from(before.is_some());
    }

    /// Returns how to wait for the next event; None if there is work now.
    pub fn wait(&self) -> Option<Wait> {
        if self.callbacks.is_empty() && self.scheduled.is_empty() { self.carrier.wait() } else { None }
    }

    /// Returns whether no channel is open and no control message is unsent or in flight.
    pub fn is_idle(&self) -> bool {
        self.ended.is_some() || self.carrier.is_idle() && !self.channels.iter().flatten().any(|state| state.is_live())
    }

    /// Replaces the carrier. The old one produces no events.
    pub fn replace_carrier(&mut self, carrier: Box<dyn Carrier>) -> Box<dyn Carrier> {
        std::mem::replace(&mut self.carrier, carrier)
    }

    /// Marks a channel as having something to send. It's pumped once, by [`Engine::flush`].
    fn schedule(&mut self, channel: u32) {
        if let Some(state) = find(&mut self.channels, channel)
            && !state.is_scheduled
        {
            state.is_scheduled = true;
            self.scheduled.push(channel);
        }
    }

    /// Serves reads, sends what the channels can send, and what the carrier held back. Only once earlier callbacks have
    /// run.
    pub fn flush(&mut self) {
        while let Some(channel) = self.scheduled.pop() {
            self.pump(channel);
        }
        self.carrier.flush();
    }

    /// Advances the engine's clock: the limits of later requests count from `now`.
    pub fn advance_clock(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    /// Ends the engine: every callback gets `error`.
    pub fn stop(&mut self, error: &ChannelError) {
        if self.ended.is_none() {
            self.end_all(error);
            self.ended = Some(error.clone());
        }
    }

    /// Ends all channels and accepts with `error`, and sends aborts to the peers.
    pub fn end_all(&mut self, error: &ChannelError) {
        self.end_where(error, |_| true);
    }

    /// Like [`Engine::end_all`], but leaves channels that are closing.
    pub fn end_open(&mut self, error: &ChannelError) {
        self.end_where(error, |state| state.closing.is_none());
    }

    fn end_where(&mut self, error: &ChannelError, which: fn(&ChannelState) -> bool) {
        for channel in 0..self.channels.len() as u32 {
            if self.state_of(channel).is_some_and(|state| state.is_live() && which(state)) {
                self.abort_with(channel, error.clone(), Reason::Stopped);
            }
        }
        for listening in self.listeners.iter_mut().flatten() {
            listening.fail(error, &mut self.callbacks);
        }
    }

    /// Serves reads, sends what the channel can send, and advances a close.
    fn pump(&mut self, channel: u32) {
        let Some(state) = find(&mut self.channels, channel) else { return };
        state.is_scheduled = false;
        state.incoming.deliver_next(&mut self.callbacks);
        if state.incoming.has_reads()
            && let Some(error) = state.refuses_reads()
        {
            state.incoming.fail(&error, &mut self.callbacks);
        }
        if !matches!(state.phase, Phase::Open) {
            return;
        }
        state.outgoing.pump(&mut *self.carrier, state.addr, &mut self.callbacks);
        let offer = state.outgoing.offer();
        if state.remote_close.is_none()
            && let Some(report) = state.incoming.report()
        {
            self.send_control(channel, Kind::Read, report.is_awaited.into(), report.id);
        }
        if let Some(id) = offer {
            self.send_control(channel, Kind::Offer, 0, id);
        }
        self.send_close_when_idle(channel);
    }

    /// Ends a channel and sends the reason to the peer.
    fn abort_with(&mut self, channel: u32, error: ChannelError, reason: Reason) {
        self.send_abort(channel, reason);
        self.end(channel, error);
    }

    /// Ends a channel: every callback gets `error`, once.
    fn end(&mut self, channel: u32, error: ChannelError) {
        let Some(state) = find(&mut self.channels, channel) else { return };
        let was = std::mem::replace(&mut state.phase, Phase::Ended(error.clone()));
        if let Phase::Ended(first) = was {
            state.phase = Phase::Ended(first);
            return;
        }
        log::debug!("channel {channel} ended: {error}");
        let addr = state.addr;
        state.outgoing.fail(&error, &mut self.callbacks);
        state.incoming.fail(&error, &mut self.callbacks);
        if let Phase::Connecting { done, .. } = was {
            self.callbacks.push(Callback::Open(done, Err(error.clone())));
        }
        if let Some(closing) = state.closing.take() {
            let result = match &error {
                ChannelError::ClosedHere { .. } => Ok(()),
                other => Err(other.clone()),
            };
            self.callbacks.extend(closing.done.into_iter().map(|done| Callback::Close(done, result.clone())));
        }
        let mut unused = state.released;
        self.carrier.close(addr);
        // Where each channel has its own connection, a past peer doesn't count.
        if self.carrier.properties().transport == Transport::Tcp {
            self.set_channel_of(addr, None);
        }
        for listening in self.listeners.iter_mut().flatten() {
            unused |= listening.drop_channel(channel);
        }
        if unused {
            self.channels[channel as usize] = None;
        }
    }

    fn protocol_violation(&mut self, channel: u32, violation: Violation) {
        let Some(state) = self.state_of(channel) else { return };
        let error = state.protocol_violation(violation);
        self.abort_with(channel, error, Reason::Violation);
    }

    /// Makes progress; true if anything happened at the carrier. With `now`, also runs the timers.
    pub fn poll(&mut self, now: Option<Instant>) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let mut events = std::mem::take(&mut self.events);
        let polled = self.carrier.poll(now.unwrap_or(self.now), &mut events);
        let is_busy = polled.as_ref().is_ok_and(|is_busy| *is_busy) || !events.is_empty();
        if let Err(error) = polled {
            self.stop(&ChannelError::Endpoint(error));
        }
        for event in events.drain(..) {
            self.event(event);
        }
        self.events = events;
        // After the events, which may be of a peer's earlier channel.
        for hello in std::mem::take(&mut self.hellos) {
            self.hello(hello);
        }
        if let Some(now) = now {
            self.timers(now);
        }
        self.flush();
        is_busy
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Hello(hello) => self.hellos.push(hello),
            Event::Control(message) => self.control(&message),
            Event::Message { from, bytes } => {
                let Some(channel) = self.channel_of(from) else { return };
                let Some(state) = find(&mut self.channels, channel).filter(|state| state.is_live()) else { return };
                state.incoming.message(bytes, &mut self.callbacks);
                self.schedule(channel);
            }
            Event::Sent { to, id, body } => {
                let Some(channel) = self.channel_of(to) else { return };
                let Some(state) = find(&mut self.channels, channel).filter(|state| state.is_live()) else { return };
                state.outgoing.sent(id, body, &mut self.callbacks);
                self.schedule(channel);
            }
            Event::Lost { peer, loss } => self.lost(peer, loss),
        }
    }

    /// Called when a peer is lost. Its channel ends, except that what the peer wrote before its close is still read.
    fn lost(&mut self, peer: Peer, loss: Loss) {
        let Some(channel) = self.channel_of(peer) else { return self.carrier.close(peer) };
        let Some(state) = self.state_of(channel) else { return };
        let is_open = state.remote_close.is_none();
        match loss {
            Loss::Violation(violation) => self.protocol_violation(channel, violation),
            Loss::Receive(source) => {
                let error = ChannelError::Failed { peer: Arc::clone(&state.peer), source };
                self.abort_with(channel, error, Reason::Stopped);
            }
            Loss::Connection(source) if is_open => self.connection_failed(channel, source),
            // A channel that waits for an answer ends at once; others end at the next read or write, after the messages
            // that have already arrived, or when the peer stays silent.
            Loss::Unreachable(source) if is_open => {
                if state.closing.is_some() || matches!(state.phase, Phase::Connecting { .. }) {
                    self.connection_failed(channel, source);
                }
            }
            // The peer is closing, so it doesn't matter that it takes no message.
            Loss::Connection(_) | Loss::Unreachable(_) => {}
        }
    }

    fn connection_failed(&mut self, channel: u32, source: Error) {
        let Some(state) = self.state_of(channel) else { return };
        let peer = Arc::clone(&state.peer);
        let error = match state.phase {
            Phase::Connecting { .. } => ChannelError::Unreachable { peer, source },
            _ => ChannelError::Failed { peer, source },
        };
        self.end(channel, error);
    }
}
