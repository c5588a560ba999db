//! Cursors near every wrap, under both policies, against an oracle that counts in 64 bits and never wraps.
//!
//! One thread posts and flushes in a random sequence. The card completes requests in random order, each time its count is read. The oracle
//! knows by number which requests are complete; the posting code only has counts.
#![cfg(not(loom))]

use ferrogin_device::post::{COUNT_MASK, Queue, combining, exclusive, flush, locked};
use ferrogin_device::wait::NoLimits;
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;
use ferrogin_test_support::Random;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

#[derive(Debug, Clone, Copy)]
struct Geometry {
    sq_size: u32,
    max_batch: u32,
    slots: u32,
}

/// The oracle's numbers, which don't wrap; their low 32 bits are the cursors'.
struct Oracle {
    /// The next request to be written.
    next: u64,
    /// The next request to be rung.
    rung: u64,
    /// The number of completed requests.
    completed: u64,
    /// Requests that are written but not complete: number, token. The card may still read their slots.
    open: BTreeMap<u64, u64>,
}

struct Card {
    by_lock: bool,
    geometry: Geometry,
    cursor: AtomicU64,
    state: AtomicU64,
    bound: AtomicU64,
    poison: AtomicU32,
    lock: AtomicU32,
    barrier: AtomicU32,
    used: AtomicU32,
    pending: AtomicU32,
    published: AtomicU32,
    values: RefCell<Vec<u64>>,
    oracle: RefCell<Oracle>,
    random: RefCell<Random>,
}

impl Card {
    /// Creates a card whose cursors begin at the low half of `start`.
    fn new(by_lock: bool, geometry: Geometry, start: u64, seed: u64) -> Self {
        let low = start as u32;
        Card {
            by_lock,
            geometry,
            cursor: AtomicU64::new(u64::from(low) << 32 | u64::from(low)),
            state: AtomicU64::new(u64::from(low) << STATE_RUNG_SHIFT),
            bound: AtomicU64::new((u64::from(low) << 32 | u64::from(low)).wrapping_sub(1)),
            poison: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            barrier: AtomicU32::new(low),
            used: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            published: AtomicU32::new(low),
            values: RefCell::new(vec![0; geometry.slots as usize]),
            oracle: RefCell::new(Oracle { next: start, rung: start, completed: start, open: BTreeMap::new() }),
            random: RefCell::new(Random::new(seed)),
        }
    }

    fn random(&self, below: usize) -> usize {
        self.random.borrow_mut().index(below)
    }

    /// Completes some rung requests, in any order, reading their value slots once more first.
    fn run(&self) {
        let mut oracle = self.oracle.borrow_mut();
        let rung = oracle.rung;
        let mut fetched: Vec<u64> = oracle.open.range(..rung).map(|(&number, _)| number).collect();
        for _ in 0..self.random(fetched.len() + 1) {
            let number = fetched.swap_remove(self.random(fetched.len()));
            let token = oracle.open.remove(&number);
            if let Some(slot) = self.slot(number as u32) {
                assert_eq!(Some(self.values.borrow()[slot]), token, "the value of {number:#x} was overwritten");
            }
            oracle.completed += 1;
        }
    }

    fn slot(&self, idx: u32) -> Option<usize> {
        let slots = self.geometry.slots;
        (slots != 0).then(|| (idx & (slots - 1)) as usize)
    }

    fn write(&self, idx: u32) {
        let mut oracle = self.oracle.borrow_mut();
        let number = oracle.next;
        assert_eq!(idx, number as u32, "numbers are given in order");
        let Geometry { sq_size, max_batch, slots } = self.geometry;
        assert!(oracle.open.len() < sq_size as usize, "the ring overflows at {number:#x}");
        assert!(number - oracle.rung < max_batch.into(), "too many are not rung at {number:#x}");
        if let Some(slot) = self.slot(idx) {
            let lap = number & !u64::from(slots - 1);
            assert!(oracle.open.range(..lap).next().is_none(), "{number:#x} begins before the lap before is complete");
            self.values.borrow_mut()[slot] = number;
        }
        oracle.open.insert(number, number);
        oracle.next += 1;
    }

    fn post(&self, aggregate: bool, is_exclusive: bool) {
        let write = |idx| self.write(idx);
        let posted = match (self.by_lock, is_exclusive) {
            (true, _) => locked::post(self, NoLimits, aggregate, write),
            (false, true) => exclusive::post(self, NoLimits, aggregate, write),
            (false, false) => combining::post(self, NoLimits, aggregate, write),
        };
        assert_eq!(posted, Ok(()));
        let oracle = self.oracle.borrow();
        assert!(aggregate || oracle.rung == oracle.next, "a plain post rings for all before it");
    }

    fn flush(&self) {
        assert_eq!(flush::flush(self, self.by_lock, None, NoLimits).failure(), 0);
        let oracle = self.oracle.borrow();
        assert!(oracle.open.is_empty() && oracle.rung == oracle.next, "the flush returned early");
    }
}

impl Queue for &Card {
    fn completed(&self) -> u32 {
        self.run();
        self.oracle.borrow().completed as u32 & COUNT_MASK
    }
    fn failed(&self) -> bool {
        false
    }
    fn sq_size(&self) -> u32 {
        self.geometry.sq_size
    }
    fn max_batch(&self) -> u32 {
        self.geometry.max_batch
    }
    fn value_slots(&self) -> u32 {
        self.geometry.slots
    }
    fn fence(&self) {}
    fn doorbell(&self, count: u32) {
        let mut oracle = self.oracle.borrow_mut();
        let step = count.wrapping_sub(oracle.rung as u32);
        assert!(
            step != 0 && step <= self.geometry.max_batch,
            "the doorbell went from {:#x} to {count:#x}",
            oracle.rung
        );
        oracle.rung += u64::from(step);
        assert!(oracle.rung <= oracle.next, "rung before it was written: {count:#x}");
    }
    fn publish(&self, rung: u32) {
        self.published.store(rung, Relaxed);
    }
    fn published(&self) -> u32 {
        self.published.load(Relaxed)
    }
    fn released(&self) -> u32 {
        self.published()
    }
}

impl combining::CombiningQueue for &Card {
    fn words(&self) -> combining::Words<'_> {
        let Card { cursor, state, bound, poison, .. } = self;
        combining::Words { cursor, state, bound, poison }
    }
}

impl locked::LockedQueue for &Card {
    fn next(&self) -> u32 {
        (self.cursor.load(Relaxed) as u32).wrapping_add(self.pending.load(Relaxed))
    }
    fn pending(&self) -> u32 {
        self.pending.load(Relaxed)
    }
    fn start(&self) {
        self.pending.store(self.pending() + 1, Relaxed);
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

/// Returns where cursors begin: just before each wrap, and anywhere.
fn starts() -> impl Strategy<Value = u64> {
    let wrap = prop_oneof![Just(16u32), Just(26), Just(31), Just(32), Just(33)];
    // Far from 0 in 64 bits, so that the oracle can begin before a wrap.
    let near = (wrap, 0u64..300).prop_map(|(bits, before)| (1 << 40) + (1 << bits) - before);
    prop_oneof![4 => near, 1 => (0u64..1 << 32).prop_map(|low| (1 << 40) + low)]
}

fn geometries() -> impl Strategy<Value = Geometry> {
    (0u32..7, 0u32..6, prop_oneof![Just(None), (0u32..7).prop_map(Some)]).prop_map(|(sq, batch, slots)| {
        let sq_size = 2 << sq;
        let slots = slots.map_or(0, |slots| (1 << slots).min(sq_size));
        Geometry { sq_size, max_batch: (1 << batch).min(16), slots }
    })
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Post { aggregate: bool, is_exclusive: bool },
    Flush,
}

/// Returns steps in any order, in one mode or in both.
fn steps() -> impl Strategy<Value = Vec<Step>> {
    let modes = prop_oneof![Just(vec![false]), Just(vec![true]), Just(vec![false, true])];
    modes.prop_flat_map(|modes| {
        let post = (any::<bool>(), prop::sample::select(modes))
            .prop_map(|(aggregate, is_exclusive)| Step::Post { aggregate, is_exclusive });
        prop::collection::vec(prop_oneof![8 => post, 1 => Just(Step::Flush)], 0..600)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cursors_agree_with_unwrapped_numbers(
        by_lock: bool,
        start in starts(),
        geometry in geometries(),
        seed: u64,
        steps in steps(),
    ) {
        let card = Card::new(by_lock, geometry, start, seed);
        for step in steps {
            match step {
                Step::Post { aggregate, is_exclusive } => card.post(aggregate, is_exclusive),
                Step::Flush => card.flush(),
            }
        }
        card.flush();
    }
}

/// The oracle must find each error that a guard prevents.
mod noticed {
    use super::*;

    const GEOMETRY: Geometry = Geometry { sq_size: 4, max_batch: 4, slots: 2 };

    fn card() -> Card {
        Card::new(false, GEOMETRY, (1 << 40) + (1 << 31) - 2, 1)
    }

    #[test]
    #[should_panic(expected = "before the lap before is complete")]
    fn oracle_finds_early_reuse_of_slot() {
        let card = card();
        (0..3).for_each(|i| card.write((1u32 << 31).wrapping_sub(2) + i));
    }

    #[test]
    #[should_panic(expected = "rung before it was written")]
    fn oracle_finds_early_doorbell() {
        let card = card();
        card.write((1 << 31) - 2);
        Queue::doorbell(&&card, 1 << 31);
    }

    #[test]
    #[should_panic(expected = "the doorbell went")]
    fn oracle_finds_doorbell_that_goes_back() {
        let card = card();
        card.write((1 << 31) - 2);
        Queue::doorbell(&&card, (1 << 31) - 3);
    }
}
