//! The posting code under loom: all interleavings of a few posters and the card, up to loom's bound on preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p ferrogin-device-kernels --lib`
//!
//! Doorbells are run early and late, and the card completes requests in the configured order. For each property, a
//! configuration that breaks it must fail.

mod checks;

use super::card::{Card, Config, Doorbell, Engine, Order, Poster, Runner};
use super::ops::{
    Mutation,
    Op::{self, Aggregated, AggregatedGroup, Flush, Group, Put},
    Policy,
};
use crate::wait::Limit;
use loom::sync::Arc;
use loom::thread;
use std::cell::Cell;
// Loom doesn't know these words, so it doesn't branch its schedule on them.
use std::sync::atomic::{AtomicU32 as Count, Ordering::SeqCst};

/// Rounds of a wait in which loom branches its schedule.
const BRANCHING_ROUNDS: u32 = 1;
/// Limit on the rounds of one wait: a wait with more never ends.
const MAX_ROUNDS: u32 = 400;

const BASE: Config = Config {
    policy: Policy::Combining,
    in_context: false,
    start: 0,
    sq_size: 4,
    max_batch: 2,
    slots: 0,
    doorbell: Doorbell::Early,
    fails: false,
    mutation: None,
    order: Order::Newest,
    preemptions: 2,
    posters: &[],
};

/// The rounds of a poster's current operation.
#[derive(Default)]
struct Rounds(Cell<u32>);

impl Limit for &Rounds {
    fn stop_word(&self) -> u32 {
        self.0.set(self.0.get() + 1);
        assert!(self.0.get() < MAX_ROUNDS, "a wait does not end");
        if self.0.get() > BRANCHING_ROUNDS {
            // An unfair schedule may never end, so from here on loom takes one fair schedule.
            loom::skip_branch();
        }
        0
    }
}

impl Runner for &Rounds {
    fn begin(&self) {
        self.0.set(0);
    }
}

/// Runs the card until every request is delivered, or all posters have `finished` and ring no more. Returns the tokens
/// in the order of completion.
fn run_card(card: &Card, finished: &Count) -> Vec<u32> {
    let (posts, posters) = (card.config.posts() as usize, card.config.posters.len() as u32);
    let mut engine = Engine::new(card);
    let mut idle = 0;
    loop {
        let all_left = finished.load(SeqCst) == posters;
        engine.fetch(card);
        let delivered = engine.delivered.len();
        let at = match (engine.open(), card.config.order) {
            // A few polls, because a rung doorbell may not be visible at once.
            (0, _) if delivered == posts || all_left && idle > 3 => return engine.delivered,
            (0, _) => {
                idle = if all_left { idle + 1 } else { 0 };
                thread::yield_now();
                continue;
            }
            (_, Order::Oldest) => 0,
            (n, Order::Newest) => n - 1,
            (n, Order::Alternating) => (delivered & 1) * (n - 1),
        };
        engine.complete(card, at);
    }
}

/// Explores one configuration and counts its interleavings; panics if a property doesn't hold.
fn explore(config: Config) -> u32 {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(config.preemptions);
    builder.max_branches = 100_000;
    let count = std::sync::Arc::new(Count::new(0));
    let counted = count.clone();
    builder.check(move || {
        counted.fetch_add(1, SeqCst);
        let card = Arc::new(Card::new(config, config.posts()));
        let finished = std::sync::Arc::new(Count::new(0));
        let posters: Vec<_> = config
            .posters()
            .map(|(id, ops, first)| {
                let (card, finished) = (card.clone(), finished.clone());
                thread::spawn(move || {
                    let rounds = Rounds::default();
                    Poster::new(&card, id, &rounds).run(ops, first);
                    finished.fetch_add(1, SeqCst);
                })
            })
            .collect();
        // This thread is the card.
        let mut delivered = run_card(&card, &finished);
        for poster in posters {
            poster.join().unwrap();
        }
        delivered.sort_unstable();
        let want: Vec<u32> = (1..=config.posts()).collect();
        assert_eq!(delivered, want, "every post is delivered once");
    });
    count.load(SeqCst)
}
