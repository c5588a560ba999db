//! What is known at a moment: which requests have completed, and what of the launches has happened.

use crate::clock::{Clock, Key, joined};
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
        let certain = |knows: &dyn Fn(&Self) -> bool| {
            let with: u64 = arrivals.iter().filter(|arrival| knows(&arrival.1)).map(|arrival| arrival.0).sum();
            total - with < least
        };
        let mut all = Self::default();
        arrivals.iter().for_each(|arrival| all.join(&arrival.1));
        if arrivals.iter().all(|arrival| total - arrival.0 < least) {
            return all;
        }
        let mut facts = Self::default();
        let requests = (0..all.done.len() * 64).filter(|&request| all.has(request));
        requests.filter(|&request| certain(&|facts| facts.has(request))).for_each(|request| facts.complete(request));
        for (&launch, clock) in &all.launches {
            if certain(&|facts| facts.launches.get(&launch).is_some_and(Option::is_none)) {
                facts.end(launch);
                continue;
            }
            let mut clock = clock.as_deref().cloned().unwrap_or_default();
            for arrival in arrivals {
                // Of a launch that has ended in what some know, what others know for certain is in their clocks.
                if let Some(Some(known)) = arrival.1.launches.get(&launch) {
                    known.entries().iter().for_each(|&(key, stamp)| clock.raise(key, stamp));
                }
            }
            let mut seen = Clock::default();
            for &(key, _) in clock.entries() {
                // The latest stamp that enough of them know.
                let mut stamps: Vec<u32> = arrivals.iter().flat_map(|arrival| arrival.1.stamps(launch, key)).collect();
                stamps.sort_unstable_by(|one, other| other.cmp(one));
                stamps.dedup();
                if let Some(stamp) =
                    stamps.into_iter().find(|&stamp| certain(&|facts| facts.covers(launch, key, stamp)))
                {
                    seen.raise(key, stamp);
                }
            }
            facts.see(launch, &Rc::new(seen));
        }
        facts
    }

    fn stamps(&self, launch: u32, key: Key) -> Option<u32> {
        let clock = self.launches.get(&launch)?.as_ref()?;
        Some(clock.seen(key)).filter(|stamp| *stamp > 0)
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
