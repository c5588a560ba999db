//! Software tag matching over [datagrams](ferrogin_datagram), for providers whose tagged messages are missing, slow or unreliable.
//!
//! An eager message fits into one datagram; short ones share a datagram (see [`records`]). A longer message starts with an RTS. When the RTS
//! matches a receive, the receiver answers with a CTS, and the payload goes out of the sender's buffer: as one tagged message of the
//! provider into the receiver's buffer, which was posted before the CTS, if both ends can (`direct`); otherwise in data records, in any
//! order, each with its offset. So no long message is ever buffered without a receive.

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

/// Payload bytes of a datagram, if the provider carries that many.
const DATA_BYTES: usize = 64 << 10;
/// Bytes of a datagram beyond its records and payload: prefix and name.
const OVERHEAD: usize = 256;
/// Bytes of the longest message; offsets have 64 bits.
const MAX_MESSAGE: usize = 1 << 40;
/// Unmatched messages of one peer, each of 64 KiB at most: several times the window of unread messages. Further messages are dropped.
const MAX_UNMATCHED: usize = 16 * UNREAD_WINDOW as usize;
/// Bits of a receive's number, which is a tag: providers use the highest bits of tags themselves.
const RECEIVE_IDS: u64 = (1 << 62) - 1;
/// Flag in a token: the send is a direct payload and not a datagram.
const LONG: u64 = 1 << 32;
/// Time for peers to confirm that the endpoint closes.
const CLOSE_GRACE: Duration = Duration::from_millis(100);

/// A receive that waits for a message.
struct Posted {
    pattern: Pattern,
    buffer: Vec<u8>,
    len: usize,
    token: u64,
    /// The receive matches messages of one peer.
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

/// A matched receive of a long message whose payload has not arrived completely.
struct Rendezvous {
    from: Peer,
    /// The endpoint uses it if the payload is direct.
    buffer: Vec<u8>,
    direct: bool,
    total: usize,
    missing: usize,
    tag: u64,
    token: u64,
}

/// A send that has not ended.
struct PendingSend {
    to: Peer,
    body: Payload,
    token: u64,
    tag: u64,
    /// The receiver's number of the receive, and how many bytes were sent; None before the CTS.
    cts: Option<(u64, usize)>,
    /// The payload goes as one tagged message of the provider.
    direct: bool,
    /// Sends that the endpoint has not completed.
    in_flight: usize,
    /// The first record (eager or RTS) is sent or in the batch.
    started: bool,
    /// The message counts in [`PeerState::unstarted`].
    unstarted: bool,
    error: Option<Error>,
    /// Nothing more is sent.
    over: bool,
}

/// Records for one peer that are not sent yet: see [`State::append_record`].
#[derive(Default)]
struct Batch {
    records: Vec<u8>,
    /// The peer is in [`State::unflushed`].
    queued: bool,
    /// The batch has records other than RTS and the lengths before them.
    urgent: bool,
    /// Bytes of the messages whose RTS are in the batch.
    rts_bytes: usize,
}

impl Batch {
    /// Empties the batch.
    fn clear(&mut self) {
        self.records.clear();
        (self.urgent, self.rts_bytes) = (false, 0);
    }
}

/// The state of one peer.
#[derive(Default)]
struct PeerState {
    batch: Batch,
    /// Bytes of messages whose RTS was sent, or is in the batch, and whose payload has not started.
    unstarted: usize,
    posted: VecDeque<Posted>,
    /// Receives with the RTS that they matched and its bytes. They get a CTS when fewer direct payloads are `inbound`.
    matched_rts: VecDeque<(Posted, Header, usize)>,
    inbound: InFlight,
    /// Sends with a CTS whose direct payload waits until the endpoint has fewer: `direct`.
    cts: VecDeque<u32>,
    direct: InFlight,
    unmatched: VecDeque<Unmatched>,
    /// The peer cannot be reached any more.
    lost: Option<Error>,
    /// The peer closed its endpoint: messages that it sent before may still arrive.
    closed: bool,
}

impl PeerState {
    /// The payload of a message to the peer starts.
    fn mark_started(&mut self, out: &mut PendingSend) {
        if std::mem::take(&mut out.unstarted) {
            self.unstarted -= out.body.len();
        }
    }
}

/// Software tag matching over an endpoint for datagrams.
pub(crate) struct SoftwareTags {
    // First, so that it is closed before the buffers that it uses are freed.
    endpoint: MessageEndpoint,
    state: State,
    name: Vec<u8>,
    provider: String,
}

/// Everything but the endpoint.
struct State {
    /// Largest payload and records of a datagram, and the longest inline message, bytes.
    data_bytes: usize,
    records: usize,
    max_inline: usize,
    peers: Vec<PeerState>,
    /// Peers with records that are not sent; and whether the endpoint had no slot for some.
    unflushed: Vec<Peer>,
    full: bool,
    /// Receives for messages of any peer.
    any_source: VecDeque<Posted>,
    sends: HashMap<u32, PendingSend>,
    rendezvous: HashMap<u64, Rendezvous>,
    /// Buffers of cancelled receives that the endpoint still uses: the peer, the buffer, and the bytes of the payload.
    abandoned: HashMap<u64, (Peer, Vec<u8>, usize)>,
    next_number: u32,
    /// Sends that the endpoint had no slot for.
    waiting: VecDeque<u32>,
    /// Answers that the endpoint had no slot for.
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
                admission: false,
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

    /// An unused number for a send.
    fn free_number(&mut self) -> u32 {
        // After a wrap, sends with low numbers may still wait for their receives.
        while self.sends.contains_key(&self.next_number) {
            self.next_number = self.next_number.wrapping_add(1);
        }
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        number
    }

    /// Appends a record to a peer's batch. The batch is sent by [`State::flush`], with a longer message, or when it is full.
    fn append_record(&mut self, outbox: &mut Outbox, to: Peer, header: &Header, bytes: &[u8]) -> Result<(), SendError> {
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

    /// Sends the batch to a peer.
    fn flush_to(&mut self, outbox: &mut Outbox, to: Peer) -> Result<(), SendError> {
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

    /// Sends the batch to a peer and a last record, whose bytes are the payload of the datagram and are not copied.
    ///
    /// # Safety
    /// As [`Outbox::send_borrowed`].
    unsafe fn send_borrowed_record(
        &mut self,
        outbox: &mut Outbox,
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
        // SAFETY: the caller keeps the bytes valid, as this function's contract asks.
        let result = unsafe { outbox.send_borrowed(to, &batch.records, data, len, token) };
        if result == Err(SendError::Full) {
            batch.records.truncate(before);
        } else {
            batch.clear();
        }
        result
    }

    /// Sends the batches that cannot wait, as far as the endpoint has slots.
    fn flush(&mut self, outbox: &mut Outbox) {
        self.full = false;
        let mut unflushed = std::mem::take(&mut self.unflushed);
        unflushed.retain(|to| {
            // The endpoint reports a peer that is gone as lost.
            let full = !self.can_wait(*to) && self.flush_to(outbox, *to) == Err(SendError::Full);
            self.full |= full;
            let batch = &mut self.peers[to.index()].batch;
            batch.queued = !batch.records.is_empty();
            batch.queued
        });
        self.unflushed = unflushed;
    }

    /// A batch can wait while it has RTS alone, direct payloads keep the stream busy, and the peer has enough other RTS to answer. Every
    /// datagram costs the stream a packet; the batch is sent later, in few datagrams.
    fn can_wait(&self, to: Peer) -> bool {
        let PeerState { batch, direct, unstarted, .. } = &self.peers[to.index()];
        !batch.urgent && direct.bytes() > 0 && unstarted.saturating_sub(batch.rts_bytes) >= PAYLOAD_WINDOW
    }

    /// Gives as much of a send to the endpoint as it takes; false when the endpoint has no slot.
    fn push(&mut self, outbox: &mut Outbox, number: u32) -> bool {
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
                // Records for other messages do not wait behind the payload.
                let flushed = if self.can_wait(peer) { Ok(()) } else { self.flush_to(outbox, peer) };
                // SAFETY: the payload's bytes are on the heap or static, because `send` copies words inline; `sends` keeps them
                // until every send of them has completed.
                flushed.and_then(|()| unsafe { outbox.send_long(peer, tag, data, len, token | LONG) })
            } else {
                // SAFETY: the payload's bytes are on the heap or static, because `send` copies words inline; `sends` keeps them
                // until every send of them has completed.
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

    /// Ends a send when the endpoint has completed all its parts.
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

    /// A datagram arrived.
    fn datagram(&mut self, outbox: &mut Outbox, from: Peer, records: &[u8], payload: &[u8]) {
        for (header, bytes) in Records::new(records, payload) {
            self.record(outbox, from, header, bytes);
        }
    }

    fn record(&mut self, outbox: &mut Outbox, from: Peer, header: Header, bytes: &[u8]) {
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

    /// Appends the waiting answers to the batches.
    fn send_replies(&mut self, outbox: &mut Outbox) {
        while let Some((to, header)) = self.replies.pop_front() {
            if self.append_record(outbox, to, &header, &[]) == Err(SendError::Full) {
                self.replies.push_front((to, header));
                return;
            }
            self.peer(to).batch.urgent = true;
        }
    }

    /// A peer is gone: nothing more can be sent to it. Messages still arrive only if it closed its endpoint itself.
    fn peer_lost(&mut self, outbox: &Outbox, peer: Peer, reason: &LostReason) {
        let error = lost(reason);
        let state = self.peer(peer);
        state.lost = Some(error.clone());
        state.closed = *reason == LostReason::Closed;
        state.batch.clear();
        // A long message that the peer did not send will not arrive.
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

    /// The endpoint completed the send of a payload.
    fn send_completed(&mut self, outbox: &mut Outbox, peer: Peer, token: u64, good: bool) {
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

    /// Gives the endpoint direct payloads that have a CTS, a few at a time: so RTS and CTS of other messages do not wait behind all of them.
    fn start_direct_sends(&mut self, outbox: &mut Outbox, peer: Peer) {
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

    /// Gives the endpoint more of a send, now or when it has a slot.
    fn continue_send(&mut self, outbox: &mut Outbox, number: u32) {
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

    fn watches_peers(&self) -> bool {
        true
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
            return match self.state.append_record(self.endpoint.outbox(), peer, &header, body.as_slice()) {
                Ok(()) => {
                    self.state.peer(peer).batch.urgent |= !more;
                    SendResult::Done(body)
                }
                Err(SendError::Full) => SendResult::Retry(body),
                Err(error) => SendResult::Failed(body, reset(error.to_string())),
            };
        }
        // One slot for the batch before it and one for the message: no later message overtakes it.
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
        self.state.continue_send(self.endpoint.outbox(), number);
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
            let mut peers = (0..self.state.peers.len()).map(Peer::from_index);
            match peers.find_map(|peer| Some((peer, self.state.unmatched(peer, pattern)?))) {
                Some((peer, message)) => self.state.match_message(self.endpoint.outbox(), peer, posted, message),
                None => self.state.any_source.push_back(posted),
            }
            return ReceiveResult::Posted;
        };
        let peer = Peer::from_index(from.0 as usize);
        if let Some(message) = self.state.unmatched(peer, pattern) {
            self.state.match_message(self.endpoint.outbox(), peer, posted, message);
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
        let peers = from.map_or(0..self.state.peers.len(), |from| from.0 as usize..from.0 as usize + 1);
        let found = peers.map(Peer::from_index).find_map(|peer| {
            let waiting = &self.state.peers.get(peer.index())?.unmatched;
            let tag = waiting.iter().map(Unmatched::tag).find(|tag| pattern.matches(*tag))?;
            Some((tag, Some(addr(peer))))
        });
        self.state.events.push(Event::Peeked { token, found });
        true
    }

    fn cancel(&mut self, which: &dyn Fn(u64) -> bool) {
        self.state.cancel(self.endpoint.outbox(), which);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let Self { endpoint, state, .. } = self;
        state.flush(endpoint.outbox());
        endpoint.poll(|outbox, event| match event {
            ferrogin_datagram::Event::Message { from, header, payload } => {
                state.datagram(outbox, from, header, payload)
            }
            ferrogin_datagram::Event::Sent { peer, token } => state.send_completed(outbox, peer, token, true),
            ferrogin_datagram::Event::SendFailed { peer, token } => state.send_completed(outbox, peer, token, false),
            ferrogin_datagram::Event::Lost { peer, reason } => state.peer_lost(outbox, peer, &reason),
        })?;
        for over in endpoint.take_long() {
            state.direct_received(endpoint.outbox(), over.token, over.result);
        }
        let outbox = endpoint.outbox();
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
        self.state.flush(self.endpoint.outbox());
    }

    fn wait_fd(&self) -> Option<RawFd> {
        // No event announces that the provider takes what it refused before: the caller must poll.
        let state = &self.state;
        let offers = !(state.waiting.is_empty() && state.replies.is_empty() && !state.full);
        self.endpoint.wait_fd().filter(|_| !offers && !self.endpoint.must_retry())
    }

    fn may_wait(&self) -> bool {
        // The next poll reports what ended in another call.
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
