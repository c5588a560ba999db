//! The receiving half of a context's data path: it turns peers' messages and immediate data into additions to words.
//!
//! What arrives may come from a process that breaks the protocol. It is refused with a line in the log and changes no
//! memory, unless it names a word in memory registered here.
#![allow(unsafe_code)]

use super::departure::Message;
use super::memory::{Memory, Registered, WordWrite};
use super::record::{self, Immediate, Record};
use super::stream::{Arrived, Incoming, OutOfWindow, StreamId};
use super::words::Word;
use crate::device::Device;
use crate::error::Error;
use crate::metrics::source::RmaCounts;
use crate::signal_proxy::windows::{self, add_all};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// While more additions than this wait for the card, peers get no acknowledgements.
const WAITING_MAX: usize = 1024;

/// An addition that a peer asked for.
#[derive(Clone, Copy)]
struct Addition {
    /// The stream's place, and the number of the word's registration.
    stream: u32,
    memory: u32,
    offset: u64,
    value: u64,
}

struct Stream {
    incoming: Incoming<Addition>,
    /// The word table, defined by the stream's messages.
    words: Vec<Option<Word>>,
}

/// A message for the sending half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// A stream's signals before this number have been applied.
    Acknowledged(StreamId, u32),
    /// A message of the peer about the end of its context or of this one.
    Departure(usize, Message),
}

/// All peers' streams to this rank; see the [module](self).
pub struct Inbound {
    rank: usize,
    nranks: usize,
    contexts: usize,
    immediate: Immediate,
    /// The secret that messages to this rank carry.
    token: u64,
    pub(super) registered: Arc<Registered>,
    streams: Vec<Option<Box<Stream>>>,
    additions: VecDeque<Addition>,
    /// Word writes that haven't completed.
    writing: usize,
    acknowledgements: Vec<(StreamId, u32)>,
    /// Number of refusals.
    refused: u64,
    counts: Arc<RmaCounts>,
}

impl Inbound {
    /// Creates the streams of `contexts` contexts to rank `rank` of `nranks`, whose messages carry `token`.
    pub fn new(
        rank: usize,
        nranks: usize,
        contexts: usize,
        immediate: Immediate,
        token: u64,
        registered: Arc<Registered>,
        counts: Arc<RmaCounts>,
    ) -> Self {
        Self {
            rank,
            nranks,
            contexts,
            immediate,
            token,
            registered,
            streams: (0..contexts * nranks).map(|_| None).collect(),
            additions: VecDeque::new(),
            writing: 0,
            acknowledgements: Vec::new(),
            refused: 0,
            counts,
        }
    }

    /// Handles the immediate data of a write that has landed.
    pub fn landed(&mut self, data: u32) {
        let (peer, context, entry, low) = self.immediate.unpack(data);
        if peer >= self.nranks || context >= self.contexts {
            return self.refuse(&format!("immediate data {data:#x} that names no rank and context"));
        }
        let from = StreamId { peer, context };
        let place = from.place(self.nranks) as u32;
        self.step(from, |stream, additions| {
            let word = match entry.checked_sub(1) {
                Some(at) => Some(stream.words.get(at as usize).copied().flatten().ok_or(OutOfWindow)?),
                None => None,
            };
            let signal = word.map(|Word { memory, offset, strong }| Arrived {
                has_put: true,
                strong,
                signal: Addition { stream: place, memory, offset, value: 1 },
            });
            stream.incoming.land(low, signal, |addition| additions.push_back(addition))
        });
    }

    /// Handles a message, or returns it if it's for the sending half.
    pub fn record(&mut self, record: &Record) -> Option<Notice> {
        let (peer, context) = (record.sender.get() as usize, usize::from(record.context.get()));
        if record.token.get() != self.token || peer >= self.nranks || context >= self.contexts {
            self.refuse("a message from an unknown peer");
            return None;
        }
        let (stream, number) = (StreamId { peer, context }, record.number.get());
        match record.kind {
            record::ACKNOWLEDGEMENT => return Some(Notice::Acknowledged(stream, number)),
            record::LEAVING => return Some(Notice::Departure(peer, Message::Leaving)),
            record::FINISHED => return Some(Notice::Departure(peer, Message::Finished)),
            record::GOODBYE => return Some(Notice::Departure(peer, Message::Goodbye)),
            kind @ (record::SIGNAL | record::SIGNAL_OF_PUT) => {
                let strong = record.strong != 0;
                let word = Word { memory: record.memory.get(), offset: record.offset.get(), strong };
                let place = stream.place(self.nranks) as u32;
                let signal =
                    Addition { stream: place, memory: word.memory, offset: word.offset, value: record.value.get() };
                let arrived = Arrived { has_put: kind == record::SIGNAL_OF_PUT, strong, signal };
                self.step(stream, |stream, additions| {
                    stream.incoming.arrive(number, arrived, |addition| additions.push_back(addition))?;
                    if let Some(at) = record.entry.get().checked_sub(1) {
                        *stream.words.get_mut(at as usize).ok_or(OutOfWindow)? = Some(word);
                    }
                    Ok(())
                });
            }
            _ => self.refuse("a message of an unknown kind"),
        }
        None
    }

    /// Advances a peer's stream, and collects the additions and the acknowledgement that become due.
    fn step(
        &mut self,
        stream: StreamId,
        step: impl FnOnce(&mut Stream, &mut VecDeque<Addition>) -> Result<(), OutOfWindow>,
    ) {
        let (bits, entries) = (self.immediate.number_bits, self.immediate.entries());
        let new = || Box::new(Stream { incoming: Incoming::new(0, bits), words: vec![None; entries] });
        let of_peer = self.streams[stream.place(self.nranks)].get_or_insert_with(new);
        let taken = step(of_peer, &mut self.additions);
        self.acknowledgements.extend(of_peer.incoming.acknowledgement().map(|number| (stream, number)));
        if taken.is_err() {
            self.refuse(&format!(
                "a signal of rank {} that is far out of order, or for a word that it has not named",
                stream.peer
            ));
        }
    }

    /// Applies the additions that are due, in order, and returns the words that the card has to write. Nothing more is
    /// added until [`written`](Self::written) has been called for each of them, because a strong signal must not become
    /// visible before an earlier one. So a batch has no more than one word per stream.
    ///
    /// # Errors
    /// The GPU driver fails.
    pub fn apply(&mut self, device: &dyn Device) -> Result<Vec<WordWrite>, Error> {
        if self.additions.is_empty() || self.writing > 0 {
            return Ok(Vec::new());
        }
        // deregMrSym takes this lock before the memory may be freed.
        let registered = self.registered.read();
        let mut words = Vec::with_capacity(self.additions.len());
        let (mut writes, mut of_streams) = (BTreeMap::new(), BTreeMap::new());
        let mut refused = None;
        let mut added = 0;
        let mut last: Option<&Arc<Memory>> = None;
        while let Some(&Addition { stream, memory: number, offset, value }) = self.additions.front() {
            let memory = last.filter(|last| last.number == number).or_else(|| registered.get(&number));
            last = memory;
            match memory.and_then(|memory| Some((memory, memory.own().word(offset)?))) {
                None => refused = Some((stream as usize % self.nranks, offset)),
                Some((memory, address)) if !memory.has_sums() => {
                    if !writes.is_empty() {
                        break;
                    }
                    words.push((windows::Word { address, adds: memory.adds }, value));
                    added += 1;
                }
                Some((memory, _)) => {
                    let word = (number, offset);
                    if *of_streams.entry(stream).or_insert(word) != word {
                        break;
                    }
                    let write = match writes.entry(word) {
                        Entry::Occupied(write) => write.into_mut(),
                        Entry::Vacant(place) => {
                            let Some(write) = WordWrite::begin(memory, offset) else { break };
                            place.insert(write)
                        }
                    };
                    write.sum = write.sum.wrapping_add(value);
                    added += 1;
                }
            }
            self.additions.pop_front();
        }
        // SAFETY: `word` checked that each word is aligned and in registered memory, which stays mapped until
        // deregMrSym has the lock.
        unsafe { add_all(device, &words) }?;
        self.counts.signals.add(added);
        drop(registered);
        self.writing = writes.len();
        if let Some((sender, offset)) = refused {
            self.refuse(&format!("a signal of rank {sender} to offset {offset} of memory that is not registered here, or not aligned to 8 bytes"));
        }
        Ok(writes.into_values().collect())
    }

    /// Notes that the card has written a word, so that its next write may begin.
    pub fn written(&mut self, _: WordWrite) {
        self.writing -= 1;
    }

    /// Returns true if all signals that have arrived and are due have been added.
    pub fn is_idle(&self) -> bool {
        self.additions.is_empty() && self.writing == 0
    }

    /// Returns the next acknowledgement that is due.
    pub fn acknowledgement(&mut self) -> Option<(StreamId, u32)> {
        if self.additions.len() > WAITING_MAX { None } else { self.acknowledgements.pop() }
    }

    /// Counts a refusal, and logs the 1st, 2nd, 4th and so on. Memory is unchanged, and the context carries on.
    pub fn refuse(&mut self, what: &str) {
        self.refused += 1;
        self.counts.refused.add(1);
        if self.refused.is_power_of_two() {
            crate::warn!("rank {} refused {what}; no memory was changed ({} refused so far)", self.rank, self.refused);
        }
    }
}

#[cfg(test)]
mod tests;
