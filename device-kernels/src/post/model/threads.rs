//! The posting code in threads of the machine, each policy in each form and mode: no request is lost, rung early or
//! overwritten, and no flush returns early, whatever the order of completion. Some tests play the card themselves.

use super::Model;
use super::card::{Card, Config, Doorbell, Engine, Poster, Runner};
use super::ops::Op::{self, Aggregated, Flush, Put};
use super::ops::Policy::{self, Combining, Exclusive, Locked};
use crate::platform;
use crate::post::{COUNT_MASK, MAX_BATCH, Queue, max_outstanding, outstanding};
use crate::status::Status;
use crate::wait::Limit;
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;
use ferrogin_test_support::Random;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::{Mutex, TryLockError};
use std::thread;

const BASE: Config = Config {
    policy: Combining,
    in_context: false,
    start: 0,
    sq_size: 64,
    max_batch: 16,
    slots: 0,
    doorbell: Doorbell::Early,
    fails: false,
    mutation: None,
    posters: &[],
};

/// A card with an engine, unless a test plays it.
struct Machine {
    card: Card,
    engine: Mutex<Option<(Engine, Random)>>,
}

impl Machine {
    /// Creates a machine for up to `posts` posts, whose test plays the card.
    fn new(config: Config, posts: u32) -> Self {
        Machine { card: Card::new(config, posts), engine: Mutex::new(None) }
    }

    /// Adds an engine that completes requests in random order.
    fn with_engine(self, seed: u64) -> Self {
        let engine = Mutex::new(Some((Engine::new(&self.card), Random::new(seed))));
        Machine { engine, ..self }
    }

    fn poster(&self, id: usize) -> Poster<'_, &Machine> {
        Poster::new(&self.card, id, self)
    }

    /// Lets the card complete one request, unless another thread drives it. Returns false if nothing was completed.
    fn step(&self) -> bool {
        let mut engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::WouldBlock) => return false,
            Err(TryLockError::Poisoned(_)) => panic!("the card failed in another thread"),
        };
        let Some((engine, random)) = engine.as_mut() else { return false };
        engine.fetch(&self.card);
        match engine.open() {
            0 => false,
            open => engine.complete(&self.card, random.index(open)) != 0,
        }
    }

    /// Runs the card until `stop`, in its own thread, while waiting posters drive it too.
    fn run_card(&self, stop: &AtomicBool) {
        loop {
            let is_last = stop.load(Acquire);
            if !self.step() {
                if is_last {
                    return;
                }
                thread::yield_now();
            }
        }
    }

    /// Runs `posters` beside the card's thread.
    fn run(&self, posters: impl FnOnce()) {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let card = scope.spawn(|| self.run_card(&stop));
            posters();
            stop.store(true, Release);
            card.join().unwrap();
        });
    }

    /// Checks that the card has completed each of `posts` posts once.
    fn check_delivered(&self, posts: u32) {
        let mut engine = self.engine.lock().unwrap();
        let delivered = &mut engine.as_mut().expect("an engine").0.delivered;
        delivered.sort_unstable();
        assert_eq!(*delivered, (1..=posts).collect::<Vec<_>>(), "every post is delivered exactly once");
    }
}

impl Limit for &Machine {
    fn stop_word(&self) -> u32 {
        0
    }
    /// Only ends a wait that hangs.
    fn has_passed(&self, began_ns: &mut u64) -> bool {
        *began_ns = platform::clock_ns().min(*began_ns);
        platform::clock_ns() - *began_ns > HANG_LIMIT.as_nanos() as u64
    }
    /// Drives the card: yielding to its thread would cost a time slice of every busy program on the machine.
    fn relax(&self, round: u32) {
        if !self.step() {
            platform::relax(round, || false);
        }
    }
}

impl Runner for &Machine {}

/// Posts `posts` times in each of `threads` threads, with flushes in between.
fn run(config: Config, threads: u32, posts: u32) {
    let machine = Machine::new(config, threads * posts).with_engine(0x5eed ^ u64::from(config.start));
    machine.run(|| {
        thread::scope(|scope| {
            for t in 0..threads {
                let poster = machine.poster(t as usize);
                let post = |i| if i % 3 == t % 3 { Aggregated } else { Put };
                let flush = |i| (i % 37 == 36 || i + 1 == posts).then_some(Flush);
                let ops: Vec<Op> = (0..posts).flat_map(|i| std::iter::once(post(i)).chain(flush(i))).collect();
                scope.spawn(move || poster.run(&ops, 1 + t * posts));
            }
        });
        let rung = machine.card.doorbell.load(Acquire);
        assert_eq!(rung, config.start.wrapping_add(threads * posts), "something stayed unrung");
    });
    machine.check_delivered(threads * posts);
}

const STARTS: [(u32, u32); 6] =
    [(0, 0), (0, 8), (0x7fff_ff80, 8), (0xffff_ff80, 8), (0x03ff_fff0, 0), (0xffff_fff0, 0)];

/// Runs with a small ring and a larger one, at every start.
fn run_all(policy: Policy, threads: u32, posts: u32) {
    for (start, slots) in STARTS {
        run(Config { policy, start, sq_size: 8, max_batch: 4, slots, ..BASE }, threads, posts);
        run(Config { policy, start, slots: slots * 4, ..BASE }, threads, posts * 4);
    }
}

#[test]
fn posts_are_delivered_once_in_any_completion_order() {
    for policy in [Combining, Locked] {
        run_all(policy, 3, 500);
    }
}

#[test]
fn posts_are_delivered_once_in_exclusive_mode() {
    run_all(Exclusive, 1, 1_000);
}

/// Each mode continues from the state that the previous one left, including deferred posts.
#[test]
fn calls_in_different_modes_follow_one_another() {
    let policies = [Combining, Exclusive, Combining];
    for (start, slots) in STARTS {
        let machine = Machine::new(Config { start, sq_size: 16, max_batch: 8, slots, ..BASE }, 600).with_engine(7);
        machine.run(|| {
            let poster = machine.poster(0);
            for i in 0..600 {
                poster.post_by(policies[(i / 7) as usize % 3], i % 5 != 0, i + 1).unwrap();
                if i % 41 == 40 {
                    poster.flush().unwrap();
                    assert_eq!(machine.card.completed.load(Relaxed), start.wrapping_add(i + 1) & COUNT_MASK);
                }
            }
            poster.flush().unwrap();
        });
        machine.check_delivered(600);
    }
}

#[test]
fn guard_of_value_slots_is_stricter_than_count() {
    let machine = Machine::new(Config { sq_size: 8, max_batch: 4, slots: 8, ..BASE }, 8);
    let poster = machine.poster(0);
    // Eight posts are rung, and the card completes the last one first. By the count alone, slot 0 would be free for
    // post 8.
    for token in 1..=8 {
        poster.post(false, token).unwrap();
    }
    machine.card.completed.fetch_add(1, Release);
    let open = outstanding(8, Model(&poster).completed());
    assert!(open < Model(&poster).sq_size(), "the count alone admits it");
    assert!(open > max_outstanding(Model(&poster), 8, 0), "the lap guard does not");
}

#[test]
fn card_error_ends_every_wait() {
    for policy in [Combining, Locked, Exclusive] {
        let machine = Machine::new(Config { policy, sq_size: 4, max_batch: 4, ..BASE }, 6);
        let (card, poster) = (&machine.card, machine.poster(0));
        for token in 1..=4 {
            poster.post(false, token).unwrap();
        }
        card.failures.store(1, Relaxed);
        assert_eq!(poster.post(false, 5), Err(Status::CardError), "{policy:?}");
        assert_eq!(poster.flush(), Err(Status::CardError), "{policy:?}");
        // A reservation that was given up leaves a hole that no mode may post past.
        if policy == Combining {
            card.failures.store(0, Relaxed);
            card.completed.store(4, Relaxed);
            assert_eq!(poster.flush(), Err(Status::Poisoned));
            for policy in [Combining, Exclusive] {
                assert_eq!(poster.post_by(policy, false, 6), Err(Status::Poisoned), "{policy:?}");
            }
            assert_eq!(card.doorbell.load(Relaxed), 4);
        }
    }
}

/// With a fast card, no post ever waits.
#[test]
fn card_error_is_found_without_wait() {
    for policy in [Combining, Locked, Exclusive] {
        let machine = Machine::new(Config { policy, ..BASE }, 1000);
        let (card, poster) = (&machine.card, machine.poster(0));
        let post = |token| {
            let posted = poster.post(false, token);
            card.completed.store(card.doorbell.load(Relaxed), Release);
            posted
        };
        assert!((1..=5).all(|token| post(token).is_ok()), "{policy:?}");
        card.failures.store(1, Relaxed);
        let refused = (6..=1000).find_map(|token| post(token).err().map(|status| (token, status)));
        let (at, status) = refused.expect("a refusal");
        assert_eq!(status, Status::CardError, "{policy:?}");
        assert!(at <= 6 + MAX_BATCH, "{policy:?}: at {at}");
    }
}

#[test]
fn deferred_posts_share_one_doorbell() {
    for policy in [Combining, Locked, Exclusive] {
        let machine = Machine::new(Config { policy, ..BASE }, 8);
        let (card, poster) = (&machine.card, machine.poster(0));
        for token in 1..=7 {
            poster.post(true, token).unwrap();
        }
        assert_eq!(card.rings.load(Relaxed), 0);
        poster.post(false, 8).unwrap();
        assert_eq!((card.rings.load(Relaxed), card.doorbell.load(Relaxed)), (1, 8), "{policy:?}");
    }
}

/// Reserves, writes and releases `n` posts as NCCL's code does, and rings them if `rings`.
fn nccl_posts(card: &Card, n: u32, rings: bool) {
    let end = (card.words.cursor.0.fetch_add(u64::from(n), Relaxed) as u32).wrapping_add(n);
    card.words.released.0.store(end, Relaxed);
    if rings {
        card.doorbell.store(end, Relaxed);
        card.words.published.0.store(end, Relaxed);
    }
}

#[test]
fn posts_by_nccl_in_between_are_rung_once() {
    for policy in [Combining, Exclusive, Locked] {
        let machine = Machine::new(Config { policy, ..BASE }, 53);
        let (card, poster) = (&machine.card, machine.poster(0));
        poster.post(false, 1).unwrap();
        nccl_posts(card, 3, true);
        poster.post(false, 5).unwrap();
        assert_eq!(card.doorbell.load(Relaxed), 5, "{policy:?}");
        nccl_posts(card, 40, true);
        card.completed.store(45, Relaxed);
        poster.post(true, 46).unwrap();
        poster.post(false, 47).unwrap();
        assert_eq!(card.doorbell.load(Relaxed), 47, "{policy:?}");
        // Our next post, or a flush, rings what NCCL's code deferred.
        nccl_posts(card, 5, false);
        poster.post(false, 53).unwrap();
        assert_eq!(card.doorbell.load(Relaxed), 53, "{policy:?}");
        nccl_posts(card, 2, false);
        card.completed.store(54, Relaxed);
        assert_eq!(card.doorbell.load(Relaxed), 53, "{policy:?}");
        thread::scope(|scope| {
            scope.spawn(|| machine.poster(1).flush().unwrap());
            wait_until("doorbell of the flush", || card.doorbell.load(Relaxed) == 55);
            card.completed.store(55, Relaxed);
        });
    }
}

/// A barrier is raised before it gets so old that it could be taken for one 2^32 posts later.
#[test]
fn old_barrier_is_raised() {
    for policy in [Combining, Exclusive] {
        let machine = Machine::new(Config { policy, ..BASE }, 2);
        let (card, poster) = (&machine.card, machine.poster(0));
        let cursor = 0x7000_0000u32;
        card.words.cursor.0.store(u64::from(cursor), Relaxed);
        card.words.state.0.store(u64::from(cursor) << STATE_RUNG_SHIFT, Relaxed);
        for word in [&card.doorbell, &card.words.published.0, &card.words.released.0, &card.completed] {
            word.store(cursor, Relaxed);
        }
        poster.post(false, 1).unwrap();
        let barrier = (card.words.cursor.0.load(Relaxed) >> 32) as u32;
        assert!(barrier.wrapping_sub(cursor) <= 1, "{policy:?}: {barrier:#x}");
        card.completed.store(cursor + 1, Relaxed);
        poster.flush().unwrap();
        poster.post(false, 2).unwrap();
        assert_eq!(card.doorbell.load(Relaxed), cursor + 2, "{policy:?}");
    }
}
