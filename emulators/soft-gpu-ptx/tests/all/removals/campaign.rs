//! Tries removals under many seeds.

use super::card::{lines, load, outcome};
use super::sites::{Change, Pause, Site, changed, sites};
use super::work::Work;
use ferrogin_test_support::repetitions;
use soft_gpu_ptx::Loaded;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many seeds to search for a removal that was found before.
const MAX_SEEDS: u64 = 1000;

/// Returns where the threads pause under a seed.
pub fn pause_of(seed: u64) -> Pause {
    Pause::ALL[seed as usize / 3 % Pause::ALL.len()]
}

/// A seed that exposes a removal.
#[derive(Clone, Debug)]
pub struct Shown {
    pub seed: u64,
    /// The workload, and what went wrong.
    pub how: String,
}

/// The campaign's verdict on a removal.
#[derive(Clone, Debug)]
pub enum Verdict {
    Found(Shown),
    /// This many workloads reach the site, but no seed exposes the removal.
    Unseen(usize),
    Unreached,
}

impl Verdict {
    pub fn name(&self) -> &'static str {
        match self {
            Verdict::Found(_) => "found",
            Verdict::Unseen(_) => "unseen",
            Verdict::Unreached => "unreached",
        }
    }
}

/// The changed module, for each pause.
struct Removal<'a> {
    text: &'a str,
    lines: &'a [usize],
    change: Change,
    loaded: [OnceCell<Loaded>; Pause::ALL.len()],
}

impl<'a> Removal<'a> {
    fn new(text: &'a str, lines: &'a [usize], change: Change) -> Self {
        Self { text, lines, change, loaded: Default::default() }
    }

    /// Checks that the pause alone is harmless.
    fn check_pause(&self, work: &Work, seed: u64) {
        let pause = pause_of(seed);
        let alone = load(&changed(self.text, self.lines, Change::Keep, pause));
        let outcome = outcome(&alone, work, seed);
        assert!(outcome.is_ok(), "seed {seed}, {:?}: a pause {pause:?} alone is wrong: {outcome:?}", work.kind);
    }

    /// Runs the workload, and returns what went wrong, if anything.
    fn try_work(&self, work: &Work, seed: u64) -> Option<Shown> {
        let pause = pause_of(seed);
        let loaded =
            self.loaded[pause as usize].get_or_init(|| load(&changed(self.text, self.lines, self.change, pause)));
        let wrong = outcome(loaded, work, seed).err()?;
        Some(Shown { seed, how: format!("{:?}, pause {pause:?}: {wrong}", work.kind) })
    }
}

/// The module, and the workloads of all seeds.
pub struct Campaign {
    pub text: String,
    pub sites: BTreeMap<Site, Vec<usize>>,
    /// Each seed's workloads, and the lines that each executes.
    works: Vec<Vec<(Work, BTreeSet<usize>)>>,
}

impl Campaign {
    /// Runs all workloads on the unchanged module.
    ///
    /// # Panics
    /// If a workload goes wrong.
    pub fn new(text: String) -> Self {
        let unchanged = load(&text);
        let works = in_parallel(&seeds().collect::<Vec<_>>(), |&seed| {
            let run = |work: Work| match lines(&unchanged, &work, seed) {
                Ok(lines) => (work, lines),
                Err(wrong) => panic!("seed {seed}, {:?}: the module is wrong: {wrong}", work.kind),
            };
            Work::of(seed).into_iter().map(run).collect()
        });
        Self { sites: sites(&text), text, works }
    }

    /// Tries a removal under all seeds until one exposes it, and under more seeds if it was found before the module
    /// changed.
    pub fn verdict(&self, site: &Site, change: Change, was_found: bool) -> Verdict {
        let sites = &self.sites[site];
        let removal = Removal::new(&self.text, sites, change);
        let mut reached = 0;
        for (seed, works) in self.works.iter().enumerate() {
            for (work, _) in works.iter().filter(|(_, lines)| sites.iter().any(|line| lines.contains(line))) {
                reached += 1;
                if let Some(shown) = removal.try_work(work, seed as u64) {
                    removal.check_pause(work, seed as u64);
                    return Verdict::Found(shown);
                }
            }
        }
        let more = if was_found { self.works.len() as u64..MAX_SEEDS } else { 0..0 };
        for seed in more {
            if let Some(shown) = Work::of(seed).iter().find_map(|work| removal.try_work(work, seed)) {
                return Verdict::Found(shown);
            }
        }
        if reached == 0 { Verdict::Unreached } else { Verdict::Unseen(reached) }
    }
}

/// Returns the result of the seed's first workload that exposes the removal.
pub fn shown_by(text: &str, lines: &[usize], change: Change, seed: u64) -> Option<Shown> {
    let removal = Removal::new(text, lines, change);
    Work::of(seed).iter().find_map(|work| removal.try_work(work, seed))
}

/// Returns a campaign's seeds.
pub fn seeds() -> std::ops::Range<u64> {
    0..repetitions("SOFTGPU_REMOVAL_SEEDS", 200, 200)
}

/// Processes all items on two threads, and returns the results in order.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(items.len()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((at, item)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, items.get(at)?)))
                {
                    let result = of(item);
                    results.lock().expect("no thread panics with the lock").push((at, result));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no thread panics with the lock");
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}
