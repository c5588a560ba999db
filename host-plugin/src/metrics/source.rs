//! The numbers of one context, from the memory where kernels and the card keep them.
//!
//! The reader takes no lock of theirs and changes nothing. Each word is read by one atomic load, and each only grows, modulo its size,
//! so a total is at most as old as its load and never wrong.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The card's counters wrap at 2^31.
const COUNTER_MASK: u32 = u32::MAX >> 1;

/// The kind of a queue.
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
    /// The value of the label.
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

/// Totals of queues. `None` where the memory has no address in the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Requests that kernels have posted.
    pub posts: Option<u64>,
    /// Requests that completed without error.
    pub completions: Option<u64>,
    /// Requests that completed in error.
    pub errors: u64,
    /// Writes of peers that raised a signal, or emulated signals that the signal proxy added.
    pub signals: Option<u64>,
    /// Emulated signals that the signal proxy refused.
    pub refused: Option<u64>,
    /// Rounds of the signal proxy that found all receives taken.
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

    /// Requests that were posted and are not complete.
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

/// The words of a send queue's cursor: the number of the next request, and with the `locked` policy the requests beyond it that are
/// not rung.
type Cursor = [*const u32; 2];

impl Total<Cursor> {
    fn sample(&mut self) {
        // Relaxed, and in this order: a thread that rings moves requests from the second word to the first. The sum may lack them
        // for one sample, and never has them twice. A sum behind the last one is such a moment, and not a wrap.
        let [next, pending] = self.word.map(|word| {
            // SAFETY: the caller of `Endpoint::new` keeps the word mapped and aligned. Kernels of the `combining` policy change the first
            // word with the flush barrier beside it, as one of 8 bytes; the others as one of 4. Either is one access of the processor.
            unsafe { AtomicU32::from_ptr(word.cast_mut()) }.load(Ordering::Relaxed)
        });
        let now = next.wrapping_add(pending);
        let step = now.wrapping_sub(self.last).cast_signed();
        if step > 0 {
            self.total += step as u64;
            self.last = now;
        }
    }
}

impl Total<*const u64> {
    fn sample(&mut self) {
        // Acquire: the card counts a completion after it has read the request, and a kernel wrote the request after it had moved the
        // cursor. So a cursor that is read after this load includes each request that is counted here.
        // SAFETY: the caller of `Endpoint::new` keeps the word mapped and aligned. The card may write it now; the load is atomic.
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
    posts: Option<Total<Cursor>>,
    completions: Option<Total<*const u64>>,
    errors: Total<*const u64>,
    signals: Option<Total<*const u64>>,
}

// SAFETY: any thread may read the words, which the caller of `Endpoint::new` keeps mapped. All accesses are atomic loads.
unsafe impl Send for Endpoint {}

/// The words of an endpoint that have an address in the host, each counter with its value before the first request.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    /// The cursor's words. Its first value is the completion counter's.
    pub cursor: Option<[*const u32; 2]>,
    /// The completion counter.
    pub completed: (Option<*const u64>, u64),
    /// The error counter.
    pub errors: (*const u64, u64),
    /// The signal counter, if the endpoint has one.
    pub signal: Option<(*const u64, u64)>,
}

impl Endpoint {
    /// An endpoint that counts in `words`.
    ///
    /// # Safety
    /// The words are aligned, and stay mapped as long as the result is sampled. Kernels and the card write them atomically.
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
        // Completions before the cursor: see above.
        self.completions.as_mut().map(Total::<*const u64>::sample);
        self.errors.sample();
        self.signals.as_mut().map(Total::<*const u64>::sample);
        self.posts.as_mut().map(Total::<Cursor>::sample);
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

/// What the signal proxy counts of the emulated signals of a context.
#[derive(Debug, Default)]
pub struct Counts {
    /// Signals that were added.
    pub added: AtomicU64,
    /// Signals that were refused.
    pub refused: AtomicU64,
    /// Rounds that found all receives taken.
    pub exhausted: AtomicU64,
}

/// A number that one thread at a time raises while others read it.
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

/// What the RMA plugin counts of a context on one rail.
#[derive(Debug, Default)]
pub struct RmaCounts {
    /// Writes, reads and messages that libfabric has taken.
    pub posts: Count,
    /// Those that completed without error.
    pub completions: Count,
    /// Those that completed in error.
    pub errors: Count,
    /// Bytes of writes and reads.
    pub bytes: Count,
    /// Signals of peers that were added: on the first rail, those of all.
    pub signals: Count,
    /// Messages and immediate data of peers that were refused.
    pub refused: Count,
}

/// A context in the file.
#[derive(Debug)]
pub struct Source {
    /// Rank of this process in the communicator.
    pub rank: usize,
    /// Number of the communicator in this process.
    pub comm: u64,
    /// Number of the context in the communicator.
    pub context: u64,
    /// Number of the rail in the communicator.
    pub rail: u32,
    /// Name of the rail's card.
    pub card: String,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// What the signal proxy counts of its emulated signals.
    pub emulated: Option<Arc<Counts>>,
    /// What the RMA plugin counts.
    pub rma: Option<Arc<RmaCounts>>,
}

impl Source {
    /// Reads all words.
    pub fn sample(&mut self) {
        self.endpoints.iter_mut().for_each(Endpoint::sample);
    }

    /// The totals by kind of queue, as of the last sample.
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
                // Completions before the posts, so that no sample has more of them.
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
        let (next, pending) = (AtomicU32::new(u32::MAX - 1), AtomicU32::new(0));
        let words = [0x7fff_fffe, 0x7fff_ffff, 5].map(AtomicU64::new);
        let [completed, errors, signal] = words.each_ref().map(|word| word.as_ptr().cast_const());
        let given = Words {
            cursor: Some([next.as_ptr(), pending.as_ptr()]),
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
    fn pending_requests_count_once_while_a_thread_rings() {
        let (next, pending, errors) = (AtomicU32::new(10), AtomicU32::new(0), AtomicU64::new(0));
        let given = Words {
            cursor: Some([next.as_ptr(), pending.as_ptr()]),
            completed: (None, 10),
            errors: (errors.as_ptr(), 0),
            signal: None,
        };
        // SAFETY: the words live until the end of this test.
        let mut endpoint = unsafe { Endpoint::new(Queue::Data, given) };
        let mut posts_at = |next_is, pending_is| {
            next.store(next_is, Ordering::Relaxed);
            pending.store(pending_is, Ordering::Relaxed);
            endpoint.sample();
            endpoint.numbers().posts
        };
        assert_eq!(posts_at(10, 4), Some(4));
        // The reader took the first word before the ringing thread changed it, and the second one after.
        assert_eq!(posts_at(10, 0), Some(4));
        assert_eq!(posts_at(14, 0), Some(4));
        assert_eq!(posts_at(14, 1), Some(5));
        assert_eq!(endpoint.numbers(), Numbers { posts: Some(5), ..Numbers::default() });
        assert_eq!(endpoint.numbers().outstanding(), None, "the completion counter has no address in the host");
    }
}
