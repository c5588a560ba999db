//! Tens of thousands of random schedules of three posters and a card, with the real posting code in a single thread.
//!
//! Each poster is a coroutine that stops before nearly every access to a shared word. A random scheduler chooses which
//! poster runs next, and when the card takes a doorbell or completes one of its requests, in any order. Memory is
//! sequentially consistent here; `interleavings` checks orderings. This test adds breadth: more posters and posts,
//! flushes with other posters' requests in flight, every wrap. A failure names its seed: FERROGIN_SCHEDULE=SEED repeats
//! it, and FERROGIN_SCHEDULES=N runs N schedules of each configuration (default 200; 1,000 in `make check`, 3,000 in a
//! soak run).

use super::card::{Card, Config, Doorbell, Engine, Poster, Runner};
use super::ops::{
    Mutation,
    Op::{self, Aggregated, AggregatedGroup, Flush, Group, Put},
    Policy,
};
use crate::wait::Limit;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use ferrogin_test_support::{Random, child, repetitions};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

/// Limit on the steps of one schedule: a schedule with more has a wait that never ends.
const MAX_STEPS: u32 = 200_000;

const BASE: Config = Config {
    policy: Policy::Combining,
    in_context: true,
    start: 0,
    sq_size: 8,
    max_batch: 4,
    slots: 0,
    doorbell: Doorbell::Late,
    fails: false,
    mutation: None,
    posters: &[],
};

struct Simulation {
    card: Card,
    engine: RefCell<Engine>,
    random: RefCell<Random>,
    /// Average number of stops that a poster passes before another poster runs.
    mean_run: usize,
}

impl Simulation {
    fn new(config: Config, seed: u64) -> Self {
        let card = Card::new(config, config.posts());
        let (engine, random) = (RefCell::new(Engine::new(&card)), RefCell::new(Random::new(seed)));
        Simulation { card, engine, random, mean_run: [1, 2, 4, 16][seed as usize % 4] }
    }

    fn random(&self, below: usize) -> usize {
        self.random.borrow_mut().index(below)
    }

    /// Lets a doorbell arrive, the card fetch requests, or one request complete. Returns false if there was nothing to
    /// do.
    fn step_card(&self) -> bool {
        let (late, mut engine) = (self.card.late_posters(), self.engine.borrow_mut());
        if !late.is_empty() && self.random(3) == 0 {
            return self.card.deliver(late[self.random(late.len())]);
        }
        if (engine.open() == 0 || self.random(2) == 0) && engine.fetch(&self.card) {
            return true;
        }
        let fails = self.card.config.fails;
        if fails && self.random(16) == 0 && engine.read_errors(&self.card) {
            return true;
        }
        match engine.open() {
            0 => !late.is_empty() || engine.read_errors(&self.card),
            open if fails && self.random(3) == 0 => {
                engine.fail(&self.card, self.random(open));
                true
            }
            open => engine.complete(&self.card, self.random(open)) != 0,
        }
    }
}

/// A poster's turns: where it stops, another poster may run.
#[derive(Clone, Copy)]
struct Turns<'a> {
    simulation: &'a Simulation,
    yielder: &'a Yielder<(), ()>,
}

impl Limit for Turns<'_> {
    fn stop_word(&self) -> u32 {
        0
    }
    /// Lets another poster run. It isn't another thread, so yielding the processor would only cost time.
    fn relax(&self, _round: u32) {
        self.yielder.suspend(());
    }
}

impl Runner for Turns<'_> {
    fn stop(&self) {
        if self.simulation.random(self.simulation.mean_run) == 0 {
            self.yielder.suspend(());
        }
    }
}

thread_local! {
    /// Stacks of earlier schedules' posters: mapping a new stack takes longer than a schedule.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// Runs one schedule.
fn run(config: Config, seed: u64) {
    let simulation = Rc::new(Simulation::new(config, seed));
    let mut posters: Vec<_> = config
        .posters()
        .map(|(id, ops, first)| {
            let simulation = simulation.clone();
            let stack = STACKS.with_borrow_mut(Vec::pop).unwrap_or_default();
            Coroutine::with_stack(stack, move |yielder: &Yielder<(), ()>, ()| {
                Poster::new(&simulation.card, id, Turns { simulation: &simulation, yielder }).run(ops, first);
            })
        })
        .collect();
    for _ in 0..MAX_STEPS {
        let next = simulation.random(posters.len() + 1);
        match posters.get_mut(next) {
            Some(poster) => {
                if let CoroutineResult::Return(()) = poster.resume(()) {
                    let stack = posters.swap_remove(next).into_stack();
                    STACKS.with_borrow_mut(|stacks| stacks.push(stack));
                }
            }
            None => {
                if !simulation.step_card() && posters.is_empty() {
                    break;
                }
            }
        }
    }
    assert!(posters.is_empty(), "a wait does not end");
    let rung = simulation.card.doorbell.load(Relaxed).wrapping_sub(config.start);
    assert_eq!(rung, config.posts(), "something stayed unrung");
    assert_eq!(simulation.engine.borrow().delivered.len() as u32, config.posts(), "something was not completed");
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

/// Checks that some schedule breaks a rule: the rule `why`, or one of several separated by `|`. Changes the process's
/// panic hook.
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

/// A failed request has ended; its entry waits for the host.
#[test]
fn posts_and_flushes_with_random_failures_keep_invariants() {
    explore_all(Config { fails: true, slots: 2, posters: MIXED, ..BASE });
    explore_all(Config { fails: true, sq_size: 2, max_batch: 2, posters: MIXED, ..BASE });
    let posters: &[&[Op]] =
        &[&[Group(5), Flush, Group(20)], &[AggregatedGroup(3), Put, Group(32)], &[Put, Group(16), Aggregated, Flush]];
    explore_all(Config { fails: true, posters, sq_size: 32, max_batch: 16, slots: 8, ..BASE });
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
    must_fail(mutation(Mutation::NoDoorbellFence, config), "may be unrung");
    must_fail(mutation(Mutation::NoBarrier, config), "a flush returned before");
    must_fail(mutation(Mutation::EarlyCount, config), "a flush returned before");
    must_fail(mutation(Mutation::LostDoorbell, config), "something stayed unrung|a wait does not end");
    must_fail(mutation(Mutation::NoInsertion, config), "a flush returned before");
    let failing = Config { fails: true, ..config };
    must_fail(mutation(Mutation::UncountedFailures, failing), "a wait does not end");
    must_fail(mutation(Mutation::EarlyAcknowledgement, failing), "without a word");
    let many: &[&[Op]] = &[&[Put; 40], &[Put; 40]];
    let small = Config { sq_size: 4, max_batch: 2, posters: many, ..failing };
    must_fail(mutation(Mutation::EarlyIdentification, small), "entry was overwritten");
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
    // A flush doesn't stop between an empty leaf word and its summary word, so only the model finds an insertion lost
    // there.
    for lost in [Mutation::Uncounted(1), Mutation::EarlyRemoval] {
        must_fail(mutation(lost, Config { posters, ..BASE }), "a flush returned before");
    }
}
