//! What the file shows: open contexts and cards, and the totals of closed ones.

use super::card::{self, Card, CardTotals};
use super::source::{Numbers, Queue, Source};
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct State {
    pub stop: bool,
    pub next: u64,
    pub comms: u64,
    /// By the number that the guards hold.
    pub contexts: BTreeMap<u64, Source>,
    /// By communicator number.
    pub rails: BTreeMap<u64, Vec<Card>>,
    /// Numbers of closed contexts, so that totals never decrease.
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
    /// Reads all contexts' memory and all cards.
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
