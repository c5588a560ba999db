//! The real posting code under loom, with a small card: all interleavings of a few threads, up to loom's bound on preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p ferrogin-device-kernels --lib`
//!
//! A poster's stores for the card stay with the poster until its next fence, so the card sees stale bytes if a request is rung before its
//! fence. A doorbell reaches the card at once, or as late as the poster's next fence; both are run. The card completes requests in the
//! configured order. It reads a value only when it completes the request, as a retransmission does. For each property, a configuration that
//! breaks it must fail.

mod checks;

use super::flush::flush;
use super::ops::{
    Mutation,
    Op::{self, Aggregated, AggregatedGroup, Flush, Group, Put},
    Policy, insert_used, post_run,
};
use super::outcome::Outcome;
use super::used::UsedSet;
use super::{COUNT_MASK, Queue, combining, locked};
use crate::status::Status;
use crate::wait::Limit;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*, fence};
use loom::thread;
use std::cell::{Cell, RefCell};
use std::sync::atomic::AtomicU32 as StdAtomicU32;

/// Rounds of a wait in which loom branches its schedule.
const BRANCHING_ROUNDS: u32 = 1;
/// Limit on the rounds of one wait: a wait with more never ends.
const MAX_ROUNDS: u32 = 400;

/// Which request in flight completes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Oldest,
    Newest,
    /// Oldest and newest alternately.
    Alternating,
}

/// When a doorbell reaches the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doorbell {
    /// At once, before unfenced stores.
    Early,
    /// With the poster's next fence.
    Late,
}

#[derive(Debug, Clone, Copy)]
struct Config {
    policy: Policy,
    /// Whether the endpoint is in a context, whose flush looks only at used endpoints.
    in_context: bool,
    start: u32,
    sq_size: u32,
    max_batch: u32,
    slots: u32,
    order: Order,
    doorbell: Doorbell,
    mutation: Option<Mutation>,
    /// Preemptions in one interleaving.
    preemptions: usize,
    threads: &'static [&'static [Op]],
}

const BASE: Config = Config {
    policy: Policy::Combining,
    in_context: false,
    start: 0,
    sq_size: 4,
    max_batch: 2,
    slots: 0,
    order: Order::Newest,
    doorbell: Doorbell::Early,
    mutation: None,
    preemptions: 2,
    threads: &[],
};

impl Config {
    fn posts(&self) -> u32 {
        self.threads.iter().flat_map(|ops| ops.iter()).map(|op| op.posts()).sum()
    }
}

/// The endpoint's words, and the memory that posters and card share.
struct Card {
    config: Config,
    cursor: AtomicU64,
    state: AtomicU64,
    bound: AtomicU64,
    poison: AtomicU32,
    lock: AtomicU32,
    barrier: AtomicU32,
    in_set: AtomicU32,
    /// The set of used endpoints, with this one endpoint: the summary word and the leaf word.
    used: [AtomicU64; 2],
    pending: AtomicU32,
    posted: AtomicU32,
    doorbell: AtomicU32,
    completed: AtomicU32,
    ring: Vec<AtomicU32>,
    values: Vec<AtomicU32>,
    /// By token: whether the card has completed the request. A thread that has seen the count must see this too.
    done: Vec<AtomicBool>,
    /// Posters that have finished. Loom doesn't know this word, so it doesn't branch the schedule on it.
    finished: StdAtomicU32,
}

impl Card {
    fn new(config: Config) -> Self {
        let Config { start, sq_size, slots, .. } = config;
        let tokens = config.posts() as usize + 1;
        Card {
            config,
            cursor: AtomicU64::new(u64::from(start) << 32 | u64::from(start)),
            state: AtomicU64::new(u64::from(start) << ferrogin_ffi::ext::STATE_RUNG_SHIFT),
            bound: AtomicU64::new((u64::from(start) << 32 | u64::from(start)).wrapping_sub(1 << 32)),
            poison: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            barrier: AtomicU32::new(start),
            in_set: AtomicU32::new(0),
            used: [AtomicU64::new(0), AtomicU64::new(0)],
            pending: AtomicU32::new(0),
            posted: AtomicU32::new(start),
            doorbell: AtomicU32::new(start),
            completed: AtomicU32::new(start & COUNT_MASK),
            ring: (0..sq_size).map(|_| AtomicU32::new(0)).collect(),
            values: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            done: (0..tokens).map(|_| AtomicBool::new(false)).collect(),
            finished: StdAtomicU32::new(0),
        }
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

    /// Runs until every request is delivered, or the posters have finished and ring no more. Returns the tokens in completion order.
    fn run(&self) -> Vec<u32> {
        let Config { start, sq_size, order, threads, .. } = self.config;
        let (mut fetched, mut open, mut delivered) = (start, Vec::<(u32, u32)>::new(), Vec::new());
        let mut idle = 0;
        loop {
            let all_left = self.finished.load(SeqCst) == threads.len() as u32;
            let rung = self.doorbell.load(Acquire);
            let fresh = rung.wrapping_sub(fetched);
            assert!(fresh as i32 >= 0, "the doorbell went back from {fetched} to {rung}");
            for _ in 0..fresh {
                open.push((fetched, self.slot(fetched).load(Relaxed)));
                fetched = fetched.wrapping_add(1);
            }
            assert!(open.len() as u32 <= sq_size, "ring overflow");
            let at = match (open.len(), order) {
                (0, _) if delivered.len() as u32 == self.config.posts() => return delivered,
                // A few polls, because a rung doorbell may not be visible at once.
                (0, _) if all_left && idle > 3 => return delivered,
                (0, _) => {
                    idle = if all_left { idle + 1 } else { 0 };
                    thread::yield_now();
                    continue;
                }
                (_, Order::Oldest) => 0,
                (n, Order::Newest) => n - 1,
                (n, Order::Alternating) => (delivered.len() & 1) * (n - 1),
            };
            let (idx, token) = open.remove(at);
            assert!(token != 0 && !delivered.contains(&token), "request {idx} was rung before it was written");
            if let Some(value) = self.value(idx) {
                assert_eq!(
                    value.load(Relaxed),
                    token,
                    "the value of request {idx} was overwritten, or is not there yet"
                );
            }
            delivered.push(token);
            self.done[token as usize].store(true, Relaxed);
            let count = self.completed.load(Relaxed);
            self.completed.store(count.wrapping_add(1) & COUNT_MASK, Release);
        }
    }
}

/// One poster's view of the card.
struct PosterView<'a> {
    card: &'a Card,
    /// Ring stores that aren't fenced yet: idx, token.
    written: RefCell<Vec<(u32, u32)>>,
    /// A doorbell that hasn't reached the card.
    late: Cell<Option<u32>>,
    /// Whether the last action was a doorbell.
    rang_last: Cell<bool>,
    rounds: Cell<u32>,
}

impl<'a> PosterView<'a> {
    fn new(card: &'a Card) -> Self {
        PosterView {
            card,
            written: RefCell::default(),
            late: Cell::new(None),
            rang_last: Cell::new(false),
            rounds: Cell::new(0),
        }
    }

    fn mutated(&self, mutation: Mutation) -> bool {
        self.card.config.mutation == Some(mutation)
    }

    fn write(&self, idx: u32, token: u32) {
        self.written.borrow_mut().push((idx, token));
        self.rang_last.set(false);
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
        if let Some(count) = self.late.take() {
            self.ring_now(count);
        }
    }

    fn ring_now(&self, count: u32) {
        // Release: a doorbell doesn't overtake stores that its thread has seen other threads fence.
        let old = self.card.doorbell.swap(count, AcqRel);
        let step = count.wrapping_sub(old);
        let most = self.card.config.max_batch;
        assert!(step >= 1 && step <= most, "the doorbell went from {old} to {count}, at most {most} may be unrung");
    }

    fn post(&self, aggregate: bool, token: u32) -> Result<(), Status> {
        if self.mutated(Mutation::NoBarrier) {
            self.card.cursor.fetch_and(0xffff_ffff, Relaxed);
            self.card.barrier.store(self.card.config.start, Relaxed);
        }
        self.rounds.set(0);
        let write = |idx| {
            self.write_value(idx, token);
            self.write(idx, token);
        };
        self.card.config.policy.post(self, self, aggregate, write)
    }

    /// Posts one request for each token from `first` on. A barrier has ordered the requests of the group's threads before the leader's
    /// fence, so here they are the leader's own.
    fn post_group(&self, posts: u32, aggregate: bool, first: u32) -> Result<(), Status> {
        self.rounds.set(0);
        let late = Cell::new(None);
        let write = |i, idx| {
            self.write_value(idx, first + i);
            if self.mutated(Mutation::LateLane) && i + 1 == posts {
                late.set(Some((idx, first + i)));
            } else {
                self.write(idx, first + i);
            }
        };
        let posted = post_run(self, self, posts, aggregate, write);
        if let Some((idx, token)) = late.get() {
            self.write(idx, token);
        }
        posted.map_err(|(status, _)| status)
    }

    fn flush(&self) -> Result<(), Status> {
        self.rounds.set(0);
        let by_lock = self.card.config.policy.is_locked();
        if !self.card.config.in_context {
            return flush(self, by_lock, None, self).into();
        }
        let set = self.card.used_set();
        let visited = set.visit(set.first(), |_| match flush(self, by_lock, None, self) {
            Outcome::COMPLETED if self.mutated(Mutation::EarlyRemoval) => Outcome::UNUSED,
            outcome => outcome,
        });
        visited.into()
    }

    /// Runs all of a thread's steps. `first` is its first token.
    fn run(&self, ops: &[Op], first: u32) {
        let card = self.card;
        let mut token = first;
        for op in ops {
            match *op {
                Flush => {
                    self.flush().unwrap();
                    for t in first..token {
                        assert!(card.done[t as usize].load(Relaxed), "a flush returned before post {t} had completed");
                    }
                }
                Put => self.post(false, token).unwrap(),
                Aggregated => self.post(true, token).unwrap(),
                Group(posts) => self.post_group(posts, false, token).unwrap(),
                AggregatedGroup(posts) => self.post_group(posts, true, token).unwrap(),
            }
            token += op.posts();
        }
        self.make_visible();
        card.finished.fetch_add(1, SeqCst);
    }
}

/// The limits of a wait, which every round reads.
impl Limit for &PosterView<'_> {
    fn aborted(&self) -> bool {
        self.rounds.set(self.rounds.get() + 1);
        assert!(self.rounds.get() < MAX_ROUNDS, "a wait does not end");
        if self.rounds.get() > BRANCHING_ROUNDS {
            // An unfair schedule may never end, so from here on loom takes one fair schedule.
            loom::skip_branch();
        }
        false
    }
}

impl Queue for &PosterView<'_> {
    fn completed(&self) -> u32 {
        let count = self.card.completed.load(Acquire);
        let ahead = self.mutated(Mutation::EarlyCount) && count != self.card.doorbell.load(Relaxed) & COUNT_MASK;
        count.wrapping_add(u32::from(ahead)) & COUNT_MASK
    }
    fn failed(&self) -> bool {
        false
    }
    fn sq_size(&self) -> u32 {
        if self.mutated(Mutation::NoRingGuard) { 64 } else { self.card.config.sq_size }
    }
    fn max_batch(&self) -> u32 {
        if self.mutated(Mutation::NoBatchBound) { 16 } else { self.card.config.max_batch }
    }
    fn value_slots(&self) -> u32 {
        if self.mutated(Mutation::NoSlotGuard) { 0 } else { self.card.config.slots }
    }
    fn fence(&self) {
        // A check has failed, and unwinding releases the lock.
        if std::thread::panicking() {
            return;
        }
        let missing = if self.rang_last.get() { Mutation::NoDoorbellFence } else { Mutation::NoWriteFence };
        if !self.mutated(missing) {
            self.make_visible();
        }
        // The mutation removes the fence only for the card; it still orders threads.
        fence(AcqRel);
        self.rang_last.set(false);
    }
    fn doorbell(&self, count: u32) {
        self.rang_last.set(true);
        let last = self.card.config.start.wrapping_add(self.card.config.posts());
        if self.mutated(Mutation::LostDoorbell) && count == last {
            return;
        }
        match self.card.config.doorbell {
            Doorbell::Early => self.ring_now(count),
            Doorbell::Late => {
                let passed = self.late.replace(Some(count));
                // One thread's doorbells reach the card in order.
                passed.into_iter().for_each(|count| self.ring_now(count));
            }
        }
    }
    fn publish(&self, rung: u32) {
        self.card.posted.store(rung, Relaxed);
    }
    fn published(&self) -> u32 {
        self.card.posted.load(Relaxed)
    }
    fn insert_used(&self) {
        if !self.card.config.in_context {
            return;
        }
        insert_used(self.card.used_set(), &self.card.used, self.card.config.mutation);
    }
}

impl combining::CombiningQueue for &PosterView<'_> {
    fn words(&self) -> combining::Words<'_> {
        let Card { cursor, state, bound, poison, .. } = self.card;
        combining::Words { cursor, state, bound, poison }
    }
}

impl locked::LockedQueue for &PosterView<'_> {
    fn next(&self) -> u32 {
        (self.card.cursor.load(Relaxed) as u32).wrapping_add(self.card.pending.load(Relaxed))
    }
    fn pending(&self) -> u32 {
        self.card.pending.load(Relaxed)
    }
    fn start(&self) {
        self.card.pending.store(self.pending() + 1, Relaxed);
    }
    fn take_pending(&self) -> u32 {
        let next = self.next();
        self.card.cursor.store(u64::from(next), Relaxed);
        self.card.pending.store(0, Relaxed);
        next
    }
    fn lock_words(&self) -> locked::Words<'_> {
        locked::Words { lock: &self.card.lock, barrier: &self.card.barrier, used: &self.card.in_set }
    }
}

/// Explores one configuration and counts its interleavings; panics if a property doesn't hold.
fn explore(config: Config) -> u32 {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(config.preemptions);
    builder.max_branches = 100_000;
    let count = std::sync::Arc::new(StdAtomicU32::new(0));
    let counted = count.clone();
    builder.check(move || {
        counted.fetch_add(1, SeqCst);
        let card = Arc::new(Card::new(config));
        let mut first = 1;
        let posters: Vec<_> = config
            .threads
            .iter()
            .map(|ops| {
                let (card, token) = (card.clone(), first);
                first += ops.iter().map(|op| op.posts()).sum::<u32>();
                thread::spawn(move || PosterView::new(&card).run(ops, token))
            })
            .collect();
        // This thread is the card.
        let mut delivered = card.run();
        for poster in posters {
            poster.join().unwrap();
        }
        delivered.sort_unstable();
        let want: Vec<u32> = (1..=config.posts()).collect();
        assert_eq!(delivered, want, "every post is delivered once");
    });
    count.load(SeqCst)
}
