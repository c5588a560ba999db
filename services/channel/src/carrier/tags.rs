//! Messages over tags that a provider matches, on one endpoint that all peers share.
//!
//! A message is two tagged messages:
//!
//! | part | tag | ignore mask of the receive | bytes |
//! |---|---|---|---|
//! | length | `1 << 32 \| id` | `0xffff_ffff` | 8, little endian |
//! | payload | `1 << 33 \| id` | 0 | as many as the length says, 0 included |
//! | control message | `1 << 34 \| kind` | `0xffff_ffff` | [`wire`](crate::proto::wire) |
//!
//! The reader posts receives for lengths of any id, and learns the id from the tag; then it posts a receive for exactly
//! that payload. So messages, which the network reorders, get back their order, and each payload arrives in memory of
//! its length.
//!
//! All peers of an endpoint use the same tags and ids, so receives for lengths and payloads are directed
//! (`FI_DIRECTED_RECV`). The price is that two endpoints can have only one channel between them at a time. Where the
//! provider doesn't report the sender, a control message of more than 4096 bytes is dropped.
//!
//! Unknown tags are searched for (`FI_PEEK`, where the provider has it) a few times a second; payloads without a length
//! every `ping_after`, while reads wait and no message has begun.

pub(crate) mod endpoint;
pub(crate) mod incoming;
pub(crate) mod outgoing;
#[allow(unsafe_code)]
pub(crate) mod provider;
mod reconnect;
mod unknown_tags;

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use crate::proto::carrier::{Carrier, Event, FirstIds, Hello, Loss, Peer, Progress, Properties};
use crate::proto::wire::{CONTROL_MAX, Control, Kind, Transport};
use crate::{Config, Payload, Violation};
use endpoint::{
    Abilities, Addr, CONTROL, Completion, Endpoint, ID_MASK, LENGTH_BUFFER, NO_SESSION, Operation, Pattern, Receive,
    ReceiveError, ReceiveResult, Received, Send, SendResult, Token, token,
};
use incoming::{Incoming, Limits};
use outgoing::Outgoing;

/// How many receives for control messages are posted at a time. More would slow down providers, which search them for
/// every message.
const CONTROL_RECEIVES: u32 = 4;
/// Bytes of the buffer for a control message. It's longer than any of them, because the sender of a truncated message
/// may be unknown.
const CONTROL_BUFFER: usize = 4096;
const _: () = assert!(CONTROL_BUFFER > CONTROL_MAX);
/// How many consecutive failed receives are put down to bad messages. More mean that the endpoint has failed.
const MAX_FAILURES: u32 = 1000;

/// Ids after the last messages of an earlier channel.
#[derive(Clone, Copy)]
struct LastIds {
    write: u32,
    read: u32,
}

/// An endpoint in the address vector.
struct Known {
    addr: Addr,
    /// The session of its channel.
    session: Option<u32>,
    /// Of its last session that has ended.
    prior: Option<LastIds>,
}

/// The channel that a hello of this end names.
#[derive(Clone, Copy, PartialEq, Eq)]
struct HelloKey {
    channel: u32,
    secret: u64,
}

/// The messages of one channel.
struct Session {
    peer: Peer,
    addr: Addr,
    outgoing: Outgoing,
    incoming: Incoming,
    /// This end's hello, until it's answered.
    hello: Option<HelloKey>,
    last_heard: Instant,
    /// When this side last peeked for payloads without a length.
    last_payload_peek: Instant,
    /// Whether the session is on the list of those to pump.
    is_scheduled: bool,
}

impl Session {
    /// Reports the messages that have been sent, in order.
    fn report_sent(&mut self, events: &mut Vec<Event>) {
        while let Some((id, body)) = self.outgoing.take_sent() {
            events.push(Event::Sent { to: self.peer, id, body });
        }
    }
}

/// A hello whose sender has to prove that it has the endpoint it names.
struct PendingHello {
    hello: Hello,
    nonce: u64,
    last_sent: Instant,
    times_sent: u32,
}

/// A control message that the endpoint hasn't taken yet.
pub(crate) struct UnsentControl {
    to: Peer,
    message: Control,
}

/// Tags that the protocol doesn't use.
struct UnknownTags {
    pattern: Pattern,
    /// A peek for them is in progress.
    is_peeking: bool,
}

/// Messages over an endpoint with tags.
pub(crate) struct Tags<E> {
    endpoint: E,
    properties: Properties,
    limits: Limits,
    start_id: u32,
    ping_after: Duration,
    /// Time between two peeks for unknown tags.
    check_interval: Duration,
    /// The secrets of all listeners, including closed ones.
    secrets: HashMap<u32, u64>,
    peers: Vec<Known>,
    by_name: HashMap<Box<[u8]>, Peer>,
    by_addr: HashMap<Addr, Peer>,
    sessions: Vec<Option<Box<Session>>>,
    /// Sessions whose hello hasn't been answered.
    connecting: Vec<u32>,
    pending_hellos: VecDeque<PendingHello>,
    pub(crate) unsent_control: VecDeque<UnsentControl>,
    control_in_flight: usize,
    /// Receives for control messages that the endpoint hasn't taken yet: their indexes and buffers.
    unposted: Vec<(u32, Vec<u8>)>,
    /// Consecutive receives for control messages that failed.
    failures: u32,
    unknown: Vec<UnknownTags>,
    /// The last unknown tag that a peek found without its sender, which led to a peek for every peer.
    suspected_tag: Option<u64>,
    last_check: Instant,
    /// Sessions to pump, and the working list.
    scheduled: Vec<u32>,
    pumping: Vec<u32>,
    completions: Vec<Completion>,
    events: Vec<Event>,
    failure: Option<Error>,
    now: Instant,
}

/// Finds a session while other fields of the carrier are borrowed.
fn find(sessions: &mut [Option<Box<Session>>], number: u32) -> Option<&mut Session> {
    sessions.get_mut(number as usize)?.as_deref_mut()
}

impl<E: Endpoint> Tags<E> {
    pub fn new(endpoint: E, config: &Config) -> Self {
        let Abilities { name, provider, max_message, .. } = endpoint.abilities();
        let properties = Properties {
            name: name.clone(),
            provider: provider.clone(),
            transport: Transport::Tags,
            max_message: *max_message,
            unread_bytes: usize::MAX,
        };
        let limits = Limits { depth: config.depth.max(1), max_message: config.max_message.min(*max_message) };
        let now = Instant::now();
        let mut this = Self {
            endpoint,
            properties,
            limits,
            start_id: config.start_id,
            ping_after: config.ping_after,
            check_interval: config.timer_interval(),
            secrets: HashMap::new(),
            peers: Vec::new(),
            by_name: HashMap::new(),
            by_addr: HashMap::new(),
            sessions: Vec::new(),
            connecting: Vec::new(),
            pending_hellos: VecDeque::new(),
            unsent_control: VecDeque::new(),
            control_in_flight: 0,
            unposted: (0..CONTROL_RECEIVES).map(|index| (index, Vec::new())).collect(),
            failures: 0,
            unknown: unknown_tags::patterns().map(|pattern| UnknownTags { pattern, is_peeking: false }).collect(),
            suspected_tag: None,
            last_check: now,
            scheduled: Vec::new(),
            pumping: Vec::new(),
            completions: Vec::new(),
            events: Vec::new(),
            failure: None,
            now,
        };
        this.post_control_receives();
        this
    }

    fn known(&mut self, peer: Peer) -> Option<&mut Known> {
        self.peers.get_mut(peer.0 as usize)
    }

    fn session_of(&mut self, peer: Peer) -> Option<&mut Session> {
        let number = self.peers.get(peer.0 as usize)?.session?;
        find(&mut self.sessions, number)
    }

    /// Returns the peer with that endpoint name.
    fn insert(&mut self, name: &[u8]) -> Result<Peer, Error> {
        if let Some(peer) = self.by_name.get(name) {
            return Ok(*peer);
        }
        let addr = self.endpoint.insert(name)?;
        let peer = Peer(self.peers.len() as u32);
        self.peers.push(Known { addr, session: None, prior: None });
        self.by_name.insert(name.into(), peer);
        self.by_addr.insert(addr, peer);
        Ok(peer)
    }

    /// Begins a session with a peer.
    fn begin(&mut self, peer: Peer, write: u32) -> Option<&mut Session> {
        let number = self.sessions.len() as u32;
        let (now, limits) = (self.now, self.limits);
        let known = self.known(peer).filter(|_| number < NO_SESSION)?;
        known.session = Some(number);
        let (addr, follows_prior) = (known.addr, known.prior.is_some());
        self.sessions.push(Some(Box::new(Session {
            peer,
            addr,
            outgoing: Outgoing::new(number, addr, write),
            incoming: Incoming::new(number, addr, limits, follows_prior),
            hello: None,
            last_heard: now,
            last_payload_peek: now,
            is_scheduled: false,
        })));
        find(&mut self.sessions, number)
    }

    /// Marks a session as having something to post. It's pumped once, by [`Carrier::flush`].
    fn schedule(&mut self, number: u32) {
        if let Some(session) = find(&mut self.sessions, number)
            && !session.is_scheduled
        {
            session.is_scheduled = true;
            self.scheduled.push(number);
        }
    }

    /// Posts what the session can post.
    fn pump(&mut self, number: u32) {
        let Some(session) = find(&mut self.sessions, number) else { return };
        session.is_scheduled = false;
        let (peer, endpoint) = (session.peer, &mut self.endpoint);
        let sent = session.outgoing.pump(endpoint).map_err(Loss::Connection);
        let posted = sent.and_then(|retry| Ok(session.incoming.pump(endpoint).map_err(Loss::Receive)? | retry));
        session.report_sent(&mut self.events);
        match posted {
            Ok(false) => {}
            Ok(true) => self.schedule(number),
            Err(loss) => self.events.push(Event::Lost { peer, loss }),
        }
    }

    /// Offers unsent control messages to the endpoint.
    fn retry_control(&mut self) {
        for _ in 0..self.unsent_control.len() {
            let Some(UnsentControl { to, message }) = self.unsent_control.pop_front() else { return };
            let Some(Known { addr, session, .. }) = self.peers.get(to.0 as usize) else { continue };
            // A refusal or a challenge is for a channel that isn't the session's.
            let of_session = !matches!(message.kind, Kind::Refuse | Kind::PathChallenge);
            let session = session.filter(|_| of_session).unwrap_or(NO_SESSION);
            let name: &[u8] = if message.kind == Kind::Hello { &self.properties.name } else { &[] };
            let send = Send {
                to: *addr,
                tag: CONTROL | message.kind as u64,
                body: message.emit(name).into(),
                token: token(Operation::SendControl, session, message.kind as u32),
                more: false,
            };
            match self.endpoint.send(send) {
                SendResult::Posted => self.control_in_flight += 1,
                SendResult::Done(_) => {}
                SendResult::Retry(_) => self.unsent_control.push_back(UnsentControl { to, message }),
                SendResult::Failed(_, error) => {
                    self.events.push(Event::Lost { peer: to, loss: Loss::Unreachable(error) });
                }
            }
        }
    }

    /// Posts the receives for control messages.
    fn post_control_receives(&mut self) {
        while let Some((index, buffer)) = self.unposted.pop() {
            let pattern = Pattern { tag: CONTROL, ignore: ID_MASK };
            let token = token(Operation::ReceiveControl, NO_SESSION, index);
            match self.endpoint.receive(Receive { from: None, pattern, buffer, len: CONTROL_BUFFER, token }) {
                ReceiveResult::Posted => {}
                ReceiveResult::Retry(buffer) => return self.unposted.push((index, buffer)),
                ReceiveResult::Failed(buffer, error) => {
                    self.failure = Some(error);
                    return self.unposted.push((index, buffer));
                }
            }
        }
    }

    fn completed(&mut self, completion: Completion) {
        match completion {
            Completion::Sent { token, body, result } => {
                if let Some(token) = Token::parse(token) {
                    self.sent(token, body, result);
                }
            }
            Completion::Received(received) => match Token::parse(received.token) {
                Some(Token { operation: Operation::ReceiveControl | Operation::ReceiveUnknown, id, .. }) => {
                    self.received_from_any(received, id);
                }
                Some(token) => self.received(token, received),
                None => {}
            },
            Completion::Peeked { token, found } => {
                if let Some(token) = Token::parse(token) {
                    self.peeked(token, found);
                }
            }
        }
    }

    fn sent(&mut self, Token { operation, session: number, id }: Token, body: Payload, result: Result<(), Error>) {
        if operation == Operation::SendControl {
            self.control_in_flight = self.control_in_flight.saturating_sub(1);
        }
        let Some(session) = find(&mut self.sessions, number) else { return };
        match (result, operation) {
            (Err(error), _) => {
                self.events.push(Event::Lost { peer: session.peer, loss: Loss::Connection(error) });
                return;
            }
            (Ok(()), Operation::SendLength) => session.outgoing.length_sent(id),
            (Ok(()), Operation::SendPayload) => session.outgoing.payload_sent(id, body),
            (Ok(()), _) => return,
        }
        session.report_sent(&mut self.events);
        self.schedule(number);
    }

    fn received(&mut self, Token { operation, session: number, id }: Token, received: Received) {
        let now = self.now;
        let Some(session) = find(&mut self.sessions, number) else { return };
        let (is_length, message) = (operation == Operation::ReceiveLength, (received.tag & ID_MASK) as u32);
        let violation = match received.result {
            Ok(()) => {
                session.last_heard = now;
                let arrived = if is_length {
                    session.incoming.length(received.tag, received.bytes)
                } else {
                    session.incoming.payload(id, received.bytes)
                };
                while let Some(bytes) = session.incoming.take_complete() {
                    self.events.push(Event::Message { from: session.peer, bytes });
                }
                arrived.err()
            }
            Err(ReceiveError::Cancelled) => {
                if is_length {
                    session.incoming.length_cancelled();
                }
                return;
            }
            Err(ReceiveError::Truncated) if is_length && session.incoming.is_stale(message) => {
                session.incoming.length_cancelled();
                None
            }
            Err(ReceiveError::Truncated) if is_length => {
                Some(Violation::LengthSize { id: message, bytes: LENGTH_BUFFER + 1 })
            }
            Err(ReceiveError::Truncated) => Some(session.incoming.too_long(id)),
            Err(ReceiveError::Failed(error)) => {
                self.events.push(Event::Lost { peer: session.peer, loss: Loss::Receive(error) });
                return;
            }
        };
        match violation {
            Some(violation) => {
                self.events.push(Event::Lost { peer: session.peer, loss: Loss::Violation(violation) });
            }
            None => self.schedule(number),
        }
    }

    /// Handles the end of a receive for any peer: a control message, or a message with an unknown tag.
    fn received_from_any(&mut self, received: Received, index: u32) {
        let Received { token, bytes, tag, from, result } = received;
        let is_control = Token::parse(token).is_some_and(|token| token.operation == Operation::ReceiveControl);
        match result {
            Ok(()) | Err(ReceiveError::Truncated) => {
                self.failures = 0;
                match Control::parse(&bytes).filter(|_| is_control && result.is_ok()) {
                    Some((message, name)) => self.control(message, name),
                    None => {
                        let violation = if is_control { Violation::Control } else { Violation::UnknownTag { tag } };
                        self.violated(violation, from);
                    }
                }
            }
            Err(ReceiveError::Cancelled) => {}
            Err(ReceiveError::Failed(error)) => {
                // A message was cut off along with its connection. Other messages aren't affected.
                log::debug!("a receive for any peer failed: {error}");
                self.failures += 1;
                if self.failures > MAX_FAILURES {
                    self.failure = Some(error);
                }
            }
        }
        if is_control {
            self.unposted.push((index, bytes));
        } else if let Some(unknown) = self.unknown.get_mut(index as usize) {
            unknown.is_peeking = false;
        }
    }

    fn control(&mut self, message: Control, name: &[u8]) {
        match message.kind {
            Kind::Hello => self.hello(message, name),
            Kind::PathChallenge => self.path_challenge(&message),
            Kind::PathResponse => self.path_response(&message),
            _ => self.events.push(Event::Control(message)),
        }
    }

    /// Handles a message that no channel sends, of any peer.
    fn violated(&mut self, violation: Violation, from: Option<Addr>) {
        let peer = from.and_then(|from| self.by_addr.get(&from)).copied();
        match peer.filter(|peer| self.session_of(*peer).is_some()) {
            Some(peer) => self.events.push(Event::Lost { peer, loss: Loss::Violation(violation) }),
            None => log::warn!("a message from an unknown sender was dropped: {violation}"),
        }
    }

    /// Looks for messages that no receive matches, and repeats challenges.
    fn check_timeouts(&mut self) {
        let now = self.now;
        self.repeat_challenges();
        if now.duration_since(self.last_check) < self.check_interval {
            return;
        }
        self.last_check = now;
        self.peek_unknown_tags();
        for number in 0..self.sessions.len() as u32 {
            let Some(session) = find(&mut self.sessions, number) else { continue };
            if session.incoming.is_waiting() && now.duration_since(session.last_payload_peek) >= self.ping_after {
                session.last_payload_peek = now;
                self.peek_payload(number);
            }
        }
    }
}

impl<E: Endpoint> Carrier for Tags<E> {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn listen(&mut self, listener: u32, secret: u64) -> Result<Box<[u8]>, Error> {
        self.secrets.insert(listener, secret);
        Ok(self.properties.name.clone())
    }

    fn connect(&mut self, name: &[u8], _: u64) -> Result<Peer, Error> {
        self.insert(name)
    }

    fn send_hello(&mut self, to: Peer, hello: Control) {
        let ids = self.known(to).and_then(|known| known.prior).map(LastIds::next);
        let (id, start_id) = ids.map_or((self.start_id, 0), |ids| (ids.write, ids.read));
        let Some(session) = self.begin(to, id) else { return };
        session.hello = Some(HelloKey { channel: hello.from, secret: hello.sender_secret });
        self.connecting.extend(self.peers[to.0 as usize].session);
        self.send_control(to, Control { id, start_id, ..hello });
    }

    fn open(&mut self, peer: Peer, greeting: &Control) -> FirstIds {
        if greeting.kind == Kind::Hello {
            let prior = self.known(peer).and_then(|known| known.prior);
            let write = if greeting.start_id == 0 {
                prior.map_or(self.start_id, |prior| prior.next().write)
            } else {
                greeting.start_id
            };
            self.begin(peer, write);
        }
        let Some(number) = self.known(peer).and_then(|known| known.session) else { return FirstIds::default() };
        self.connecting.retain(|connecting| *connecting != number);
        let Some(session) = find(&mut self.sessions, number) else { return FirstIds::default() };
        session.hello = None;
        session.incoming.start_at(greeting.id);
        let ids = FirstIds { write: session.outgoing.next_id(), read: greeting.id };
        if session.incoming.follows_prior {
            self.peek_payload(number);
        }
        ids
    }

    fn close(&mut self, peer: Peer) {
        let Some(number) = self.known(peer).and_then(|known| known.session.take()) else { return };
        self.connecting.retain(|connecting| *connecting != number);
        let Some(session) = self.sessions.get_mut(number as usize).and_then(Option::take) else { return };
        let last = LastIds { write: session.outgoing.next_id(), read: session.incoming.next_id() };
        if let Some(known) = self.known(peer) {
            known.prior = Some(last);
        }
        self.endpoint.cancel(&|token| {
            Token::parse(token).is_some_and(|token| {
                token.session == number
                    && matches!(token.operation, Operation::ReceiveLength | Operation::ReceivePayload)
            })
        });
    }

    fn send_control(&mut self, to: Peer, message: Control) {
        // The new message replaces an unsent one of the same kind to the same peer, so a peer that sends pings but
        // receives no answers doesn't fill up memory.
        let is_same = |unsent: &&mut UnsentControl| {
            let Control { kind, from, .. } = unsent.message;
            (unsent.to, kind, from) == (to, message.kind, message.from)
        };
        match self.unsent_control.iter_mut().find(is_same) {
            Some(unsent) => unsent.message = message,
            None => self.unsent_control.push_back(UnsentControl { to, message }),
        }
        self.retry_control();
    }

    fn send(&mut self, to: Peer, id: u32, body: Payload) -> Option<Payload> {
        let number = self.known(to)?.session?;
        let session = find(&mut self.sessions, number)?;
        session.outgoing.push(body);
        let retry = session.outgoing.pump(&mut self.endpoint);
        let mut own = None;
        while let Some((sent, body)) = session.outgoing.take_sent() {
            if sent == id {
                own = Some(body);
            } else {
                self.events.push(Event::Sent { to, id: sent, body });
            }
        }
        match retry {
            Ok(false) => {}
            Ok(true) => self.schedule(number),
            Err(error) => self.events.push(Event::Lost { peer: to, loss: Loss::Connection(error) }),
        }
        own
    }

    fn stop_sending(&mut self, to: Peer) {
        if let Some(session) = self.session_of(to) {
            session.outgoing.stop();
        }
    }

    fn read(&mut self, from: Peer, buffer: Vec<u8>) {
        let Some(number) = self.known(from).and_then(|known| known.session) else { return };
        if let Some(session) = find(&mut self.sessions, number) {
            session.incoming.read(buffer);
            self.schedule(number);
        }
    }

    fn flush(&mut self) {
        let mut pumping = std::mem::replace(&mut self.scheduled, std::mem::take(&mut self.pumping));
        pumping.drain(..).for_each(|number| self.pump(number));
        self.pumping = pumping;
    }

    fn poll(&mut self, now: Instant, events: &mut Vec<Event>) -> Result<bool, Error> {
        self.now = self.now.max(now);
        let mut completions = std::mem::take(&mut self.completions);
        let polled = self.endpoint.poll(&mut completions);
        let is_busy = !completions.is_empty();
        completions.drain(..).for_each(|completion| self.completed(completion));
        self.completions = completions;
        self.check_timeouts();
        if !self.unposted.is_empty() {
            self.post_control_receives();
        }
        self.retry_control();
        events.append(&mut self.events);
        polled.and(self.failure.take().map_or(Ok(is_busy), Err))
    }

    fn progress(&self, peer: Peer) -> Progress {
        let number = self.peers.get(peer.0 as usize).and_then(|known| known.session);
        let session = number.and_then(|number| self.sessions.get(number as usize)?.as_deref());
        match session {
            None => Progress { last_heard: self.now, reading: 0, writing: 0 },
            Some(session) => Progress {
                last_heard: session.last_heard,
                reading: session.incoming.bytes_in_flight(),
                writing: session.outgoing.bytes_in_flight(),
            },
        }
    }

    fn overdue(&mut self, peer: Peer, now: Instant, limit: Duration) -> Option<Violation> {
        self.session_of(peer)?.incoming.overdue(now, limit)
    }

    fn restart_deadlines(&mut self, peer: Peer) {
        if let Some(session) = self.session_of(peer) {
            session.incoming.restart_deadlines();
        }
    }

    fn is_idle(&self) -> bool {
        self.unsent_control.is_empty() && self.control_in_flight == 0
    }

    fn wait_fd(&self) -> Option<RawFd> {
        self.endpoint.wait_fd()
    }

    fn has_work(&self) -> bool {
        !(self.unsent_control.is_empty()
            && self.unposted.is_empty()
            && self.scheduled.is_empty()
            && self.events.is_empty())
    }

    fn may_wait(&self) -> bool {
        self.endpoint.may_wait()
    }
}
