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
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use crate::proto::carrier::{Carrier, Event, FirstIds, Hello, Loss, Peer, Progress, Properties, Wait};
use crate::proto::wire::{CONTROL_MAX, Control, Kind, Transport};
use crate::{Config, Payload, Violation};
use endpoint::{
    Abilities, Addr, CONTROL, Completion, Endpoint, ID_MASK, LENGTH_BUFFER, Operation, Pattern, Receive, ReceiveError,
    ReceiveResult, Received, Send, SendResult, SessionId, Token,
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
    session: Option<Box<Session>>,
    /// Of its last session that has ended.
    prior: Option<LastIds>,
}

/// A hello of this end that hasn't been answered.
struct SentHello {
    to: Peer,
    channel: u32,
    secret: u64,
}

/// The messages of one channel.
struct Session {
    id: SessionId,
    addr: Addr,
    outgoing: Outgoing,
    incoming: Incoming,
    last_heard: Instant,
    /// When this side last peeked for payloads without a length.
    last_payload_peek: Instant,
    /// Whether the session is on the list of those to pump.
    is_scheduled: bool,
}

impl Session {
    fn last_ids(&self) -> LastIds {
        LastIds { write: self.outgoing.next_id(), read: self.incoming.next_id() }
    }

    /// Reports the messages that have been sent, in order.
    fn report_sent(&mut self, events: &mut Vec<Event>) {
        while let Some((id, body)) = self.outgoing.take_sent() {
            events.push(Event::Sent { to: self.id.peer, id, body });
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
    /// Number of the next session.
    next_session: u64,
    sent_hellos: Vec<SentHello>,
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
    scheduled: Vec<SessionId>,
    pumping: Vec<SessionId>,
    completions: Vec<Completion>,
    events: Vec<Event>,
    failure: Option<Error>,
    now: Instant,
}

/// Finds a peer's session while other fields of the carrier are borrowed.
fn of_peer(peers: &mut [Known], peer: Peer) -> Option<&mut Session> {
    peers.get_mut(peer.0 as usize)?.session.as_deref_mut()
}

/// Finds a session, if it hasn't ended, while other fields of the carrier are borrowed.
fn find(peers: &mut [Known], id: SessionId) -> Option<&mut Session> {
    of_peer(peers, id.peer).filter(|session| session.id == id)
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
            next_session: 0,
            sent_hellos: Vec::new(),
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

    /// Returns the ids after the messages of the last session with a peer that has ended.
    fn prior(&self, peer: Peer) -> Option<LastIds> {
        self.peers.get(peer.0 as usize)?.prior
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
        let id = SessionId { peer, number: self.next_session };
        self.next_session += 1;
        let (now, limits) = (self.now, self.limits);
        let known = self.peers.get_mut(peer.0 as usize)?;
        let (addr, follows_prior) = (known.addr, known.prior.is_some());
        let session = Session {
            id,
            addr,
            outgoing: Outgoing::new(id, addr, write),
            incoming: Incoming::new(id, addr, limits, follows_prior),
            last_heard: now,
            last_payload_peek: now,
            is_scheduled: false,
        };
        Some(known.session.insert(Box::new(session)))
    }

    /// Marks a session as having something to post. It's pumped once, by [`Carrier::flush`].
    fn schedule(&mut self, peer: Peer) {
        if let Some(session) = of_peer(&mut self.peers, peer)
            && !session.is_scheduled
        {
            session.is_scheduled = true;
            self.scheduled.push(session.id);
        }
    }

    /// Posts what the session can post.
    fn pump(&mut self, id: SessionId) {
        let Some(session) = find(&mut self.peers, id) else { return };
        session.is_scheduled = false;
        let (peer, endpoint) = (id.peer, &mut self.endpoint);
        let sent = session.outgoing.pump(endpoint).map_err(Loss::Connection);
        let posted = sent.and_then(|retry| Ok(session.incoming.pump(endpoint).map_err(Loss::Receive)? | retry));
        session.report_sent(&mut self.events);
        match posted {
            Ok(false) => {}
            Ok(true) => self.schedule(peer),
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
            let session = session.as_ref().filter(|_| of_session).map(|session| session.id);
            let name: &[u8] = if message.kind == Kind::Hello { &self.properties.name } else { &[] };
            let send = Send {
                to: *addr,
                tag: CONTROL | message.kind as u64,
                body: message.emit(name).into(),
                token: Token { operation: Operation::SendControl, session, id: message.kind as u32 },
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
            let token = Token { operation: Operation::ReceiveControl, session: None, id: index };
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
            Completion::Sent { token, body, result } => self.sent(token, body, result),
            Completion::Received(received) => match received.token.operation {
                Operation::ReceiveControl | Operation::ReceiveUnknown => self.received_from_any(received),
                _ => self.received(received),
            },
            Completion::Peeked { token, found } => self.peeked(token, found),
        }
    }

    fn sent(&mut self, Token { operation, session, id }: Token, body: Payload, result: Result<(), Error>) {
        if operation == Operation::SendControl {
            self.control_in_flight = self.control_in_flight.saturating_sub(1);
        }
        let Some(session) = session.and_then(|id| find(&mut self.peers, id)) else { return };
        let peer = session.id.peer;
        match (result, operation) {
            (Err(error), _) => {
                self.events.push(Event::Lost { peer, loss: Loss::Connection(error) });
                return;
            }
            (Ok(()), Operation::SendLength) => session.outgoing.length_sent(id),
            (Ok(()), Operation::SendPayload) => session.outgoing.payload_sent(id, body),
            (Ok(()), _) => return,
        }
        session.report_sent(&mut self.events);
        self.schedule(peer);
    }

    fn received(&mut self, received: Received) {
        let (now, Token { operation, session, id }) = (self.now, received.token);
        let Some(session) = session.and_then(|id| find(&mut self.peers, id)) else { return };
        let peer = session.id.peer;
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
                    self.events.push(Event::Message { from: peer, bytes });
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
                self.events.push(Event::Lost { peer, loss: Loss::Receive(error) });
                return;
            }
        };
        match violation {
            Some(violation) => self.events.push(Event::Lost { peer, loss: Loss::Violation(violation) }),
            None => self.schedule(peer),
        }
    }

    /// Handles the end of a receive for any peer: a control message, or a message with an unknown tag.
    fn received_from_any(&mut self, received: Received) {
        let Received { token: Token { operation, id: index, .. }, bytes, tag, from, result } = received;
        let is_control = operation == Operation::ReceiveControl;
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
        match peer.filter(|peer| of_peer(&mut self.peers, *peer).is_some()) {
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
        for peer in 0..self.peers.len() as u32 {
            let Some(session) = of_peer(&mut self.peers, Peer(peer)) else { continue };
            if session.incoming.is_waiting() && now.duration_since(session.last_payload_peek) >= self.ping_after {
                session.last_payload_peek = now;
                self.peek_payload(Peer(peer));
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
        let ids = self.prior(to).map(LastIds::next);
        let (id, start_id) = ids.map_or((self.start_id, 0), |ids| (ids.write, ids.read));
        if self.begin(to, id).is_none() {
            return;
        }
        self.sent_hellos.push(SentHello { to, channel: hello.from, secret: hello.sender_secret });
        self.send_control(to, Control { id, start_id, ..hello });
    }

    fn open(&mut self, peer: Peer, greeting: &Control) -> FirstIds {
        if greeting.kind == Kind::Hello {
            let write = match greeting.start_id {
                0 => self.prior(peer).map_or(self.start_id, |prior| prior.next().write),
                start_id => start_id,
            };
            self.begin(peer, write);
        }
        self.sent_hellos.retain(|hello| hello.to != peer);
        let Some(session) = of_peer(&mut self.peers, peer) else { return FirstIds::default() };
        session.incoming.start_at(greeting.id);
        let ids = FirstIds { write: session.outgoing.next_id(), read: greeting.id };
        if session.incoming.follows_prior {
            self.peek_payload(peer);
        }
        ids
    }

    fn close(&mut self, peer: Peer) {
        let Some(known) = self.peers.get_mut(peer.0 as usize) else { return };
        let Some(session) = known.session.take() else { return };
        known.prior = Some(session.last_ids());
        self.sent_hellos.retain(|hello| hello.to != peer);
        self.endpoint.cancel(&|token| token.session == Some(session.id));
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
        let session = of_peer(&mut self.peers, to)?;
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
            Ok(true) => self.schedule(to),
            Err(error) => self.events.push(Event::Lost { peer: to, loss: Loss::Connection(error) }),
        }
        own
    }

    fn stop_sending(&mut self, to: Peer) {
        if let Some(session) = of_peer(&mut self.peers, to) {
            session.outgoing.stop();
        }
    }

    fn read(&mut self, from: Peer, buffer: Vec<u8>) {
        if let Some(session) = of_peer(&mut self.peers, from) {
            session.incoming.read(buffer);
            self.schedule(from);
        }
    }

    fn flush(&mut self) {
        let mut pumping = std::mem::replace(&mut self.scheduled, std::mem::take(&mut self.pumping));
        pumping.drain(..).for_each(|session| self.pump(session));
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
        match self.peers.get(peer.0 as usize).and_then(|known| known.session.as_deref()) {
            None => Progress { last_heard: self.now, reading: 0, writing: 0 },
            Some(session) => Progress {
                last_heard: session.last_heard,
                reading: session.incoming.bytes_in_flight(),
                writing: session.outgoing.bytes_in_flight(),
            },
        }
    }

    fn overdue(&mut self, peer: Peer, now: Instant, limit: Duration) -> Option<Violation> {
        of_peer(&mut self.peers, peer)?.incoming.overdue(now, limit)
    }

    fn restart_deadlines(&mut self, peer: Peer) {
        if let Some(session) = of_peer(&mut self.peers, peer) {
            session.incoming.restart_deadlines();
        }
    }

    fn is_idle(&self) -> bool {
        self.unsent_control.is_empty() && self.control_in_flight == 0
    }

    fn wait(&self) -> Option<Wait> {
        let is_idle = self.unsent_control.is_empty()
            && self.unposted.is_empty()
            && self.scheduled.is_empty()
            && self.events.is_empty();
        let fd = self.endpoint.wait_fd();
        (is_idle && (fd.is_none() || self.endpoint.may_wait())).then_some(Wait { fd, until: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake_network::{Fake, Net};

    /// A carrier with a session with a peer, and the network that they are on.
    fn with_session() -> (Tags<Fake>, Peer, Net) {
        let net = Net::new(1, false);
        let [here, there] = [(); 2].map(|()| net.endpoint());
        let (mut tags, name) = (Tags::new(here, &Config::default()), there.abilities.name);
        let peer = tags.connect(&name, 0).unwrap();
        tags.send_hello(peer, Control::new(Kind::Hello, 0, 0));
        assert_eq!(lost(&mut tags), 0);
        (tags, peer, net)
    }

    /// Polls, and returns how often a peer was lost.
    fn lost<E: Endpoint>(tags: &mut Tags<E>) -> usize {
        let mut events = Vec::new();
        tags.poll(tags.now, &mut events).unwrap();
        events.iter().filter(|event| matches!(event, Event::Lost { .. })).count()
    }

    #[test]
    fn late_failure_does_not_end_the_next_session() {
        let (mut tags, peer, _net) = with_session();
        let session = of_peer(&mut tags.peers, peer).map(|session| session.id);
        let fail = |tags: &mut Tags<Fake>| {
            let token = Token { operation: Operation::SendPayload, session, id: 0 };
            let result = Err(Error::Argument { what: "the connection is gone".to_owned() });
            tags.completed(Completion::Sent { token, body: Payload::word(0), result });
            lost(tags)
        };
        assert_eq!(fail(&mut tags), 1);
        tags.close(peer);
        assert_eq!(fail(&mut tags), 0);
        tags.send_hello(peer, Control::new(Kind::Hello, 1, 0));
        assert_eq!(fail(&mut tags), 0);
    }

    #[test]
    fn failed_refusal_does_not_end_the_session() {
        let (mut tags, peer, net) = with_session();
        net.kill(1);
        tags.send_control(peer, Control::new(Kind::Refuse, 0, 0));
        assert_eq!(lost(&mut tags), 0);
        tags.send_control(peer, Control::new(Kind::Ping, 0, 0));
        assert_eq!(lost(&mut tags), 1);
    }
}
