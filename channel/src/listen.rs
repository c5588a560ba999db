//! Control messages: how channels are opened, watched and closed.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::again::{Knock, Pair};
use super::engine::{Call, Engine, FOREVER, NOBODY, OpenDone, Operation, token};
use super::incoming::Incoming;
use super::link::{Link, Opened, State};
use super::outgoing::Outgoing;
use super::transport::{Addr, Sending, Transport};
use super::wire::{self, Address, CONTROL, Control, Kind, NAME_MAX, VERSION};
use super::{ChannelError, Reason};

/// Channels that may wait to be accepted, per listener.
const BACKLOG: usize = 1024;
/// Strangers that get an answer; beyond, they run into their time limit.
const REFUSALS: u32 = 4096;
/// Slowest transfer that does not count as stuck, bytes per second.
const SLOWEST: u64 = 4 << 20;

/// A listener inside the engine.
pub(super) struct Listening {
    secret: u64,
    /// Opened and not accepted yet.
    arrived: VecDeque<u32>,
    /// Accepts that wait, by ticket.
    waiting: VecDeque<(u64, OpenDone)>,
}

impl Listening {
    pub fn fail(&mut self, error: &ChannelError, calls: &mut Vec<Call>) {
        calls.extend(self.waiting.drain(..).map(|(_, done)| Call::Open(done, Err(error.clone()))));
    }

    /// A channel is over; true if nobody has accepted it.
    pub fn drop_channel(&mut self, channel: u32) -> bool {
        let before = self.arrived.len();
        self.arrived.retain(|arrived| *arrived != channel);
        self.arrived.len() < before
    }
}

/// A number that nobody can guess: a keyed hash with keys from the system.
pub(super) fn secret() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Time that is allowed beyond the usual when so many bytes are under way.
fn grace(bytes: usize) -> Duration {
    Duration::from_millis((bytes as u64).saturating_mul(1000) / SLOWEST)
}

impl<T: Transport> Engine<T> {
    /// Begins to listen; gives the listener's number and its address.
    pub fn listen(&mut self) -> Result<(u32, Address), ChannelError> {
        if let Some(over) = &self.over {
            return Err(over.clone());
        }
        let name = self.transport.name();
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(ChannelError::BadAddress { what: "the provider's endpoint names do not fit into 128 bytes" });
        }
        let secret = secret();
        let listener = self.listeners.len() as u32;
        let address = Address { listener, secret, name: name.into() };
        self.listeners.push(Some(Listening { secret, arrived: VecDeque::new(), waiting: VecDeque::new() }));
        Ok((listener, address))
    }

    /// The next channel that somebody opened, or will open.
    pub fn accept(&mut self, listener: u32, ticket: u64, done: OpenDone) {
        let Some(listening) = self.listeners.get_mut(listener as usize).and_then(Option::as_mut) else {
            self.calls.push(Call::Open(done, Err(ChannelError::Stopped)));
            return;
        };
        if let Some(over) = &self.over {
            self.calls.push(Call::Open(done, Err(over.clone())));
            return;
        }
        match listening.arrived.pop_front() {
            Some(channel) => {
                if let Some(opened) = self.opened(channel) {
                    self.calls.push(Call::Open(done, Ok(opened)));
                }
            }
            None => listening.waiting.push_back((ticket, done)),
        }
    }

    /// Takes an accept back.
    pub fn cancel_accept(&mut self, listener: u32, ticket: u64) {
        let Some(listening) = self.listeners.get_mut(listener as usize).and_then(Option::as_mut) else { return };
        if let Some(at) = listening.waiting.iter().position(|(waiting, _)| *waiting == ticket)
            && let Some((_, done)) = listening.waiting.remove(at)
        {
            let error = ChannelError::Cancelled { peer: "a peer yet to come".into() };
            self.calls.push(Call::Open(done, Err(error)));
        }
    }

    /// Takes a channel back that was accepted by somebody who does not want it: the next accept gets it.
    pub fn unaccept(&mut self, listener: u32, channel: u32) {
        let live = self.link(channel).is_some_and(|link| link.is_live());
        let listening = self.listeners.get_mut(listener as usize).and_then(Option::as_mut).filter(|_| live);
        match listening.map(|listening| (listening.waiting.pop_front(), &mut listening.arrived)) {
            None => {
                self.abort(channel);
                self.forget(channel);
            }
            Some((None, arrived)) => arrived.push_front(channel),
            Some((Some((_, done)), _)) => {
                if let Some(opened) = self.opened(channel) {
                    self.calls.push(Call::Open(done, Ok(opened)));
                }
            }
        }
    }

    /// Stops listening: who is not accepted yet is turned away.
    pub fn close_listener(&mut self, listener: u32) {
        let Some(mut listening) = self.listeners.get_mut(listener as usize).and_then(Option::take) else { return };
        listening.fail(&ChannelError::Stopped, &mut self.calls);
        for channel in listening.arrived {
            self.abort(channel);
            self.forget(channel);
        }
    }

    fn opened(&mut self, channel: u32) -> Option<Opened> {
        let link = self.link(channel)?;
        Some(Opened { channel, peer: Arc::clone(&link.peer), max_write: link.max_write })
    }

    /// Opens a channel to a listener. `start` is the id of the first message; gives the channel's number.
    pub fn connect(&mut self, address: &Address, start: u32, limit: Duration, done: OpenDone) {
        let peer = address.endpoint();
        let error = if let Some(over) = &self.over {
            over.clone()
        } else if *address.name == *self.transport.name() {
            ChannelError::BadAddress { what: "it is this reactor's own: a channel needs two" }
        } else if self.is_paired(&address.name) {
            ChannelError::Refused { peer, reason: Reason::PairInUse }
        } else {
            let before = self.by_name.get(&address.name).map(Pair::next);
            let (start, begin) = before.unwrap_or((start, 0));
            match self.transport.insert(&address.name) {
                Err(source) => ChannelError::Unreachable { peer, source },
                Ok(addr) => match self.add_link(addr, &address.name, start) {
                    None => ChannelError::Refused { peer, reason: Reason::Busy },
                    Some(channel) => {
                        let deadline = self.now + limit.min(FOREVER);
                        let value = self.max_read() as u64;
                        let name: Box<[u8]> = self.transport.name().into();
                        let Some(link) = self.link(channel) else { return };
                        link.state = State::Connecting { done, deadline, limit };
                        if before.is_some() {
                            link.inc.succeed();
                        }
                        let hello = Control {
                            from: channel,
                            own: link.secret,
                            value,
                            id: start,
                            begin,
                            name: &name,
                            ..Control::new(Kind::Hello, address.listener, address.secret)
                        };
                        self.say(addr, channel, &hello);
                        return;
                    }
                },
            }
        };
        self.calls.push(Call::Open(done, Err(error)));
    }

    /// There is a channel with that endpoint.
    fn is_paired(&mut self, name: &[u8]) -> bool {
        let channel = self.by_name.get(name).map(|pair| pair.channel);
        channel.and_then(|channel| self.link(channel)).is_some_and(|link| link.is_live())
    }

    /// The longest message that we take.
    fn max_read(&self) -> usize {
        self.config.max_message.min(self.transport.max_message())
    }

    fn add_link(&mut self, addr: Addr, name: &[u8], start: u32) -> Option<u32> {
        let channel = self.free_number()?;
        let link = Link {
            peer: wire::label(name),
            name: name.into(),
            addr,
            state: State::Open,
            out: Outgoing::new(channel, start, self.config.depth),
            inc: Incoming::new(channel, 0, self.config.depth, self.max_read()),
            secret: secret(),
            theirs: (0, 0),
            max_write: 0,
            closing: None,
            their_end: None,
            forgotten: false,
            heard: self.now,
            looked: self.now,
            asked: None,
            marked: false,
        };
        self.links.push(Some(Box::new(link)));
        self.by_name.insert(name.into(), Pair { channel, write: start, read: start });
        self.by_addr.insert(addr, channel);
        Some(channel)
    }

    pub(super) fn say(&mut self, to: Addr, channel: u32, control: &Control<'_>) {
        let tag = CONTROL | control.kind as u64;
        let token = token(Operation::SendControl, channel, control.kind as u32);
        let message = (to, tag, control.emit().into(), token);
        // What waits of the same kind for the same peer is old: so nobody who asks and takes no answers fills memory.
        match self.unsent.iter_mut().find(|(of, _, _, same)| (*of, *same) == (to, token)) {
            Some(waiting) => *waiting = message,
            None => self.unsent.push_back(message),
        }
        self.send_control();
    }

    /// Sends what waits.
    pub(super) fn send_control(&mut self) {
        for _ in 0..self.unsent.len() {
            let Some((to, tag, body, token)) = self.unsent.pop_front() else { return };
            match self.transport.send(to, tag, body, token, false) {
                Sending::Posted => self.telling += 1,
                Sending::Done(_) => {}
                Sending::Again(body) => self.unsent.push_back((to, tag, body, token)),
                // Who cannot be told finds out by silence.
                Sending::Failed(_, source) => self.unreachable(to, source),
            }
        }
    }

    /// A control message to the peer of an open channel.
    pub(super) fn tell(&mut self, channel: u32, kind: Kind, value: u64, id: u32) {
        let Some(link) = self.link(channel) else { return };
        let (addr, (to, secret), own) = (link.addr, link.theirs, link.secret);
        let own = if kind == Kind::Welcome { own } else { 0 };
        self.say(addr, channel, &Control { from: channel, own, value, id, ..Control::new(kind, to, secret) });
    }

    pub(super) fn say_abort(&mut self, channel: u32, reason: Reason) {
        if self.link(channel).is_some_and(|link| matches!(link.state, State::Open)) {
            self.tell(channel, Kind::Abort, reason as u64, 0);
        }
    }

    /// Tells the peer that we close, once all is out.
    pub(super) fn tell_closing(&mut self, channel: u32) {
        let Some(link) = self.link(channel) else { return };
        let idle = link.out.is_idle();
        let (id, unread) = (link.out.next_id(), link.inc.next_id());
        if let Some(closing) = &mut link.closing
            && idle
            && !closing.told
        {
            closing.told = true;
            self.tell(channel, Kind::Close, u64::from(unread), id);
        }
    }

    /// A control message came in; false when it is none.
    pub(super) fn control(&mut self, bytes: &[u8]) -> bool {
        let Some(message) = Control::parse(bytes) else { return false };
        if message.kind == Kind::Hello {
            self.hello(&message);
            return true;
        }
        if message.kind == Kind::Here {
            self.is_here(&message);
            return true;
        }
        let (now, channel) = (self.now, message.to);
        let Some(link) = self.link(channel).filter(|link| link.secret == message.secret && link.is_live()) else {
            log::debug!("a {:?} for a channel that is not, or is over", message.kind);
            return true;
        };
        (link.heard, link.asked) = (now, None);
        let peer = Arc::clone(&link.peer);
        let connecting = matches!(link.state, State::Connecting { .. });
        let reason = Reason::of(message.value);
        match message.kind {
            Kind::Welcome if connecting && message.version != VERSION => {
                self.end(channel, ChannelError::Refused { peer, reason: Reason::Version });
            }
            Kind::Welcome if connecting => self.welcome(channel, &message),
            Kind::Again if connecting => self.asked_again(channel, &message),
            Kind::Refuse if connecting => self.end(channel, ChannelError::Refused { peer, reason }),
            Kind::Abort => self.end(channel, ChannelError::Aborted { peer, reason }),
            Kind::Ping if !connecting => self.tell(channel, Kind::Pong, 0, 0),
            Kind::Read if !connecting => {
                link.out.read_to(message.id);
                self.mark(channel);
            }
            Kind::Close if !connecting => self.closed_by_peer(channel, message.id, message.value as u32),
            Kind::Goodbye if link.closing.as_ref().is_some_and(|closing| closing.told) => {
                let error = link.closed_here();
                self.end(channel, error);
            }
            _ => {}
        }
        true
    }

    fn welcome(&mut self, channel: u32, message: &Control<'_>) {
        let max = self.transport.max_message();
        let Some(link) = self.link(channel) else { return };
        link.theirs = (message.from, message.own);
        link.max_write = usize::try_from(message.value).unwrap_or(usize::MAX).min(max);
        link.inc.start_at(message.id);
        if let State::Connecting { done, .. } = std::mem::replace(&mut link.state, State::Open)
            && let Some(opened) = self.opened(channel)
        {
            self.calls.push(Call::Open(done, Ok(opened)));
        }
        if self.link(channel).is_some_and(|link| link.inc.succeeds()) {
            self.look_for_payload(channel);
        }
    }

    /// The peer has written everything before message `end` and read everything before our message `unread`.
    fn closed_by_peer(&mut self, channel: u32, end: u32, unread: u32) {
        let now = self.now;
        self.tell(channel, Kind::Goodbye, 0, 0);
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else { return };
        let error = link.closed_there();
        if link.closing.is_some() {
            // Both close: neither reads any more.
            let error = if link.out.is_idle() { link.closed_here() } else { error };
            self.end(channel, error);
            return;
        }
        link.their_end = Some((end, now));
        link.out.end_at(unread, error.clone(), &mut self.calls);
        link.inc.end_at(end, &error, &mut self.calls);
    }

    fn hello(&mut self, message: &Control<'_>) {
        let listening = self.listeners.get_mut(message.to as usize).and_then(Option::as_mut);
        let listening = listening.filter(|listening| listening.secret == message.secret);
        let refused = if message.version != VERSION {
            Some(Reason::Version)
        } else if let Some(listening) = listening {
            let new = !self.by_name.contains_key(message.name);
            let busy = listening.arrived.len() >= BACKLOG || new && self.by_name.len() >= self.config.max_peers;
            if *message.name == *self.transport.name() { Some(Reason::PairInUse) } else { busy.then_some(Reason::Busy) }
        } else {
            Some(Reason::NotListening)
        };
        if refused.is_some() {
            self.refusals += 1;
            if self.refusals > REFUSALS {
                return;
            }
        }
        let addr = match self.transport.insert(message.name) {
            Ok(addr) => addr,
            Err(error) => {
                log::warn!("a hello from {}, which cannot be answered: {error}", wire::label(message.name));
                return;
            }
        };
        if let Some(reason) = refused {
            log::debug!("refused {}: {reason}", wire::label(message.name));
            self.refuse(addr, (message.from, message.own), reason);
        } else if self.by_name.contains_key(message.name) {
            self.knock(Knock::new(addr, message));
        } else {
            self.admit(&Knock::new(addr, message));
        }
    }

    fn refuse(&mut self, addr: Addr, (to, secret): (u32, u64), reason: Reason) {
        self.say(addr, NOBODY, &Control { value: reason as u64, ..Control::new(Kind::Refuse, to, secret) });
    }

    /// Opens a channel to who said hello; gives its number.
    pub(super) fn admit(&mut self, knock: &Knock) -> Option<u32> {
        if self.listeners.get(knock.listener as usize).is_none_or(Option::is_none) {
            self.refuse(knock.addr, knock.theirs, Reason::NotListening);
            return None;
        }
        let start = if knock.write == 0 { self.config.start_id } else { knock.write };
        let channel = self.add_link(knock.addr, &knock.name, start)?;
        let (max, value) = (self.transport.max_message(), self.max_read() as u64);
        if let Some(link) = self.link(channel) {
            link.theirs = knock.theirs;
            link.max_write = usize::try_from(knock.max).unwrap_or(usize::MAX).min(max);
            link.inc.start_at(knock.read);
        }
        self.tell(channel, Kind::Welcome, value, start);
        let listening = self.listeners.get_mut(knock.listener as usize).and_then(Option::as_mut)?;
        match listening.waiting.pop_front() {
            None => listening.arrived.push_back(channel),
            Some((_, done)) => {
                if let Some(opened) = self.opened(channel) {
                    self.calls.push(Call::Open(done, Ok(opened)));
                }
            }
        }
        Some(channel)
    }

    /// How often timers have to be looked at.
    pub fn timer_interval(&self) -> Duration {
        (self.config.ping_after / 4).min(self.config.lost_after / 8).max(Duration::from_millis(1))
    }

    /// Asks quiet peers to answer, gives up on those that do not, and on what takes too long.
    pub(super) fn timers(&mut self, now: Instant) {
        // If we were away for long ourselves, the answer may be waiting unread: deadlines start again.
        let away = now.duration_since(self.timed) >= self.config.lost_after / 2;
        if now.duration_since(self.looked) >= self.timer_interval() {
            self.looked = now;
            self.look_for_unknown();
        }
        (self.now, self.timed) = (now, now);
        self.ask_again();
        for channel in 0..self.links.len() as u32 {
            let (ping_after, lost_after) = (self.config.ping_after, self.config.lost_after);
            let Some(link) = self.link(channel).filter(|link| link.is_live()) else { continue };
            let peer = Arc::clone(&link.peer);
            if away {
                link.inc.excuse();
                link.asked = link.asked.map(|_| now);
            }
            let late = |since: Instant, limit: Duration| now.duration_since(since) >= limit;
            if let State::Connecting { deadline, limit, .. } = link.state {
                if now >= deadline {
                    let error = ChannelError::Timeout { peer, what: "answer the connect", limit };
                    self.end(channel, error);
                }
                continue;
            }
            if let Some(closing) = &link.closing
                && now >= closing.deadline
            {
                let limit = closing.limit;
                let error = ChannelError::Timeout { peer, what: "take all messages and say goodbye", limit };
                self.give_up(channel, error, Reason::Stopped);
                continue;
            }
            // A peer that does not answer at all is not blamed for what it began.
            if link.asked.is_none()
                && let Some(violation) = link.inc.overdue(now, |bytes| lost_after + grace(bytes))
            {
                self.broken(channel, violation);
                continue;
            }
            if let Some((_, since)) = link.their_end {
                if (link.inc.has_reads() || !link.out.is_idle())
                    && late(since, lost_after + grace(link.inc.bytes_under_way()))
                {
                    let error = link.closed_there();
                    self.end(channel, error);
                }
                continue;
            }
            if link.inc.is_waiting() && late(link.looked, ping_after) {
                link.looked = now;
                self.look_for_payload(channel);
            }
            let Some(link) = self.link(channel) else { continue };
            match link.asked {
                Some(asked) => {
                    let bytes = link.inc.bytes_under_way().saturating_add(link.out.bytes_under_way());
                    if late(asked, lost_after + grace(bytes)) {
                        let silent = now.duration_since(link.heard);
                        self.give_up(channel, ChannelError::Silent { peer, silent }, Reason::Stopped);
                    }
                }
                None if late(link.heard, ping_after) => {
                    link.asked = Some(now);
                    self.tell(channel, Kind::Ping, 0, 0);
                }
                None => {}
            }
        }
    }
}
