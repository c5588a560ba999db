//! A context handle's data path: it turns operations into posts on lanes, and completions into finished requests. What
//! arrives from peers goes to [`super::inbound`].

use super::departure::{Departure, Message};
use super::inbound::{Inbound, Notice};
use super::lane::{Access, Event, Lane, Post};
use super::memory::{Memory, Registered, WordWrite};
use super::rail::Rail;
use super::ranks::{Gone, Ranks};
use super::record::{self, Immediate, Record};
use super::requests::{Request, Requests};
use super::stream::{Outgoing, StreamId, window};
use super::waits::Waits;
use super::words::{Name, Word, Words};
use crate::error::{DataResult, Error};
use crate::metrics::Guard;
use crate::shortage;
use ferrogin_libfabric::{CompletionError, bindings};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

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

/// A put or get with checked arguments.
#[derive(Clone, Copy)]
pub struct Transfer<M> {
    /// This rank's memory and the peer's; `None` if there are no bytes.
    pub ends: Option<[M; 2]>,
    /// Where the bytes are in each.
    pub offsets: [u64; 2],
    /// Number of bytes.
    pub size: u64,
    /// NCCL has another operation for this peer right behind this one.
    pub more_follows: bool,
}

impl<M> Transfer<M> {
    fn map<'a, T>(&'a self, map: impl FnMut(&'a M) -> T) -> Transfer<T> {
        let ends = self.ends.as_ref().map(|ends| ends.each_ref().map(map));
        Transfer { ends, offsets: self.offsets, size: self.size, more_follows: self.more_follows }
    }
}

/// A signal with checked arguments.
#[derive(Debug, Clone, Copy)]
pub struct Signal {
    /// The word, with its registration's number.
    pub word: Word,
    /// Amount to add.
    pub value: u64,
}

/// What a lane notes about an operation.
#[derive(Clone, Copy)]
pub enum Note {
    /// A part of a request. `put` is the group in the stream of a put without a number.
    Part { request: Request, stream: StreamId, put: Option<u32> },
    /// An acknowledgement.
    Acknowledgement,
    /// A message to this peer that nothing is under way to it.
    Departure(usize),
    /// One of the engine's `writes`.
    Word(usize),
}

/// A signal with a number, and the lane for its message.
struct Numbered {
    lane: usize,
    record: Record,
    request: Request,
}

/// A signal that has no number yet, because the window is full.
struct Waiting {
    put: Transfer<Arc<Memory>>,
    signal: Signal,
    request: Request,
}

struct Outbound {
    stream: Outgoing<Numbered>,
    words: Words,
    waiting: VecDeque<Waiting>,
}

/// The data path; see the [module](self).
pub struct Engine {
    pub(super) ranks: Arc<Ranks>,
    /// Number of contexts behind the handle.
    pub(super) contexts: usize,
    immediate: Immediate,
    lanes: Vec<Lane<Note>>,
    /// Most bytes that one write or read can carry, whichever the rail.
    part_max: u64,
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
    requests: Requests,
    waits: Waits,
    departure: Departure,
    /// The last check of the network found nothing.
    is_quiet: bool,
    /// Calls to `progress`.
    calls: u32,
    /// The last request that a test found incomplete, and the number of such tests since the last check of the network.
    tested: (Option<Request>, usize),
    failure: Option<String>,
    _metrics: Option<Guard>,
}

impl Engine {
    /// Creates the data path for `contexts` contexts on open lanes. `tokens` are the ranks' secrets.
    pub fn new(
        ranks: Arc<Ranks>,
        registered: Arc<Registered>,
        contexts: usize,
        immediate: Immediate,
        lanes: Vec<Lane<Note>>,
        tokens: Vec<u64>,
    ) -> Self {
        let (rank, nranks, counts) = (ranks.rank, ranks.nranks, lanes[0].counts.clone());
        let waits = Waits::new(nranks, ranks.timeout, Instant::now());
        Self {
            part_max: ranks.rails.iter().map(|rail| rail.part_max() as u64).min().unwrap_or(1),
            keeps_order: ranks.keep_order(),
            _metrics: ranks.metrics.as_ref().map(|metrics| {
                let cards = ranks.rails.iter().map(Rail::name);
                metrics.rma_context(cards.zip(lanes.iter().map(|lane| lane.counts.clone())))
            }),
            inbound: Inbound::new(rank, nranks, contexts, immediate, tokens[rank], registered, counts),
            ranks,
            contexts,
            immediate,
            lanes,
            turn: 0,
            tokens,
            outbound: (0..contexts * nranks).map(|_| None).collect(),
            writes: Vec::new(),
            requests: Requests::new(nranks),
            waits,
            departure: Departure::new(rank, nranks),
            is_quiet: false,
            calls: 0,
            tested: (None, 0),
            failure: None,
        }
    }

    #[inline(always)]
    fn outbound(&mut self, stream: StreamId) -> &mut Outbound {
        let bits = self.immediate.number_bits;
        self.outbound[stream.place(self.ranks.nranks)].get_or_insert_with(|| {
            let (stream, words, waiting) = (Outgoing::new(0, window(bits)), Words::default(), VecDeque::new());
            Box::new(Outbound { stream, words, waiting })
        })
    }

    /// Returns the cause, once an operation has failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    fn check(&self) -> DataResult<()> {
        match &self.failure {
            Some(failure) => Err(Error::Peer(failure.clone()).into()),
            None => Ok(()),
        }
    }

    /// Keeps the first failure, so that every later call fails.
    #[cold]
    fn fail(&mut self, error: Box<Error>) -> Box<Error> {
        self.failure.get_or_insert_with(|| error.to_string());
        self.ranks.has_failed.store(true, Ordering::Relaxed);
        error
    }

    /// Starts a put or get with checked arguments, and a put's signal if it has one.
    #[inline(always)]
    pub(super) fn transfer(
        &mut self,
        stream: StreamId,
        access: Access,
        transfer: Transfer<&Arc<Memory>>,
        signal: Option<Signal>,
    ) -> DataResult<Request> {
        let request = self.done()?;
        let started = match signal {
            Some(signal) => self.signal(stream, transfer, signal, request),
            None => self.parts(stream, transfer, access, request),
        };
        started.map(|()| request).map_err(|error| self.fail(error))
    }

    /// Returns a request that is done.
    #[inline(always)]
    pub(super) fn done(&mut self) -> DataResult<Request> {
        self.check()?;
        self.requests.open()
    }

    fn next_rail(&mut self) -> usize {
        let rail = self.turn;
        self.turn = if rail + 1 < self.lanes.len() { rail + 1 } else { 0 };
        rail
    }

    /// Returns the part size for a transfer of `size` bytes.
    fn part(&self, size: u64) -> u64 {
        let rails = self.lanes.len() as u64;
        let share = if rails > 1 && size >= SPREAD { size.div_ceil(rails).next_multiple_of(64) } else { size };
        share.min(self.part_max)
    }

    /// Posts a transfer's parts, on one rail after the other.
    #[inline(always)]
    fn parts(
        &mut self,
        stream: StreamId,
        transfer: Transfer<&Arc<Memory>>,
        access: Access,
        request: Request,
    ) -> DataResult<()> {
        let Transfer { ends, offsets: [near_offset, far_offset], size, more_follows } = transfer;
        let Some([near, far]) = ends else { return Ok(()) };
        let far = far.peer(stream.peer);
        let (part, mut offset) = (self.part(size), 0);
        // If order is kept, no signal waits for a put.
        let has_group = access == Access::Write && !self.keeps_order;
        while offset < size {
            let (rail, len) = (self.next_rail(), part.min(size - offset));
            self.add_part(request, stream.peer);
            let put = has_group.then(|| self.outbound(stream).stream.put(size == NCCL_PART));
            let post = Post {
                access,
                peer: stream.peer,
                len: len as usize,
                remote: far.remote(rail, far_offset + offset),
                note: Note::Part { request, stream, put },
                more_follows,
            };
            self.lanes[rail].post(post, near, near_offset + offset)?;
            offset += len;
        }
        Ok(())
    }

    fn add_part(&mut self, request: Request, peer: usize) {
        if !self.requests.is_under_way(peer) {
            self.waits.note(peer);
        }
        self.requests.add_part(request, peer);
    }

    /// Starts a put with a signal, or keeps it waiting if the window is full.
    #[inline(always)]
    fn signal(
        &mut self,
        stream: StreamId,
        put: Transfer<&Arc<Memory>>,
        signal: Signal,
        request: Request,
    ) -> DataResult<()> {
        let outbound = self.outbound(stream);
        if outbound.waiting.is_empty()
            && let Some(number) = outbound.stream.number()
        {
            return self.start(stream, number, put, signal, request);
        }
        outbound.waiting.push_back(Waiting { put: put.map(|memory| Arc::clone(memory)), signal, request });
        self.add_part(request, stream.peer);
        Ok(())
    }

    /// Starts as many of a stream's waiting signals as the window has room for.
    fn start_waiting(&mut self, stream: StreamId) -> DataResult<()> {
        while !self.outbound(stream).waiting.is_empty()
            && let Some(number) = self.outbound(stream).stream.number()
            && let Some(Waiting { put, signal, request }) = self.outbound(stream).waiting.pop_front()
        {
            self.start(stream, number, put.map(|memory| memory), signal, request)?;
            self.requests.part_done(request, stream.peer);
        }
        Ok(())
    }

    fn start(
        &mut self,
        stream: StreamId,
        number: u32,
        put: Transfer<&Arc<Memory>>,
        signal: Signal,
        request: Request,
    ) -> DataResult<()> {
        let (entries, keeps_order) = (self.immediate.entries(), self.keeps_order);
        // The immediate data of a single write announces its landing. If there are several, this rank waits for their
        // completions. If order is kept, the message announces it: the tcp of libfabric 1.17 crashes if an endpoint is
        // closed while a write with immediate data arrives (docs/found-elsewhere.md).
        let is_one = put.size > 0 && self.part(put.size) >= put.size && !keeps_order;
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
        self.lanes[lane].post_bytes(post, record.as_bytes())
    }

    /// Returns whether a request is done, and closes it if so; `None` if the request isn't open.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn test(&mut self, request: Request) -> DataResult<Option<bool>> {
        self.check()?;
        let is_done = self.requests.close(request);
        if is_done != Some(false) {
            return Ok(is_done);
        }
        // NCCL tests many requests between calls to rmaProgress, or one over and over: one check of the network per
        // round is enough.
        let again = self.tested.0.replace(request) == Some(request);
        self.tested.1 += 1;
        if again || self.tested.1 > self.requests.count_open() {
            self.progress()?;
        }
        Ok(self.requests.close(request))
    }

    /// Handles completions and messages, and posts whatever is waiting.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn progress(&mut self) -> DataResult<()> {
        self.check()?;
        self.tested.1 = 0;
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
        if let Some(peer) = self.waits.expired(Instant::now(), self.requests.under_way()) {
            self.ranks.blame(peer);
            return Err(Error::Peer(format!(
                "rank {peer} has completed no request of rank {rank} for {} s (FERROGIN_TIMEOUT), so they fail: it is stopped or hangs, or \
                 the network between them is down; see the output of rank {peer}, and raise FERROGIN_TIMEOUT if it is only slow",
                self.ranks.timeout.as_secs()
            ))
            .into());
        }
        Err(Error::Peer(match self.ranks.gone(|| self.requests.under_way().chain(self.departure.awaited())) {
            None => return Ok(()),
            Some(Gone::Closed(closed)) if !self.requests.is_under_way(closed) => {
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

    fn rounds(&mut self) -> DataResult<()> {
        for _ in 0..BATCHES {
            let mut more = false;
            self.is_quiet = true;
            for lane in 0..self.lanes.len() {
                more |= self.lanes[lane].read()?;
                while let Some(event) = self.lanes[lane].next() {
                    self.is_quiet = false;
                    self.event(lane, event)?;
                }
                self.lanes[lane].refill()?;
            }
            self.apply()?;
            self.acknowledge()?;
            while let Some((peer, message)) = self.departure.next(|peer| self.requests.is_under_way(peer)) {
                self.tell(peer, message)?;
            }
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn event(&mut self, lane: usize, event: Event<Note>) -> DataResult<()> {
        match event {
            Event::Done(Note::Part { request, stream, put, .. }) => {
                self.waits.note(stream.peer);
                self.requests.part_done(request, stream.peer);
                if let Some(group) = put
                    && self.outbound(stream).stream.put_done(group)
                {
                    while let Some(signal) = self.outbound(stream).stream.release() {
                        self.send(stream, signal, false)?;
                    }
                }
            }
            Event::Done(Note::Word(at)) => {
                self.writes[at].take().into_iter().for_each(|write| self.inbound.written(write))
            }
            Event::Done(Note::Acknowledgement) => {}
            Event::Done(Note::Departure(peer)) => self.departure.sent(peer),
            Event::Failed(failed) => return self.failed(&failed.0, &failed.1),
            Event::Landed(data) => self.inbound.landed(data),
            Event::Message { slot, len } => match self.lanes[lane].message(slot, len) {
                None => self.inbound.refuse(&format!("a message of {len} bytes")),
                Some(record) => self.record(&record)?,
            },
            Event::Refused(what) => self.inbound.refuse(&what),
        }
        Ok(())
    }

    fn failed(&mut self, post: &Post<Note>, error: &CompletionError) -> DataResult<()> {
        let rank = self.ranks.rank;
        let (what, peer) = match post.note {
            Note::Part { stream, .. } => (post.access.name(), stream.peer),
            Note::Word(_) => ("write of a signal", rank),
            // A peer whose signals have all been applied may be gone, and needs no acknowledgement.
            Note::Acknowledgement => return Ok(()),
            Note::Departure(peer) => {
                self.departure.sent(peer);
                self.departure.peer_gone(peer);
                return Ok(());
            }
        };
        // A card also reports a peer as unreachable if this process lacks the resources for a connection.
        let shortage = (error.code == bindings::FI_EHOSTUNREACH).then(shortage::of_software_card).flatten();
        let fix = shortage.map_or("check the peer, its card and the network".to_owned(), |it| it.to_string());
        let blamed = self.ranks.blame(peer);
        if blamed != peer {
            return Err(Error::Peer(lost_text(rank, blamed)).into());
        }
        let (text, code) = (&error.text, error.provider_code);
        let text = format!("a {what} from rank {rank} to rank {peer} failed: {text} (provider code {code}); {fix}");
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
            self.lanes[rail].post_bytes(post, write.sum.as_bytes())?;
            self.writes.push(Some(write));
        }
        Ok(())
    }

    fn acknowledge(&mut self) -> DataResult<()> {
        while let Some((stream, number)) = self.inbound.acknowledgement() {
            let record = self.acknowledgement(stream, number);
            let lane = self.next_rail();
            let post = message_post(Access::Message, stream.peer, Note::Acknowledgement);
            self.lanes[lane].post_bytes(post, record.as_bytes())?;
        }
        Ok(())
    }

    /// Tells a peer how far this rank or the peer has got with leaving.
    fn tell(&mut self, peer: usize, message: Message) -> DataResult<()> {
        let record = Record { kind: message.kind(), ..self.acknowledgement(StreamId { peer, context: 0 }, 0) };
        let post = message_post(Access::ConfirmedMessage, peer, Note::Departure(peer));
        self.lanes[0].post_bytes(post, record.as_bytes())
    }

    /// Does one step of `destroyContext`'s wait for everything that is under way between this rank and the others (see
    /// [`super::departure`]). Returns true if the wait is over. If it has `expired`, or a rank is gone, a line in the
    /// log says what is lost.
    pub fn drain(&mut self, has_expired: bool) -> bool {
        // Whatever failed has its own line.
        if self.failure.is_some() || self.ranks.has_failed.load(Ordering::Relaxed) {
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
        let undelivered: Vec<_> = self.requests.under_way().collect();
        let awaited: Vec<_> = self.departure.awaited().collect();
        if !undelivered.is_empty() {
            crate::warn!(
                "rank {rank} destroyed a context with {} undelivered parts of requests to {}: {why}; check that these ranks still run and \
                 poll the context",
                self.requests.parts(),
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
        if self.requests.under_way().next().is_some() {
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
    pub fn retire(mut self) -> Vec<Lane<Note>> {
        self.lanes.iter_mut().for_each(Lane::retire);
        self.lanes
    }
}

fn message_post(access: Access, peer: usize, note: Note) -> Post<Note> {
    Post { access, peer, len: size_of::<Record>(), remote: (0, 0), note, more_follows: false }
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
