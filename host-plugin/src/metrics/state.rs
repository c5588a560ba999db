//! What the file shows: the contexts and cards that are open, and the totals of those that were closed.

use super::card::{self, Card, CardTotals};
use super::source::{Numbers, Queue, Source};
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct State {
    pub stop: bool,
    pub next: u64,
    pub comms: u64,
    /// By number, as the guards have it.
    pub contexts: BTreeMap<u64, Source>,
    /// By the number of the communicator.
    pub rails: BTreeMap<u64, Vec<Card>>,
    /// Numbers of contexts that are closed, so that totals never fall.
    pub closed: BTreeMap<ClosedKey, Numbers>,
    pub cards: BTreeMap<String, CardTotals>,
    pub writes: u64,
    pub failed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClosedKey {
    pub rank: usize,
    pub rail: u32,
    pub card: String,
    pub queue: Queue,
}

impl State {
    /// Reads all memory and cards.
    pub fn sample(&mut self) {
        self.contexts.values_mut().for_each(Source::sample);
        for card in self.rails.values().flatten() {
            if let Some(now) = card::statistics(card) {
                self.cards.entry(card.1.domain_name()).or_default().update(&now);
            }
        }
    }

    pub fn close(&mut self, id: u64) {
        let Some(mut source) = self.contexts.remove(&id) else { return };
        source.sample();
        for (queue, numbers) in source.numbers() {
            let key = ClosedKey { rank: source.rank, rail: source.rail, card: source.card.clone(), queue };
            self.closed.entry(key).or_default().add(&numbers);
        }
    }
}
