//! Both policies, in each form and mode, against a small card that completes requests in any order: no request is lost, rung early or
//! overwritten, and no flush returns early.

mod schedules;

use super::flush::flush;
use super::ops::Policy::{self, Combining, Exclusive, Locked};
use super::*;
use crate::platform;
use crate::wait::Limit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use std::sync::{Mutex, TryLockError};
use std::thread;

/// The endpoint that posters and card share. The card reads a value slot when it executes the post, in any order.
struct Shared {
    sq_size: u32,
    max_batch: u32,
    slots: u32,
    cursor: AtomicU64,
    state: AtomicU64,
    bound: AtomicU64,
    poison: AtomicU32,
    lock: AtomicU32,
    barrier: AtomicU32,
    used: AtomicU32,
    pending: AtomicU32,
    doorbell: AtomicU32,
    posted: AtomicU32,
    released: AtomicU32,
    completed: AtomicU32,
    rings: AtomicU32,
    values: Vec<AtomicU64>,
    ring: Vec<AtomicU64>,
    /// The delivered tokens.
    delivered: Mutex<Vec<u64>>,
    failed: AtomicBool,
    /// None if a test plays the card itself.
    card: Mutex<Option<Card>>,
}

impl Shared {
    fn new(start: u32, sq_size: u32, max_batch: u32, slots: u32) -> Self {
        let word = |_| AtomicU64::new(0);
        Shared {
            sq_size,
            max_batch,
            slots,
            cursor: AtomicU64::new(u64::from(start) << 32 | u64::from(start)),
            state: AtomicU64::new(u64::from(start) << ferrogin_ffi::ext::STATE_RUNG_SHIFT),
            bound: AtomicU64::new((u64::from(start) << 32 | u64::from(start)).wrapping_sub(1)),
            poison: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            barrier: AtomicU32::new(start),
            used: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            doorbell: AtomicU32::new(start),
            posted: AtomicU32::new(start),
            released: AtomicU32::new(start),
            completed: AtomicU32::new(start),
            rings: AtomicU32::new(0),
            values: (0..slots.max(1)).map(word).collect(),
            ring: (0..sq_size).map(word).collect(),
            delivered: Mutex::new(Vec::new()),
            failed: AtomicBool::new(false),
            card: Mutex::new(None),
        }
    }

    /// Writes a post's token into its value slot and its ring slot.
    fn write(&self, idx: u32, token: u64) {
        if self.slots != 0 {
            self.values[(idx & (self.slots - 1)) as usize].store(token, Relaxed);
        }
        self.ring[(idx % self.sq_size) as usize].store(token, Relaxed);
    }

    /// Lets the card complete one post, unless another thread drives it. Returns false if nothing was completed.
    fn step_card(&self) -> bool {
        match self.card.try_lock() {
            Ok(mut card) => card.as_mut().is_some_and(|card| card.step(self)),
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Poisoned(_)) => panic!("the card failed in another thread"),
        }
    }

    fn post(&self, policy: Policy, aggregate: bool, token: u64) -> Result<(), Status> {
        policy.post(self, self, aggregate, |idx| self.write(idx, token))
    }

    fn flush(&self, policy: Policy) -> Result<(), Status> {
        flush(self, policy.is_locked(), None, self).into()
    }
}

impl Limit for &Shared {
    fn aborted(&self) -> bool {
        false
    }
    /// Only ends a wait that hangs.
    fn has_passed(&self, began_ns: &mut u64) -> bool {
        *began_ns = platform::clock_ns().min(*began_ns);
        platform::clock_ns() - *began_ns > HANG_LIMIT.as_nanos() as u64
    }
    /// Drives the card: yielding to its thread would cost a time slice of every busy program on the machine.
    fn relax(&self, round: u32) {
        if !self.step_card() {
            platform::relax(round, || false);
        }
    }
}

impl Queue for &Shared {
    fn completed(&self) -> u32 {
        self.completed.load(Acquire) & COUNT_MASK
    }
    fn failed(&self) -> bool {
        self.failed.load(Relaxed)
    }
    fn sq_size(&self) -> u32 {
        self.sq_size
    }
    fn max_batch(&self) -> u32 {
        self.max_batch
    }
    fn value_slots(&self) -> u32 {
        self.slots
    }
    fn fence(&self) {
        core::sync::atomic::fence(AcqRel);
    }
    fn doorbell(&self, count: u32) {
        let old = self.doorbell.swap(count, AcqRel);
        let step = count.wrapping_sub(old);
        assert!(step >= 1 && step <= self.max_batch, "doorbell moved from {old} to {count}");
        self.rings.fetch_add(1, Relaxed);
    }
    fn publish(&self, rung: u32) {
        self.posted.store(rung, Relaxed);
        self.released.store(rung, Relaxed);
    }
    fn published(&self) -> u32 {
        self.posted.load(Relaxed)
    }
    fn released(&self) -> u32 {
        self.released.load(Relaxed)
    }
}

impl combining::CombiningQueue for &Shared {
    fn words(&self) -> combining::Words<'_> {
        let Shared { cursor, state, bound, poison, .. } = self;
        combining::Words { cursor, state, bound, poison }
    }
}

impl locked::LockedQueue for &Shared {
    fn next(&self) -> u32 {
        (self.cursor.load(Relaxed) as u32).wrapping_add(self.pending.load(Relaxed))
    }
    fn pending(&self) -> u32 {
        self.pending.load(Relaxed)
    }
    fn start(&self) {
        self.pending.fetch_add(1, Relaxed);
    }
    fn take_pending(&self) -> u32 {
        let next = self.next();
        self.cursor.store(u64::from(next), Relaxed);
        self.pending.store(0, Relaxed);
        next
    }
    fn lock_words(&self) -> locked::Words<'_> {
        locked::Words { lock: &self.lock, barrier: &self.barrier, used: &self.used }
    }
}

/// Executes rung posts in random order. The card reads a value slot late, as a retransmission does, and delivers its token.
struct Card {
    fetched: u32,
    open: Vec<(u32, u64)>,
    seed: u64,
}

impl Card {
    fn new(start: u32, seed: u64) -> Self {
        Card { fetched: start, open: Vec::new(), seed }
    }

    /// Completes one post. Returns false if there is none.
    fn step(&mut self, shared: &Shared) -> bool {
        let rung = shared.doorbell.load(Acquire);
        while self.fetched != rung {
            let token = shared.ring[(self.fetched % shared.sq_size) as usize].load(Relaxed);
            self.open.push((self.fetched, token));
            self.fetched = self.fetched.wrapping_add(1);
        }
        assert!(self.open.len() as u32 <= shared.sq_size, "ring overflow");
        if self.open.is_empty() {
            return false;
        }
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (idx, token) = self.open.swap_remove((self.seed >> 33) as usize % self.open.len());
        if shared.slots != 0 {
            let value = shared.values[(idx & (shared.slots - 1)) as usize].load(Relaxed);
            assert_eq!(value, token, "value slot of post {idx} was overwritten before it completed");
        }
        shared.delivered.lock().unwrap().push(token);
        shared.completed.fetch_add(1, Release);
        true
    }
}

/// Runs the card until `stop`, in its own thread, while waiting posters drive it too.
fn run_card(shared: &Shared, stop: &AtomicBool) {
    loop {
        let is_last = stop.load(Acquire);
        if !shared.step_card() {
            if is_last {
                return;
            }
            thread::yield_now();
        }
    }
}

fn run(policy: Policy, start: u32, sq_size: u32, max_batch: u32, slots: u32, threads: u64, posts: u64) -> Shared {
    let mut shared = Shared::new(start, sq_size, max_batch, slots);
    shared.card = Mutex::new(Some(Card::new(start, 0x5eed ^ u64::from(start))));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let card = scope.spawn(|| run_card(&shared, &stop));
        let posters: Vec<_> = (0..threads)
            .map(|t| {
                let shared = &shared;
                scope.spawn(move || {
                    for i in 0..posts {
                        let token = t << 32 | i;
                        shared.post(policy, i % 3 == t % 3, token).unwrap();
                        if i % 37 == 36 {
                            shared.flush(policy).unwrap();
                            let delivered = shared.delivered.lock().unwrap();
                            let mine = delivered.iter().filter(|&&d| d >> 32 == t).count() as u64;
                            assert_eq!(mine, i + 1, "flush of thread {t} returned early");
                        }
                    }
                    shared.flush(policy).unwrap();
                })
            })
            .collect();
        for poster in posters {
            poster.join().unwrap();
        }
        assert_eq!(
            shared.doorbell.load(Acquire),
            start.wrapping_add((threads * posts) as u32),
            "something stayed unrung"
        );
        stop.store(true, Release);
        card.join().unwrap();
    });
    let mut all = std::mem::take(&mut *shared.delivered.lock().unwrap());
    all.sort_unstable();
    let want: Vec<u64> = (0..threads).flat_map(|t| (0..posts).map(move |i| t << 32 | i)).collect();
    assert_eq!(all, want, "every post is delivered exactly once");
    shared
}

const STARTS: [(u32, u32); 6] =
    [(0, 0), (0, 8), (0x7fff_ff80, 8), (0xffff_ff80, 8), (0x03ff_fff0, 0), (0xffff_fff0, 0)];

#[test]
fn posts_are_delivered_once_in_any_completion_order() {
    for policy in [Combining, Locked] {
        for (start, slots) in STARTS {
            run(policy, start, 8, 4, slots, 3, 500);
            run(policy, start, 64, 16, if slots == 0 { 0 } else { 32 }, 4, 2_000);
        }
    }
}

#[test]
fn posts_are_delivered_once_in_exclusive_mode() {
    for (start, slots) in STARTS {
        run(Exclusive, start, 8, 4, slots, 1, 1_000);
        run(Exclusive, start, 64, 16, if slots == 0 { 0 } else { 32 }, 1, 4_000);
    }
}

/// Each mode continues from the state that the previous one left, including deferred posts.
#[test]
fn calls_in_different_modes_follow_one_another() {
    let policies = [Combining, Exclusive, Combining];
    for (start, slots) in STARTS {
        let mut shared = Shared::new(start, 16, 8, slots);
        shared.card = Mutex::new(Some(Card::new(start, 7)));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let card = scope.spawn(|| run_card(&shared, &stop));
            for i in 0..600u64 {
                let policy = policies[(i / 7) as usize % 3];
                shared.post(policy, i % 5 != 0, i).unwrap();
                if i % 41 == 40 {
                    shared.flush(policies[(i / 41) as usize % 3]).unwrap();
                    assert_eq!(shared.delivered.lock().unwrap().len() as u64, i + 1);
                }
            }
            shared.flush(policies[0]).unwrap();
            stop.store(true, Release);
            card.join().unwrap();
        });
        assert_eq!(shared.delivered.lock().unwrap().len(), 600);
    }
}

#[test]
fn guard_of_value_slots_is_stricter_than_count() {
    let shared = Shared::new(0, 8, 4, 8);
    // Eight posts are rung, and the card completes the last one first. By the count alone, slot 0 would be free for post 8.
    for token in 0..8u64 {
        shared.post(Combining, false, token).unwrap();
    }
    shared.completed.fetch_add(1, Release);
    assert!(outstanding(8, (&shared).completed()) < shared.sq_size, "the count alone admits it");
    assert!(outstanding(8, (&shared).completed()) > max_outstanding(&shared, 8, 0), "the lap guard does not");
}

#[test]
fn card_error_ends_every_wait() {
    for policy in [Combining, Locked, Exclusive] {
        let shared = Shared::new(0, 4, 4, 0);
        for token in 0..4 {
            shared.post(policy, false, token).unwrap();
        }
        shared.failed.store(true, Relaxed);
        assert_eq!(shared.post(policy, false, 4), Err(Status::CardError), "{policy:?}");
        assert_eq!(shared.flush(policy), Err(Status::CardError), "{policy:?}");
        // A reservation that was given up leaves a hole that no mode may post past.
        if policy == Combining {
            shared.failed.store(false, Relaxed);
            shared.completed.store(4, Relaxed);
            assert_eq!(shared.flush(policy), Err(Status::Poisoned));
            for policy in [Combining, Exclusive] {
                assert_eq!(shared.post(policy, false, 5), Err(Status::Poisoned), "{policy:?}");
            }
            assert_eq!(shared.doorbell.load(Relaxed), 4);
        }
    }
}

/// With a fast card, no post ever waits.
#[test]
fn card_error_is_found_without_wait() {
    for policy in [Combining, Locked, Exclusive] {
        let shared = Shared::new(0, 64, 16, 0);
        let post = |token: u32| {
            let posted = shared.post(policy, false, u64::from(token));
            shared.completed.store(shared.doorbell.load(Relaxed), Release);
            posted
        };
        assert!((0..5).all(|token| post(token).is_ok()), "{policy:?}");
        shared.failed.store(true, Relaxed);
        let refused = (5..1000).find_map(|token| post(token).err().map(|status| (token, status)));
        let (at, status) = refused.expect("a refusal");
        assert_eq!(status, Status::CardError, "{policy:?}");
        assert!(at <= 5 + MAX_BATCH, "{policy:?}: at {at}");
    }
}

#[test]
fn deferred_posts_share_one_doorbell() {
    for policy in [Combining, Locked, Exclusive] {
        let shared = Shared::new(0, 64, 16, 0);
        for token in 0..7 {
            shared.post(policy, true, token).unwrap();
        }
        assert_eq!(shared.rings.load(Relaxed), 0);
        shared.post(policy, false, 7).unwrap();
        assert_eq!((shared.rings.load(Relaxed), shared.doorbell.load(Relaxed)), (1, 8), "{policy:?}");
    }
}

/// Reserves, writes and releases `n` posts as NCCL's code does, and rings them if `rings`.
fn nccl_posts(shared: &Shared, n: u32, rings: bool) {
    let end = (shared.cursor.fetch_add(u64::from(n), Relaxed) as u32).wrapping_add(n);
    shared.released.store(end, Relaxed);
    if rings {
        shared.doorbell.store(end, Relaxed);
        shared.posted.store(end, Relaxed);
    }
}

#[test]
fn posts_by_nccl_in_between_are_rung_once() {
    for policy in [Combining, Exclusive, Locked] {
        let shared = Shared::new(0, 64, 16, 0);
        shared.post(policy, false, 0).unwrap();
        nccl_posts(&shared, 3, true);
        shared.post(policy, false, 4).unwrap();
        assert_eq!(shared.doorbell.load(Relaxed), 5, "{policy:?}");
        nccl_posts(&shared, 40, true);
        shared.completed.store(45, Relaxed);
        shared.post(policy, true, 45).unwrap();
        shared.post(policy, false, 46).unwrap();
        assert_eq!(shared.doorbell.load(Relaxed), 47, "{policy:?}");
        // Our next post, or a flush, rings what NCCL's code deferred.
        nccl_posts(&shared, 5, false);
        shared.post(policy, false, 52).unwrap();
        assert_eq!(shared.doorbell.load(Relaxed), 53, "{policy:?}");
        nccl_posts(&shared, 2, false);
        shared.completed.store(54, Relaxed);
        assert_eq!(shared.doorbell.load(Relaxed), 53, "{policy:?}");
        thread::scope(|scope| {
            scope.spawn(|| shared.flush(policy).unwrap());
            wait_until("doorbell of the flush", || shared.doorbell.load(Relaxed) == 55);
            shared.completed.store(55, Relaxed);
        });
    }
}

/// A barrier is raised before it gets so old that it could be taken for one 2^32 posts later.
#[test]
fn old_barrier_is_raised() {
    for policy in [Combining, Exclusive] {
        let shared = Shared::new(0, 64, 16, 0);
        let cursor = 0x7000_0000u32;
        shared.cursor.store(u64::from(cursor), Relaxed);
        shared.state.store(u64::from(cursor) << ferrogin_ffi::ext::STATE_RUNG_SHIFT, Relaxed);
        for word in [&shared.doorbell, &shared.posted, &shared.released, &shared.completed] {
            word.store(cursor, Relaxed);
        }
        shared.post(policy, false, 1).unwrap();
        let barrier = (shared.cursor.load(Relaxed) >> 32) as u32;
        assert!(barrier.wrapping_sub(cursor) <= 1, "{policy:?}: {barrier:#x}");
        shared.completed.store(cursor + 1, Relaxed);
        shared.flush(policy).unwrap();
        shared.post(policy, false, 2).unwrap();
        assert_eq!(shared.doorbell.load(Relaxed), cursor + 2, "{policy:?}");
    }
}
