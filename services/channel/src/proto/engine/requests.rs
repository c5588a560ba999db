//! User requests: opening, writing, reading and closing channels.

use std::sync::Arc;
use std::time::Duration;

use ferrogin_libfabric::Error;
use ferrogin_rendezvous::Secret;

use super::{Engine, MAX_LIMIT, find};
use crate::proto::carrier::Peer;
use crate::proto::channel_state::{ChannelState, Closing, Listening, Phase, RemoteChannel};
use crate::proto::incoming::Incoming;
use crate::proto::outgoing::Outgoing;
use crate::proto::wire::{self, Address, Control, Kind, NAME_MAX, SHARED_LISTENER, Transport, secret};
use crate::proto::{Callback, CloseDone, OpenDone, Opened, ReadDone, ReadId, WriteDone};
use crate::{ChannelError, Payload, Reason};

impl Engine {
    /// Queues a message.
    pub fn write(&mut self, channel: u32, ticket: u64, body: Payload, done: WriteDone) {
        let state = find(&mut self.channels, channel).ok_or(ChannelError::Stopped);
        match state.and_then(|state| state.refuses_write(body.len()).map_or(Ok(state), Err)) {
            Ok(state) => {
                state.outgoing.push(ticket, body, done);
                self.schedule(channel);
            }
            Err(error) => self.callbacks.push(Callback::Write(done, Err(error))),
        }
    }

    /// Queues a read. It gets a message that is there, or an error, only once the channel is pumped: the callback of an
    /// earlier read that was dropped may be about to return a message.
    pub fn read(&mut self, channel: u32, ticket: u64, buffer: Vec<u8>, done: ReadDone) {
        let id = ReadId { channel, ticket };
        let Some(state) = find(&mut self.channels, channel) else {
            return self.callbacks.push(Callback::Read(done, Err(ChannelError::Stopped), id));
        };
        if state.incoming.push(id, done) && state.refuses_reads().is_none() {
            self.carrier.read(state.addr, buffer);
        }
        self.schedule(channel);
    }

    /// Takes back a message that was delivered but not used: the next read gets it, even if the channel has ended
    /// since.
    pub fn return_message(&mut self, channel: u32, number: u64, bytes: Vec<u8>) {
        let state = find(&mut self.channels, channel);
        if let Some(state) = state.filter(|state| state.closing.is_none()) {
            state.incoming.take_back(number, bytes);
            self.schedule(channel);
        }
    }

    /// Cancels a read whose callback hasn't run, or a write that hasn't started.
    pub fn cancel(&mut self, channel: u32, ticket: u64) {
        let Some(state) = find(&mut self.channels, channel) else { return };
        let error = ChannelError::Cancelled { peer: Arc::clone(&state.peer) };
        let id = ReadId { channel, ticket };
        if let Some(done) = state.outgoing.cancel(ticket) {
            self.callbacks.push(Callback::Write(done, Err(error)));
        } else if let Some(done) = state.incoming.cancel(id) {
            self.callbacks.push(Callback::Read(done, Err(error), id));
        } else if let Some(at) =
            self.callbacks.iter().position(|callback| matches!(callback, Callback::Read(_, Ok(_), of) if *of == id))
            && let Callback::Read(done, Ok(mut message), _) = self.callbacks.remove(at)
        {
            // The read has its message, but its callback hasn't run: the channel's next read gets the message. That
            // read may have one, too, which goes to the one after it, so that messages stay in order.
            for later in &mut self.callbacks[at..] {
                if let Callback::Read(_, Ok(next), of) = later
                    && of.channel == channel
                {
                    std::mem::swap(&mut message, next);
                }
            }
            self.callbacks.push(Callback::Read(done, Err(error), id));
            let (number, bytes) = message;
            state.incoming.take_back(number, bytes);
        }
        self.schedule(channel);
    }

    /// Sends everything written so far, then the close, and ends the channel when the peer confirms it.
    pub fn close(&mut self, channel: u32, limit: Duration, done: Option<CloseDone>) {
        let now = self.now;
        let Some(state) = find(&mut self.channels, channel) else {
            self.callbacks.extend(done.map(|done| Callback::Close(done, Err(ChannelError::Stopped))));
            return;
        };
        if let Phase::Ended(error) = &state.phase {
            let result = match error {
                ChannelError::ClosedHere { .. } | ChannelError::Closed { .. } => Ok(()),
                other => Err(other.clone()),
            };
            self.callbacks.extend(done.map(|done| Callback::Close(done, result)));
            return;
        }
        let deadline = now + limit.min(MAX_LIMIT);
        let closing =
            state.closing.get_or_insert_with(|| Closing { done: Vec::new(), deadline, limit, announced: false });
        closing.done.extend(done);
        if deadline < closing.deadline {
            (closing.deadline, closing.limit) = (deadline, limit);
        }
        let error = state.closed_locally();
        state.incoming.drop_unclaimed();
        state.incoming.fail(&error, &mut self.callbacks);
        if state.remote_close.is_some() || matches!(state.phase, Phase::Connecting { .. }) {
            self.end(channel, error);
            return;
        }
        self.schedule(channel);
    }

    /// Ends the channel at once and sends the peer an abort.
    pub fn abort(&mut self, channel: u32) {
        let Some(state) = self.state_of(channel) else { return };
        let error = state.closed_locally();
        self.abort_with(channel, error, Reason::Stopped);
    }

    /// Called when the user has dropped all handles to the channel.
    pub fn release(&mut self, channel: u32) {
        let limit = self.config.lost_after;
        let Some(state) = self.state_of(channel) else { return };
        state.released = true;
        if state.is_live() {
            if state.closing.is_none() {
                self.close(channel, limit, None);
            }
        } else {
            self.channels[channel as usize] = None;
        }
    }

    /// Closes every open channel.
    pub fn close_all(&mut self, limit: Duration) {
        for channel in 0..self.channels.len() as u32 {
            if self.state_of(channel).is_some_and(|state| state.is_live()) {
                self.close(channel, limit, None);
            }
        }
    }

    /// Opens a listener and returns its number and address.
    pub fn listen(&mut self) -> Result<(u32, Address), ChannelError> {
        if let Some(ended) = &self.ended {
            return Err(ended.clone());
        }
        let (listener, shared) = (self.listeners.len() as u32, self.shared_secret());
        if shared.is_some() && self.shared_listener.is_some() {
            let what = "a reactor with Config::secret has one listener at a time: drop the other one first".to_owned();
            return Err(ChannelError::CannotListen(Error::Argument { what }));
        }
        let secret = shared.unwrap_or_else(secret);
        let name = self.carrier.listen(listener, secret).map_err(ChannelError::CannotListen)?;
        if name.is_empty() || name.len() > NAME_MAX {
            let what = "the provider's endpoint names do not fit into 128 bytes".to_owned();
            return Err(ChannelError::BadAddress { what });
        }
        let transport = self.carrier.properties().transport;
        let address = match shared {
            Some(_) => Address { transport, listener: SHARED_LISTENER, secret: None, name },
            None => Address { transport, listener, secret: Some(secret), name },
        };
        self.shared_listener = shared.map(|_| listener);
        self.listeners.push(Some(Listening::default()));
        Ok((listener, address))
    }

    /// Passes the next channel that a peer opens to the listener to `done`.
    pub fn accept(&mut self, listener: u32, ticket: u64, done: OpenDone) {
        let ended = self.ended.clone();
        let error = match (self.listening(listener), ended) {
            (None, _) => ChannelError::Stopped,
            (Some(_), Some(ended)) => ended,
            (Some(listening), None) => {
                return match listening.arrived.pop_front() {
                    Some(channel) => self.opened(channel, done),
                    None => listening.waiting.push_back((ticket, done)),
                };
            }
        };
        self.callbacks.push(Callback::Open(done, Err(error)));
    }

    /// Cancels an accept.
    pub fn cancel_accept(&mut self, listener: u32, ticket: u64) {
        let Some(listening) = self.listening(listener) else { return };
        if let Some(at) = listening.waiting.iter().position(|(waiting, _)| *waiting == ticket)
            && let Some((_, done)) = listening.waiting.remove(at)
        {
            let error = ChannelError::Cancelled { peer: "a peer".into() };
            self.callbacks.push(Callback::Open(done, Err(error)));
        }
    }

    /// Takes back a channel that was accepted but not used: the next accept gets it.
    pub fn return_channel(&mut self, listener: u32, channel: u32) {
        let live = self.state_of(channel).is_some_and(|state| state.is_live());
        let listening = self.listening(listener).filter(|_| live);
        match listening.map(|listening| (listening.waiting.pop_front(), &mut listening.arrived)) {
            None => {
                self.abort(channel);
                self.release(channel);
            }
            Some((None, arrived)) => arrived.push_front(channel),
            Some((Some((_, done)), _)) => self.opened(channel, done),
        }
    }

    /// Closes a listener and aborts the channels that haven't been accepted.
    pub fn close_listener(&mut self, listener: u32) {
        let Some(mut listening) = self.listeners.get_mut(listener as usize).and_then(Option::take) else { return };
        self.carrier.unlisten(listener);
        self.shared_listener = self.shared_listener.filter(|shared| *shared != listener);
        listening.fail(&ChannelError::Stopped, &mut self.callbacks);
        for channel in listening.arrived {
            self.abort(channel);
            self.release(channel);
        }
    }

    /// Returns the secret derived from [`Config::secret`](crate::Config::secret).
    fn shared_secret(&self) -> Option<u64> {
        let secret = Secret::derive("ferrogin channel: Config::secret", self.config.secret.as_ref()?);
        let (bytes, _) = secret.bytes().split_first_chunk()?;
        Some(u64::from_le_bytes(*bytes).max(1))
    }

    pub(super) fn listening(&mut self, listener: u32) -> Option<&mut Listening> {
        self.listeners.get_mut(listener as usize)?.as_mut()
    }

    /// Reports an open channel to `done`.
    pub(super) fn opened(&mut self, channel: u32, done: OpenDone) {
        let state = find(&mut self.channels, channel).ok_or(ChannelError::Stopped);
        let opened = state.map(|state| Opened { channel, peer: Arc::clone(&state.peer), max_write: state.max_write });
        self.callbacks.push(Callback::Open(done, opened));
    }

    /// Opens a channel to a listener.
    pub fn connect(&mut self, address: &Address, limit: Duration, done: OpenDone) {
        match self.start_connect(address) {
            Err(error) => self.callbacks.push(Callback::Open(done, Err(error))),
            Ok(channel) => {
                let deadline = self.now + limit.min(MAX_LIMIT);
                if let Some(state) = self.state_of(channel) {
                    state.phase = Phase::Connecting { done, deadline, limit };
                }
            }
        }
    }

    /// Adds a channel and sends its hello.
    fn start_connect(&mut self, address: &Address) -> Result<u32, ChannelError> {
        let peer = address.endpoint();
        let bad = |what: &str| ChannelError::BadAddress { what: what.to_owned() };
        let properties = self.carrier.properties();
        if let Some(ended) = &self.ended {
            return Err(ended.clone());
        }
        if *address.name == *properties.name {
            return Err(bad("it is an address of this reactor: a channel needs two reactors"));
        }
        if address.transport != properties.transport {
            return Err(bad(match address.transport {
                Transport::Tcp => {
                    "its listener is over tcp, and this reactor over another provider: open both with the same Config::provider"
                }
                Transport::Tags => {
                    "its listener is not over tcp, and this reactor is: open both with the same Config::provider"
                }
            }));
        }
        let secret = address.secret.or_else(|| self.shared_secret());
        let secret =
            secret.ok_or_else(|| bad("it has no key: pass HOST:PORT#KEY, or set Config::secret on both ends"))?;
        let addr = match self.carrier.connect(&address.name, secret) {
            Ok(addr) => addr,
            Err(source) => return Err(ChannelError::Unreachable { peer, source }),
        };
        if self.channel_of(addr).and_then(|channel| self.state_of(channel)).is_some_and(|state| state.is_live()) {
            return Err(ChannelError::Refused { peer, reason: Reason::PairInUse });
        }
        let channel = self.add_channel(addr, &address.name);
        let channel = channel.ok_or(ChannelError::Refused { peer, reason: Reason::Busy })?;
        let hello = Control {
            from: channel,
            sender_secret: self.state_of(channel).map_or(0, |state| state.secret),
            value: self.max_read() as u64,
            ..Control::new(Kind::Hello, address.listener, secret)
        };
        self.carrier.send_hello(addr, hello);
        Ok(channel)
    }

    /// Returns the length of the longest message that this end accepts, in bytes.
    pub(super) fn max_read(&self) -> usize {
        self.config.max_message.min(self.carrier.properties().max_message)
    }

    pub(super) fn add_channel(&mut self, addr: Peer, name: &[u8]) -> Option<u32> {
        let channel = u32::try_from(self.channels.len()).ok()?;
        let unread_bytes = self.carrier.properties().unread_bytes;
        let state = ChannelState {
            peer: wire::label(name),
            addr,
            phase: Phase::Open,
            outgoing: Outgoing::new(self.config.depth, unread_bytes),
            incoming: Incoming::new(unread_bytes),
            secret: secret(),
            remote: RemoteChannel::default(),
            max_write: 0,
            closing: None,
            remote_close: None,
            released: false,
            last_heard: self.now,
            pinged_at: None,
            is_scheduled: false,
        };
        self.channels.push(Some(Box::new(state)));
        self.set_channel_of(addr, Some(channel));
        Some(channel)
    }
}
