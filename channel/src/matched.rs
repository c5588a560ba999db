//! Tagged messages for providers that have none, or none that can be relied on: matching of our own over [`ferrogin_datagram`].
//!
//! A message that fits into one datagram travels in one, short ones several together (see [`super::records`]). A longer one is
//! announced; when a receive matches, the receiver clears it. Then the bytes go straight from the sender's buffer: if both ends can,
//! as one tagged message of the provider, for which the receiver has posted its own memory before it cleared; otherwise in pieces, in
//! any order, each saying where it belongs. So nothing long is ever kept unmatched.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::listen::secret;
use super::records::{HEADER, Header, INLINE, Kind, RECORDS, Records};
use super::transport::{Addr, Event, Fault, PAYLOADS, Pattern, Receiving, Sending, Transport, UnderWay};
use super::{Config, Payload};
use ferrogin_datagram::{LostReason, MessageEndpoint, Outbox, Peer, SendError};
use ferrogin_libfabric::{Error, Libfabric, bindings, find_datagrams};

/// Bytes of a piece, if the provider carries that much.
const PIECE: usize = 64 << 10;
/// Room that the provider's largest message has beyond records and a piece: prefix, name.
const OVERHEAD: usize = 256;
/// Longest message; offsets have 64 bits.
const MAX_MESSAGE: usize = 1 << 40;
/// Unmatched messages that one peer may have here, of 64 KiB at most each: several times what a writer has unread. Beyond, it is too far
/// ahead of its reader.
const UNMATCHED: usize = 16 * super::outgoing::AHEAD as usize;
/// Bits of a receive's number: providers keep the highest bits of tags for themselves.
const NUMBERS: u64 = (1 << 62) - 1;
/// In tokens: it is a message that goes at once, not a datagram.
const LONG: u64 = 1 << 32;
/// Time that peers get to hear that the endpoint is closed.
const FAREWELL: Duration = Duration::from_millis(100);

/// A receive that waits for a message.
struct Posted {
    pattern: Pattern,
    room: Vec<u8>,
    len: usize,
    token: u64,
    /// It is for messages of one peer.
    directed: bool,
}

/// A message that waits for a receive.
enum Unmatched {
    Whole(u64, Vec<u8>),
    Announced(Header),
}

impl Unmatched {
    fn tag(&self) -> u64 {
        match self {
            Self::Whole(tag, _) => *tag,
            Self::Announced(header) => header.tag,
        }
    }
}

/// A receive whose bytes come in.
struct Filling {
    from: Peer,
    /// Lent to the endpoint if they come at once.
    room: Vec<u8>,
    at_once: bool,
    total: usize,
    missing: usize,
    tag: u64,
    token: u64,
}

/// A send that is not over.
struct Outgoing {
    to: Peer,
    body: Payload,
    token: u64,
    tag: u64,
    /// None until the receiver clears it; then its number of the receive and how far pieces went out.
    cleared: Option<(u64, usize)>,
    /// The rest goes at once instead of in pieces.
    at_once: bool,
    /// Datagrams that are lent to the endpoint.
    lent: usize,
    /// The first record (whole or announce) is out, or open.
    begun: bool,
    /// It is among what is `ahead`.
    ahead: bool,
    error: Option<Error>,
    /// Nothing more will be sent.
    over: bool,
}

/// Records for a peer that have not gone out: see [`State::say`].
#[derive(Default)]
struct Open {
    records: Vec<u8>,
    /// The peer is among those to be flushed.
    listed: bool,
    /// There are others than announcements, and lengths before them.
    urgent: bool,
    /// Bytes of the messages that are announced.
    announced: usize,
}

impl Open {
    /// They went out, or are dropped.
    fn clear(&mut self) {
        self.records.clear();
        (self.urgent, self.announced) = (false, 0);
    }
}

/// What is known of one peer.
#[derive(Default)]
struct PeerState {
    open: Open,
    /// Bytes of messages that were announced, or are about to be, and have not begun.
    ahead: usize,
    posted: VecDeque<Posted>,
    /// Receives with their announced messages and the bytes of those, to be cleared when less is `coming`, which was and comes at once.
    met: VecDeque<(Posted, Header, usize)>,
    coming: UnderWay,
    /// Cleared sends whose bytes go at once, when fewer are with the endpoint: `at_once`.
    cleared: VecDeque<u32>,
    at_once: UnderWay,
    unmatched: VecDeque<Unmatched>,
    /// Nothing can be sent to it any more.
    lost: Option<Error>,
    /// It said so itself: what it sent before may still come.
    closed: bool,
}

impl PeerState {
    /// A message to it is not ahead any more.
    fn has_begun(&mut self, out: &mut Outgoing) {
        if std::mem::take(&mut out.ahead) {
            self.ahead -= out.body.len();
        }
    }
}

/// Tags over datagrams.
pub(crate) struct Matched {
    // First, so that it is closed before the memory that it was lent goes.
    endpoint: MessageEndpoint,
    state: State,
    name: Vec<u8>,
    provider: String,
}

/// All but the endpoint.
struct State {
    /// Bytes of a piece, of the records of a datagram, and of the longest message that goes among them.
    piece: usize,
    records: usize,
    inline: usize,
    peers: Vec<PeerState>,
    /// Those with open records; and whether some found no slot.
    saying: Vec<Peer>,
    full: bool,
    /// Receives for messages of anyone.
    anyone: VecDeque<Posted>,
    outgoing: HashMap<u32, Outgoing>,
    filling: HashMap<u64, Filling>,
    /// Rooms that are lent to the endpoint for receives that were given up, and from whom how many bytes would come.
    given_up: HashMap<u64, (Peer, Vec<u8>, usize)>,
    next_number: u32,
    /// Sends with datagrams still to be given to the endpoint.
    waiting: VecDeque<u32>,
    /// Answers that found no room.
    replies: VecDeque<(Peer, Header)>,
    events: Vec<Event>,
}

fn lost(reason: &LostReason) -> Error {
    match reason {
        LostReason::Failed(error) => error.clone(),
        other => reset(other.to_string()),
    }
}

fn reset(text: String) -> Error {
    Error::Call { call: "fi_send", code: bindings::FI_ECONNRESET, text }
}

impl Matched {
    /// Opens an endpoint of the provider that `config` names.
    pub fn open(lib: &Arc<Libfabric>, config: &Config) -> Result<Self, Error> {
        let info = find_datagrams(lib, &config.provider, config.source.as_deref(), bindings::FI_MSG)?;
        let max = info.max_msg_size();
        let records = RECORDS.min(max / 4);
        let piece = max.saturating_sub(OVERHEAD + records).min(PIECE);
        if records < 2 * HEADER || piece < HEADER {
            let what = format!("{} carries messages up to {max} bytes: too short for channels", info.provider());
            return Err(Error::Argument { what });
        }
        let endpoint = MessageEndpoint::open_with_long(
            lib,
            &ferrogin_datagram::Config {
                provider: config.provider.clone(),
                source: config.source.clone(),
                max_header: records,
                max_payload: piece,
                tx_depth: 64,
                rx_depth: 64,
                max_peers: config.max_peers,
                ping_after: config.ping_after,
                lost_after: config.lost_after,
            },
        )?;
        let state = State {
            piece,
            records,
            inline: INLINE.min(records - HEADER),
            peers: Vec::new(),
            saying: Vec::new(),
            full: false,
            anyone: VecDeque::new(),
            outgoing: HashMap::new(),
            filling: HashMap::new(),
            given_up: HashMap::new(),
            next_number: 0,
            waiting: VecDeque::new(),
            replies: VecDeque::new(),
            events: Vec::new(),
        };
        let (name, provider) = (endpoint.address().to_vec(), endpoint.provider().to_owned());
        Ok(Self { endpoint, state, name, provider })
    }
}

impl State {
    fn peer(&mut self, peer: Peer) -> &mut PeerState {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, PeerState::default);
        }
        &mut self.peers[peer.index()]
    }

    /// A number for a send.
    fn free_number(&mut self) -> u32 {
        // Some may have waited for a receive since the numbers began anew.
        while self.outgoing.contains_key(&self.next_number) {
            self.next_number = self.next_number.wrapping_add(1);
        }
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        number
    }

    /// Opens a record to a peer. It goes out with [`State::flush`], with a longer message, or when there is no room for another.
    fn say(&mut self, outbox: &mut Outbox<'_>, to: Peer, header: &Header, bytes: &[u8]) -> Result<(), SendError> {
        let len = HEADER + bytes.len();
        if self.peer(to).open.records.len() + len > self.records {
            self.flush_to(outbox, to)?;
        }
        let Open { records, listed, .. } = &mut self.peer(to).open;
        records.extend_from_slice(&header.emit());
        records.extend_from_slice(bytes);
        if !std::mem::replace(listed, true) {
            self.saying.push(to);
        }
        Ok(())
    }

    /// Sends the open records to a peer.
    fn flush_to(&mut self, outbox: &mut Outbox<'_>, to: Peer) -> Result<(), SendError> {
        let open = &mut self.peers[to.index()].open;
        if open.records.is_empty() {
            return Ok(());
        }
        let result = outbox.send(to, &open.records, &[]);
        if result != Err(SendError::Full) {
            open.clear();
        }
        result
    }

    /// Sends the open records to a peer, and behind them one whose bytes are the payload of the datagram, from where they lie.
    ///
    /// # Safety
    /// As [`Outbox::send_borrowed`].
    unsafe fn say_borrowed(
        &mut self,
        outbox: &mut Outbox<'_>,
        to: Peer,
        header: &Header,
        (data, len): (*const u8, usize),
        token: u64,
    ) -> Result<(), SendError> {
        if self.peers[to.index()].open.records.len() + HEADER > self.records {
            self.flush_to(outbox, to)?;
        }
        let open = &mut self.peers[to.index()].open;
        let before = open.records.len();
        open.records.extend_from_slice(&header.emit());
        // SAFETY: by the caller's promise.
        let result = unsafe { outbox.send_borrowed(to, &open.records, data, len, token) };
        if result == Err(SendError::Full) {
            open.records.truncate(before);
        } else {
            open.clear();
        }
        result
    }

    /// Sends open records, as far as there are slots and unless they can wait.
    fn flush(&mut self, outbox: &mut Outbox<'_>) {
        self.full = false;
        let mut saying = std::mem::take(&mut self.saying);
        saying.retain(|to| {
            // Those that are gone are told as lost.
            let full = !self.may_wait(*to) && self.flush_to(outbox, *to) == Err(SendError::Full);
            self.full |= full;
            let open = &mut self.peers[to.index()].open;
            open.listed = !open.records.is_empty();
            open.listed
        });
        self.saying = saying;
    }

    /// The open records are announcements alone, the stream is busy, and the peer has enough other messages to clear meanwhile:
    /// every datagram costs the stream a packet of its own. They go when less is ahead, and are then few datagrams.
    fn may_wait(&self, to: Peer) -> bool {
        let PeerState { open, at_once, ahead, .. } = &self.peers[to.index()];
        !open.urgent && at_once.bytes() > 0 && ahead.saturating_sub(open.announced) >= PAYLOADS
    }

    /// Gives as much of a send to the endpoint as it takes; false when it has no slot.
    fn push(&mut self, outbox: &mut Outbox<'_>, number: u32) -> bool {
        loop {
            let Some(out) = self.outgoing.get(&number) else { return true };
            let total = out.body.len();
            let whole = total <= self.piece;
            let (kind, tag, from, to) = match (out.begun, out.cleared) {
                _ if out.over => return true,
                (false, _) if whole => (Kind::Whole, out.tag, 0, total),
                (false, _) => (Kind::Announce, out.tag, 0, 0),
                (true, Some((filling, 0))) if out.at_once => (Kind::Piece, filling, 0, total),
                (true, Some((filling, at))) if at < total => (Kind::Piece, filling, at, (at + self.piece).min(total)),
                (true, _) => return true,
            };
            let at_once = if out.begun { out.at_once } else { !whole && outbox.has_long() };
            let header = Header { at_once, offset: from as u64, ..Header::new(kind, number, tag, total) };
            let (peer, bytes, token) = (out.to, &out.body.as_slice()[from..to], u64::from(number));
            let (data, len) = (bytes.as_ptr(), bytes.len());
            let long = kind == Kind::Piece && at_once;
            let sent = if kind == Kind::Announce {
                self.say(outbox, peer, &header, &[])
            } else if long {
                // What is said about others does not wait behind it.
                let said = if self.may_wait(peer) { Ok(()) } else { self.flush_to(outbox, peer) };
                // SAFETY: as below.
                said.and_then(|()| unsafe { outbox.send_long(peer, tag, data, len, token | LONG) })
            } else {
                // SAFETY: the payload's bytes are on the heap or static (`send` saw to that), and the entry keeps them until
                // every loan has come back.
                unsafe { self.say_borrowed(outbox, peer, &header, (data, len), token) }
            };
            let Some(out) = self.outgoing.get_mut(&number) else { return true };
            let state = &mut self.peers[peer.index()];
            match sent {
                Ok(()) => {
                    out.lent += usize::from(kind != Kind::Announce);
                    out.begun = true;
                    if kind == Kind::Announce {
                        (out.ahead, state.ahead) = (true, state.ahead + total);
                        state.open.announced += total;
                    } else {
                        state.has_begun(out);
                    }
                    if long {
                        state.at_once.begin(total);
                    }
                    if let Some((_, at)) = &mut out.cleared {
                        *at = to;
                    }
                    out.over = whole || out.cleared.is_some_and(|(_, at)| at == total);
                }
                Err(SendError::Full) => return false,
                Err(error) => {
                    out.error = Some(reset(error.to_string()));
                    out.over = true;
                }
            }
        }
    }

    /// Ends a send when nothing of it is lent any more.
    fn settle(&mut self, number: u32) {
        if self.outgoing.get(&number).is_some_and(|out| out.over && out.lent == 0)
            && let Some(mut out) = self.outgoing.remove(&number)
        {
            self.peers[out.to.index()].has_begun(&mut out);
            let Outgoing { body, token, error, .. } = out;
            let result = error.map_or(Ok(()), Err);
            self.events.push(Event::Sent { token, body, result });
        }
    }

    /// A datagram came in.
    fn datagram(&mut self, outbox: &mut Outbox<'_>, from: Peer, records: &[u8], payload: &[u8]) {
        for (header, bytes) in Records::new(records, payload) {
            self.record(outbox, from, header, bytes);
        }
    }

    fn record(&mut self, outbox: &mut Outbox<'_>, from: Peer, header: Header, bytes: &[u8]) {
        match header.kind {
            Kind::Whole | Kind::Announce => self.arrived(outbox, from, header, bytes),
            Kind::Clear => {
                if let Some(out) = self.outgoing.get_mut(&header.number)
                    && out.to == from
                    && out.begun
                    && out.cleared.is_none()
                    && !out.over
                {
                    out.cleared = Some((header.tag, 0));
                    out.at_once = header.at_once && outbox.has_long();
                    if out.at_once {
                        self.peer(from).cleared.push_back(header.number);
                        self.feed(outbox, from);
                    } else {
                        self.go_on(outbox, header.number);
                    }
                }
            }
            Kind::Decline => {
                if let Some(out) = self.outgoing.get_mut(&header.number).filter(|out| out.to == from) {
                    out.over = true;
                    self.settle(header.number);
                }
            }
            Kind::Piece => self.piece(from, header, bytes),
        }
    }

    /// Sends what was to be answered.
    fn reply(&mut self, outbox: &mut Outbox<'_>) {
        while let Some((to, header)) = self.replies.pop_front() {
            if self.say(outbox, to, &header, &[]) == Err(SendError::Full) {
                self.replies.push_front((to, header));
                return;
            }
            self.peer(to).open.urgent = true;
        }
    }

    /// A peer is gone: nothing more can be sent to it, and nothing comes unless it said so itself.
    fn lose(&mut self, outbox: &Outbox<'_>, peer: Peer, reason: &LostReason) {
        let error = lost(reason);
        let state = self.peer(peer);
        state.lost = Some(error.clone());
        state.closed = *reason == LostReason::Closed;
        state.open.clear();
        // It will not be cleared any more.
        state.unmatched.retain(|message| matches!(message, Unmatched::Whole(..)));
        let hit: Vec<u32> = self.outgoing.iter().filter(|(_, out)| out.to == peer).map(|(number, _)| *number).collect();
        for number in hit {
            if let Some(out) = self.outgoing.get_mut(&number) {
                out.over = true;
                out.error.get_or_insert(error.clone());
            }
            self.settle(number);
        }
        if *reason == LostReason::Closed {
            self.take_back(outbox, peer);
            return;
        }
        self.events.push(Event::Lost { peer: addr(peer), error: error.clone() });
        let state = self.peer(peer);
        let met = std::mem::take(&mut state.met).into_iter().map(|(posted, ..)| posted);
        let posted: Vec<_> = std::mem::take(&mut state.posted).into_iter().chain(met).collect();
        let filling = self.give_up(|filling| filling.from == peer);
        self.take_back(outbox, peer);
        for (token, bytes) in posted.into_iter().map(|posted| (posted.token, posted.room)).chain(filling) {
            let result = Err(Fault::Failed(error.clone()));
            self.events.push(Event::Received { token, bytes, tag: 0, from: None, result });
        }
    }

    /// A lent payload came back.
    fn returned(&mut self, outbox: &mut Outbox<'_>, peer: Peer, token: u64, good: bool) {
        let number = token as u32;
        if let Some(out) = self.outgoing.get_mut(&number) {
            out.lent = out.lent.saturating_sub(1);
            if !good {
                out.over = true;
                out.error.get_or_insert_with(|| reset("the datagram did not go out".to_owned()));
            }
            if token & LONG != 0 {
                self.peers[peer.index()].at_once.end(out.body.len());
                self.feed(outbox, peer);
            }
        }
        self.settle(number);
    }

    /// Gives the endpoint cleared messages that go at once: few at a time, so that announcements and clearances, which keep the
    /// other end going, do not wait behind all of them.
    fn feed(&mut self, outbox: &mut Outbox<'_>, peer: Peer) {
        loop {
            let state = self.peer(peer);
            let Some(&number) = state.cleared.front() else { return };
            let at_once = state.at_once;
            let len = self.outgoing.get(&number).map_or(0, |out| out.body.len());
            if !at_once.has_room(len, PAYLOADS) {
                return;
            }
            self.peer(peer).cleared.pop_front();
            self.go_on(outbox, number);
        }
    }

    /// Gives the endpoint more of a send, now or when it has room.
    fn go_on(&mut self, outbox: &mut Outbox<'_>, number: u32) {
        if !self.push(outbox, number) {
            self.waiting.push_back(number);
        }
        self.settle(number);
    }
}

fn addr(peer: Peer) -> Addr {
    Addr(peer.index() as u64)
}

impl Transport for Matched {
    fn name(&self) -> &[u8] {
        &self.name
    }

    fn provider(&self) -> &str {
        &self.provider
    }

    fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error> {
        let peer = self.endpoint.add_peer(name)?;
        self.state.peer(peer);
        Ok(addr(peer))
    }

    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, more: bool) -> Sending {
        let peer = Peer::from_index(to.0 as usize);
        if let Some(error) = self.state.peer(peer).lost.clone() {
            return Sending::Failed(body, error);
        }
        if body.len() <= self.state.inline {
            let header = Header { follows: true, ..Header::new(Kind::Whole, 0, tag, body.len()) };
            return match self.state.say(&mut self.endpoint.outbox(), peer, &header, body.as_slice()) {
                Ok(()) => {
                    self.state.peer(peer).open.urgent |= !more;
                    Sending::Done(body)
                }
                Err(SendError::Full) => Sending::Again(body),
                Err(error) => Sending::Failed(body, reset(error.to_string())),
            };
        }
        // One for the records before it, and one for itself: nothing that is sent later overtakes it.
        if self.endpoint.free_slots() < 2 {
            return Sending::Again(body);
        }
        let number = self.state.free_number();
        let out = Outgoing {
            to: peer,
            body,
            token,
            tag,
            cleared: None,
            at_once: false,
            lent: 0,
            begun: false,
            ahead: false,
            error: None,
            over: false,
        };
        self.state.outgoing.insert(number, out);
        self.state.go_on(&mut self.endpoint.outbox(), number);
        Sending::Posted
    }

    fn receive(&mut self, from: Option<Addr>, pattern: Pattern, room: Vec<u8>, len: usize, token: u64) -> Receiving {
        let posted = Posted { pattern, room, len, token, directed: from.is_some() };
        let Some(from) = from else {
            let peers = 0..self.state.peers.len() as u32;
            let found = peers
                .map(|peer| Peer::from_index(peer as usize))
                .find_map(|peer| Some((peer, self.state.unmatched(peer, pattern)?)));
            match found {
                Some((peer, message)) => self.state.meet(&mut self.endpoint.outbox(), peer, posted, message),
                None => self.state.anyone.push_back(posted),
            }
            return Receiving::Posted;
        };
        let peer = Peer::from_index(from.0 as usize);
        if let Some(message) = self.state.unmatched(peer, pattern) {
            self.state.meet(&mut self.endpoint.outbox(), peer, posted, message);
            return Receiving::Posted;
        }
        let state = self.state.peer(peer);
        match &state.lost {
            Some(error) if !state.closed => Receiving::Failed(posted.room, error.clone()),
            _ => {
                state.posted.push_back(posted);
                Receiving::Posted
            }
        }
    }

    fn look(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool {
        let all = 0..self.state.peers.len() as u32;
        let peers = from.map_or(all, |from| from.0 as u32..from.0 as u32 + 1);
        let found = peers.map(|peer| Peer::from_index(peer as usize)).find_map(|peer| {
            let waiting = &self.state.peers.get(peer.index())?.unmatched;
            let tag = waiting.iter().map(Unmatched::tag).find(|tag| pattern.matches(*tag))?;
            Some((tag, Some(addr(peer))))
        });
        self.state.events.push(Event::Seen { token, found });
        true
    }

    fn cancel(&mut self, which: &dyn Fn(u64) -> bool) {
        self.state.cancel(&mut self.endpoint.outbox(), which);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let Self { endpoint, state, .. } = self;
        state.flush(&mut endpoint.outbox());
        endpoint.poll(|outbox, event| match event {
            ferrogin_datagram::Event::Message { from, header, payload } => {
                state.datagram(outbox, from, header, payload)
            }
            ferrogin_datagram::Event::Sent { peer, token } => state.returned(outbox, peer, token, true),
            ferrogin_datagram::Event::SendFailed { peer, token } => state.returned(outbox, peer, token, false),
            ferrogin_datagram::Event::Lost { peer, reason } => state.lose(outbox, peer, &reason),
        })?;
        for over in endpoint.take_long() {
            state.received(&mut endpoint.outbox(), over.token, over.result);
        }
        let outbox = &mut endpoint.outbox();
        state.reply(outbox);
        for _ in 0..state.waiting.len() {
            let Some(number) = state.waiting.pop_front() else { break };
            if !state.push(outbox, number) {
                state.waiting.push_front(number);
                break;
            }
            state.settle(number);
        }
        events.append(&mut state.events);
        Ok(())
    }

    fn flush(&mut self) {
        self.state.flush(&mut self.endpoint.outbox());
    }

    fn wait_fd(&self) -> Option<RawFd> {
        // What has to be offered again is not waited for: nothing tells when the provider will take it.
        let state = &self.state;
        let offers = !(state.waiting.is_empty() && state.replies.is_empty() && !state.full);
        self.endpoint.wait_fd().filter(|_| !offers && !self.endpoint.must_retry())
    }

    fn may_wait(&self) -> bool {
        // What ended in a call other than a poll is told by the next poll.
        self.state.events.is_empty() && self.endpoint.may_wait()
    }
}

impl Drop for Matched {
    fn drop(&mut self) {
        let begin = Instant::now();
        let mut events = Vec::new();
        while !self.state.saying.is_empty() && begin.elapsed() < FAREWELL && self.poll(&mut events).is_ok() {}
        if let Err(error) = self.endpoint.shutdown(FAREWELL, |_, _| ()) {
            log::debug!("closing the endpoint: {error}");
        }
    }
}

mod receiving;
#[cfg(test)]
mod tests;
