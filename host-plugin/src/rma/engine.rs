//! The data path of a context handle: operations become posts on lanes, completions become finished requests, and messages of peers
//! become additions to words.
#![allow(unsafe_code)]

use super::comm::RmaComm;
use super::lane::{Access, Event, Lane, Post};
use super::memory::Memory;
use super::record::{self, Immediate, Record};
use super::requests::{Request, Requests};
use super::stream::{Arrived, Incoming, Outgoing, window};
use crate::agent::windows::{Word, add_all};
use crate::error::Error;
use crate::turn::Turn;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};

/// Bytes from which a put spreads over all rails.
const SPREAD: u64 = 1 << 20;
/// Batches of completions in one call.
const BATCHES: usize = 8;

/// A put: the bytes and their places, checked.
pub struct Put {
    /// Source: memory and offset. With a size of 0 there is none.
    pub source: Option<(Arc<Memory>, u64)>,
    /// Target: memory and offset.
    pub target: Option<(Arc<Memory>, u64)>,
    /// Bytes.
    pub size: u64,
    /// NCCL has another operation for this peer.
    pub more_follows: bool,
}

/// A signal, checked.
#[derive(Debug, Clone, Copy)]
pub struct Signal {
    /// The registration of the word.
    pub memory: u32,
    /// Offset of the word.
    pub offset: u64,
    /// Amount to add.
    pub value: u64,
    /// All earlier operations of the stream are visible before.
    pub strong: bool,
}

/// A stream: peer and context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamId {
    /// The peer's rank.
    pub peer: usize,
    /// The context.
    pub context: usize,
}

/// What a lane notes about an operation.
pub struct Note {
    request: Option<Request>,
    /// The stream, and the put's index in it if the put has no number.
    put: Option<(StreamId, u64)>,
    what: &'static str,
    peer: usize,
}

/// A signal that has a number, and the lane of its message.
struct Numbered {
    lane: usize,
    record: Record,
    request: Request,
}

/// A signal without a number, because the window is full.
struct Waiting {
    put: Put,
    signal: Signal,
    request: Request,
}

struct Outbound {
    stream: Outgoing<Numbered>,
    waiting: VecDeque<Waiting>,
}

/// An addition that a peer asked for.
struct Addition {
    sender: usize,
    memory: u32,
    offset: u64,
    value: u64,
}

/// The data path; see the [module](self).
pub struct Engine {
    comm: Arc<RmaComm>,
    contexts: usize,
    immediate: Immediate,
    lanes: Vec<Lane<Note>>,
    /// Bytes that a write carries on each rail.
    part_max: u64,
    /// The rail of the next operation.
    turn: usize,
    /// The peers' secrets and this rank's.
    tokens: Vec<u64>,
    outbound: Vec<Option<Box<Outbound>>>,
    inbound: Vec<Option<Box<Incoming<Addition>>>>,
    requests: Requests,
    additions: Vec<Addition>,
    events: Vec<Event<Note>>,
    acknowledgements: Vec<(StreamId, u32)>,
    rounds: Turn,
    /// Messages that broke the protocol.
    refused: u64,
    failure: Option<String>,
}

impl Engine {
    /// The data path of `contexts` contexts on open lanes, whose peers have the secrets `tokens`.
    pub fn new(
        comm: Arc<RmaComm>,
        contexts: usize,
        immediate: Immediate,
        lanes: Vec<Lane<Note>>,
        tokens: Vec<u64>,
    ) -> Self {
        let streams = contexts * comm.nranks;
        let part_max = comm.rails.iter().map(|rail| rail.part_max() as u64).min().unwrap_or(1);
        Self {
            part_max,
            comm,
            contexts,
            immediate,
            lanes,
            turn: 0,
            tokens,
            outbound: (0..streams).map(|_| None).collect(),
            inbound: (0..streams).map(|_| None).collect(),
            requests: Requests::default(),
            additions: Vec::new(),
            events: Vec::new(),
            acknowledgements: Vec::new(),
            rounds: Turn::default(),
            refused: 0,
            failure: None,
        }
    }

    fn place(&self, stream: StreamId) -> usize {
        stream.context * self.comm.nranks + stream.peer
    }

    fn outbound(&mut self, stream: StreamId) -> &mut Outbound {
        let (place, window) = (self.place(stream), window(self.immediate.number_bits));
        self.outbound[place]
            .get_or_insert_with(|| Box::new(Outbound { stream: Outgoing::new(0, window), waiting: VecDeque::new() }))
    }

    fn inbound(&mut self, stream: StreamId) -> &mut Incoming<Addition> {
        let (place, bits) = (self.place(stream), self.immediate.number_bits);
        self.inbound[place].get_or_insert_with(|| Box::new(Incoming::new(0, bits)))
    }

    /// The cause, once an operation has failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    fn check(&self) -> Result<(), Error> {
        match &self.failure {
            Some(failure) => Err(Error::Peer(failure.clone())),
            None => Ok(()),
        }
    }

    /// Keeps the first failure, after which every call fails.
    fn fail(&mut self, error: Error) -> Error {
        self.failure.get_or_insert_with(|| error.to_string());
        error
    }

    /// Starts a put, and a signal behind it.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn put(&mut self, stream: StreamId, put: Put, signal: Option<Signal>) -> Result<Request, Error> {
        self.check()?;
        let request = self.requests.open()?;
        let started = match signal {
            Some(signal) => self.signal(stream, Waiting { put, signal, request }),
            None => self.plain(stream, &put, request),
        };
        started.map(|()| request).map_err(|error| self.fail(error))
    }

    /// Starts a get.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn get(&mut self, peer: usize, get: Put) -> Result<Request, Error> {
        self.check()?;
        let request = self.requests.open()?;
        let started = self.parts(peer, &get, |_| (Access::Read, "get", None), request);
        started.map(|()| request).map_err(|error| self.fail(error))
    }

    fn next_rail(&mut self) -> usize {
        let rail = self.turn;
        self.turn = (rail + 1) % self.lanes.len();
        rail
    }

    /// Bytes of each part of a transfer of `size` bytes.
    fn part(&self, size: u64) -> u64 {
        let rails = self.lanes.len() as u64;
        let share = if rails > 1 && size >= SPREAD { size.div_ceil(rails).next_multiple_of(64) } else { size };
        share.min(self.part_max)
    }

    /// The parts of a transfer: rail, offset and size.
    fn split(&mut self, size: u64) -> impl Iterator<Item = (usize, u64, u64)> + use<> {
        let (part, rails, first) = (self.part(size).max(1), self.lanes.len(), self.turn);
        let parts = size.div_ceil(part);
        self.turn = (first + parts as usize) % rails;
        (0..parts).map(move |n| ((first + n as usize) % rails, n * part, part.min(size - n * part)))
    }

    /// Posts the parts of a transfer, of which `access` tells how each travels.
    fn parts(
        &mut self,
        peer: usize,
        put: &Put,
        mut access: impl FnMut(&mut Self) -> (Access, &'static str, Option<(StreamId, u64)>),
        request: Request,
    ) -> Result<(), Error> {
        let (Some((source, from)), Some((target, to))) = (&put.source, &put.target) else { return Ok(()) };
        let parts = self.split(put.size);
        self.requests.add_parts(request, parts.size_hint().0 as u32);
        for (rail, offset, size) in parts {
            let (access, what, index) = access(self);
            let (own, own_offset, other, other_offset) =
                if access == Access::Read { (target, to, source, from) } else { (source, from, target, to) };
            let post = Post::Rma {
                access,
                peer,
                local: (own.clone(), own_offset + offset),
                len: size as usize,
                remote: other.peers[peer].remote(rail, other_offset + offset),
                note: Note { request: Some(request), put: index, what, peer },
            };
            self.lanes[rail].post(post, put.more_follows)?;
        }
        Ok(())
    }

    /// A put without a number.
    fn plain(&mut self, stream: StreamId, put: &Put, request: Request) -> Result<(), Error> {
        let index = |this: &mut Self| {
            let index = this.outbound(stream).stream.put();
            (Access::Write, "put", Some((stream, index)))
        };
        self.parts(stream.peer, put, index, request)
    }

    fn signal(&mut self, stream: StreamId, waiting: Waiting) -> Result<(), Error> {
        // Its parts are the message, and those of the put once it has a number.
        self.requests.add_parts(waiting.request, 1);
        let outbound = self.outbound(stream);
        outbound.waiting.push_back(waiting);
        self.start_waiting(stream)
    }

    /// Starts the signals of a stream that the window has room for.
    fn start_waiting(&mut self, stream: StreamId) -> Result<(), Error> {
        loop {
            let outbound = self.outbound(stream);
            if outbound.waiting.is_empty() {
                return Ok(());
            }
            let Some(number) = outbound.stream.number() else { return Ok(()) };
            let Some(waiting) = outbound.waiting.pop_front() else { return Ok(()) };
            self.start(stream, number, waiting)?;
        }
    }

    fn start(&mut self, stream: StreamId, number: u32, waiting: Waiting) -> Result<(), Error> {
        let Waiting { put, signal, request } = waiting;
        let has_bytes = put.size > 0 && put.source.is_some();
        // One write tells of its landing by immediate data. Of several, this rank waits for the completions.
        let is_one = has_bytes && self.part(put.size) >= put.size;
        let lane = self.turn;
        let more_follows = put.more_follows;
        // The message shares the doorbell of the write.
        let put = Put { more_follows: is_one, ..put };
        if is_one {
            let data = self.immediate.pack(self.comm.rank, stream.context, number);
            self.parts(stream.peer, &put, |_| (Access::WriteData(data), "put", None), request)?;
        } else if has_bytes {
            self.plain(stream, &put, request)?;
        }
        let record = Record {
            token: self.tokens[stream.peer].into(),
            sender: (self.comm.rank as u32).into(),
            number: number.into(),
            context: (stream.context as u16).into(),
            kind: if is_one { record::SIGNAL_OF_PUT } else { record::SIGNAL },
            strong: u8::from(signal.strong),
            memory: signal.memory.into(),
            offset: signal.offset.into(),
            value: signal.value.into(),
        };
        let numbered = Numbered { lane, record, request };
        let waits = signal.strong || has_bytes && !is_one;
        match if waits { self.outbound(stream).stream.hold(numbered) } else { Some(numbered) } {
            Some(numbered) => self.send(stream.peer, numbered, more_follows),
            None if more_follows => Ok(()),
            None => self.lanes[lane].flush(),
        }
    }

    fn send(
        &mut self,
        peer: usize,
        Numbered { lane, record, request }: Numbered,
        more_follows: bool,
    ) -> Result<(), Error> {
        let note = Note { request: Some(request), put: None, what: "signal", peer };
        self.lanes[lane].post(Post::Record { peer, record, note }, more_follows)
    }

    /// Whether a request is done, which ends it; `None` for a request that is not open.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn test(&mut self, request: Request) -> Result<Option<bool>, Error> {
        if self.requests.is_done(request) == Some(false) {
            self.progress()?;
        }
        self.check()?;
        let done = self.requests.is_done(request);
        if done == Some(true) {
            self.requests.close(request);
        }
        Ok(done)
    }

    /// Takes completions and messages, and posts what waits.
    ///
    /// # Errors
    /// An operation of this context has failed.
    pub fn progress(&mut self) -> Result<(), Error> {
        self.check()?;
        let result = self.rounds();
        result.map_err(|error| self.fail(error))
    }

    fn rounds(&mut self) -> Result<(), Error> {
        for _ in 0..BATCHES {
            let mut more = false;
            let mut events = std::mem::take(&mut self.events);
            for lane in &mut self.lanes {
                more |= lane.poll(&mut events)?;
            }
            for event in events.drain(..) {
                self.event(event)?;
            }
            self.events = events;
            self.apply()?;
            self.acknowledge()?;
            if !more {
                break;
            }
        }
        Ok(())
    }

    fn event(&mut self, event: Event<Note>) -> Result<(), Error> {
        match event {
            Event::Done(note) => {
                if let Some(request) = note.request {
                    self.requests.part_done(request);
                }
                let Some((stream, index)) = note.put else { return Ok(()) };
                self.outbound(stream).stream.put_done(index);
                while let Some(signal) = self.outbound(stream).stream.release() {
                    self.send(stream.peer, signal, false)?;
                }
            }
            // A peer that has all its signals, and is gone, needs no acknowledgement.
            Event::Failed(Note { request: None, .. }, _) => {}
            Event::Failed(note, failure) => {
                return Err(Error::Peer(format!(
                    "a {} of rank {} to rank {} failed: {failure}; check the peer, its card and the network",
                    note.what, self.comm.rank, note.peer
                )));
            }
            Event::Landed(data) => {
                let (peer, context, low) = self.immediate.unpack(data);
                if peer >= self.comm.nranks || context >= self.contexts {
                    self.refuse(&format!("immediate data {data:#x} of no rank and context"));
                    return Ok(());
                }
                self.incoming(StreamId { peer, context }, |stream, apply| stream.land(low, apply));
            }
            Event::Record(record) => self.record(&record)?,
            Event::Refused(what) => self.refuse(&what),
        }
        Ok(())
    }

    /// Lets a peer's stream take a step, and collects the additions that this completes.
    fn incoming<E>(
        &mut self,
        stream: StreamId,
        step: impl FnOnce(&mut Incoming<Addition>, &mut dyn FnMut(Addition)) -> Result<(), E>,
    ) {
        let mut additions = std::mem::take(&mut self.additions);
        let inbound = self.inbound(stream);
        let taken = step(inbound, &mut |addition| additions.push(addition));
        let due = inbound.acknowledgement();
        self.additions = additions;
        self.acknowledgements.extend(due.map(|number| (stream, number)));
        if taken.is_err() {
            self.refuse(&format!("a signal of rank {} with a number that is not due", stream.peer));
        }
    }

    fn record(&mut self, record: &Record) -> Result<(), Error> {
        let (peer, context) = (record.sender.get() as usize, usize::from(record.context.get()));
        if record.token.get() != self.tokens[self.comm.rank] || peer >= self.comm.nranks || context >= self.contexts {
            self.refuse("a message of no peer");
            return Ok(());
        }
        let stream = StreamId { peer, context };
        match record.kind {
            record::ACKNOWLEDGEMENT => {
                // A late one says less than those before.
                self.outbound(stream).stream.acknowledge(record.number.get());
                return self.start_waiting(stream);
            }
            kind @ (record::SIGNAL | record::SIGNAL_OF_PUT) => {
                let signal = Addition {
                    sender: peer,
                    memory: record.memory.get(),
                    offset: record.offset.get(),
                    value: record.value.get(),
                };
                let arrived = Arrived { has_put: kind == record::SIGNAL_OF_PUT, strong: record.strong != 0, signal };
                self.incoming(stream, |stream, apply| stream.arrive(record.number.get(), arrived, apply));
            }
            _ => self.refuse("a message of an unknown kind"),
        }
        Ok(())
    }

    /// Adds what is due to the words, in order.
    fn apply(&mut self) -> Result<(), Error> {
        if self.additions.is_empty() {
            return Ok(());
        }
        // deregMrSym takes this lock before its memory may be freed.
        let registered = self.comm.registered.read().unwrap_or_else(PoisonError::into_inner);
        let mut words = Vec::with_capacity(self.additions.len());
        let mut refused = None;
        for addition in &self.additions {
            let memory = registered.get(&addition.memory);
            match memory.and_then(|memory| Some((memory.own().word(addition.offset)?, memory.adds))) {
                Some((address, adds)) => words.push((Word { address, adds }, addition.value)),
                None => refused = Some((addition.sender, addition.offset)),
            }
        }
        if let Some(round) = self.rounds.begin() {
            // SAFETY: `word` checked that each word is aligned and in registered memory, which stays mapped until deregMrSym has the lock.
            unsafe { add_all(&round, &*self.comm.device, &words) }?;
        }
        drop(registered);
        self.additions.clear();
        if let Some((sender, offset)) = refused {
            self.refuse(&format!("a signal of rank {sender} to offset {offset} of memory that is not registered here, or not aligned to 8 bytes"));
        }
        Ok(())
    }

    fn acknowledge(&mut self) -> Result<(), Error> {
        while let Some((stream, number)) = self.acknowledgements.pop() {
            let record = Record {
                token: self.tokens[stream.peer].into(),
                sender: (self.comm.rank as u32).into(),
                number: number.into(),
                context: (stream.context as u16).into(),
                kind: record::ACKNOWLEDGEMENT,
                strong: 0,
                memory: 0.into(),
                offset: 0.into(),
                value: 0.into(),
            };
            let note = Note { request: None, put: None, what: "acknowledgement", peer: stream.peer };
            let lane = self.next_rail();
            self.lanes[lane].post(Post::Record { peer: stream.peer, record, note }, false)?;
        }
        Ok(())
    }

    /// A peer broke the protocol. Memory is unchanged, and the context goes on. Few of many lines are written.
    fn refuse(&mut self, what: &str) {
        self.refused += 1;
        if self.refused.is_power_of_two() {
            crate::warn!(
                "rank {} refused {what}; no memory was changed ({} refused until now)",
                self.comm.rank,
                self.refused
            );
        }
    }

    /// The lanes of a context that is destroyed: they take the late traffic of peers, and nothing looks at it.
    pub fn retire(mut self) -> Vec<Lane<Note>> {
        self.lanes.iter_mut().for_each(Lane::retire);
        self.lanes
    }
}
