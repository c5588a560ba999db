//! All channels of one endpoint, without threads: users' requests and the transport's events go in, calls to make come out.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::again::{Knock, Pair};
use super::incoming::LENGTH_ROOM;
use super::link::{Closing, Link, Opened, State};
use super::listen::Listening;
use super::transport::{Addr, Event, Fault, Pattern, Receiving, Transport};
use super::wire::{self, CONTROL, CONTROL_MAX, ID_MASK, Kind, PAYLOAD};
use super::{ChannelError, Config, Payload, ReadDone, Violation, WriteDone};
use ferrogin_libfabric::Error;

/// Answer to a connect or an accept.
pub(crate) type OpenDone = Box<dyn FnOnce(Result<Opened, ChannelError>) + Send>;
/// Answer to a close.
pub(crate) type CloseDone = Box<dyn FnOnce(Result<(), ChannelError>) + Send>;

/// A callback whose time has come, with its argument, and a read's ticket.
pub(crate) enum Call {
    Write(WriteDone, Result<Payload, ChannelError>),
    Read(ReadDone, Result<(u64, Vec<u8>), ChannelError>, u64),
    Open(OpenDone, Result<Opened, ChannelError>),
    Close(CloseDone, Result<(), ChannelError>),
}

impl Call {
    pub fn run(self) {
        match self {
            Self::Write(done, result) => done(result),
            Self::Read(done, result, _) => done(result),
            Self::Open(done, result) => done(result),
            Self::Close(done, result) => done(result),
        }
    }
}

/// What an operation given to the transport is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    SendLength = 1,
    SendPayload = 2,
    ReceiveLength = 3,
    ReceivePayload = 4,
    SendControl = 5,
    ReceiveControl = 6,
    ReceiveUnknown = 7,
    LookUnknown = 8,
    LookPayload = 9,
    Discard = 10,
}

/// Channels are numbered with 28 bits and never twice.
const CHANNELS: usize = 1 << 28;
/// The number in operations that are of no channel.
pub(super) const NOBODY: u32 = CHANNELS as u32 - 1;

/// Names an operation to the transport.
pub(super) fn token(operation: Operation, channel: u32, id: u32) -> u64 {
    (operation as u64) << 60 | u64::from(channel) << 32 | u64::from(id)
}

fn parse_token(token: u64) -> Option<(Operation, u32, u32)> {
    let operation = match token >> 60 {
        1 => Operation::SendLength,
        2 => Operation::SendPayload,
        3 => Operation::ReceiveLength,
        4 => Operation::ReceivePayload,
        5 => Operation::SendControl,
        6 => Operation::ReceiveControl,
        7 => Operation::ReceiveUnknown,
        8 => Operation::LookUnknown,
        9 => Operation::LookPayload,
        10 => Operation::Discard,
        _ => return None,
    };
    Some((operation, (token >> 32) as u32 & NOBODY, token as u32))
}

/// Receives for control messages that are posted at a time: few, because providers look through them for every message.
const CONTROL_RECEIVES: u32 = 4;
/// Room for a control message; longer than one, because who sent what was cut off need not be known.
const CONTROL_ROOM: usize = 4096;
const _: () = assert!(CONTROL_ROOM > CONTROL_MAX);
/// Room for messages with unknown tags; what they say is of no interest.
const UNKNOWN_ROOM: usize = 8;
/// Longer than anybody waits, and short enough to be added to any time.
pub(super) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// Failed receives in a row that are laid to messages; more are the endpoint's failure.
const FAILURES: u32 = 1000;

/// All channels of one endpoint.
pub(crate) struct Engine<T> {
    pub(super) transport: T,
    pub(super) config: Config,
    pub(super) links: Vec<Option<Box<Link>>>,
    pub(super) listeners: Vec<Option<Listening>>,
    /// Endpoint names that a channel was opened with, and the last one.
    pub(super) by_name: HashMap<Box<[u8]>, Pair>,
    /// Hellos from such that wait for an answer.
    pub(super) knocks: VecDeque<Knock>,
    pub(super) by_addr: HashMap<Addr, u32>,
    /// Control messages that the transport did not take yet.
    pub(super) unsent: VecDeque<(Addr, u64, Payload, u64)>,
    /// Receives of the endpoint itself that it did not take yet.
    unposted: Vec<(Operation, u32, Vec<u8>)>,
    unknown: Vec<Pattern>,
    /// Which of them are being looked for.
    looking: Vec<bool>,
    /// A tag that was seen without a sender; all peers were asked for it.
    hunted: Option<u64>,
    /// Channels to pump in [`Engine::go_on`].
    marked: Vec<u32>,
    /// Room for them meanwhile.
    pumping: Vec<u32>,
    events: Vec<Event>,
    pub(super) calls: Vec<Call>,
    pub(super) now: Instant,
    /// When the timers were last looked at.
    pub(super) timed: Instant,
    /// When messages with unknown tags were last looked for.
    pub(super) looked: Instant,
    pub(super) refusals: u32,
    /// Control messages that are under way.
    pub(super) telling: usize,
    failures: u32,
    /// The endpoint failed, or was stopped.
    pub(super) over: Option<ChannelError>,
}

impl<T: Transport> Engine<T> {
    pub fn new(transport: T, config: Config, now: Instant) -> Self {
        let config = Config { depth: config.depth.max(1), lost_after: config.lost_after.min(FOREVER), ..config };
        let unknown: Vec<_> = wire::unknown_tags().collect();
        let control = (0..CONTROL_RECEIVES).map(|index| (Operation::ReceiveControl, index, Vec::new()));
        let mut this = Self {
            transport,
            config,
            links: Vec::new(),
            listeners: Vec::new(),
            by_name: HashMap::new(),
            knocks: VecDeque::new(),
            by_addr: HashMap::new(),
            unsent: VecDeque::new(),
            unposted: control.collect(),
            looking: vec![false; unknown.len()],
            hunted: None,
            unknown,
            marked: Vec::new(),
            pumping: Vec::new(),
            events: Vec::new(),
            calls: Vec::new(),
            now,
            timed: now,
            looked: now,
            refusals: 0,
            telling: 0,
            failures: 0,
            over: None,
        };
        this.post_own();
        this
    }

    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// Takes the callbacks that are to be called, in order.
    pub fn take_calls(&mut self, into: &mut Vec<Call>) {
        into.append(&mut self.calls);
    }

    pub(super) fn link(&mut self, channel: u32) -> Option<&mut Link> {
        self.links.get_mut(channel as usize)?.as_deref_mut()
    }

    /// A number for a new channel.
    pub(super) fn free_number(&self) -> Option<u32> {
        u32::try_from(self.links.len()).ok().filter(|number| *number < NOBODY)
    }

    // Requests of users.

    /// Tells the time, if it is later than what was known: limits of what is asked next count from now. The timers' own look at the clock
    /// may be long ago.
    pub fn tell_time(&mut self, now: Instant) {
        self.now = self.now.max(now);
    }

    pub fn write(&mut self, channel: u32, ticket: u64, body: Payload, done: WriteDone) {
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else {
            self.calls.push(Call::Write(done, Err(ChannelError::Stopped)));
            return;
        };
        let refused = link.refuses_writes().or_else(|| {
            let (len, max) = (body.len(), link.max_write);
            (len > max).then(|| ChannelError::TooLong { peer: Arc::clone(&link.peer), len, max })
        });
        if let Some(error) = refused {
            self.calls.push(Call::Write(done, Err(error)));
            return;
        }
        link.out.push(ticket, body, done);
        self.mark(channel);
    }

    pub fn read(&mut self, channel: u32, ticket: u64, room: Vec<u8>, done: ReadDone) {
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else {
            self.calls.push(Call::Read(done, Err(ChannelError::Stopped), ticket));
            return;
        };
        if let Some(message) = link.inc.take_returned() {
            self.calls.push(Call::Read(done, Ok(message), ticket));
            return;
        }
        if let Some(error) = link.refuses_reads() {
            self.calls.push(Call::Read(done, Err(error), ticket));
            return;
        }
        link.inc.push(ticket, room, done);
        self.mark(channel);
    }

    /// Takes a message back that was handed out: the next read gets it, even if the channel is over meanwhile.
    pub fn unread(&mut self, channel: u32, number: u64, bytes: Vec<u8>) {
        let link = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut);
        if let Some(link) = link.filter(|link| link.closing.is_none()) {
            link.inc.give_back(number, bytes, &mut self.calls);
            self.mark(channel);
        }
    }

    /// Cancels a read that has no message yet, or a write that has not begun.
    pub fn cancel(&mut self, channel: u32, ticket: u64) {
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else { return };
        let error = ChannelError::Cancelled { peer: Arc::clone(&link.peer) };
        if let Some(done) = link.out.cancel(ticket) {
            self.calls.push(Call::Write(done, Err(error)));
        } else if let Some(done) = link.inc.cancel(ticket) {
            self.calls.push(Call::Read(done, Err(error), ticket));
        } else if let Some(at) =
            self.calls.iter().position(|call| matches!(call, Call::Read(_, Ok(_), of) if *of == ticket))
            && let Call::Read(done, Ok((number, bytes)), _) = self.calls.remove(at)
        {
            // It has its message, and nobody has seen it yet: the next read must not get a later one before.
            self.calls.push(Call::Read(done, Err(error), ticket));
            link.inc.give_back(number, bytes, &mut self.calls);
        }
        self.pump(channel);
    }

    /// Lets what was written go out, tells the peer, and ends the channel.
    pub fn close(&mut self, channel: u32, limit: Duration, done: Option<CloseDone>) {
        let now = self.now;
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else {
            self.calls.extend(done.map(|done| Call::Close(done, Err(ChannelError::Stopped))));
            return;
        };
        if let State::Ended(error) = &link.state {
            let result = match error {
                ChannelError::ClosedHere { .. } | ChannelError::Closed { .. } => Ok(()),
                other => Err(other.clone()),
            };
            self.calls.extend(done.map(|done| Call::Close(done, result)));
            return;
        }
        let deadline = now + limit.min(FOREVER);
        let closing = link.closing.get_or_insert_with(|| Closing { done: Vec::new(), deadline, limit, told: false });
        closing.done.extend(done);
        if deadline < closing.deadline {
            (closing.deadline, closing.limit) = (deadline, limit);
        }
        let error = link.closed_here();
        link.inc.forget_returned();
        link.inc.fail(&error, &mut self.calls);
        if link.their_end.is_some() || matches!(link.state, State::Connecting { .. }) {
            self.end(channel, error);
            return;
        }
        self.pump(channel);
    }

    /// Ends the channel at once.
    pub fn abort(&mut self, channel: u32) {
        let Some(link) = self.link(channel) else { return };
        let error = link.closed_here();
        self.give_up(channel, error, super::Reason::Stopped);
    }

    /// Nobody uses the channel any more.
    pub fn forget(&mut self, channel: u32) {
        let limit = self.config.lost_after;
        let Some(link) = self.link(channel) else { return };
        link.forgotten = true;
        if link.is_live() {
            if link.closing.is_none() {
                self.close(channel, limit, None);
            }
        } else {
            self.links[channel as usize] = None;
        }
    }

    /// Ends everything: every callback is called, with `error`.
    pub fn stop(&mut self, error: &ChannelError) {
        if self.over.is_none() {
            self.end_all(error);
            self.over = Some(error.clone());
        }
    }

    /// Ends all channels and accepts with `error`, and tells the peers.
    pub fn end_all(&mut self, error: &ChannelError) {
        for channel in 0..self.links.len() as u32 {
            if self.link(channel).is_some_and(|link| link.is_live()) {
                self.give_up(channel, error.clone(), super::Reason::Stopped);
            }
        }
        for listening in self.listeners.iter_mut().flatten() {
            listening.fail(error, &mut self.calls);
        }
    }

    /// No channel is open any more, and what peers are told is out.
    pub fn is_quiet(&self) -> bool {
        self.over.is_some()
            || self.unsent.is_empty() && self.telling == 0 && !self.links.iter().flatten().any(|link| link.is_live())
    }

    /// Something is to be done that no event will tell of.
    pub fn has_work(&self) -> bool {
        !(self.calls.is_empty() && self.unsent.is_empty() && self.unposted.is_empty() && self.marked.is_empty())
    }

    /// Puts another transport in the place of the one that was used; what that one holds is over.
    pub fn replace_transport(&mut self, transport: T) -> T {
        std::mem::replace(&mut self.transport, transport)
    }

    /// Closes every channel that is open.
    pub fn close_all(&mut self, limit: Duration) {
        for channel in 0..self.links.len() as u32 {
            if self.link(channel).is_some_and(|link| link.is_live()) {
                self.close(channel, limit, None);
            }
        }
    }

    // Inner workings.

    /// Something changed: the channel is pumped when all that came at once has been looked at.
    pub(super) fn mark(&mut self, channel: u32) {
        if let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut)
            && !link.marked
        {
            link.marked = true;
            self.marked.push(channel);
        }
    }

    /// Posts what can be posted of all that was asked for since the last time.
    pub fn go_on(&mut self) {
        if self.marked.is_empty() {
            return self.transport.flush();
        }
        let mut pumping = std::mem::replace(&mut self.marked, std::mem::take(&mut self.pumping));
        for channel in pumping.drain(..) {
            if let Some(link) = self.link(channel) {
                link.marked = false;
                self.pump(channel);
            }
        }
        self.pumping = pumping;
        self.transport.flush();
    }

    /// Posts what the channel can post, and moves a close on.
    pub(super) fn pump(&mut self, channel: u32) {
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else { return };
        if !matches!(link.state, State::Open) {
            return;
        }
        let (transport, calls) = (&mut self.transport, &mut self.calls);
        let out = link.out.pump(transport, link.addr, calls);
        let result = out.and_then(|again| Ok(link.inc.pump(transport, link.addr, calls)? | again));
        match result {
            Ok(again) => {
                if again && !link.marked {
                    link.marked = true;
                    self.marked.push(channel);
                }
                if let Some((end, _)) = link.their_end {
                    let error = link.closed_there();
                    link.inc.end_at(end, &error, &mut self.calls);
                }
                if let Some(id) = link.inc.report() {
                    self.tell(channel, Kind::Read, 0, id);
                }
                self.tell_closing(channel);
            }
            Err(source) => {
                let error = ChannelError::Failed { peer: Arc::clone(&link.peer), source };
                self.end(channel, error);
            }
        }
    }

    /// Ends a channel and tells the peer why.
    pub(super) fn give_up(&mut self, channel: u32, error: ChannelError, reason: super::Reason) {
        self.say_abort(channel, reason);
        self.end(channel, error);
    }

    /// Ends a channel: every callback is called, once.
    pub(super) fn end(&mut self, channel: u32, error: ChannelError) {
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else { return };
        let was = std::mem::replace(&mut link.state, State::Ended(error.clone()));
        if let State::Ended(first) = was {
            link.state = State::Ended(first);
            return;
        }
        log::debug!("channel {channel} is over: {error}");
        let pair = link.pair(channel);
        if let Some(known) = self.by_name.get_mut(&link.name).filter(|known| known.channel == channel) {
            *known = pair;
        }
        link.out.fail(&error, &mut self.calls);
        link.inc.fail(&error, &mut self.calls);
        if let State::Connecting { done, .. } = was {
            self.calls.push(Call::Open(done, Err(error.clone())));
        }
        if let Some(closing) = link.closing.take() {
            let result = match &error {
                ChannelError::ClosedHere { .. } => Ok(()),
                other => Err(other.clone()),
            };
            self.calls.extend(closing.done.into_iter().map(|done| Call::Close(done, result.clone())));
        }
        self.transport.cancel(&|token| {
            parse_token(token).is_some_and(|(operation, of, _)| {
                of == channel && matches!(operation, Operation::ReceiveLength | Operation::ReceivePayload)
            })
        });
        let mut unused = self.link(channel).is_some_and(|link| link.forgotten);
        for listening in self.listeners.iter_mut().flatten() {
            unused |= listening.drop_channel(channel);
        }
        if unused {
            self.links[channel as usize] = None;
        }
    }

    pub(super) fn broken(&mut self, channel: u32, violation: Violation) {
        let Some(link) = self.link(channel) else { return };
        let error = link.broken(violation);
        self.give_up(channel, error, super::Reason::Violation);
    }

    /// Looks whether messages with unknown tags lie about.
    pub(super) fn look_for_unknown(&mut self) {
        for index in 0..self.unknown.len() {
            if !self.looking[index] {
                let token = token(Operation::LookUnknown, NOBODY, index as u32);
                self.looking[index] = self.transport.look(None, self.unknown[index], token);
                if !self.looking[index] {
                    self.take_unknown(index);
                }
            }
        }
        self.transport.cancel(&|token| {
            parse_token(token).is_some_and(|(operation, _, _)| operation == Operation::ReceiveUnknown)
        });
    }

    /// Takes a message with an unknown tag where the transport cannot look, or where it is no peer's. The receive is taken back with
    /// the next look: left posted, it would be in the way of every other message.
    fn take_unknown(&mut self, index: usize) {
        let token = token(Operation::ReceiveUnknown, NOBODY, index as u32);
        let posted = self.transport.receive(None, self.unknown[index], Vec::new(), UNKNOWN_ROOM, token);
        self.looking[index] = matches!(posted, Receiving::Posted);
    }

    /// The transport has looked at what waits.
    fn seen(&mut self, operation: Operation, channel: u32, index: u32, found: Option<(u64, Option<Addr>)>) {
        let now = self.now;
        if operation == Operation::LookPayload {
            let discards = self.transport.discards_leftovers();
            let Some(link) = self.link(channel).filter(|link| link.is_live()) else { return };
            let addr = link.addr;
            let id = found.map(|(tag, _)| (tag & ID_MASK) as u32);
            match id.filter(|id| link.inc.is_leftover(*id)) {
                Some(id) if discards => {
                    self.discard(addr, PAYLOAD | u64::from(id));
                    self.look_for_payload(channel);
                }
                Some(_) => {}
                None => link.inc.seen(id, now),
            }
            return;
        }
        let index = index as usize;
        let of_channel = self.link(channel).map(|link| link.addr);
        if of_channel.is_none()
            && let Some(looking) = self.looking.get_mut(index)
        {
            *looking = false;
        }
        let Some((tag, from)) = found else { return };
        if let Some(from) = from.or(of_channel) {
            self.discard(from, tag);
            self.unknown_tag(tag, Some(from));
        } else if self.hunted.replace(tag) == Some(tag) {
            // No peer's, or it would be gone.
            self.hunted = None;
            self.take_unknown(index);
        } else {
            for channel in 0..self.links.len() as u32 {
                let Some(from) = self.link(channel).map(|link| link.addr) else { continue };
                let token = token(Operation::LookUnknown, channel, index as u32);
                self.transport.look(Some(from), Pattern { tag, ignore: 0 }, token);
            }
        }
    }

    /// Takes a message away that was seen. What cannot be taken now is seen again.
    fn discard(&mut self, from: Addr, tag: u64) {
        let token = token(Operation::Discard, NOBODY, 0);
        self.transport.receive(Some(from), Pattern { tag, ignore: 0 }, Vec::new(), UNKNOWN_ROOM, token);
    }

    /// Looks whether a payload of the channel's peer lies about.
    pub(super) fn look_for_payload(&mut self, channel: u32) {
        let Some(from) = self.link(channel).map(|link| link.addr) else { return };
        let pattern = Pattern { tag: PAYLOAD, ignore: ID_MASK };
        self.transport.look(Some(from), pattern, token(Operation::LookPayload, channel, 0));
    }

    fn unknown_tag(&mut self, tag: u64, from: Option<Addr>) {
        match from.and_then(|from| self.by_addr.get(&from)).copied() {
            Some(channel) => self.broken(channel, Violation::UnknownTag { tag }),
            None => log::warn!("a message with tag {tag:#x} from nobody known was dropped"),
        }
    }

    /// Posts the receives of the endpoint itself.
    fn post_own(&mut self) {
        while let Some((operation, index, room)) = self.unposted.pop() {
            let pattern = Pattern { tag: CONTROL, ignore: ID_MASK };
            match self.transport.receive(None, pattern, room, CONTROL_ROOM, token(operation, NOBODY, index)) {
                Receiving::Posted => {}
                Receiving::Again(room) => {
                    self.unposted.push((operation, index, room));
                    return;
                }
                Receiving::Failed(room, error) => {
                    self.unposted.push((operation, index, room));
                    self.stop(&ChannelError::Endpoint(error));
                    return;
                }
            }
        }
    }

    /// Makes progress; true when something happened. `now` is the time if the caller knows it anew.
    pub fn poll(&mut self, now: Option<Instant>) -> bool {
        if self.over.is_some() {
            return false;
        }
        let mut events = std::mem::take(&mut self.events);
        if let Err(error) = self.transport.poll(&mut events) {
            self.stop(&ChannelError::Endpoint(error));
        }
        let busy = !events.is_empty();
        for event in events.drain(..) {
            self.event(event);
        }
        self.events = events;
        if !self.unposted.is_empty() {
            self.post_own();
        }
        if !self.knocks.is_empty() {
            self.answer_knocks();
        }
        self.send_control();
        self.go_on();
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
                    self.received_own(operation, &bytes, tag, from, result);
                    if operation == Operation::ReceiveControl {
                        self.unposted.push((operation, index, bytes));
                    } else if let Some(looking) = self.looking.get_mut(index as usize) {
                        *looking = false;
                    }
                }
                Some((operation, channel, id)) => self.received(operation, channel, id, bytes, tag, result),
                None => {}
            },
            Event::Seen { token, found } => {
                if let Some((operation, channel, index)) = parse_token(token) {
                    self.seen(operation, channel, index, found);
                }
            }
            Event::Lost { peer, error } => self.unreachable(peer, error),
        }
    }

    fn sent(&mut self, operation: Operation, channel: u32, id: u32, body: Payload, result: Result<(), Error>) {
        if operation == Operation::SendControl {
            self.telling = self.telling.saturating_sub(1);
        }
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else { return };
        match result {
            Ok(()) if operation == Operation::SendControl => {}
            Ok(()) => {
                if link.is_live() {
                    link.out.sent(operation, id, body, &mut self.calls);
                    self.mark(channel);
                }
            }
            // The peer has closed: what it did not take does not matter.
            Err(_) if link.their_end.is_some() => {}
            Err(source) => self.cut_off(channel, source),
        }
    }

    /// Nothing can be sent to a peer any more. Who waits for an answer hears of it at once; others when they read or write, after what
    /// has come before.
    pub(super) fn unreachable(&mut self, peer: Addr, source: Error) {
        let Some(&channel) = self.by_addr.get(&peer) else { return };
        let Some(link) = self.link(channel) else { return };
        if link.their_end.is_none() && (link.closing.is_some() || matches!(link.state, State::Connecting { .. })) {
            self.cut_off(channel, source);
        }
    }

    fn cut_off(&mut self, channel: u32, source: Error) {
        let Some(link) = self.link(channel) else { return };
        let peer = Arc::clone(&link.peer);
        let error = match link.state {
            State::Connecting { .. } => ChannelError::Unreachable { peer, source },
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
        result: Result<(), Fault>,
    ) {
        let now = self.now;
        let Some(link) = self.links.get_mut(channel as usize).and_then(Option::as_deref_mut) else { return };
        if !link.is_live() {
            return;
        }
        let violation = match result {
            Ok(()) => {
                (link.heard, link.asked) = (now, None);
                if operation == Operation::ReceiveLength {
                    link.inc.length(tag, bytes).err()
                } else {
                    link.inc.payload(id, bytes, &mut self.calls).err()
                }
            }
            Err(Fault::Cancelled) => {
                if operation == Operation::ReceiveLength {
                    link.inc.length_cancelled();
                }
                return;
            }
            Err(Fault::Truncated)
                if operation == Operation::ReceiveLength && link.inc.is_leftover((tag & ID_MASK) as u32) =>
            {
                link.inc.length_cancelled();
                None
            }
            Err(Fault::Truncated) if operation == Operation::ReceiveLength => {
                Some(Violation::LengthSize { id: (tag & ID_MASK) as u32, bytes: LENGTH_ROOM + 1 })
            }
            Err(Fault::Truncated) => Some(link.inc.too_long(id)),
            Err(Fault::Failed(source)) => {
                let error = ChannelError::Failed { peer: Arc::clone(&link.peer), source };
                self.give_up(channel, error, super::Reason::Stopped);
                return;
            }
        };
        match violation {
            Some(violation) => self.broken(channel, violation),
            None => self.mark(channel),
        }
    }

    /// A message that is for no channel's data.
    fn received_own(
        &mut self,
        operation: Operation,
        bytes: &[u8],
        tag: u64,
        from: Option<Addr>,
        result: Result<(), Fault>,
    ) {
        match result {
            Ok(()) | Err(Fault::Truncated) => self.failures = 0,
            Err(Fault::Cancelled) => return,
            Err(Fault::Failed(error)) => {
                // A message that was cut off with its connection; it says nothing about others.
                log::debug!("a receive for anyone failed: {error}");
                self.failures += 1;
                if self.failures > FAILURES {
                    self.stop(&ChannelError::Endpoint(error));
                }
                return;
            }
        }
        if operation != Operation::ReceiveControl || result.is_err() || !self.control(bytes) {
            self.unknown_tag(tag, from);
        }
    }
}
