//! All channels of one endpoint: user requests and transport events go in, operations and callbacks come out.

mod control;
mod liveness;
mod reconnect;
mod requests;
mod unknown_tags;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use super::callback::Callback;
use super::channel_state::{ChannelState, Phase};
use super::hello::{PendingHello, PriorChannel};
use super::listening::Listening;
use super::operation::{NO_CHANNEL, Operation, parse_token, token};
use super::tags::{CONTROL, ID_MASK, LENGTH_BUFFER, Pattern, unknown_tags};
use super::transport::{Addr, Event, Receive, ReceiveError, ReceiveResult, Transport};
use super::wire::{CONTROL_MAX, Carrier, Kind};
use crate::{ChannelError, Config, Payload, Reason, Violation};

/// How many receives for control messages are posted at a time. More would slow down providers, which search them for every message.
const CONTROL_RECEIVES: u32 = 4;
/// Bytes of the buffer for a control message. It's longer than any of them, because the sender of a truncated message may be unknown.
const CONTROL_BUFFER: usize = 4096;
const _: () = assert!(CONTROL_BUFFER > CONTROL_MAX);
/// The longest limit: longer than any process lives, yet short enough to add to any time.
const MAX_LIMIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// How many consecutive failed receives are put down to bad messages. More mean that the endpoint has failed.
const MAX_FAILURES: u32 = 1000;

/// All channels of one endpoint.
pub(crate) struct Engine {
    transport: Box<dyn Transport>,
    pub(crate) config: Config,
    channels: Vec<Option<Box<ChannelState>>>,
    listeners: Vec<Option<Listening>>,
    /// The secrets of all listeners, including closed ones.
    secrets: Vec<u64>,
    /// The last channel with each endpoint name, if all channels share one endpoint.
    by_name: HashMap<Box<[u8]>, PriorChannel>,
    /// Hellos from endpoint names that had a channel before, until their path responses arrive.
    pending_hellos: VecDeque<PendingHello>,
    by_addr: HashMap<Addr, u32>,
    /// Control messages that the transport hasn't taken yet: address, tag, message, token.
    pub(crate) unsent_control: VecDeque<(Addr, u64, Payload, u64)>,
    /// The endpoint's receives that the transport hasn't taken yet.
    unposted: Vec<(Operation, u32, Vec<u8>)>,
    /// Patterns of unknown tags, and whether a peek for each is in progress.
    unknown: Vec<(Pattern, bool)>,
    /// The last unknown tag that a peek found without its sender, which led to a peek for every peer.
    suspected_tag: Option<u64>,
    /// Channels to pump in [`Engine::run_scheduled`], and its working list.
    scheduled: Vec<u32>,
    pumping: Vec<u32>,
    events: Vec<Event>,
    callbacks: Vec<Callback>,
    now: Instant,
    /// When the timers last ran.
    last_timers: Instant,
    /// When the engine last peeked for unknown tags.
    last_peek: Instant,
    refusals: u32,
    control_in_flight: usize,
    failures: u32,
    /// The error with which the endpoint failed or was stopped.
    pub(crate) ended: Option<ChannelError>,
}

/// Finds a channel's state while other fields of the engine are borrowed.
fn find(channels: &mut [Option<Box<ChannelState>>], channel: u32) -> Option<&mut ChannelState> {
    channels.get_mut(channel as usize)?.as_deref_mut()
}

impl Engine {
    pub fn new(transport: Box<dyn Transport>, config: Config, now: Instant) -> Self {
        let config = Config { depth: config.depth.max(1), lost_after: config.lost_after.min(MAX_LIMIT), ..config };
        let control = (0..CONTROL_RECEIVES).map(|index| (Operation::ReceiveControl, index, Vec::new()));
        let mut this = Self {
            transport,
            config,
            channels: Vec::new(),
            listeners: Vec::new(),
            secrets: Vec::new(),
            by_name: HashMap::new(),
            pending_hellos: VecDeque::new(),
            by_addr: HashMap::new(),
            unsent_control: VecDeque::new(),
            unposted: control.collect(),
            suspected_tag: None,
            unknown: unknown_tags().map(|pattern| (pattern, false)).collect(),
            scheduled: Vec::new(),
            pumping: Vec::new(),
            events: Vec::new(),
            callbacks: Vec::new(),
            now,
            last_timers: now,
            last_peek: now,
            refusals: 0,
            control_in_flight: 0,
            failures: 0,
            ended: None,
        };
        this.post_endpoint_receives();
        this
    }

    pub fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// Takes the callbacks that are due, in order.
    pub fn take_callbacks(&mut self, into: &mut Vec<Callback>) {
        into.append(&mut self.callbacks);
    }

    pub(crate) fn state_of(&mut self, channel: u32) -> Option<&mut ChannelState> {
        find(&mut self.channels, channel)
    }

    /// True if there is work that no transport event will announce.
    pub fn has_work(&self) -> bool {
        !(self.callbacks.is_empty()
            && self.unsent_control.is_empty()
            && self.unposted.is_empty()
            && self.scheduled.is_empty())
    }

    /// True if no channel is open and no control message is unsent or in flight.
    pub fn is_idle(&self) -> bool {
        self.ended.is_some()
            || self.unsent_control.is_empty()
                && self.control_in_flight == 0
                && !self.channels.iter().flatten().any(|state| state.is_live())
    }

    /// Replaces the transport. Operations on the old one produce no events.
    pub fn replace_transport(&mut self, transport: Box<dyn Transport>) -> Box<dyn Transport> {
        std::mem::replace(&mut self.transport, transport)
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

    /// Marks a channel as having something to post. It's pumped once, after all events of a poll.
    fn schedule(&mut self, channel: u32) {
        if let Some(state) = find(&mut self.channels, channel)
            && !state.scheduled
        {
            state.scheduled = true;
            self.scheduled.push(channel);
        }
    }

    /// Pumps the scheduled channels.
    pub fn run_scheduled(&mut self) {
        if self.scheduled.is_empty() {
            return self.transport.flush();
        }
        let mut pumping = std::mem::replace(&mut self.scheduled, std::mem::take(&mut self.pumping));
        for channel in pumping.drain(..) {
            if let Some(state) = self.state_of(channel) {
                state.scheduled = false;
                self.pump(channel);
            }
        }
        self.pumping = pumping;
        self.transport.flush();
    }

    /// Posts what the channel can post, and advances a close.
    fn pump(&mut self, channel: u32) {
        let Some(state) = find(&mut self.channels, channel) else { return };
        if !matches!(state.phase, Phase::Open) {
            return;
        }
        let (transport, callbacks) = (&mut *self.transport, &mut self.callbacks);
        let outgoing = state.outgoing.pump(transport, state.addr, callbacks);
        let result = outgoing.and_then(|retry| Ok(state.incoming.pump(transport, state.addr, callbacks)? | retry));
        match result {
            Ok(retry) => {
                if retry && !state.scheduled {
                    state.scheduled = true;
                    self.scheduled.push(channel);
                }
                if let Some((end, _)) = state.remote_close {
                    let error = state.closed_by_remote();
                    state.incoming.end_at(end, &error, &mut self.callbacks);
                } else if let Some(id) = state.incoming.report() {
                    self.send_control(channel, Kind::Read, 0, id);
                }
                self.send_close_when_idle(channel);
            }
            Err(source) => {
                let error = ChannelError::Failed { peer: Arc::clone(&state.peer), source };
                self.end(channel, error);
            }
        }
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
        let (prior, addr) = (PriorChannel::of(state, channel), state.addr);
        if let Some(known) = self.by_name.get_mut(&state.name).filter(|known| known.channel == channel) {
            *known = prior;
        }
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
        self.transport.cancel(&|token| {
            parse_token(token).is_some_and(|(operation, of, _)| {
                of == channel && matches!(operation, Operation::ReceiveLength | Operation::ReceivePayload)
            })
        });
        if self.transport.properties().carrier == Carrier::Tcp {
            self.by_addr.remove(&addr);
            self.transport.disconnect(addr);
        }
        let mut unused = self.state_of(channel).is_some_and(|state| state.released);
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

    /// Posts the receives that belong to no channel.
    fn post_endpoint_receives(&mut self) {
        while let Some((operation, index, buffer)) = self.unposted.pop() {
            let pattern = Pattern { tag: CONTROL, ignore: ID_MASK };
            let token = token(operation, NO_CHANNEL, index);
            match self.transport.receive(Receive { from: None, pattern, buffer, len: CONTROL_BUFFER, token }) {
                ReceiveResult::Posted => {}
                ReceiveResult::Retry(buffer) => {
                    self.unposted.push((operation, index, buffer));
                    return;
                }
                ReceiveResult::Failed(buffer, error) => {
                    self.unposted.push((operation, index, buffer));
                    self.stop(&ChannelError::Endpoint(error));
                    return;
                }
            }
        }
    }

    /// Makes progress; true if the transport had events. With `now`, also runs the timers.
    pub fn poll(&mut self, now: Option<Instant>) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let mut events = std::mem::take(&mut self.events);
        if let Err(error) = self.transport.poll(now.unwrap_or(self.now), &mut events) {
            self.stop(&ChannelError::Endpoint(error));
        }
        let busy = !events.is_empty();
        for event in events.drain(..) {
            self.event(event);
        }
        self.events = events;
        if !self.unposted.is_empty() {
            self.post_endpoint_receives();
        }
        if !self.pending_hellos.is_empty() {
            self.challenge_pending_hellos();
        }
        self.retry_control();
        self.run_scheduled();
        if let Some(now) = now {
            self.timers(now);
            self.transport.flush();
        }
        busy
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Sent { token, body, result } => {
                if let Some((operation, channel, id)) = parse_token(token) {
                    self.sent(operation, channel, id, body, result);
                }
            }
            Event::Received { token, bytes, tag, from, result } => match parse_token(token) {
                Some((operation @ (Operation::ReceiveControl | Operation::ReceiveUnknown), _, index)) => {
                    self.endpoint_received(operation, &bytes, tag, from, result);
                    if operation == Operation::ReceiveControl {
                        self.unposted.push((operation, index, bytes));
                    } else if let Some((_, peeking)) = self.unknown.get_mut(index as usize) {
                        *peeking = false;
                    }
                }
                Some((operation, channel, id)) => self.received(operation, channel, id, bytes, tag, result),
                None => {}
            },
            Event::Peeked { token, found } => {
                if let Some((operation, channel, index)) = parse_token(token) {
                    self.peeked(operation, channel, index, found);
                }
            }
            Event::Lost { peer, error } => self.lost(peer, error),
        }
    }

    fn sent(&mut self, operation: Operation, channel: u32, id: u32, body: Payload, result: Result<(), Error>) {
        if operation == Operation::SendControl {
            self.control_in_flight = self.control_in_flight.saturating_sub(1);
        }
        let Some(state) = find(&mut self.channels, channel) else { return };
        match result {
            Ok(()) if operation == Operation::SendControl => {}
            Ok(()) => {
                if state.is_live() {
                    state.outgoing.sent(operation, id, body, &mut self.callbacks);
                    self.schedule(channel);
                }
            }
            // The peer is closing, so it doesn't matter that it didn't take a message.
            Err(_) if state.remote_close.is_some() => {}
            Err(source) => self.connection_failed(channel, source),
        }
    }

    /// Called when a peer can no longer be reached. A channel that waits for an answer ends at once; other channels end at the next read or
    /// write, after the messages that have already arrived.
    fn unreachable(&mut self, peer: Addr, source: Error) {
        let Some(&channel) = self.by_addr.get(&peer) else { return };
        let Some(state) = self.state_of(channel) else { return };
        let waits_for_peer = state.closing.is_some() || matches!(state.phase, Phase::Connecting { .. });
        if state.remote_close.is_none() && waits_for_peer {
            self.connection_failed(channel, source);
        }
    }

    /// Called when a connection is lost. Its channel ends, except that what the peer wrote before its close is still read.
    fn lost(&mut self, peer: Addr, source: Error) {
        let Some(&channel) = self.by_addr.get(&peer) else { return self.transport.disconnect(peer) };
        if self.state_of(channel).is_some_and(|state| state.remote_close.is_none()) {
            self.connection_failed(channel, source);
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

    fn received(
        &mut self,
        operation: Operation,
        channel: u32,
        id: u32,
        bytes: Vec<u8>,
        tag: u64,
        result: Result<(), ReceiveError>,
    ) {
        let now = self.now;
        let Some(state) = find(&mut self.channels, channel) else { return };
        if !state.is_live() {
            return;
        }
        let violation = match result {
            Ok(()) => {
                (state.last_heard, state.pinged_at) = (now, None);
                if operation == Operation::ReceiveLength {
                    state.incoming.length(tag, bytes).err()
                } else {
                    state.incoming.payload(id, bytes, &mut self.callbacks).err()
                }
            }
            Err(ReceiveError::Cancelled) => {
                if operation == Operation::ReceiveLength {
                    state.incoming.length_cancelled();
                }
                return;
            }
            Err(ReceiveError::Truncated)
                if operation == Operation::ReceiveLength && state.incoming.is_stale((tag & ID_MASK) as u32) =>
            {
                state.incoming.length_cancelled();
                None
            }
            Err(ReceiveError::Truncated) if operation == Operation::ReceiveLength => {
                Some(Violation::LengthSize { id: (tag & ID_MASK) as u32, bytes: LENGTH_BUFFER + 1 })
            }
            Err(ReceiveError::Truncated) => Some(state.incoming.too_long(id)),
            Err(ReceiveError::Failed(source)) => {
                let error = ChannelError::Failed { peer: Arc::clone(&state.peer), source };
                self.abort_with(channel, error, Reason::Stopped);
                return;
            }
        };
        match violation {
            Some(violation) => self.protocol_violation(channel, violation),
            None => self.schedule(channel),
        }
    }

    /// Handles the end of a receive that belongs to no channel.
    fn endpoint_received(
        &mut self,
        operation: Operation,
        bytes: &[u8],
        tag: u64,
        from: Option<Addr>,
        result: Result<(), ReceiveError>,
    ) {
        match result {
            Ok(()) | Err(ReceiveError::Truncated) => self.failures = 0,
            Err(ReceiveError::Cancelled) => return,
            Err(ReceiveError::Failed(error)) => {
                // A message was cut off along with its connection. Other messages aren't affected.
                log::debug!("a receive for any peer failed: {error}");
                self.failures += 1;
                if self.failures > MAX_FAILURES {
                    self.stop(&ChannelError::Endpoint(error));
                }
                return;
            }
        }
        if operation != Operation::ReceiveControl || result.is_err() || !self.control(bytes, from) {
            self.unknown_tag(tag, from);
        }
    }
}
