//! Tens of thousands of random schedules of three posters and a card, with the real posting code in a single thread.
//!
//! Each poster is a coroutine that stops before nearly every access to a shared word. A random scheduler chooses which poster runs next,
//! and when the card takes a doorbell or completes one of its requests, in any order. Memory is sequentially consistent here; the loom
//! model (`post/model.rs`) checks orderings. This test adds breadth: more posters and posts, flushes with other posters' requests in
//! flight, every wrap. A failure names its seed: FERROGIN_SCHEDULE=SEED repeats it, and FERROGIN_SCHEDULES=N runs N schedules of each
//! configuration (default 200; 1,000 in `make check`, 3,000 in a soak run).

use crate::post::flush::flush;
use crate::post::ops::{
    Mutation,
    Op::{self, Aggregated, AggregatedGroup, Flush, Group, Put},
    Policy, insert_used, post_run,
};
use crate::post::outcome::Outcome;
use crate::post::used::UsedSet;
use crate::post::{COUNT_MASK, Queue, combining, locked};
use crate::wait::Limit;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;
use ferrogin_test_support::{Random, child, repetitions};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Limit on the steps of one schedule: a schedule with more has a wait that never ends.
const MAX_STEPS: u32 = 200_000;

#[derive(Debug, Clone, Copy)]
struct Config {
    policy: Policy,
    start: u32,
    sq_size: u32,
    max_batch: u32,
    slots: u32,
    mutation: Option<Mutation>,
    posters: &'static [&'static [Op]],
}

const BASE: Config =
    Config { policy: Policy::Combining, start: 0, sq_size: 8, max_batch: 4, slots: 0, mutation: None, posters: &[] };

impl Config {
    fn posts(&self) -> u32 {
        self.posters.iter().flat_map(|ops| ops.iter()).map(|op| op.posts()).sum()
    }
}

struct Simulation {
    config: Config,
    cursor: AtomicU64,
    state: AtomicU64,
    bound: AtomicU64,
    poison: AtomicU32,
    lock: AtomicU32,
    barrier: AtomicU32,
    in_set: AtomicU32,
    /// The set of used endpoints, with this one endpoint.
    used: [AtomicU64; 2],
    pending: AtomicU32,
    published: AtomicU32,
    completed: AtomicU32,
    /// Memory as the card sees it.
    doorbell: Cell<u32>,
    ring: Vec<Cell<u32>>,
    values: Vec<Cell<u32>>,
    /// All posters' doorbells that haven't arrived; one poster's arrive in order.
    late: RefCell<Vec<(usize, u32)>>,
    /// Requests that the card has taken but not completed: number, token.
    open: RefCell<Vec<(u32, u32)>>,
    fetched: Cell<u32>,
    /// By token.
    returned: RefCell<Vec<bool>>,
    done: RefCell<Vec<bool>>,
    random: RefCell<Random>,
    /// Average number of stops that a poster passes before another poster runs.
    mean_run: usize,
}

impl Simulation {
    #[allow(unsafe_code)]
    fn used_set(&self) -> UsedSet<'_> {
        // SAFETY: the words for one endpoint.
        unsafe { UsedSet::new(&self.used, 1) }
    }

    fn new(config: Config, seed: u64) -> Self {
        let Config { start, sq_size, slots, .. } = config;
        let tokens = config.posts() as usize + 1;
        let both = u64::from(start) << 32 | u64::from(start);
        Simulation {
            config,
            cursor: AtomicU64::new(both),
            state: AtomicU64::new(u64::from(start) << STATE_RUNG_SHIFT),
            bound: AtomicU64::new(both.wrapping_sub(1 << 32)),
            poison: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            barrier: AtomicU32::new(start),
            in_set: AtomicU32::new(0),
            used: Default::default(),
            pending: AtomicU32::new(0),
            published: AtomicU32::new(start),
            completed: AtomicU32::new(start & COUNT_MASK),
            doorbell: Cell::new(start),
            ring: vec![Cell::new(0); sq_size as usize],
            values: vec![Cell::new(0); slots as usize],
            late: RefCell::default(),
            open: RefCell::default(),
            fetched: Cell::new(start),
            returned: RefCell::new(vec![false; tokens]),
            done: RefCell::new(vec![false; tokens]),
            random: RefCell::new(Random::new(seed)),
            mean_run: [1, 2, 4, 16][seed as usize % 4],
        }
    }

    fn random(&self, below: usize) -> usize {
        self.random.borrow_mut().index(below)
    }

    fn mutated(&self, mutation: Mutation) -> bool {
        self.config.mutation == Some(mutation)
    }

    fn ring_now(&self, count: u32) {
        let step = count.wrapping_sub(self.doorbell.get());
        let (from, most) = (self.doorbell.get(), self.config.max_batch);
        assert!(step >= 1 && step <= most, "the doorbell went from {from} to {count}, at most {most} may be unrung");
        self.doorbell.set(count);
    }

    /// Lets a doorbell arrive, the card take requests, or one request complete. Returns false if there was nothing to do.
    fn card(&self) -> bool {
        let late = self.late.borrow().len();
        if late != 0 && self.random(3) == 0 {
            let at = self.random(late);
            let mut doorbells = self.late.borrow_mut();
            let poster = doorbells[at].0;
            let first = doorbells.iter().position(|bell| bell.0 == poster).unwrap_or(at);
            let (_, count) = doorbells.remove(first);
            self.ring_now(count);
            return true;
        }
        let rung = self.doorbell.get();
        if self.fetched.get() != rung && (self.open.borrow().is_empty() || self.random(2) == 0) {
            while self.fetched.get() != rung {
                let number = self.fetched.get();
                let token = self.ring[(number & (self.config.sq_size - 1)) as usize].get();
                let fresh = token != 0
                    && !self.done.borrow()[token as usize]
                    && self.open.borrow().iter().all(|open| open.1 != token);
                assert!(fresh, "request {number} was rung before it was written");
                self.open.borrow_mut().push((number, token));
                self.fetched.set(number.wrapping_add(1));
            }
            return true;
        }
        let open = self.open.borrow().len();
        if open == 0 {
            return late != 0;
        }
        assert!(open <= self.config.sq_size as usize, "ring overflow");
        let (number, token) = self.open.borrow_mut().swap_remove(self.random(open));
        if let Some(slot) = self.slot(number) {
            assert_eq!(self.values[slot].get(), token, "the value of request {number} was overwritten");
        }
        self.done.borrow_mut()[token as usize] = true;
        self.completed.store(self.completed.load(Relaxed).wrapping_add(1) & COUNT_MASK, Relaxed);
        true
    }

    fn slot(&self, idx: u32) -> Option<usize> {
        let slots = self.config.slots;
        (slots != 0).then(|| (idx & (slots - 1)) as usize)
    }
}

/// A poster's view of the simulation; in every method another poster may run.
struct PosterView<'a> {
    sim: &'a Simulation,
    id: usize,
    yielder: &'a Yielder<(), ()>,
    /// Requests that aren't fenced yet.
    written: RefCell<Vec<(u32, u32)>>,
    rang_last: Cell<bool>,
}

impl PosterView<'_> {
    fn stop(&self) {
        if self.sim.random(self.sim.mean_run) == 0 {
            self.yielder.suspend(());
        }
    }

    fn make_visible(&self) {
        for (idx, token) in self.written.borrow_mut().drain(..) {
            self.sim.ring[(idx & (self.sim.config.sq_size - 1)) as usize].set(token);
        }
        loop {
            let mut late = self.sim.late.borrow_mut();
            let Some(first) = late.iter().position(|bell| bell.0 == self.id) else { return };
            let (_, count) = late.remove(first);
            drop(late);
            self.sim.ring_now(count);
        }
    }

    fn write(&self, idx: u32, token: u32) {
        self.stop();
        if let Some(slot) = self.sim.slot(idx) {
            self.sim.values[slot].set(token);
        }
        self.written.borrow_mut().push((idx, token));
        self.rang_last.set(false);
    }

    fn post(&self, aggregate: bool, token: u32) {
        if self.sim.mutated(Mutation::NoBarrier) {
            self.sim.cursor.fetch_and(0xffff_ffff, Relaxed);
            self.sim.bound.fetch_and(0xffff_ffff, Relaxed);
        }
        let write = |idx| self.write(idx, token);
        assert_eq!(self.sim.config.policy.post(self, self, aggregate, write), Ok(()));
    }

    /// Posts one request for each token from `first` on.
    fn post_group(&self, posts: u32, aggregate: bool, first: u32) {
        if self.sim.config.policy.is_locked() {
            return (first..first + posts).for_each(|token| self.post(aggregate, token));
        }
        let late = Cell::new(None);
        let write = |i, idx| {
            if self.sim.mutated(Mutation::LateLane) && i + 1 == posts {
                late.set(Some((idx, first + i)));
            } else {
                self.write(idx, first + i);
            }
        };
        assert_eq!(post_run(self, self, posts, aggregate, write), Ok(()));
        if let Some((idx, token)) = late.get() {
            self.write(idx, token);
        }
    }

    fn flush(&self) {
        let known: Vec<usize> =
            self.sim.returned.borrow().iter().enumerate().filter(|known| *known.1).map(|known| known.0).collect();
        self.stop();
        let set = self.sim.used_set();
        let flushed = set.visit(set.first(), |_| {
            let ended = flush(self, self.sim.config.policy.is_locked(), None, self);
            self.stop();
            match ended {
                Outcome::COMPLETED if self.sim.mutated(Mutation::EarlyRemoval) => Outcome::UNUSED,
                ended => ended,
            }
        });
        assert_eq!(flushed.failure(), 0);
        for token in known {
            assert!(self.sim.done.borrow()[token], "a flush returned before post {token} had completed");
        }
    }
}

impl Limit for &PosterView<'_> {
    fn aborted(&self) -> bool {
        false
    }
    /// Lets another poster run. It isn't another thread, so yielding the processor would only cost time.
    fn relax(&self, _round: u32) {
        self.yielder.suspend(());
    }
}

impl Queue for &PosterView<'_> {
    fn completed(&self) -> u32 {
        self.stop();
        let count = self.sim.completed.load(Relaxed);
        let ahead = self.sim.mutated(Mutation::EarlyCount) && count != self.sim.doorbell.get() & COUNT_MASK;
        count.wrapping_add(u32::from(ahead)) & COUNT_MASK
    }
    fn failed(&self) -> bool {
        self.stop();
        false
    }
    fn sq_size(&self) -> u32 {
        if self.sim.mutated(Mutation::NoRingGuard) { 64 } else { self.sim.config.sq_size }
    }
    fn max_batch(&self) -> u32 {
        if self.sim.mutated(Mutation::NoBatchBound) { 32 } else { self.sim.config.max_batch }
    }
    fn value_slots(&self) -> u32 {
        if self.sim.mutated(Mutation::NoSlotGuard) { 0 } else { self.sim.config.slots }
    }
    fn fence(&self) {
        // A check has failed, and unwinding releases the lock.
        if std::thread::panicking() {
            return;
        }
        self.stop();
        let missing = if self.rang_last.get() { Mutation::NoDoorbellFence } else { Mutation::NoWriteFence };
        if !self.sim.mutated(missing) {
            self.make_visible();
        }
        self.rang_last.set(false);
    }
    fn doorbell(&self, count: u32) {
        self.stop();
        self.rang_last.set(true);
        let last = self.sim.config.start.wrapping_add(self.sim.config.posts());
        if !(self.sim.mutated(Mutation::LostDoorbell) && count == last) {
            self.sim.late.borrow_mut().push((self.id, count));
        }
    }
    fn publish(&self, rung: u32) {
        self.stop();
        self.sim.published.store(rung, Relaxed);
    }
    fn published(&self) -> u32 {
        self.stop();
        self.sim.published.load(Relaxed)
    }
    fn released(&self) -> u32 {
        self.published()
    }
    fn insert_used(&self) {
        self.stop();
        insert_used(self.sim.used_set(), &self.sim.used, self.sim.config.mutation);
        self.stop();
    }
}

impl combining::CombiningQueue for &PosterView<'_> {
    fn words(&self) -> combining::Words<'_> {
        self.stop();
        let Simulation { cursor, state, bound, poison, .. } = self.sim;
        combining::Words { cursor, state, bound, poison }
    }
}

impl locked::LockedQueue for &PosterView<'_> {
    fn next(&self) -> u32 {
        self.stop();
        if self.sim.mutated(Mutation::NoBarrier) {
            self.sim.barrier.store(self.sim.config.start, Relaxed);
        }
        (self.sim.cursor.load(Relaxed) as u32).wrapping_add(self.sim.pending.load(Relaxed))
    }
    fn pending(&self) -> u32 {
        self.sim.pending.load(Relaxed)
    }
    fn start(&self) {
        self.stop();
        self.sim.pending.fetch_add(1, Relaxed);
    }
    fn take_pending(&self) -> u32 {
        let next = locked::LockedQueue::next(self);
        self.stop();
        self.sim.cursor.store(u64::from(next), Relaxed);
        self.sim.pending.store(0, Relaxed);
        next
    }
    fn lock_words(&self) -> locked::Words<'_> {
        self.stop();
        locked::Words { lock: &self.sim.lock, barrier: &self.sim.barrier, used: &self.sim.in_set }
    }
}

thread_local! {
    /// Stacks of earlier schedules' posters: mapping a new stack takes longer than a schedule.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// Runs one schedule.
fn run(config: Config, seed: u64) {
    let sim = Rc::new(Simulation::new(config, seed));
    let mut first = 1;
    let mut posters: Vec<_> = config
        .posters
        .iter()
        .enumerate()
        .map(|(id, ops)| {
            let (sim, mut token) = (sim.clone(), first);
            first += ops.iter().map(|op| op.posts()).sum::<u32>();
            let stack = STACKS.with_borrow_mut(Vec::pop).unwrap_or_default();
            Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
                let view =
                    PosterView { sim: &sim, id, yielder, written: RefCell::default(), rang_last: Cell::new(false) };
                for op in *ops {
                    match *op {
                        Flush => view.flush(),
                        Put => view.post(false, token),
                        Aggregated => view.post(true, token),
                        Group(posts) => view.post_group(posts, false, token),
                        AggregatedGroup(posts) => view.post_group(posts, true, token),
                    }
                    sim.returned.borrow_mut()[token as usize..][..op.posts() as usize].fill(true);
                    token += op.posts();
                }
                view.make_visible();
            })
        })
        .collect();
    for _ in 0..MAX_STEPS {
        let next = sim.random(posters.len() + 1);
        match posters.get_mut(next) {
            Some(poster) => {
                if let CoroutineResult::Return(()) = poster.resume(()) {
                    let stack = posters.swap_remove(next).into_stack();
                    STACKS.with_borrow_mut(|stacks| stacks.push(stack));
                }
            }
            None => {
                if !sim.card() && posters.is_empty() {
                    break;
                }
            }
        }
    }
    assert!(posters.is_empty(), "a wait does not end");
    let rung = sim.doorbell.get().wrapping_sub(config.start);
    assert_eq!(rung, first - 1, "something stayed unrung");
    assert!(sim.done.borrow()[1..].iter().all(|done| *done), "something was not completed");
}

/// Runs many schedules; a failure names its seed.
fn explore(config: Config) {
    let seeds = match std::env::var("FERROGIN_SCHEDULE").ok().map(|text| text.parse().expect("the seed is a number")) {
        Some(seed) => seed..seed + 1,
        None => 0..repetitions("FERROGIN_SCHEDULES", 200, 3_000),
    };
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(config, seed))) {
            eprintln!("FERROGIN_SCHEDULE={seed} repeats it: {config:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Explores both policies, at every wrap.
fn explore_all(config: Config) {
    for &policy in Policy::of(config.posters.len()) {
        for start in [0, 0x03ff_fffe, 0x7fff_fffd, 0xffff_fffd] {
            explore(Config { policy, start, ..config });
        }
    }
}

/// Checks that some schedule breaks a rule: the rule `why`, or one of several separated by `|`. Changes the process's panic hook.
fn must_fail(config: Config, why: &str) {
    must_fail_by(&[Policy::Combining, Policy::Locked], config, why);
}

/// Runs [`must_fail`] for some policies.
fn must_fail_by(policies: &[Policy], config: Config, why: &str) {
    for &policy in policies {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let config = Config { policy, ..config };
        let found = (0..20_000).find_map(|seed| catch_unwind(AssertUnwindSafe(|| run(config, seed))).err());
        std::panic::set_hook(hook);
        let Some(found) = found else { panic!("no schedule shows {:?}, {policy:?}", config.mutation) };
        let text = found.downcast_ref::<String>().map(String::as_str).or(found.downcast_ref::<&str>().copied());
        let text = text.unwrap_or_default();
        assert!(
            why.split('|').any(|why| text.contains(why)),
            "{:?} was found by another rule: {text}",
            config.mutation
        );
    }
}

const MIXED: &[&[Op]] =
    &[&[Put, Aggregated, Flush, Put], &[Aggregated, Put, Aggregated, Flush], &[Put, Put, Flush, Aggregated, Put]];

#[test]
fn one_poster_with_posts_and_flushes_keeps_invariants() {
    let posters: &[&[Op]] =
        &[&[Put, Aggregated, Aggregated, Put, Flush, Put, Put, Aggregated, Aggregated, Aggregated, Put, Flush]];
    explore_all(Config { slots: 4, posters, ..BASE });
}

#[test]
fn three_posters_with_posts_and_flushes_keep_invariants() {
    explore_all(Config { posters: MIXED, ..BASE });
}

#[test]
fn three_posters_with_few_value_slots_keep_invariants() {
    explore_all(Config { slots: 2, posters: MIXED, ..BASE });
    explore_all(Config { slots: 4, max_batch: 2, posters: MIXED, ..BASE });
}

#[test]
fn ring_of_two_with_batches_of_one_keeps_invariants() {
    explore_all(Config { sq_size: 2, max_batch: 2, posters: MIXED, ..BASE });
    explore_all(Config { max_batch: 1, posters: MIXED, ..BASE });
}

#[test]
fn aggregated_posts_with_one_flush_keep_invariants() {
    let posters: &[&[Op]] =
        &[&[Aggregated, Aggregated, Aggregated, Flush], &[Aggregated, Aggregated, Flush], &[Aggregated, Flush]];
    explore_all(Config { posters, ..BASE });
    explore_all(Config { slots: 2, max_batch: 2, posters, ..BASE });
}

#[test]
fn four_concurrent_flushes_keep_invariants() {
    let posters: &[&[Op]] = &[&[Put, Flush], &[Put, Flush, Put, Flush], &[Aggregated, Flush], &[Flush, Put]];
    explore_all(Config { posters, ..BASE });
}

/// Groups with ready bits, and groups too long for them, whole and in parts.
#[test]
fn groups_keep_invariants() {
    let posters: &[&[Op]] =
        &[&[Group(5), Flush, Group(20)], &[AggregatedGroup(3), Put, Group(32)], &[Put, Group(16), Aggregated, Flush]];
    explore_all(Config { posters, sq_size: 64, max_batch: 32, ..BASE });
    explore_all(Config { posters, sq_size: 32, max_batch: 16, slots: 8, ..BASE });
    explore_all(Config { posters, sq_size: 32, max_batch: 24, slots: 32, ..BASE });
    explore_all(Config { posters, ..BASE });
}

/// The second flush of an idle endpoint removes it from the set of used endpoints.
#[test]
fn posts_beside_removals_keep_invariants() {
    let posters: &[&[Op]] = &[&[Put, Flush, Flush, Put, Flush], &[Flush, Flush, Aggregated, Flush], &[Put, Put, Flush]];
    explore_all(Config { posters, ..BASE });
}

#[test]
#[ignore = "make check"]
fn invariants_hold_in_1000_schedules_of_each_configuration() {
    child::run_again(&["schedules::"], &[("FERROGIN_SCHEDULES", "1000")]);
}

/// Runs in a child process, because the panic hook belongs to the process.
#[test]
#[ignore = "make check"]
fn every_missing_guard_breaks_invariant() {
    child::run("every_missing_guard_breaks_invariant", &[], break_every_invariant);
}

fn break_every_invariant() {
    let config = Config { posters: MIXED, ..BASE };
    let mutation = |mutation, config: Config| Config { mutation: Some(mutation), ..config };
    must_fail(mutation(Mutation::NoSlotGuard, Config { slots: 2, ..config }), "was overwritten");
    must_fail(
        mutation(Mutation::NoRingGuard, Config { sq_size: 2, max_batch: 2, ..config }),
        "before it was written|ring overflow",
    );
    must_fail(mutation(Mutation::NoBatchBound, Config { max_batch: 1, ..config }), "may be unrung");
    must_fail(mutation(Mutation::NoWriteFence, config), "before it was written");
    must_fail(mutation(Mutation::NoDoorbellFence, config), "the doorbell went");
    must_fail(mutation(Mutation::NoBarrier, config), "a flush returned before");
    must_fail(mutation(Mutation::EarlyCount, config), "a flush returned before");
    must_fail(mutation(Mutation::LostDoorbell, config), "something stayed unrung|a wait does not end");
    must_fail(mutation(Mutation::NoInsertion, config), "a flush returned before");
    let groups = Config {
        posters: &[&[AggregatedGroup(20), Flush, Group(5)], &[Group(18), Put]],
        sq_size: 64,
        max_batch: 32,
        ..BASE
    };
    must_fail(mutation(Mutation::NoWriteFence, groups), "before it was written");
    // Under the `locked` policy, each thread of a group posts for itself.
    must_fail_by(&[Policy::Combining], mutation(Mutation::LateLane, groups), "before it was written");
    must_fail(mutation(Mutation::NoSlotGuard, Config { slots: 8, ..groups }), "was overwritten");
    must_fail(mutation(Mutation::NoBatchBound, Config { max_batch: 8, ..groups }), "may be unrung");
    let posters: &[&[Op]] = &[&[Put, Flush, Flush, Put, Flush, Flush], &[Put, Flush, Flush, Put, Flush, Flush]];
    // A flush doesn't stop between an empty leaf word and its summary word, so only the model finds an insertion lost there.
    for lost in [Mutation::Uncounted(1), Mutation::EarlyRemoval] {
        must_fail(mutation(lost, Config { posters, ..BASE }), "a flush returned before");
    }
}
