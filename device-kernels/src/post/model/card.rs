//! The card, and a poster's view of it.
//!
//! A poster's stores for the card stay with the poster until its next fence, so the card sees stale bytes if a request
//! is rung before its fence. A doorbell reaches the card at once, or as late as the poster's next fence. The card reads
//! a value only when it completes the request, as a retransmission does.

use super::ops::{Mutation, Op, Policy, insert_used, post_run};
use super::{Backend, Geometry, Model, Words};
use crate::post::COUNT_MASK;
use crate::post::flush::flush;
use crate::post::outcome::Outcome;
use crate::post::used::UsedSet;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering::*, fence};
use crate::wait::Limit;
use ferrogin_ffi::ext::Losses;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Mutex;
// Loom doesn't know these words, so it doesn't branch its schedule on them.
use std::sync::atomic::{AtomicBool as Flag, AtomicU32 as Count};

/// When a doorbell reaches the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doorbell {
    /// At once, before unfenced stores.
    Early,
    /// With the poster's next fence, or when the test delivers it.
    Late,
}

/// Which request in flight completes first.
#[cfg(loom)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Oldest,
    Newest,
    /// Oldest and newest alternately.
    Alternating,
}

/// A card, and what its posters do.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    pub policy: Policy,
    /// Whether the endpoint is in a context, whose flush looks only at used endpoints.
    pub in_context: bool,
    pub start: u32,
    pub sq_size: u32,
    pub max_batch: u32,
    pub slots: u32,
    pub doorbell: Doorbell,
    /// Whether requests may fail, in a context that isolates peers.
    pub fails: bool,
    pub mutation: Option<Mutation>,
    #[cfg(loom)]
    pub order: Order,
    /// Preemptions in one interleaving.
    #[cfg(loom)]
    pub preemptions: usize,
    pub posters: &'static [&'static [Op]],
}

impl Config {
    pub fn posts(&self) -> u32 {
        self.posters.iter().flat_map(|ops| ops.iter()).map(|op| op.posts()).sum()
    }

    /// Returns each poster's number, its operations and its first token. Tokens begin at 1.
    pub fn posters(&self) -> impl Iterator<Item = (usize, &'static [Op], u32)> {
        let mut token = 1;
        self.posters.iter().enumerate().map(move |(id, ops)| {
            let first = token;
            token += ops.iter().map(|op| op.posts()).sum::<u32>();
            (id, *ops, first)
        })
    }

    fn geometry(&self) -> Geometry {
        Geometry { sq_size: self.sq_size, max_batch: self.max_batch, slots: self.slots }
    }
}

/// The endpoint's words, and the memory that posters and card share.
pub struct Card {
    pub config: Config,
    pub words: Words,
    /// The set of used endpoints, with this one endpoint: the summary word and the leaf word.
    used: [AtomicU64; 2],
    pub doorbell: AtomicU32,
    pub completed: AtomicU32,
    ring: Vec<AtomicU32>,
    values: Vec<AtomicU32>,
    /// By token: nonzero once the card has completed the request: [`FAILED`] after an error, until the host has read
    /// it. A thread that has seen the count must see this too.
    done: Vec<AtomicU32>,
    /// By token: whether the post has returned.
    returned: Vec<Flag>,
    /// Doorbells that haven't arrived: poster, count.
    late: Mutex<Vec<(usize, u32)>>,
    pub failures: Count,
    /// What the host says of the failures, which it acknowledges when it identifies them.
    losses: Mutex<Losses>,
    /// Doorbells that have arrived.
    pub rings: Count,
}

impl Card {
    /// Creates a card for up to `posts` posts, whose tokens are 1 and up.
    pub fn new(config: Config, posts: u32) -> Self {
        let start = config.start;
        let words = |n: u32| (0..n).map(|_| AtomicU32::new(0)).collect();
        Card {
            config,
            words: Words::new(start),
            used: [AtomicU64::new(0), AtomicU64::new(0)],
            doorbell: AtomicU32::new(start),
            completed: AtomicU32::new(start & COUNT_MASK),
            ring: words(config.sq_size),
            values: words(config.slots),
            done: words(posts + 1),
            returned: (0..=posts).map(|_| Flag::new(false)).collect(),
            late: Mutex::default(),
            failures: Count::new(0),
            losses: Mutex::new(if config.fails { Losses::new(0, 0) } else { Losses::default() }),
            rings: Count::new(0),
        }
    }

    pub fn mutated(&self, mutation: Mutation) -> bool {
        self.config.mutation == Some(mutation)
    }

    #[allow(unsafe_code)]
    fn used_set(&self) -> UsedSet<'_> {
        // SAFETY: the words for one endpoint.
        unsafe { UsedSet::new(&self.used, 1) }
    }

    fn slot(&self, idx: u32) -> &AtomicU32 {
        &self.ring[(idx & (self.config.sq_size - 1)) as usize]
    }

    fn value(&self, idx: u32) -> Option<&AtomicU32> {
        let slots = self.config.slots;
        (slots != 0).then(|| &self.values[(idx & (slots - 1)) as usize])
    }

    /// Returns the posters whose doorbells haven't arrived, one entry for each doorbell.
    #[cfg(not(loom))]
    pub fn late_posters(&self) -> Vec<usize> {
        self.late.lock().unwrap().iter().map(|late| late.0).collect()
    }

    /// Lets a late doorbell of `poster` arrive. One poster's arrive in order. Returns false if there is none.
    pub fn deliver(&self, poster: usize) -> bool {
        let mut late = self.late.lock().unwrap();
        let first = late.iter().position(|doorbell| doorbell.0 == poster).map(|at| late.remove(at));
        drop(late);
        first.inspect(|&(_, count)| self.ring_now(count)).is_some()
    }

    fn ring_now(&self, count: u32) {
        // Release: a doorbell doesn't overtake stores that its thread has seen other threads fence.
        let old = self.doorbell.swap(count, AcqRel);
        let (step, most) = (count.wrapping_sub(old), self.config.max_batch);
        assert!(step >= 1 && step <= most, "the doorbell went from {old} to {count}, at most {most} may be unrung");
        self.rings.fetch_add(1, Relaxed);
    }
}

/// What only the card knows.
pub struct Engine {
    fetched: u32,
    /// Requests that are fetched but not complete: number, token.
    open: Vec<(u32, u32)>,
    /// Tokens in the order of completion.
    pub delivered: Vec<u32>,
    /// Tokens of failed requests whose entries the host hasn't read, and how many entries have been written since the
    /// first one.
    unread: (Vec<u32>, u32),
}

/// The state of a failed request whose entry the host hasn't read.
const FAILED: u32 = 2;

impl Engine {
    pub fn new(card: &Card) -> Self {
        Engine { fetched: card.config.start, open: Vec::new(), delivered: Vec::new(), unread: Default::default() }
    }

    /// Returns the number of requests in flight.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Fetches what is rung. Returns false if there was nothing.
    pub fn fetch(&mut self, card: &Card) -> bool {
        let rung = card.doorbell.load(Acquire);
        let fresh = rung.wrapping_sub(self.fetched);
        assert!(fresh as i32 >= 0, "the doorbell went back from {} to {rung}", self.fetched);
        for _ in 0..fresh {
            let (idx, token) = (self.fetched, card.slot(self.fetched).load(Relaxed));
            let is_new = !self.delivered.contains(&token) && self.open.iter().all(|open| open.1 != token);
            assert!(token != 0 && is_new, "request {idx} was rung before it was written");
            self.open.push((idx, token));
            self.fetched = idx.wrapping_add(1);
        }
        assert!(self.open.len() as u32 <= card.config.sq_size, "ring overflow");
        fresh != 0
    }

    /// Completes a request in flight; 0 is the oldest. Returns its token.
    pub fn complete(&mut self, card: &Card, at: usize) -> u32 {
        let (idx, token) = self.open.remove(at);
        if let Some(value) = card.value(idx) {
            let value = value.load(Relaxed);
            assert_eq!(value, token, "the value of request {idx} was overwritten, or is not there yet");
        }
        self.end_request(card, token);
        let count = card.completed.load(Relaxed);
        card.completed.store(count.wrapping_add(1) & COUNT_MASK, Release);
        token
    }

    fn end_request(&mut self, card: &Card, token: u32) {
        self.delivered.push(token);
        card.done[token as usize].store(1, Relaxed);
        if !self.unread.0.is_empty() {
            self.unread.1 += 1;
            assert!(self.unread.1 < 2 * card.config.sq_size, "an error's entry was overwritten");
        }
    }

    /// Completes a request in error; 0 is the oldest.
    #[cfg(not(loom))]
    pub fn fail(&mut self, card: &Card, at: usize) {
        let (_, token) = self.open.remove(at);
        self.end_request(card, token);
        card.done[token as usize].store(FAILED, Relaxed);
        self.unread.0.push(token);
        card.failures.fetch_add(1, Release);
    }

    /// Lets the host read the entries of errors. Returns false if there are none.
    #[cfg(not(loom))]
    pub fn read_errors(&mut self, card: &Card) -> bool {
        let failures = card.failures.load(Relaxed);
        for token in &self.unread.0 {
            card.done[*token as usize].store(1, Relaxed);
        }
        *card.losses.lock().unwrap() = Losses::new(failures, failures);
        !std::mem::take(&mut self.unread).0.is_empty()
    }
}

/// How a test runs a poster: its waits, and what happens beside it.
pub trait Runner: Limit {
    /// The poster begins an operation.
    fn begin(&self) {}
    /// Another poster may run here.
    fn stop(&self) {}
    /// The poster is about to read the completion count.
    fn before_count(&self) {}
    /// The poster is about to write request `idx`.
    fn before_write(&self, _idx: u32) {}
    /// The poster is about to ring the doorbell.
    fn before_doorbell(&self, _count: u32) {}
}

/// A poster's view of the card.
pub struct Poster<'a, R> {
    card: &'a Card,
    id: usize,
    runner: R,
    /// Ring stores that aren't fenced yet: number, token.
    written: RefCell<Vec<(u32, u32)>>,
    /// Whether the last action was a doorbell.
    rang_last: Cell<bool>,
}

impl<'a, R: Runner> Poster<'a, R> {
    pub fn new(card: &'a Card, id: usize, runner: R) -> Self {
        Poster { card, id, runner, written: RefCell::default(), rang_last: Cell::new(false) }
    }

    /// Carries out `ops`. Their posts' tokens are `first` and up.
    pub fn run(&self, ops: &[Op], first: u32) {
        let mut token = first;
        for &op in ops {
            match op {
                Op::Flush => {
                    let seen = self.seen(first..token);
                    self.flush().unwrap();
                    for token in seen {
                        let done = self.card.done[token as usize].load(Relaxed);
                        assert!(done != 0, "a flush returned before post {token} had completed");
                        assert!(done != FAILED, "a flush returned without a word about post {token}");
                    }
                }
                Op::Put => self.post(false, token).unwrap(),
                Op::Aggregated => self.post(true, token).unwrap(),
                Op::Group(posts) => self.post_group(posts, false, token).unwrap(),
                Op::AggregatedGroup(posts) => self.post_group(posts, true, token).unwrap(),
            }
            for _ in 0..op.posts() {
                self.card.returned[token as usize].store(true, Release);
                token += 1;
            }
        }
        self.make_visible();
    }

    /// Returns the posts that a flush which begins now must find complete: those that have returned. Under loom, only
    /// this poster's `own` posts, because the flags order nothing there.
    fn seen(&self, own: Range<u32>) -> Vec<u32> {
        if cfg!(loom) {
            return own.collect();
        }
        let returned = self.card.returned.iter().zip(0..);
        returned.filter(|(flag, _)| flag.load(Acquire)).map(|(_, token)| token).collect()
    }

    pub fn post(&self, aggregate: bool, token: u32) -> Result<(), Status> {
        self.post_by(self.card.config.policy, aggregate, token)
    }

    pub fn post_by(&self, policy: Policy, aggregate: bool, token: u32) -> Result<(), Status> {
        if self.card.mutated(Mutation::NoBarrier) {
            self.card.words.cursor.0.fetch_and(0xffff_ffff, Relaxed);
            self.card.words.barrier.store(self.card.config.start, Relaxed);
        }
        self.runner.begin();
        policy.post(Model(self), self.runner, aggregate, |idx| self.write(idx, token))
    }

    /// Posts one request for each token from `first` on. A barrier has ordered the requests of the group's threads
    /// before the leader's fence, so here they are the leader's own.
    fn post_group(&self, posts: u32, aggregate: bool, first: u32) -> Result<(), Status> {
        if self.card.config.policy.is_locked() {
            return (first..first + posts).try_for_each(|token| self.post(aggregate, token));
        }
        self.runner.begin();
        let late = Cell::new(None);
        let write = |i, idx| {
            if self.card.mutated(Mutation::LateLane) && i + 1 == posts {
                self.write_value(idx, first + i);
                late.set(Some((idx, first + i)));
            } else {
                self.write(idx, first + i);
            }
        };
        let posted = post_run(Model(self), self.runner, posts, aggregate, write);
        self.written.borrow_mut().extend(late.get());
        posted.map_err(|(status, _)| status)
    }

    pub fn flush(&self) -> Result<(), Status> {
        self.runner.begin();
        let flush_once = || flush(Model(self), self.card.config.policy.is_locked(), None, self.runner);
        if !self.card.config.in_context {
            return flush_once().into();
        }
        self.runner.stop();
        let set = self.card.used_set();
        let visited = set.visit(set.first(), true, |_| {
            let outcome = flush_once();
            self.runner.stop();
            match outcome {
                Outcome::COMPLETED if self.card.mutated(Mutation::EarlyRemoval) => Outcome::UNUSED,
                outcome => outcome,
            }
        });
        visited.into()
    }

    pub fn write(&self, idx: u32, token: u32) {
        self.runner.stop();
        self.runner.before_write(idx);
        self.check_batch(idx);
        self.write_value(idx, token);
        self.written.borrow_mut().push((idx, token));
        self.rang_last.set(false);
    }

    /// Checks that the doorbells that have arrived leave room for request `idx` in a batch.
    fn check_batch(&self, idx: u32) {
        // Under loom, another load would multiply the interleavings.
        if !cfg!(loom) {
            let (rung, most) = (self.card.doorbell.load(Relaxed), self.card.config.max_batch);
            let fits = idx.wrapping_sub(rung) < most;
            assert!(fits, "request {idx} was written after a doorbell of {rung}, at most {most} may be unrung");
        }
    }

    /// Writes a value, which is visible at once, because an overwriter doesn't wait for its own fence.
    fn write_value(&self, idx: u32, token: u32) {
        if let Some(value) = self.card.value(idx) {
            value.store(token, Relaxed);
        }
    }

    fn make_visible(&self) {
        for (idx, token) in self.written.borrow_mut().drain(..) {
            self.card.slot(idx).store(token, Relaxed);
        }
        while self.card.deliver(self.id) {}
    }
}

impl<R: Runner> Backend for Poster<'_, R> {
    fn words(&self) -> &Words {
        &self.card.words
    }

    fn geometry(&self) -> Geometry {
        let real = self.card.config.geometry();
        match self.card.config.mutation {
            Some(Mutation::NoRingGuard) => Geometry { sq_size: 64, ..real },
            Some(Mutation::NoBatchBound) => Geometry { max_batch: 32, ..real },
            Some(Mutation::NoSlotGuard) => Geometry { slots: 0, ..real },
            _ => real,
        }
    }

    fn completed(&self) -> u32 {
        self.runner.before_count();
        let count = self.card.completed.load(Acquire);
        let ahead = self.card.mutated(Mutation::EarlyCount) && count != self.card.doorbell.load(Relaxed) & COUNT_MASK;
        count.wrapping_add(u32::from(ahead))
    }

    fn failures(&self) -> u32 {
        if self.card.mutated(Mutation::UncountedFailures) { 0 } else { self.card.failures.load(Acquire) }
    }

    fn losses(&self) -> Losses {
        let failures = self.card.failures.load(Acquire);
        match self.card.config.mutation {
            Some(Mutation::EarlyIdentification) => {
                Losses { identified: Losses::new(failures, 0).identified, ..*self.card.losses.lock().unwrap() }
            }
            Some(Mutation::EarlyAcknowledgement) => Losses::new(failures, failures),
            _ => *self.card.losses.lock().unwrap(),
        }
    }

    fn fence(&self) {
        // A check has failed, and unwinding releases the lock.
        if std::thread::panicking() {
            return;
        }
        self.runner.stop();
        let missing = if self.rang_last.get() { Mutation::NoDoorbellFence } else { Mutation::NoWriteFence };
        if !self.card.mutated(missing) {
            self.make_visible();
        }
        // The mutation removes the fence only for the card; it still orders threads.
        fence(AcqRel);
        self.rang_last.set(false);
    }

    fn doorbell(&self, count: u32) {
        self.runner.before_doorbell(count);
        self.rang_last.set(true);
        let last = self.card.config.start.wrapping_add(self.card.config.posts());
        if self.card.mutated(Mutation::LostDoorbell) && count == last {
            return;
        }
        match self.card.config.doorbell {
            Doorbell::Early => self.card.ring_now(count),
            Doorbell::Late => self.card.late.lock().unwrap().push((self.id, count)),
        }
    }

    fn insert_used(&self) {
        if self.card.config.in_context {
            insert_used(self.card.used_set(), &self.card.used, self.card.config.mutation);
        }
    }

    fn stop(&self) {
        self.runner.stop();
    }
}
