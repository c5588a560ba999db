//! A context handle's data path: it turns operations into posts on lanes, and completions into finished requests. What
//! arrives from peers goes to [`super::inbound`].

use super::departure::{Departure, Message};
use super::inbound::{Inbound, Notice};
use super::lane::{Access, BATCH, Event, Failure, Lane, Local, Note, Post, SLOT};
use super::memory::{Memory, Peer, Registered, WordWrite};
use super::rail::Rail;
use super::ranks::{Gone, Ranks};
use super::record::{self, Immediate, Record};
use super::requests::{Request, Requests};
use super::stream::{Outgoing, StreamId, window};
use super::waits::Waits;
use super::words::{Name, Word, Words};
use crate::error::{DataResult, Error};
use crate::isolation::{LostRanks, Verdict};
use crate::metrics::Guard;
use crate::shortage;
use crate::watcher::SUSPECT_LIMIT;
use ferrogin_libfabric::{Read, bindings};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, Immutable, IntoBytes};

/// Size from which a transfer is spread over all rails.
const SPREAD: u64 = 1 << 20;
/// NCCL's proxy splits a put into parts of this size, and only the last part has the put's signal.
const NCCL_PART: u64 = 1 << 30;
/// Maximum batches of completions per call.
const BATCHES: usize = 8;
/// Calls to `progress` between checks of the other ranks.
const CHECK_INTERVAL: u32 = 32;
/// How long `destroyContext` waits. The software card reports a silent peer after 5 s, and that error says more.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_secs(7);

/// A put or get with checked arguments, or a part of one.
#[derive(Clone, Copy)]
pub struct Transfer<'a> {
    /// This rank's memory and the peer's, and the peer's part of it; `None` if there are no bytes.
    pub ends: Option<(&'a Arc<Memory>, &'a Arc<Memory>, &'a Peer)>,
    /// Where the bytes are in each.
    pub offsets: [u64; 2],
    /// Number of bytes.
    pub size: u64,
    /// NCCL has another operation for this peer right behind this one.
    pub more_follows: bool,
}

/// A signal with checked arguments.
#[derive(Debug, Clone, Copy)]
pub struct Signal {
    /// The word, with its registration's number.
    pub word: Word,
    /// Amount to add.
    pub value: u64,
}

/// A signal with a number, and the lane for its message.
struct Numbered {
    lane: usize,
    record: Record,
    request: Request,
}

/// A signal that has no number yet, because the window is full.
struct Waiting {
    ends: Option<(Arc<Memory>, Arc<Memory>)>,
    offsets: [u64; 2],
    size: u64,
    signal: Signal,
    request: Request,
}

struct Outbound {
    stream: Outgoing<Numbered>,
    words: Words,
    waiting: VecDeque<Waiting>,
}

/// Requests that have ended without success, and with them all later ones.
enum Ended {
    /// Those to any rank, for this reason.
    All(Box<str>),
    /// Those to these lost ranks.
    Lost(BTreeSet<usize>),
}

/// A request that failed because its peer is lost or it named memory that isn't registered, with the time and text.
struct Suspect {
    peer: usize,
    request: Request,
    at: Instant,
    text: String,
}

/// The data path; see the [module](self).
pub struct Engine {
    pub(super) ranks: Arc<Ranks>,
    /// Number of ranks.
    pub(super) nranks: usize,
    /// Number of contexts behind the handle.
    pub(super) contexts: usize,
    immediate: Immediate,
    lanes: Vec<Lane>,
    /// Most bytes that one write or read can carry, whichever the rail.
    part_max: u64,
    /// Size up to which a transfer is one write or read.
    whole_max: u64,
    /// See [`Ranks::keep_order`].
    keeps_order: bool,
    /// The rail for the next operation.
    turn: usize,
    /// Every rank's secret.
    tokens: Vec<u64>,
    outbound: Vec<Option<Box<Outbound>>>,
    inbound: Inbound,
    /// The words that the card writes for peers' signals, until it has written them.
    writes: Vec<Option<WordWrite>>,
    pub(super) requests: Requests,
    waits: Waits,
    departure: Departure,
    /// The last check of the network found nothing.
    is_quiet: bool,
    /// Calls to `progress`.
    calls: u32,
    ended: Option<Ended>,
    suspects: Vec<Suspect>,
    _metrics: Option<Guard>,
}

impl Engine {
    /// Creates the data path for `contexts` contexts on open lanes. `tokens` are the ranks' secrets.
    pub fn new(
        ranks: Arc<Ranks>,
        registered: Arc<Registered>,
        contexts: usize,
        immediate: Immediate,
        lanes: Vec<Lane>,
        tokens: Vec<u64>,
    ) -> Self {
        let (rank, nranks, counts) = (ranks.rank, ranks.nranks, lanes[0].counts.clone());
        // The ring and the cards find lost ranks within the timeout, and know them from ranks that wait for one.
        let limit = if ranks.isolation.is_some() { 2 * ranks.timeout } else { ranks.timeout };
        let waits = Waits::new(nranks, limit, Instant::now());
        let part_max = ranks.rails.iter().map(|rail| rail.part_max() as u64).min().unwrap_or(1);
        Self {
            part_max,
            whole_max: if lanes.len() > 1 { part_max.min(SPREAD - 1) } else { part_max },
            keeps_order: ranks.keep_order(),
            _metrics: ranks.metrics.as_ref().map(|metrics| {
                let cards = ranks.rails.iter().map(Rail::name);
                metrics.rma_context(cards.zip(lanes.iter().map(|lane| lane.counts.clone())))
            }),
            inbound: Inbound::new(rank, nranks, contexts, immediate, tokens[rank], registered, counts),
            ranks,
            nranks,
            contexts,
            immediate,
            lanes,
            turn: 0,
            tokens,
            outbound: (0..contexts * nranks).map(|_| None).collect(),
            writes: Vec::new(),
            requests: Requests::new(),
            waits,
            departure: Departure::new(rank, nranks),
            is_quiet: false,
            calls: 0,
            ended: None,
            suspects: Vec::new(),
        }
    }

    #[inline(always)]
    fn outbound(&mut self, stream: StreamId) -> &mut Outbound {
        let bits = self.immediate.number_bits;
        self.outbound[stream.place(self.nranks)].get_or_insert_with(
            #[cold]
            || {
                let (stream, words, waiting) = (Outgoing::new(0, window(bits)), Words::default(), VecDeque::new());
                Box::new(Outbound { stream, words, waiting })
            },
        )
    }

    /// Returns whether an operation has failed, and with it the context.
    pub fn has_failed(&self) -> bool {
        matches!(self.ended, Some(Ended::All(_)))
    }

    /// Returns an error if requests to `peer`, or without one to any rank, have failed.
    #[inline(always)]
    fn check(&self, peer: Option<usize>) -> DataResult<()> {
        if self.ended.is_none() { Ok(()) } else { self.check_ended(peer) }
    }

    #[cold]
    fn check_ended(&self, peer: Option<usize>) -> DataResult<()> {
        match (&self.ended, peer) {
            (Some(Ended::All(reason)), _) => Err(Error::Peer(reason.to_string()).into()),
            (_, Some(peer)) if self.is_lost(peer) => Err(self.lost_error(peer)),
            _ => Ok(()),
        }
    }

    fn is_lost(&self, peer: usize) -> bool {
        matches!(&self.ended, Some(Ended::Lost(lost)) if lost.contains(&peer))
    }

    #[cold]
    fn lost_error(&self, lost: usize) -> Box<Error> {
        let reason = self.ranks.isolation.as_ref().and_then(|lost_ranks| lost_ranks.reason(lost)).unwrap_or_default();
        Error::Peer(format!(
            "rank {lost} is lost, so requests of rank {} to it fail: {reason}; post only to the other ranks",
            self.ranks.rank
        ))
        .into()
    }

    /// Keeps the first failure, so that every later call fails.
    #[cold]
    fn fail(&mut self, error: Box<Error>) -> Box<Error> {
        if !self.has_failed() {
            self.ended = Some(Ended::All(error.to_string().into()));
        }
        self.ranks.has_failed.store(true, Ordering::Relaxed);
        error
    }

    /// Starts a put or get with checked arguments, and a put's signal if it has one.
    #[inline(always)]
    pub(super) fn transfer(
        &mut self,
        stream: StreamId,
        access: Access,
        transfer: Transfer<'_>,
        signal: Option<Signal>,
    ) -> DataResult<Request> {
        let request = self.done(stream.peer)?;
        let started = match signal {
            Some(signal) => self.signal(stream, transfer, signal, request),
            None => self.parts(stream, transfer, access, request),
        };
        started.map(|()| request).map_err(|error| self.fail(error))
    }

    /// Returns a request to `peer` that is done.
    #[inline(always)]
    pub(super) fn done(&mut self, peer: usize) -> DataResult<Request> {
        self.check(Some(peer))?;
        self.requests.open()
    }

    fn next_rail(&mut self) -> usize {
        let rail = self.turn;
        self.turn = if rail + 1 < self.lanes.len() { rail + 1 } else { 0 };
        rail
    }

    /// Posts a transfer, in parts if it's large, on one rail after the other.
    #[inline(always)]
    fn parts(&mut self, stream: StreamId, transfer: Transfer<'_>, access: Access, request: Request) -> DataResult<()> {
        if transfer.size > self.whole_max {
            return self.split(stream, transfer, access, request);
        }
        self.post_part(stream, transfer, access, request, false)
    }

    #[inline(never)]
    fn split(&mut self, stream: StreamId, whole: Transfer<'_>, access: Access, request: Request) -> DataResult<()> {
        let share = whole.size.div_ceil(self.lanes.len() as u64).next_multiple_of(64);
        let part = share.min(self.part_max);
        (0..whole.size).step_by(part as usize).try_for_each(|offset| {
            let size = part.min(whole.size - offset);
            let offsets = whole.offsets.map(|first| first + offset);
            self.post_part(stream, Transfer { offsets, size, ..whole }, access, request, whole.size == NCCL_PART)
        })
    }

    #[inline(always)]
    fn post_part(
        &mut self,
        stream: StreamId,
        part: Transfer<'_>,
        access: Access,
        request: Request,
        is_in_parts: bool,
    ) -> DataResult<()> {
        let Transfer { ends, offsets: [near_offset, far_offset], size, more_follows } = part;
        let Some((near, _, peer)) = ends else { return Ok(()) };
        let rail = self.next_rail();
        self.add_part(request, stream.peer);
        // If order is kept, no signal waits for a put.
        let has_group = access == Access::Write && !self.keeps_order;
        let put = has_group.then(|| self.outbound(stream).stream.put(is_in_parts));
        let (remote, note) = (peer.remote(rail, far_offset), Note::Part { request, stream, put });
        let post = Post { access, peer: stream.peer, len: size as usize, remote, note, more_follows };
        self.lanes[rail].post(post, Local::Memory(near, near_offset))
    }

    fn add_part(&mut self, request: Request, peer: usize) {
        self.waits.part_started(peer);
        self.requests.add_part(request);
    }

    fn part_done(&mut self, request: Request, peer: usize) {
        self.waits.part_done(peer);
        self.requests.part_done(request);
    }

    /// Starts a put with a signal, or keeps it waiting if the window is full.
    #[inline(always)]
    fn signal(&mut self, stream: StreamId, put: Transfer<'_>, signal: Signal, request: Request) -> DataResult<()> {
        let outbound = self.outbound(stream);
        if outbound.waiting.is_empty()
            && let Some(number) = outbound.stream.number()
        {
            return self.start(stream, number, put, signal, request);
        }
        let Transfer { ends, offsets, size, .. } = put;
        let ends = ends.map(|(near, far, _)| (near.clone(), far.clone()));
        outbound.waiting.push_back(Waiting { ends, offsets, size, signal, request });
        self.add_part(request, stream.peer);
        Ok(())
    }

    /// Starts as many of a stream's waiting signals as the window has room for.
    #[inline(never)]
    fn start_waiting(&mut self, stream: StreamId) -> DataResult<()> {
        while !self.outbound(stream).waiting.is_empty()
            && let Some(number) = self.outbound(stream).stream.number()
            && let Some(Waiting { ends, offsets, size, signal, request }) = self.outbound(stream).waiting.pop_front()
        {
            let ends = ends.as_ref().map(|(near, far)| (near, far, far.peer(stream.peer)));
            let put = Transfer { ends, offsets, size, more_follows: false };
            let started = self.start(stream, number, put, signal, request);
            // If deregMrSym came while the signal waited, this may be the last reference; otherwise it will call `keep`.
            if let Some((near, ..)) = ends
                && !self.inbound.registered.has(near.number)
            {
                self.keep(near);
            }
            started?;
            self.part_done(request, stream.peer);
        }
        Ok(())
    }

    #[inline(always)]
    fn start(
        &mut self,
        stream: StreamId,
        number: u32,
        put: Transfer<'_>,
        signal: Signal,
        request: Request,
    ) -> DataResult<()> {
        let (entries, keeps_order) = (self.immediate.entries(), self.keeps_order);
        // The immediate data of a single write announces its landing. If there are several, this rank waits for their
        // completions. If order is kept, the message announces it: the tcp of libfabric 1.17 crashes if an endpoint is
        // closed while a write with immediate data arrives (docs/found-elsewhere.md).
        let is_one = (1..=self.whole_max).contains(&put.size) && !keeps_order;
        let outbound = self.outbound(stream);
        let waits = outbound.stream.follows_puts(signal.word.strong, is_one) && !keeps_order;
        let name = match (signal.value, is_one && !(waits && outbound.stream.has_puts())) {
            (1, true) => outbound.words.name(signal.word, entries, number, outbound.stream.acknowledged()),
            _ => Name::InMessage(0),
        };
        let lane = self.turn;
        let (known, entry) = match name {
            Name::Known(entry) => (entry, 0),
            Name::InMessage(entry) => (0, entry),
        };
        let data = self.immediate.pack(self.ranks.rank, stream.context, known, number);
        let access = if is_one { Access::WriteData(data) } else { Access::Write };
        // The message shares the write's doorbell.
        let more_follows = put.more_follows;
        let shares = if known > 0 { more_follows } else { is_one || keeps_order };
        self.parts(stream, Transfer { more_follows: shares, ..put }, access, request)?;
        if known > 0 {
            return Ok(());
        }
        self.add_part(request, stream.peer);
        let record = Record {
            kind: if is_one { record::SIGNAL_OF_PUT } else { record::SIGNAL },
            strong: u8::from(signal.word.strong),
            memory: signal.word.memory.into(),
            offset: signal.word.offset.into(),
            value: signal.value.into(),
            entry: entry.into(),
            ..self.acknowledgement(stream, number)
        };
        let numbered = Numbered { lane, record, request };
        match if waits { self.outbound(stream).stream.hold(numbered) } else { Some(numbered) } {
            Some(numbered) => self.send(stream, numbered, more_follows),
            None if more_follows => Ok(()),
            None => self.lanes[lane].flush(),
        }
    }

    fn send(&mut self, stream: StreamId, signal: Numbered, more_follows: bool) -> DataResult<()> {
        let Numbered { lane, record, request } = signal;
        let note = Note::Part { request, stream, put: None };
        let post = Post { more_follows, ..message_post(Access::Message, stream.peer, note) };
        self.lanes[lane].post(post, Local::Bytes(&padded(&record)))
    }

    /// Returns whether a request is done, and closes it if so; `None` if the request isn't open.
    ///
    /// # Errors
    /// An operation of this context has failed, or the request's rank is lost; then it's closed.
    pub fn test(&mut self, request: Request) -> DataResult<Option<bool>> {
        self.check(None)?;
        let is_done = self.requests.close(request);
        if is_done != Some(false) {
            return Ok(is_done);
        }
        self.test_incomplete(request)
    }

    #[cold]
    fn test_incomplete(&mut self, request: Request) -> DataResult<Option<bool>> {
        // NCCL tests many requests between calls to rmaProgress, or one over and over: one check of the network per
        // round is enough.
        if self.requests.is_tested_again(request) {
            self.progress()?;
            // This test belongs to the new round, so the next one of this request checks again.
            self.requests.is_tested_again(request);
        }
        match self.requests.close_failed(request) {
            Some(lost) => Err(self.lost_error(lost)),
            None => Ok(self.requests.close(request)),
        }
    }

    /// Keeps memory registered for the operations in flight that use it.
    pub fn keep(&mut self, memory: &Arc<Memory>) {
        self.lanes.iter_mut().for_each(|lane| lane.keep(memory));
    }

    /// Handles completions and messages, and posts whatever is waiting.
    ///
    /// # Errors
    /// An operation of this context has failed.
    #[inline(never)]
    pub fn progress(&mut self) -> DataResult<()> {
        self.check(None)?;
        self.requests.begin_round();
        let result = self.rounds().and_then(|()| self.check_ranks());
        result.map_err(|error| self.fail(error))
    }

    /// Checks the other ranks, because not every provider reports that a peer is gone or stopped. Requests to a rank
    /// that closed its communicator fail, and so do those that a rank keeps waiting for too long. If a rank is lost,
    /// all requests fail, because several ranks may have ended and the ring names only one. A context without requests
    /// carries on, because ranks may exit when they're done.
    fn check_ranks(&mut self) -> DataResult<()> {
        self.calls = self.calls.wrapping_add(1);
        if !self.calls.is_multiple_of(CHECK_INTERVAL) {
            return Ok(());
        }
        let rank = self.ranks.rank;
        if let Some(lost_ranks) = self.ranks.isolation.clone() {
            return self.check_isolated(&lost_ranks, Instant::now());
        }
        if let Some(peer) = self.waits.expired(Instant::now()) {
            self.ranks.blame(peer);
            return Err(Error::Peer(format!(
                "rank {peer} has completed no request of rank {rank} for {} s (FERROGIN_TIMEOUT), so they fail: it is stopped or hangs, or \
                 the network between them is down; see the output of rank {peer}, and raise FERROGIN_TIMEOUT if it is only slow",
                self.ranks.timeout.as_secs()
            ))
            .into());
        }
        Err(Error::Peer(match self.ranks.gone(|| self.waits.under_way().chain(self.departure.awaited())) {
            None => return Ok(()),
            Some(Gone::Closed(closed)) if !self.waits.is_under_way(closed) => {
                self.departure.peer_gone(closed);
                return Ok(());
            }
            Some(Gone::Lost(lost)) => {
                self.ranks.blame(lost);
                lost_text(rank, lost)
            }
            Some(Gone::Closed(closed)) => format!(
                "rank {closed} closed its communicator while requests of rank {rank} to it were outstanding, so they \
                 fail; rank {closed} must not close it before they are done"
            ),
        })
        .into())
    }

    /// Does the same if peers are isolated: ends the requests to each lost rank.
    fn check_isolated(&mut self, lost_ranks: &LostRanks, now: Instant) -> DataResult<()> {
        if let Some(reason) = lost_ranks.given_up() {
            return Err(Error::Peer(reason).into());
        }
        if let Some(peer) = self.waits.expired(now) {
            let seconds = 2 * self.ranks.timeout.as_secs();
            let silent = format!(
                "it has completed no request of rank {} for {seconds} s (twice FERROGIN_TIMEOUT)",
                self.ranks.rank
            );
            if self.ended.is_some() && self.lanes.iter().any(Lane::is_full) {
                return Err(Error::Peer(format!(
                    "rank {peer} may not be to blame that {silent}: requests to lost ranks, which {} does not end, take up the card's queue",
                    self.ranks.provider.name()
                ))
                .into());
            }
            lost_ranks.add(peer, || silent);
        }
        let none = BTreeSet::new();
        let known = if let Some(Ended::Lost(known)) = &self.ended { known } else { &none };
        for (peer, reason) in lost_ranks.news(known) {
            crate::warn!(
                "rank {}: rank {peer} is lost: {reason}. Requests to it fail, and those to the other ranks go on; look for the first error in \
                 the output of rank {peer}",
                self.ranks.rank
            );
            self.lose(peer);
        }
        match self.suspects.iter().find(|suspect| now >= suspect.at + SUSPECT_LIMIT) {
            Some(suspect) => Err(Error::Peer(suspect.text.clone()).into()),
            None => Ok(()),
        }
    }

    /// Ends the requests to a lost rank.
    fn lose(&mut self, lost: usize) {
        if let Ended::Lost(all) = self.ended.get_or_insert_with(|| Ended::Lost(BTreeSet::new())) {
            all.insert(lost);
        }
        let requests = &mut self.requests;
        self.lanes.iter_mut().for_each(|lane| lane.lose(lost, |request| requests.fail(request, lost)));
        for context in 0..self.contexts {
            let Some(ended) = self.outbound[StreamId { peer: lost, context }.place(self.nranks)].take() else {
                continue;
            };
            ended.stream.into_held().for_each(|signal| requests.fail(signal.request, lost));
            ended.waiting.iter().for_each(|waiting| requests.fail(waiting.request, lost));
        }
        self.suspects.retain(|suspect| {
            if suspect.peer == lost {
                requests.fail(suspect.request, lost);
            }
            suspect.peer != lost
        });
        self.waits.lost(lost);
        self.departure.peer_gone(lost);
    }

    fn rounds(&mut self) -> DataResult<()> {
        for _ in 0..BATCHES {
            let mut more = false;
            self.is_quiet = true;
            for lane in 0..self.lanes.len() {
                let read = self.lanes[lane].read()?;
                let count = if let Read::Entries(count) = read { count } else { 0 };
                for at in 0..count {
                    match self.lanes[lane].event(at) {
                        Some(Event::Done(Note::Part { request, stream, put })) => {
                            self.complete(request, stream, put)?;
                        }
                        Some(Event::Landed(data)) => self.inbound.landed(data),
                        Some(event) => self.event(lane, event)?,
                        None => {}
                    }
                }
                if let Some(failure) = self.lanes[lane].failure() {
                    self.failed(failure)?;
                }
                // The next call to rmaProgress handles what has arrived meanwhile.
                more |= may_be_followed(read);
                self.is_quiet &= read == Read::Entries(0);
                self.lanes[lane].refill()?;
            }
            self.apply()?;
            self.acknowledge()?;
            while let Some((peer, message)) = self.departure.next(|peer| self.waits.is_under_way(peer)) {
                self.tell(peer, message)?;
            }
            if !more {
                break;
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn complete(&mut self, request: Request, stream: StreamId, put: Option<u32>) -> DataResult<()> {
        self.part_done(request, stream.peer);
        if let Some(group) = put
            && self.outbound(stream).stream.put_done(group)
        {
            self.release(stream)?;
        }
        Ok(())
    }

    /// Sends the signals that no longer have to wait.
    #[inline(never)]
    fn release(&mut self, stream: StreamId) -> DataResult<()> {
        while let Some(signal) = self.outbound(stream).stream.release() {
            self.send(stream, signal, false)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn event(&mut self, lane: usize, event: Event) -> DataResult<()> {
        match event {
            Event::Done(Note::Part { request, stream, put }) => self.complete(request, stream, put)?,
            Event::Done(Note::Word(at)) => {
                self.writes[at].take().into_iter().for_each(|write| self.inbound.written(write))
            }
            Event::Done(Note::Unawaited) => {}
            Event::Done(Note::Departure(peer)) => self.departure.sent(peer),
            Event::Landed(data) => self.inbound.landed(data),
            Event::Message { slot, len } => match self.lanes[lane].message(slot, len) {
                None => self.inbound.refuse(&format!("a message of {len} bytes")),
                Some(record) => self.record(&record)?,
            },
        }
        Ok(())
    }

    #[cold]
    fn failed(&mut self, failure: Failure) -> DataResult<()> {
        let rank = self.ranks.rank;
        let (access, note, error) = match failure {
            Failure::Operation(access, note, error) => (access, note, error),
            Failure::Receive(error) => {
                self.inbound.refuse(&format!("a receive that failed: {}", error.text));
                return Ok(());
            }
        };
        let (what, peer) = match note {
            Note::Part { stream, .. } => (access.name(), stream.peer),
            Note::Word(_) => ("write of a signal", rank),
            // A peer whose signals have all been applied may be gone, and needs no acknowledgement.
            Note::Unawaited => return Ok(()),
            Note::Departure(peer) => {
                self.departure.sent(peer);
                self.departure.peer_gone(peer);
                return Ok(());
            }
        };
        // A card also reports a peer as unreachable if this process lacks the resources for a connection.
        let shortage = (error.code == bindings::FI_EHOSTUNREACH).then(shortage::of_software_card).flatten();
        let fix = shortage.map_or("check the peer, its card and the network".to_owned(), |it| it.to_string());
        let (text, code) = (&error.text, error.provider_code);
        let text = format!("a {what} from rank {rank} to rank {peer} failed: {text} (provider code {code}); {fix}");
        if let Some(lost_ranks) = &self.ranks.isolation {
            let Note::Part { request, .. } = note else { return Err(Error::Peer(text).into()) };
            match self.ranks.judge(&error, peer) {
                Verdict::Lost(_) if peer != rank && shortage.is_none() => lost_ranks.add(peer, || text.clone()),
                Verdict::Suspect(_) => {}
                _ => return Err(Error::Peer(text).into()),
            }
            self.suspects.push(Suspect { peer, request, at: Instant::now(), text });
            return Ok(());
        }
        let blamed = self.ranks.blame(peer);
        if blamed != peer {
            return Err(Error::Peer(lost_text(rank, blamed)).into());
        }
        Err(Error::Peer(text).into())
    }

    fn record(&mut self, record: &Record) -> DataResult<()> {
        match self.inbound.record(record) {
            Some(Notice::Acknowledged(stream, number)) => {
                self.waits.note(stream.peer);
                // A late one is ignored: an earlier one covered more.
                self.outbound(stream).stream.acknowledge(number);
                self.start_waiting(stream)?;
            }
            Some(Notice::Departure(peer, message)) => self.departure.received(peer, message),
            None => {}
        }
        Ok(())
    }

    /// Applies the additions that are due, and posts writes of the words that the card writes.
    fn apply(&mut self) -> DataResult<()> {
        let rank = self.ranks.rank;
        let due = self.inbound.apply(&*self.ranks.device)?;
        if !due.is_empty() {
            // All earlier ones have been written.
            self.writes.clear();
        }
        for (at, write) in due.into_iter().enumerate() {
            let (rail, len) = (self.next_rail(), size_of_val(&write.sum));
            let remote = write.memory.own().remote(rail, write.offset);
            let post =
                Post { access: Access::Write, peer: rank, len, remote, note: Note::Word(at), more_follows: false };
            self.lanes[rail].post(post, Local::Bytes(&padded(&write.sum)))?;
            self.writes.push(Some(write));
        }
        Ok(())
    }

    fn acknowledge(&mut self) -> DataResult<()> {
        while let Some((stream, number)) = self.inbound.acknowledgement() {
            if self.is_lost(stream.peer) {
                continue;
            }
            let record = self.acknowledgement(stream, number);
            let lane = self.next_rail();
            let post = message_post(Access::Message, stream.peer, Note::Unawaited);
            self.lanes[lane].post(post, Local::Bytes(&padded(&record)))?;
        }
        Ok(())
    }

    /// Tells a peer how far this rank or the peer has got with leaving.
    fn tell(&mut self, peer: usize, message: Message) -> DataResult<()> {
        let record = Record { kind: message.kind(), ..self.acknowledgement(StreamId { peer, context: 0 }, 0) };
        let post = message_post(Access::ConfirmedMessage, peer, Note::Departure(peer));
        self.lanes[0].post(post, Local::Bytes(&padded(&record)))
    }

    /// Does one step of `destroyContext`'s wait for everything that is under way between this rank and the others (see
    /// [`super::departure`]). Returns true if the wait is over. If it has `expired`, or a rank is gone, a line in the
    /// log says what is lost.
    pub fn drain(&mut self, has_expired: bool) -> bool {
        // Whatever failed has its own line.
        if self.has_failed() || self.ranks.has_failed.load(Ordering::Relaxed) {
            return true;
        }
        let why = match self.progress().and_then(|()| self.leave()) {
            Ok(true) => return true,
            Ok(false) if !has_expired => return false,
            Ok(false) => format!("the wait for them ended after {} s", DRAIN_LIMIT.as_secs()),
            Err(error) => error.to_string(),
        };
        self.ranks.has_failed.store(true, Ordering::Relaxed);
        let rank = self.ranks.rank;
        let undelivered: Vec<_> = self.waits.under_way().collect();
        let awaited: Vec<_> = self.departure.awaited().collect();
        if !undelivered.is_empty() {
            crate::warn!(
                "rank {rank} destroyed a context with {} undelivered parts of requests to {}: {why}; check that these ranks still run and \
                 poll the context",
                self.waits.parts(),
                ranks_text(undelivered.into_iter())
            );
        } else if awaited.is_empty() {
            crate::warn!(
                "rank {rank} destroyed a context while signals of other ranks were still being added, or its last message was under way, so \
                 signals may be lost: {why}; check the CPU load and the GPU's driver"
            );
        } else if !self.ranks.has_lost_rank() {
            // Otherwise, the next call says which rank is lost, and nobody waits for its signals.
            crate::warn!(
                "rank {rank} destroyed a context without hearing that {} had nothing under way to it, so signals of theirs may be \
                 lost: {why}; check that all ranks destroy the context or keep polling it",
                ranks_text(awaited.into_iter())
            );
        }
        true
    }

    fn leave(&mut self) -> DataResult<bool> {
        if self.waits.under_way().next().is_some() {
            return Ok(false);
        }
        self.departure.leave();
        Ok(self.departure.is_complete() && self.is_quiet && self.inbound.is_idle())
    }

    fn acknowledgement(&self, stream: StreamId, number: u32) -> Record {
        Record {
            token: self.tokens[stream.peer].into(),
            sender: (self.ranks.rank as u32).into(),
            number: number.into(),
            context: (stream.context as u16).into(),
            kind: record::ACKNOWLEDGEMENT,
            ..Record::new_zeroed()
        }
    }

    /// Returns the lanes of a context that is being destroyed: they take peers' late traffic, and nothing reads it.
    pub fn retire(mut self) -> Vec<Lane> {
        self.lanes.iter_mut().for_each(Lane::retire);
        self.lanes
    }
}

/// Returns whether entries that weren't read may be behind those that were.
fn may_be_followed(read: Read) -> bool {
    matches!(read, Read::Failure | Read::Entries(BATCH))
}

fn message_post(access: Access, peer: usize, note: Note) -> Post {
    Post { access, peer, len: size_of::<Record>(), remote: (0, 0), note, more_follows: false }
}

/// Returns the bytes of a message or word, and zeros.
fn padded(value: &(impl IntoBytes + Immutable)) -> [u8; SLOT] {
    let mut bytes = [0; SLOT];
    bytes[..size_of_val(value)].copy_from_slice(value.as_bytes());
    bytes
}

fn lost_text(rank: usize, lost: usize) -> String {
    format!(
        "rank {lost} ended without closing its communicator, or did not answer another rank, so the outstanding requests of rank {rank} fail; \
         look for the first error in the output of rank {lost}"
    )
}

/// Returns the ranks as words: "rank 1", or "ranks 1, 2".
fn ranks_text(ranks: impl Iterator<Item = usize>) -> String {
    let ranks: Vec<_> = ranks.map(|rank| rank.to_string()).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, ranks.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Even if the failure is nobody's, as one without a context.
    #[test]
    fn entries_may_follow_a_failure_or_a_full_batch() {
        let reads = [Read::Failure, Read::Entries(BATCH), Read::Entries(BATCH - 1), Read::Entries(0)];
        assert_eq!(reads.map(may_be_followed), [true, true, false, false]);
    }
}
