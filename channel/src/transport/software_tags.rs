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

use ferrogin_datagram::{LostReason, MessageEndpoint, Outbox, Peer, SendError};
use ferrogin_libfabric::{Error, Libfabric, bindings, find_datagrams};

use crate::proto::outgoing::UNREAD_WINDOW;
use crate::proto::secret::secret;
use crate::proto::tags::Pattern;
use crate::proto::transport::{
    Addr, Event, InFlight, PAYLOAD_WINDOW, ReceiveError, ReceiveResult, SendResult, Transport,
};
use crate::{Config, Matching, Payload};
use records::{HEADER, Header, Kind, MAX_INLINE, RECORDS, Records};

/// Bytes of a piece, if the provider carries that much.
const DATA_BYTES: usize = 64 << 10;
/// Room that the provider's largest message has beyond records and a piece: prefix, name.
const OVERHEAD: usize = 256;
/// Longest message; offsets have 64 bits.
const MAX_MESSAGE: usize = 1 << 40;
/// Unmatched messages that one peer may have here, of 64 KiB at most each: several times what a writer has unread. Beyond, it is too far
/// ahead of its reader.
const MAX_UNMATCHED: usize = 16 * UNREAD_WINDOW as usize;
/// Bits of a receive's number: providers keep the highest bits of tags for themselves.
const RECEIVE_IDS: u64 = (1 << 62) - 1;
/// In tokens: it is a message that goes at once, not a datagram.
const LONG: u64 = 1 << 32;
/// Time that peers get to hear that the endpoint is closed.
const CLOSE_GRACE: Duration = Duration::from_millis(100);

/// A receive that waits for a message.
struct Posted {
    pattern: Pattern,
    buffer: Vec<u8>,
    len: usize,
    token: u64,
    /// It is for messages of one peer.
    directed: bool,
}

/// A message that waits for a receive.
enum Unmatched {
    Eager(u64, Vec<u8>),
    Rts(Header),
}

impl Unmatched {
    fn tag(&self) -> u64 {
        match self {
            Self::Eager(tag, _) => *tag,
            Self::Rts(header) => header.tag,
        }
    }
}

/// A receive whose bytes come in.
struct Rendezvous {
    from: Peer,
    /// Lent to the endpoint if they come at once.
    buffer: Vec<u8>,
    direct: bool,
    total: usize,
    missing: usize,
    tag: u64,
    token: u64,
}

/// A send that is not over.
struct PendingSend {
    to: Peer,
    body: Payload,
    token: u64,
    tag: u64,
    /// None until the receiver clears it; then its number of the receive and how far pieces went out.
    cts: Option<(u64, usize)>,
    /// The rest goes at once instead of in pieces.
    direct: bool,
    /// Datagrams that are lent to the endpoint.
    in_flight: usize,
    /// The first record (whole or announce) is out, or open.
    started: bool,
    /// It is among what is `ahead`.
    unstarted: bool,
    error: Option<Error>,
    /// Nothing more will be sent.
    over: bool,
}

/// Records for a peer that have not gone out: see [`State::say`].
#[derive(Default)]
struct Batch {
    records: Vec<u8>,
    /// The peer is among those to be flushed.
    queued: bool,
    /// There are others than announcements, and lengths before them.
    urgent: bool,
    /// Bytes of the messages that are announced.
    rts_bytes: usize,
}

impl Batch {
    /// They went out, or are dropped.
    fn clear(&mut self) {
        self.records.clear();
        (self.urgent, self.rts_bytes) = (false, 0);
    }
}

/// What is known of one peer.
#[derive(Default)]
struct PeerState {
    batch: Batch,
    /// Bytes of messages that were announced, or are about to be, and have not begun.
    unstarted: usize,
    posted: VecDeque<Posted>,
    /// Receives with their announced messages and the bytes of those, to be cleared when less is `coming`, which was and comes at once.
    matched_rts: VecDeque<(Posted, Header, usize)>,
    inbound: InFlight,
    /// Cleared sends whose bytes go at once, when fewer are with the endpoint: `at_once`.
    cts: VecDeque<u32>,
    direct: InFlight,
    unmatched: VecDeque<Unmatched>,
    /// Nothing can be sent to it any more.
    lost: Option<Error>,
    /// It said so itself: what it sent before may still come.
    closed: bool,
}

impl PeerState {
    /// A message to it is not ahead any more.
    fn mark_started(&mut self, out: &mut PendingSend) {
        if std::mem::take(&mut out.unstarted) {
            self.unstarted -= out.body.len();
        }
    }
}

/// Tags over datagrams.
pub(crate) struct SoftwareTags {
    // First, so that it is closed before the memory that it was lent goes.
    endpoint: MessageEndpoint,
    state: State,
    name: Vec<u8>,
    provider: String,
}

/// All but the endpoint.
struct State {
    /// Bytes of a piece, of the records of a datagram, and of the longest message that goes among them.
    data_bytes: usize,
    records: usize,
    max_inline: usize,
    peers: Vec<PeerState>,
    /// Those with open records; and whether some found no slot.
    unflushed: Vec<Peer>,
    full: bool,
    /// Receives for messages of anyone.
    any_source: VecDeque<Posted>,
    sends: HashMap<u32, PendingSend>,
    rendezvous: HashMap<u64, Rendezvous>,
    /// Rooms that are lent to the endpoint for receives that were given up, and from whom how many bytes would come.
    abandoned: HashMap<u64, (Peer, Vec<u8>, usize)>,
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

impl SoftwareTags {
    /// Opens an endpoint of the provider that `config` names.
    pub fn open(lib: &Arc<Libfabric>, config: &Config) -> Result<Self, Error> {
        let info = find_datagrams(lib, &config.provider, config.source.as_deref(), bindings::FI_MSG)?;
        let max = info.max_msg_size();
        let records = RECORDS.min(max / 4);
        let data_bytes = max.saturating_sub(OVERHEAD + records).min(DATA_BYTES);
        if records < 2 * HEADER || data_bytes < HEADER {
            let what = format!("{} carries messages up to {max} bytes: too short for channels", info.provider());
            return Err(Error::Argument { what });
        }
        let endpoint = MessageEndpoint::open_with_long(
            lib,
            &ferrogin_datagram::Config {
                provider: config.provider.clone(),
                source: config.source.clone(),
                max_header: records,
                max_payload: data_bytes,
                tx_depth: 64,
                rx_depth: 64,
                max_peers: config.max_peers,
                ping_after: config.ping_after,
                lost_after: config.lost_after,
            },
        )?;
        let state = State {
            data_bytes,
            records,
            max_inline: MAX_INLINE.min(records - HEADER),
            peers: Vec::new(),
            unflushed: Vec::new(),
            full: false,
            any_source: VecDeque::new(),
            sends: HashMap::new(),
            rendezvous: HashMap::new(),
            abandoned: HashMap::new(),
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
        while self.sends.contains_key(&self.next_number) {
            self.next_number = self.next_number.wrapping_add(1);
        }
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        number
    }

    /// Opens a record to a peer. It goes out with [`State::flush`], with a longer message, or when there is no room for another.
    fn append_record(
        &mut self,
        outbox: &mut Outbox<'_>,
        to: Peer,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), SendError> {
        let len = HEADER + bytes.len();
        if self.peer(to).batch.records.len() + len > self.records {
            self.flush_to(outbox, to)?;
        }
        let Batch { records, queued, .. } = &mut self.peer(to).batch;
        records.extend_from_slice(&header.emit());
        records.extend_from_slice(bytes);
        if !std::mem::replace(queued, true) {
            self.unflushed.push(to);
        }
        Ok(())
    }

    /// Sends the open records to a peer.
    fn flush_to(&mut self, outbox: &mut Outbox<'_>, to: Peer) -> Result<(), SendError> {
        let batch = &mut self.peers[to.index()].batch;
        if batch.records.is_empty() {
            return Ok(());
        }
        let result = outbox.send(to, &batch.records, &[]);
        if result != Err(SendError::Full) {
            batch.clear();
        }
        result
    }

    /// Sends the open records to a peer, and behind them one whose bytes are the payload of the datagram, from where they lie.
    ///
    /// # Safety
    /// As [`Outbox::send_borrowed`].
    unsafe fn send_borrowed_record(
        &mut self,
        outbox: &mut Outbox<'_>,
        to: Peer,
        header: &Header,
        (data, len): (*const u8, usize),
        token: u64,
    ) -> Result<(), SendError> {
        if self.peers[to.index()].batch.records.len() + HEADER > self.records {
            self.flush_to(outbox, to)?;
        }
        let batch = &mut self.peers[to.index()].batch;
        let before = batch.records.len();
        batch.records.extend_from_slice(&header.emit());
        // SAFETY: by the caller's promise.
        let result = unsafe { outbox.send_borrowed(to, &batch.records, data, len, token) };
        if result == Err(SendError::Full) {
            batch.records.truncate(before);
        } else {
            batch.clear();
        }
        result
    }

    /// Sends open records, as far as there are slots and unless they can wait.
    fn flush(&mut self, outbox: &mut Outbox<'_>) {
        self.full = false;
        let mut unflushed = std::mem::take(&mut self.unflushed);
        unflushed.retain(|to| {
            // Those that are gone are told as lost.
            let full = !self.can_wait(*to) && self.flush_to(outbox, *to) == Err(SendError::Full);
            self.full |= full;
            let batch = &mut self.peers[to.index()].batch;
            batch.queued = !batch.records.is_empty();
            batch.queued
        });
        self.unflushed = unflushed;
    }

    /// The open records are announcements alone, the stream is busy, and the peer has enough other messages to clear meanwhile:
    /// every datagram costs the stream a packet of its own. They go when less is ahead, and are then few datagrams.
    fn can_wait(&self, to: Peer) -> bool {
        let PeerState { batch, direct, unstarted, .. } = &self.peers[to.index()];
        !batch.urgent && direct.bytes() > 0 && unstarted.saturating_sub(batch.rts_bytes) >= PAYLOAD_WINDOW
    }

    /// Gives as much of a send to the endpoint as it takes; false when it has no slot.
    fn push(&mut self, outbox: &mut Outbox<'_>, number: u32) -> bool {
        loop {
            let Some(out) = self.sends.get(&number) else { return true };
            let total = out.body.len();
            let whole = total <= self.data_bytes;
            let (kind, tag, from, to) = match (out.started, out.cts) {
                _ if out.over => return true,
                (false, _) if whole => (Kind::Eager, out.tag, 0, total),
                (false, _) => (Kind::Rts, out.tag, 0, 0),
                (true, Some((rendezvous, 0))) if out.direct => (Kind::Data, rendezvous, 0, total),
                (true, Some((rendezvous, at))) if at < total => {
                    (Kind::Data, rendezvous, at, (at + self.data_bytes).min(total))
                }
                (true, _) => return true,
            };
            let direct = if out.started { out.direct } else { !whole && outbox.has_long() };
            let header = Header { direct, offset: from as u64, ..Header::new(kind, number, tag, total) };
            let (peer, bytes, token) = (out.to, &out.body.as_slice()[from..to], u64::from(number));
            let (data, len) = (bytes.as_ptr(), bytes.len());
            let long = kind == Kind::Data && direct;
            let sent = if kind == Kind::Rts {
                self.append_record(outbox, peer, &header, &[])
            } else if long {
                // What is said about others does not wait behind it.
                let said = if self.can_wait(peer) { Ok(()) } else { self.flush_to(outbox, peer) };
                // SAFETY: as below.
                said.and_then(|()| unsafe { outbox.send_long(peer, tag, data, len, token | LONG) })
            } else {
                // SAFETY: the payload's bytes are on the heap or static (`send` saw to that), and the entry keeps them until
                // every loan has come back.
                unsafe { self.send_borrowed_record(outbox, peer, &header, (data, len), token) }
            };
            let Some(out) = self.sends.get_mut(&number) else { return true };
            let state = &mut self.peers[peer.index()];
            match sent {
                Ok(()) => {
                    out.in_flight += usize::from(kind != Kind::Rts);
                    out.started = true;
                    if kind == Kind::Rts {
                        (out.unstarted, state.unstarted) = (true, state.unstarted + total);
                        state.batch.rts_bytes += total;
                    } else {
                        state.mark_started(out);
                    }
                    if long {
                        state.direct.begin(total);
                    }
                    if let Some((_, at)) = &mut out.cts {
                        *at = to;
                    }
                    out.over = whole || out.cts.is_some_and(|(_, at)| at == total);
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
        if self.sends.get(&number).is_some_and(|out| out.over && out.in_flight == 0)
            && let Some(mut out) = self.sends.remove(&number)
        {
            self.peers[out.to.index()].mark_started(&mut out);
            let PendingSend { body, token, error, .. } = out;
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
            Kind::Eager | Kind::Rts => self.incoming_message(outbox, from, header, bytes),
            Kind::Cts => {
                if let Some(out) = self.sends.get_mut(&header.number)
                    && out.to == from
                    && out.started
                    && out.cts.is_none()
                    && !out.over
                {
                    out.cts = Some((header.tag, 0));
                    out.direct = header.direct && outbox.has_long();
                    if out.direct {
                        self.peer(from).cts.push_back(header.number);
                        self.start_direct_sends(outbox, from);
                    } else {
                        self.continue_send(outbox, header.number);
                    }
                }
            }
            Kind::Decline => {
                if let Some(out) = self.sends.get_mut(&header.number).filter(|out| out.to == from) {
                    out.over = true;
                    self.settle(header.number);
                }
            }
            Kind::Data => self.data(from, header, bytes),
        }
    }

    /// Sends what was to be answered.
    fn send_replies(&mut self, outbox: &mut Outbox<'_>) {
        while let Some((to, header)) = self.replies.pop_front() {
            if self.append_record(outbox, to, &header, &[]) == Err(SendError::Full) {
                self.replies.push_front((to, header));
                return;
            }
            self.peer(to).batch.urgent = true;
        }
    }

    /// A peer is gone: nothing more can be sent to it, and nothing comes unless it said so itself.
    fn peer_lost(&mut self, outbox: &Outbox<'_>, peer: Peer, reason: &LostReason) {
        let error = lost(reason);
        let state = self.peer(peer);
        state.lost = Some(error.clone());
        state.closed = *reason == LostReason::Closed;
        state.batch.clear();
        // It will not be cleared any more.
        state.unmatched.retain(|message| matches!(message, Unmatched::Eager(..)));
        let hit: Vec<u32> = self.sends.iter().filter(|(_, out)| out.to == peer).map(|(number, _)| *number).collect();
        for number in hit {
            if let Some(out) = self.sends.get_mut(&number) {
                out.over = true;
                out.error.get_or_insert(error.clone());
            }
            self.settle(number);
        }
        if *reason == LostReason::Closed {
            self.cancel_abandoned(outbox, peer);
            return;
        }
        self.events.push(Event::Lost { peer: addr(peer), error: error.clone() });
        let state = self.peer(peer);
        let matched_rts = std::mem::take(&mut state.matched_rts).into_iter().map(|(posted, ..)| posted);
        let posted: Vec<_> = std::mem::take(&mut state.posted).into_iter().chain(matched_rts).collect();
        let rendezvous = self.abandon(|rendezvous| rendezvous.from == peer);
        self.cancel_abandoned(outbox, peer);
        for (token, bytes) in posted.into_iter().map(|posted| (posted.token, posted.buffer)).chain(rendezvous) {
            let result = Err(ReceiveError::Failed(error.clone()));
            self.events.push(Event::Received { token, bytes, tag: 0, from: None, result });
        }
    }

    /// A lent payload came back.
    fn send_completed(&mut self, outbox: &mut Outbox<'_>, peer: Peer, token: u64, good: bool) {
        let number = token as u32;
        if let Some(out) = self.sends.get_mut(&number) {
            out.in_flight = out.in_flight.saturating_sub(1);
            if !good {
                out.over = true;
                out.error.get_or_insert_with(|| reset("the datagram did not go out".to_owned()));
            }
            if token & LONG != 0 {
                self.peers[peer.index()].direct.end(out.body.len());
                self.start_direct_sends(outbox, peer);
            }
        }
        self.settle(number);
    }

    /// Gives the endpoint cleared messages that go at once: few at a time, so that announcements and clearances, which keep the
    /// other end going, do not wait behind all of them.
    fn start_direct_sends(&mut self, outbox: &mut Outbox<'_>, peer: Peer) {
        loop {
            let state = self.peer(peer);
            let Some(&number) = state.cts.front() else { return };
            let direct = state.direct;
            let len = self.sends.get(&number).map_or(0, |out| out.body.len());
            if !direct.has_room(len, PAYLOAD_WINDOW) {
                return;
            }
            self.peer(peer).cts.pop_front();
            self.continue_send(outbox, number);
        }
    }

    /// Gives the endpoint more of a send, now or when it has room.
    fn continue_send(&mut self, outbox: &mut Outbox<'_>, number: u32) {
        if !self.push(outbox, number) {
            self.waiting.push_back(number);
        }
        self.settle(number);
    }
}

fn addr(peer: Peer) -> Addr {
    Addr(peer.index() as u64)
}

impl Transport for SoftwareTags {
    fn name(&self) -> &[u8] {
        &self.name
    }

    fn provider(&self) -> &str {
        &self.provider
    }

    fn matching(&self) -> Matching {
        Matching::Software
    }

    fn max_message(&self) -> usize {
        MAX_MESSAGE
    }

    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error> {
        let peer = self.endpoint.add_peer(name)?;
        self.state.peer(peer);
        Ok(addr(peer))
    }

    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, more: bool) -> SendResult {
        let peer = Peer::from_index(to.0 as usize);
        if let Some(error) = self.state.peer(peer).lost.clone() {
            return SendResult::Failed(body, error);
        }
        if body.len() <= self.state.max_inline {
            let header = Header { inline: true, ..Header::new(Kind::Eager, 0, tag, body.len()) };
            return match self.state.append_record(&mut self.endpoint.outbox(), peer, &header, body.as_slice()) {
                Ok(()) => {
                    self.state.peer(peer).batch.urgent |= !more;
                    SendResult::Done(body)
                }
                Err(SendError::Full) => SendResult::Retry(body),
                Err(error) => SendResult::Failed(body, reset(error.to_string())),
            };
        }
        // One for the records before it, and one for itself: nothing that is sent later overtakes it.
        if self.endpoint.free_slots() < 2 {
            return SendResult::Retry(body);
        }
        let number = self.state.free_number();
        let out = PendingSend {
            to: peer,
            body,
            token,
            tag,
            cts: None,
            direct: false,
            in_flight: 0,
            started: false,
            unstarted: false,
            error: None,
            over: false,
        };
        self.state.sends.insert(number, out);
        self.state.continue_send(&mut self.endpoint.outbox(), number);
        SendResult::Posted
    }

    fn receive(
        &mut self,
        from: Option<Addr>,
        pattern: Pattern,
        buffer: Vec<u8>,
        len: usize,
        token: u64,
    ) -> ReceiveResult {
        let posted = Posted { pattern, buffer, len, token, directed: from.is_some() };
        let Some(from) = from else {
            let peers = 0..self.state.peers.len() as u32;
            let found = peers
                .map(|peer| Peer::from_index(peer as usize))
                .find_map(|peer| Some((peer, self.state.unmatched(peer, pattern)?)));
            match found {
                Some((peer, message)) => self.state.match_message(&mut self.endpoint.outbox(), peer, posted, message),
                None => self.state.any_source.push_back(posted),
            }
            return ReceiveResult::Posted;
        };
        let peer = Peer::from_index(from.0 as usize);
        if let Some(message) = self.state.unmatched(peer, pattern) {
            self.state.match_message(&mut self.endpoint.outbox(), peer, posted, message);
            return ReceiveResult::Posted;
        }
        let state = self.state.peer(peer);
        match &state.lost {
            Some(error) if !state.closed => ReceiveResult::Failed(posted.buffer, error.clone()),
            _ => {
                state.posted.push_back(posted);
                ReceiveResult::Posted
            }
        }
    }

    fn peek(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool {
        let all = 0..self.state.peers.len() as u32;
        let peers = from.map_or(all, |from| from.0 as u32..from.0 as u32 + 1);
        let found = peers.map(|peer| Peer::from_index(peer as usize)).find_map(|peer| {
            let waiting = &self.state.peers.get(peer.index())?.unmatched;
            let tag = waiting.iter().map(Unmatched::tag).find(|tag| pattern.matches(*tag))?;
            Some((tag, Some(addr(peer))))
        });
        self.state.events.push(Event::Peeked { token, found });
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
            ferrogin_datagram::Event::Sent { peer, token } => state.send_completed(outbox, peer, token, true),
            ferrogin_datagram::Event::SendFailed { peer, token } => state.send_completed(outbox, peer, token, false),
            ferrogin_datagram::Event::Lost { peer, reason } => state.peer_lost(outbox, peer, &reason),
        })?;
        for over in endpoint.take_long() {
            state.direct_received(&mut endpoint.outbox(), over.token, over.result);
        }
        let outbox = &mut endpoint.outbox();
        state.send_replies(outbox);
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

impl Drop for SoftwareTags {
    fn drop(&mut self) {
        let begin = Instant::now();
        let mut events = Vec::new();
        while !self.state.unflushed.is_empty() && begin.elapsed() < CLOSE_GRACE && self.poll(&mut events).is_ok() {}
        if let Err(error) = self.endpoint.shutdown(CLOSE_GRACE, |_, _| ()) {
            log::debug!("closing the endpoint: {error}");
        }
    }
}

mod receiving;
mod records;
#[cfg(test)]
mod tests;
