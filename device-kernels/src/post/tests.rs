//! Both policies against a small card that completes in any order: nothing is lost, rung early, overwritten or flushed
//! early.

use super::*;
use crate::wait::Limits;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::Mutex;
use std::thread;

const NO_LIMITS: Limits<'static> = Limits { abort: None, timeout_ns: 60_000_000_000 };

/// What the card has of one post: the value slot is read when the post is executed, in any order.
struct Shared {
    sq_size: u32,
    max_batch: u32,
    slots: u32,
    cursor: AtomicU64,
    state: AtomicU64,
    poison: AtomicU32,
    lock: AtomicU32,
    barrier: AtomicU32,
    pending: AtomicU32,
    doorbell: AtomicU32,
    posted: AtomicU32,
    completed: AtomicU32,
    rings: AtomicU32,
    values: Vec<AtomicU64>,
    ring: Vec<AtomicU64>,
    /// Tokens that the card has delivered.
    delivered: Mutex<Vec<u64>>,
    failed: AtomicBool,
}

impl Shared {
    fn new(start: u32, sq_size: u32, max_batch: u32, slots: u32) -> Self {
        let word = |_| AtomicU64::new(0);
        Shared {
            sq_size,
            max_batch,
            slots,
            cursor: AtomicU64::new(u64::from(start) << 32 | u64::from(start)),
            state: AtomicU64::new(u64::from(start & ((1 << 26) - 1)) << 38),
            poison: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            barrier: AtomicU32::new(start),
            pending: AtomicU32::new(0),
            doorbell: AtomicU32::new(start),
            posted: AtomicU32::new(start),
            completed: AtomicU32::new(start),
            rings: AtomicU32::new(0),
            values: (0..slots.max(1)).map(word).collect(),
            ring: (0..sq_size).map(word).collect(),
            delivered: Mutex::new(Vec::new()),
            failed: AtomicBool::new(false),
        }
    }

    fn combining(&self) -> combining::Words<'_> {
        combining::Words { cursor: &self.cursor, state: &self.state, poison: &self.poison }
    }

    fn locked(&self) -> locked::Words<'_> {
        locked::Words { lock: &self.lock, barrier: &self.barrier }
    }

    /// A post writes its token in its value slot and in its ring slot.
    fn write(&self, idx: u32, token: u64) {
        if self.slots != 0 {
            self.values[(idx & (self.slots - 1)) as usize].store(token, Relaxed);
        }
        self.ring[(idx % self.sq_size) as usize].store(token, Relaxed);
    }

    fn post(&self, by_lock: bool, aggregate: bool, token: u64) -> Result<(), Status> {
        let write = |idx| self.write(idx, token);
        if by_lock {
            locked::post(self, self.locked(), NO_LIMITS, aggregate, write)
        } else {
            combining::post(self, self.combining(), NO_LIMITS, aggregate, write)
        }
    }

    fn flush(&self, by_lock: bool) -> Result<(), Status> {
        if by_lock {
            locked::flush(self, self.locked(), NO_LIMITS)
        } else {
            combining::flush(self, self.combining(), NO_LIMITS)
        }
    }
}

impl Queue for Shared {
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
    }
    fn published(&self) -> u32 {
        self.posted.load(Relaxed)
    }
}

impl locked::Batch for Shared {
    fn next(&self) -> u32 {
        (self.cursor.load(Relaxed) as u32).wrapping_add(self.pending.load(Relaxed))
    }
    fn pending(&self) -> u32 {
        self.pending.load(Relaxed)
    }
    fn start(&self) {
        if self.pending.load(Relaxed) + 1 > self.max_batch {
            self.ring();
        }
        self.pending.fetch_add(1, Relaxed);
    }
    fn ring(&self) {
        let pending = self.pending.swap(0, Relaxed);
        if pending != 0 {
            let pc = (self.cursor.load(Relaxed) as u32).wrapping_add(pending);
            self.cursor.store(u64::from(pc), Relaxed);
            Queue::fence(self);
            self.doorbell(pc);
            self.publish(pc);
        }
    }
}

/// Executes rung posts in random order: reads the value slot late, as a retransmission does, and delivers what it finds.
fn card(shared: &Shared, start: u32, stop: &AtomicBool, mut seed: u64) {
    let mut fetched = start;
    let mut open: Vec<(u32, u64)> = Vec::new();
    loop {
        let rung = shared.doorbell.load(Acquire);
        while fetched != rung {
            open.push((fetched, shared.ring[(fetched % shared.sq_size) as usize].load(Relaxed)));
            fetched = fetched.wrapping_add(1);
        }
        assert!(open.len() as u32 <= shared.sq_size, "ring overflow");
        if open.is_empty() {
            if stop.load(Acquire) && shared.doorbell.load(Acquire) == fetched {
                return;
            }
            thread::yield_now();
            continue;
        }
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (idx, token) = open.swap_remove((seed >> 33) as usize % open.len());
        if shared.slots != 0 {
            let value = shared.values[(idx & (shared.slots - 1)) as usize].load(Relaxed);
            assert_eq!(value, token, "value slot of post {idx} was overwritten before it completed");
        }
        shared.delivered.lock().unwrap().push(token);
        shared.completed.fetch_add(1, Release);
        if seed >> 60 == 0 {
            thread::yield_now();
        }
    }
}

fn run(by_lock: bool, start: u32, sq_size: u32, max_batch: u32, slots: u32, threads: u64, posts: u64) -> Shared {
    let shared = Shared::new(start, sq_size, max_batch, slots);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let card = scope.spawn(|| card(&shared, start, &stop, 0x5eed ^ u64::from(start)));
        let posters: Vec<_> = (0..threads)
            .map(|t| {
                let shared = &shared;
                scope.spawn(move || {
                    for i in 0..posts {
                        let token = t << 32 | i;
                        shared.post(by_lock, i % 3 == t % 3, token).unwrap();
                        if i % 37 == 36 {
                            shared.flush(by_lock).unwrap();
                            let delivered = shared.delivered.lock().unwrap();
                            let mine = delivered.iter().filter(|&&d| d >> 32 == t).count() as u64;
                            assert_eq!(mine, i + 1, "flush of thread {t} returned early");
                        }
                    }
                    shared.flush(by_lock).unwrap();
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

#[test]
fn combining_is_exact_in_any_completion_order() {
    for (start, slots) in [(0, 0), (0, 8), (0x7fff_ff80, 8), (0xffff_ff80, 8), (0x03ff_fff0, 0), (0xffff_fff0, 0)] {
        run(false, start, 8, 4, slots, 3, 500);
        run(false, start, 64, 16, if slots == 0 { 0 } else { 32 }, 4, 2_000);
    }
}

#[test]
fn locked_is_exact_in_any_completion_order() {
    for (start, slots) in [(0, 0), (0, 8), (0x7fff_ff80, 8), (0xffff_ff80, 8)] {
        run(true, start, 8, 4, slots, 3, 500);
        run(true, start, 64, 16, if slots == 0 { 0 } else { 32 }, 4, 2_000);
    }
}

/// The model must notice a policy without the guard that it is about.
#[test]
fn the_model_catches_reuse_by_count() {
    let shared = Shared::new(0, 8, 4, 8);
    // Eight posts ring; the card completes the last first. By count alone slot 0 would be free for post 8.
    for token in 0..8u64 {
        shared.post(false, false, token).unwrap();
    }
    shared.completed.fetch_add(1, Release);
    assert!(outstanding(8, shared.completed()) < shared.sq_size, "the count alone admits it");
    assert!(outstanding(8, shared.completed()) > admitted(&shared, 8, 0), "the lap guard does not");
}

#[test]
fn an_error_ends_every_wait() {
    for by_lock in [false, true] {
        let shared = Shared::new(0, 4, 4, 0);
        for token in 0..4 {
            shared.post(by_lock, false, token).unwrap();
        }
        shared.failed.store(true, Relaxed);
        assert_eq!(shared.post(by_lock, false, 4), Err(Status::CardError));
        assert_eq!(shared.flush(by_lock), Err(if by_lock { Status::CardError } else { Status::Poisoned }));
    }
}

#[test]
fn deferred_posts_share_a_doorbell() {
    for by_lock in [false, true] {
        let shared = Shared::new(0, 64, 16, 0);
        for token in 0..7 {
            shared.post(by_lock, true, token).unwrap();
        }
        assert_eq!(shared.rings.load(Relaxed), 0);
        shared.post(by_lock, false, 7).unwrap();
        assert_eq!((shared.rings.load(Relaxed), shared.doorbell.load(Relaxed)), (1, 8));
    }
}

#[test]
fn posts_by_nccl_in_between_are_taken_over() {
    let shared = Shared::new(0, 64, 16, 0);
    shared.post(false, false, 0).unwrap();
    // NCCL's code reserves, writes, rings and publishes three of its own.
    shared.cursor.fetch_add(3, Relaxed);
    shared.doorbell.store(4, Relaxed);
    shared.posted.store(4, Relaxed);
    shared.post(false, false, 4).unwrap();
    assert_eq!(shared.doorbell.load(Relaxed), 5);
    shared.cursor.fetch_add(40, Relaxed);
    shared.doorbell.store(45, Relaxed);
    shared.posted.store(45, Relaxed);
    shared.completed.store(45, Relaxed);
    shared.post(false, true, 45).unwrap();
    shared.completed.store(46, Relaxed);
    shared.flush(false).unwrap();
}
