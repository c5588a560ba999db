//! Cursors near every wrap, under both policies, against an oracle that counts in 64 bits and never wraps.
//!
//! One thread posts and flushes in a random sequence. The card completes requests in random order, each time its count
//! is read. The oracle knows by number which requests are complete; the posting code only has counts.

use super::Geometry;
use super::card::{Card, Config, Doorbell, Engine, Poster, Runner};
use super::ops::Policy;
use crate::wait::Limit;
use ferrogin_test_support::Random;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Numbers of requests, which don't wrap; their low 32 bits are the cursors'.
struct Numbers {
    /// The first request. Its token is 1.
    first: u64,
    /// The next request to be written.
    next: u64,
    /// The next request to be rung.
    rung: u64,
    /// Requests that are written but not complete. The card may still read their slots.
    open: BTreeSet<u64>,
}

impl Numbers {
    fn token(&self, number: u64) -> u32 {
        (number - self.first) as u32 + 1
    }
}

/// Drives the card, and knows the number of every request.
struct Oracle<'a> {
    card: &'a Card,
    engine: RefCell<Engine>,
    numbers: RefCell<Numbers>,
    random: RefCell<Random>,
}

impl<'a> Oracle<'a> {
    /// Creates an oracle for a card whose cursors begin at the low half of `first`.
    fn new(card: &'a Card, first: u64, seed: u64) -> Self {
        let numbers = Numbers { first, next: first, rung: first, open: BTreeSet::new() };
        let (numbers, random) = (RefCell::new(numbers), RefCell::new(Random::new(seed)));
        Oracle { card, engine: RefCell::new(Engine::new(card)), numbers, random }
    }

    fn poster(&self) -> Poster<'_, &Self> {
        Poster::new(self.card, 0, self)
    }

    fn post(&self, policy: Policy, aggregate: bool) {
        let token = { self.numbers.borrow().token(self.numbers.borrow().next) };
        assert_eq!(self.poster().post_by(policy, aggregate, token), Ok(()));
        let numbers = self.numbers.borrow();
        assert!(aggregate || numbers.rung == numbers.next, "a plain post rings for all before it");
    }

    fn flush(&self) {
        assert_eq!(self.poster().flush(), Ok(()));
        let numbers = self.numbers.borrow();
        assert!(numbers.open.is_empty() && numbers.rung == numbers.next, "the flush returned early");
    }
}

impl Limit for &Oracle<'_> {
    fn stop_word(&self) -> u32 {
        0
    }
}

impl Runner for &Oracle<'_> {
    /// Completes some rung requests, in any order.
    fn before_count(&self) {
        let (mut engine, mut random) = (self.engine.borrow_mut(), self.random.borrow_mut());
        engine.fetch(self.card);
        for _ in 0..random.index(engine.open() + 1) {
            let at = random.index(engine.open());
            let token = engine.complete(self.card, at);
            let mut numbers = self.numbers.borrow_mut();
            let number = numbers.first + u64::from(token) - 1;
            numbers.open.remove(&number);
        }
    }

    fn before_write(&self, idx: u32) {
        let mut numbers = self.numbers.borrow_mut();
        let number = numbers.next;
        assert_eq!(idx, number as u32, "numbers are given in order");
        let Config { sq_size, max_batch, slots, .. } = self.card.config;
        assert!(numbers.open.len() < sq_size as usize, "the ring overflows at {number:#x}");
        assert!(number - numbers.rung < max_batch.into(), "too many are not rung at {number:#x}");
        if slots != 0 {
            let lap = number & !u64::from(slots - 1);
            assert!(numbers.open.range(..lap).next().is_none(), "{number:#x} begins before the lap before is complete");
        }
        numbers.open.insert(number);
        numbers.next += 1;
    }

    fn before_doorbell(&self, count: u32) {
        let mut numbers = self.numbers.borrow_mut();
        let step = count.wrapping_sub(numbers.rung as u32);
        let most = self.card.config.max_batch;
        assert!(step != 0 && step <= most, "the doorbell went from {:#x} to {count:#x}", numbers.rung);
        numbers.rung += u64::from(step);
        assert!(numbers.rung <= numbers.next, "rung before it was written: {count:#x}");
    }
}

/// A card whose cursors begin at the low half of `first`.
fn card(policy: Policy, Geometry { sq_size, max_batch, slots }: Geometry, first: u64, posts: u32) -> Card {
    let config = Config {
        policy,
        in_context: false,
        start: first as u32,
        sq_size,
        max_batch,
        slots,
        doorbell: Doorbell::Early,
        fails: false,
        mutation: None,
        posters: &[],
    };
    Card::new(config, posts)
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
        let policy = |is_exclusive| match (by_lock, is_exclusive) {
            (true, _) => Policy::Locked,
            (false, true) => Policy::Exclusive,
            (false, false) => Policy::Combining,
        };
        let card = card(policy(false), geometry, start, steps.len() as u32);
        let oracle = Oracle::new(&card, start, seed);
        for step in steps {
            match step {
                Step::Post { aggregate, is_exclusive } => oracle.post(policy(is_exclusive), aggregate),
                Step::Flush => oracle.flush(),
            }
        }
        oracle.flush();
    }
}

/// The oracle must find each error that a guard prevents.
mod noticed {
    use super::*;
    use crate::post::model::Backend;

    const FIRST: u64 = (1 << 40) + (1 << 31) - 2;

    /// Writes `n` requests from the first on, and rings the doorbell for `count`.
    fn write_and_ring(n: u32, count: Option<u32>) {
        let card = card(Policy::Combining, Geometry { sq_size: 4, max_batch: 4, slots: 2 }, FIRST, 3);
        let oracle = Oracle::new(&card, FIRST, 1);
        let poster = oracle.poster();
        (0..n).for_each(|i| poster.write((FIRST as u32).wrapping_add(i), 1 + i));
        count.into_iter().for_each(|count| poster.doorbell(count));
    }

    #[test]
    #[should_panic(expected = "before the lap before is complete")]
    fn oracle_finds_early_reuse_of_slot() {
        write_and_ring(3, None);
    }

    #[test]
    #[should_panic(expected = "rung before it was written")]
    fn oracle_finds_early_doorbell() {
        write_and_ring(1, Some(1 << 31));
    }

    #[test]
    #[should_panic(expected = "the doorbell went")]
    fn oracle_finds_doorbell_that_goes_back() {
        write_and_ring(1, Some((1 << 31) - 3));
    }
}
