//! One context's numbers, from the memory where kernels and the card keep them.
//!
//! The reader takes none of their locks and changes nothing. Each word is read with one atomic load, and each only
//! grows, modulo its size, so a total is at most as old as its load and never wrong.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The card's counters wrap at 2^31.
const COUNTER_MASK: u32 = u32::MAX >> 1;

/// The kind of queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Queue {
    /// Puts and gets without a signal or counter.
    Data,
    /// Values without a signal or counter.
    Value,
    /// Operations that name a counter.
    Counter,
    /// Operations that raise a signal and name no counter.
    Signal,
    /// All operations of the RMA plugin.
    Rma,
}

impl Queue {
    /// Returns the label's value.
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Value => "value",
            Self::Counter => "counter",
            Self::Signal => "signal",
            Self::Rma => "rma",
        }
    }
}

/// Totals of queues. `None` where the memory has no host address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Requests that kernels have posted.
    pub posts: Option<u64>,
    /// Requests that completed without error.
    pub completions: Option<u64>,
    /// Requests that completed in error.
    pub errors: u64,
    /// Peers' writes that raised a signal, or emulated signals that the signal proxy added.
    pub signals: Option<u64>,
    /// Emulated signals that the signal proxy refused.
    pub refused: Option<u64>,
    /// Signal proxy rounds that found all receives taken.
    pub exhausted: Option<u64>,
    /// Bytes of the RMA plugin's puts and gets.
    pub bytes: Option<u64>,
}

impl Numbers {
    /// Adds another queue's numbers.
    pub fn add(&mut self, other: &Self) {
        let sum = |into: &mut Option<u64>, more: Option<u64>| {
            if let Some(more) = more {
                *into = Some(into.unwrap_or(0) + more);
            }
        };
        sum(&mut self.posts, other.posts);
        sum(&mut self.completions, other.completions);
        sum(&mut self.signals, other.signals);
        sum(&mut self.refused, other.refused);
        sum(&mut self.exhausted, other.exhausted);
        sum(&mut self.bytes, other.bytes);
        self.errors += other.errors;
    }

    /// Returns the number of requests that were posted and haven't completed.
    pub fn outstanding(&self) -> Option<u64> {
        Some(self.posts?.saturating_sub(self.completions? + self.errors))
    }
}

/// A word that wraps, and its total since `start`.
#[derive(Debug)]
struct Total<W> {
    word: W,
    last: u32,
    total: u64,
}

impl Total<*const u32> {
    fn sample(&mut self) {
        // SAFETY: the caller of `Endpoint::new` keeps the word mapped and aligned. Kernels with the `combining` policy
        // change it together with the flush barrier next to it, as 8 bytes; the others as 4. Either is a single access.
        let now = unsafe { AtomicU32::from_ptr(self.word.cast_mut()) }.load(Ordering::Relaxed);
        self.total += u64::from(now.wrapping_sub(self.last));
        self.last = now;
    }
}

impl Total<*const u64> {
    fn sample(&mut self) {
        // Acquire: the card counts a completion after it has read the request, and a kernel wrote the request after it
        // had moved the cursor. So a cursor read after this load includes every request counted here. SAFETY: the
        // caller of `Endpoint::new` keeps the word mapped and aligned. The card may write it now; the load is atomic.
        let now = unsafe { AtomicU64::from_ptr(self.word.cast_mut()) }.load(Ordering::Acquire) as u32 & COUNTER_MASK;
        self.total += u64::from(now.wrapping_sub(self.last) & COUNTER_MASK);
        self.last = now;
    }
}

fn counter(word: *const u64, start: u64) -> Total<*const u64> {
    Total { word, last: start as u32 & COUNTER_MASK, total: 0 }
}

/// Where an endpoint counts.
#[derive(Debug)]
pub struct Endpoint {
    queue: Queue,
    posts: Option<Total<*const u32>>,
    completions: Option<Total<*const u64>>,
    errors: Total<*const u64>,
    signals: Option<Total<*const u64>>,
}

// SAFETY: any thread may read the words, which the caller of `Endpoint::new` keeps mapped. All accesses are atomic
// loads.
unsafe impl Send for Endpoint {}

/// An endpoint's words that have a host address, each counter with its value before the first request.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    /// The send queue's cursor: the number of the next request to ring. It starts at the completion counter's first
    /// value.
    pub cursor: Option<*const u32>,
    /// The completion counter.
    pub completed: (Option<*const u64>, u64),
    /// The error counter.
    pub errors: (*const u64, u64),
    /// The signal counter, if the endpoint has one.
    pub signal: Option<(*const u64, u64)>,
}

impl Endpoint {
    /// Reads an endpoint that counts in `words`.
    ///
    /// # Safety
    /// The words must be aligned, and stay mapped as long as the result is sampled. Kernels and the card must write
    /// them atomically.
    pub unsafe fn new(queue: Queue, words: Words) -> Self {
        let (completed, start) = words.completed;
        Self {
            queue,
            posts: words.cursor.map(|word| Total { word, last: start as u32, total: 0 }),
            completions: completed.map(|word| counter(word, start)),
            errors: counter(words.errors.0, words.errors.1),
            signals: words.signal.map(|(word, start)| counter(word, start)),
        }
    }

    fn sample(&mut self) {
        // Completions before the cursor: see `Total::<*const u64>::sample`.
        self.completions.as_mut().map(Total::<*const u64>::sample);
        self.errors.sample();
        self.signals.as_mut().map(Total::<*const u64>::sample);
        self.posts.as_mut().map(Total::<*const u32>::sample);
    }

    fn numbers(&self) -> Numbers {
        Numbers {
            posts: self.posts.as_ref().map(|all| all.total),
            completions: self.completions.as_ref().map(|all| all.total),
            errors: self.errors.total,
            signals: self.signals.as_ref().map(|all| all.total),
            ..Numbers::default()
        }
    }
}

/// The signal proxy's counts for a context's emulated signals.
#[derive(Debug, Default)]
pub struct Counts {
    /// Signals that were added.
    pub added: AtomicU64,
    /// Signals that were refused.
    pub refused: AtomicU64,
    /// Rounds that found all receives taken.
    pub exhausted: AtomicU64,
}

/// A number that one thread at a time increments while others read it.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds `more`.
    pub fn add(&self, more: u64) {
        self.0.store(self.get() + more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The RMA plugin's counts for a context on one rail.
#[derive(Debug, Default)]
pub struct RmaCounts {
    /// Writes, reads and messages that libfabric has accepted.
    pub posts: Count,
    /// Those that completed without error.
    pub completions: Count,
    /// Those that completed in error.
    pub errors: Count,
    /// Bytes of writes and reads.
    pub bytes: Count,
    /// Peers' signals that were added; the first rail has those of all rails.
    pub signals: Count,
    /// Peers' messages and immediate data that were refused.
    pub refused: Count,
}

/// A context in the file.
#[derive(Debug)]
pub struct Source {
    /// This process's rank in the communicator.
    pub rank: usize,
    /// The communicator's number in this process.
    pub comm: u64,
    /// The context's number in the communicator.
    pub context: u64,
    /// The rail's number in the communicator.
    pub rail: u32,
    /// Name of the rail's card.
    pub card: String,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// The signal proxy's counts for its emulated signals.
    pub emulated: Option<Arc<Counts>>,
    /// The RMA plugin's counts.
    pub rma: Option<Arc<RmaCounts>>,
}

impl Source {
    /// Reads all words.
    pub fn sample(&mut self) {
        self.endpoints.iter_mut().for_each(Endpoint::sample);
    }

    /// Returns the totals by kind of queue, as of the last sample.
    pub fn numbers(&self) -> Vec<(Queue, Numbers)> {
        let mut all: Vec<(Queue, Numbers)> = Vec::new();
        for endpoint in &self.endpoints {
            match all.iter_mut().find(|(queue, _)| *queue == endpoint.queue) {
                Some((_, numbers)) => numbers.add(&endpoint.numbers()),
                None => all.push((endpoint.queue, endpoint.numbers())),
            }
        }
        if let Some(counts) = &self.emulated {
            let counts = [&counts.added, &counts.refused, &counts.exhausted];
            let [signals, refused, exhausted] = counts.map(|count| Some(count.load(Ordering::Relaxed)));
            all.push((Queue::Signal, Numbers { signals, refused, exhausted, ..Numbers::default() }));
        }
        if let Some(counts) = &self.rma {
            let numbers = Numbers {
                // Completions before the posts, so that no sample has more completions than posts.
                completions: Some(counts.completions.get()),
                errors: counts.errors.get(),
                posts: Some(counts.posts.get()),
                bytes: Some(counts.bytes.get()),
                signals: Some(counts.signals.get()),
                refused: Some(counts.refused.get()),
                exhausted: None,
            };
            all.push((Queue::Rma, numbers));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_go_on_where_words_wrap() {
        let next = AtomicU32::new(u32::MAX - 1);
        let words = [0x7fff_fffe, 0x7fff_ffff, 5].map(AtomicU64::new);
        let [completed, errors, signal] = words.each_ref().map(|word| word.as_ptr().cast_const());
        let given = Words {
            cursor: Some(next.as_ptr()),
            completed: (Some(completed), 0xffff_fffe),
            errors: (errors, 0x7fff_ffff),
            signal: Some((signal, 5)),
        };
        // SAFETY: the words live until the end of this test.
        let endpoints = vec![unsafe { Endpoint::new(Queue::Signal, given) }];
        let mut source =
            Source { rank: 0, comm: 0, context: 0, rail: 0, card: String::new(), endpoints, emulated: None, rma: None };
        source.sample();
        let zero = Numbers { posts: Some(0), completions: Some(0), signals: Some(0), ..Numbers::default() };
        assert_eq!(source.numbers(), [(Queue::Signal, zero)]);
        next.store(7, Ordering::Relaxed);
        words[0].store(3, Ordering::Relaxed);
        words[1].store(1, Ordering::Relaxed);
        words[2].store(9, Ordering::Relaxed);
        source.sample();
        let numbers = source.numbers()[0].1;
        assert_eq!(
            numbers,
            Numbers { posts: Some(9), completions: Some(5), errors: 2, signals: Some(4), ..Numbers::default() }
        );
        assert_eq!(numbers.outstanding(), Some(2));
    }

    #[test]
    fn completion_counter_without_an_address_leaves_outstanding_unknown() {
        let (next, errors) = (AtomicU32::new(10), AtomicU64::new(0));
        let given =
            Words { cursor: Some(next.as_ptr()), completed: (None, 10), errors: (errors.as_ptr(), 0), signal: None };
        // SAFETY: the words live until the end of this test.
        let mut endpoint = unsafe { Endpoint::new(Queue::Data, given) };
        next.store(15, Ordering::Relaxed);
        endpoint.sample();
        assert_eq!(endpoint.numbers(), Numbers { posts: Some(5), ..Numbers::default() });
        assert_eq!(endpoint.numbers().outstanding(), None, "the completion counter has no address in the host");
    }
}
