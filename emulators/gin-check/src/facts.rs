//! What is known at a moment: which requests have completed, and what of the launches has happened.

use crate::clock::{Clock, Key, joined};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What is known at a moment.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The requests that have completed, as bits.
    done: Vec<u64>,
    /// What of each launch has happened; `None`: all of it.
    launches: BTreeMap<u32, Option<Rc<Clock>>>,
}

impl Facts {
    /// Whether a request has completed.
    pub fn has(&self, request: usize) -> bool {
        self.done.get(request / 64).is_some_and(|word| word >> (request % 64) & 1 == 1)
    }

    /// Adds a request that has completed.
    pub fn complete(&mut self, request: usize) {
        if self.done.len() <= request / 64 {
            self.done.resize(request / 64 + 1, 0);
        }
        self.done[request / 64] |= 1 << (request % 64);
    }

    /// Whether what `key` did at `stamp` of a launch has happened.
    pub fn covers(&self, launch: u32, key: Key, stamp: u32) -> bool {
        self.launches.get(&launch).is_some_and(|clock| clock.as_ref().is_none_or(|clock| clock.covers(key, stamp)))
    }

    /// Adds all of a launch.
    pub fn end(&mut self, launch: u32) {
        self.launches.insert(launch, None);
    }

    /// Adds what of a launch is in a clock.
    pub fn see(&mut self, launch: u32, clock: &Rc<Clock>) {
        match self.launches.entry(launch).or_insert_with(|| Some(Rc::default())) {
            None => {}
            Some(known) => *known = joined(known, clock),
        }
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty() && self.launches.is_empty()
    }

    /// Returns a number that grows with what is known.
    pub fn size(&self) -> usize {
        let done: u32 = self.done.iter().map(|word| word.count_ones()).sum();
        let seen = self.launches.values().map(|clock| {
            clock.as_ref().map_or(1 << 24, |clock| clock.entries().iter().map(|entry| entry.1 as usize).sum::<usize>())
        });
        done as usize + seen.sum::<usize>()
    }

    /// Returns what is known for certain if some of the arrivals have happened that count `least` together: what so
    /// many of them know that the others count less.
    pub fn of_any(arrivals: &[(u64, Rc<Self>)], least: u64) -> Self {
        let total: u64 = arrivals.iter().map(|arrival| arrival.0).sum();
        let mut all = Self::default();
        arrivals.iter().for_each(|arrival| all.join(&arrival.1));
        if arrivals.iter().all(|arrival| total - arrival.0 < least) {
            return all;
        }
        let mut facts = Self { done: vec![0; all.done.len()], ..Self::default() };
        for (at, done) in facts.done.iter_mut().enumerate() {
            // In a loop, most arrivals know the same here as the one before.
            let mut counts: Vec<(u64, u64)> = Vec::new();
            for (count, known) in arrivals {
                let word = known.done.get(at).copied().unwrap_or(0);
                match counts.last_mut() {
                    Some(last) if last.0 == word => last.1 += count,
                    _ => counts.push((word, *count)),
                }
            }
            for bit in 0..64 {
                let without: u64 = counts.iter().filter(|(word, _)| word >> bit & 1 == 0).map(|(_, count)| count).sum();
                *done |= u64::from(without < least) << bit;
            }
        }
        for (&launch, clock) in &all.launches {
            let mut keys = clock.as_deref().cloned().unwrap_or_default();
            for (_, known) in arrivals {
                // Of a launch that has ended in what some know, what others know for certain is in their clocks.
                if let Some(Some(clock)) = known.launches.get(&launch) {
                    clock.entries().iter().for_each(|&(key, stamp)| keys.raise(key, stamp));
                }
            }
            // The latest stamp that enough of them know.
            let certain = |stamp_of: &dyn Fn(&Self) -> u32| {
                let mut stamps: Vec<_> =
                    arrivals.iter().map(|(count, known)| (Reverse(stamp_of(known)), count)).collect();
                stamps.sort_unstable();
                let mut without = total;
                let enough = stamps.into_iter().find(|(_, count)| {
                    without -= *count;
                    without < least
                });
                enough.map_or(0, |(Reverse(stamp), _)| stamp)
            };
            if certain(&|known| u32::from(known.launches.get(&launch).is_some_and(Option::is_none))) > 0 {
                facts.end(launch);
                continue;
            }
            let mut seen = Clock::default();
            for &(key, _) in keys.entries() {
                let stamp = certain(&|known| known.stamp(launch, key));
                if stamp > 0 {
                    seen.raise(key, stamp);
                }
            }
            facts.see(launch, &Rc::new(seen));
        }
        facts
    }

    /// The last of what `key` did in a launch that has happened.
    fn stamp(&self, launch: u32, key: Key) -> u32 {
        self.launches.get(&launch).map_or(0, |clock| clock.as_ref().map_or(u32::MAX, |clock| clock.seen(key)))
    }

    /// Adds what `other` has.
    pub fn join(&mut self, other: &Self) {
        if self.done.len() < other.done.len() {
            self.done.resize(other.done.len(), 0);
        }
        self.done.iter_mut().zip(&other.done).for_each(|(own, other)| *own |= other);
        for (launch, clock) in &other.launches {
            match clock {
                None => self.end(*launch),
                Some(clock) => self.see(*launch, clock),
            }
        }
    }
}
