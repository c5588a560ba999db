//! Random programs of a few threads. The oracle keeps for each thread the set of all earlier accesses that it has seen,
//! where the detector has clocks that are compressed by warp and block.

use gin_check::race::Detector;
use proptest::prelude::*;
use soft_gpu_ptx::{Access, BulkStart, Does, MbarrierUse, Observer, Ordering, Reach, Who};
use std::collections::HashMap;

/// Threads of a block: a full warp, and a thread of another.
const THREADS: u32 = 33;
/// Those that access memory.
const ACTIVE: [u32; 3] = [0, 1, 32];

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Block, active thread, word, shared, what, strength.
    Access(u32, usize, u64, bool, Does, Option<Ordering>),
    Fence(u32, usize, Ordering),
    Barrier(u32),
    /// The first warp waits; with `true`, the other thread has arrived and goes on.
    Warps(u32, bool),
    /// Lanes of the first warp: two, or all.
    Lanes(u32, bool),
}

fn reach() -> impl Strategy<Value = Reach> {
    prop_oneof![Just(Reach::Block), Just(Reach::Gpu), Just(Reach::System)]
}

fn ordering() -> impl Strategy<Value = Ordering> {
    (any::<bool>(), any::<bool>(), reach()).prop_map(|(acquires, releases, reach)| Ordering {
        acquires,
        releases,
        reach,
    })
}

fn step() -> impl Strategy<Value = Step> {
    let does = prop_oneof![Just(Does::Load), Just(Does::Store), Just(Does::Update)];
    let access = (0..2u32, 0..ACTIVE.len(), 0..3u64, any::<bool>(), does, prop::option::of(ordering()));
    let access = access.prop_map(|(block, thread, word, shared, does, ordering)| {
        let sane = match does {
            Does::Load => ordering.map(|ordering| Ordering { releases: false, ..ordering }),
            Does::Store => ordering.map(|ordering| Ordering { acquires: false, ..ordering }),
            // Atomics are strong.
            Does::Update => ordering.or(Some(Ordering { acquires: false, releases: false, reach: Reach::Gpu })),
        };
        Step::Access(block, thread, word, shared, does, sane)
    });
    let fence = Ordering { acquires: true, releases: true, reach: Reach::Gpu };
    prop_oneof![
        8 => access,
        2 => (0..2u32, 0..ACTIVE.len(), reach())
            .prop_map(move |(block, thread, reach)| Step::Fence(block, thread, Ordering { reach, ..fence })),
        1 => (0..2u32).prop_map(Step::Barrier),
        1 => (0..2u32, any::<bool>()).prop_map(|(block, arrives)| Step::Warps(block, arrives)),
        1 => (0..2u32, any::<bool>()).prop_map(|(block, all)| Step::Lanes(block, all)),
    ]
}

/// Sets of steps.
type Set = u128;

#[derive(Clone, Copy)]
struct Entry {
    step: usize,
    who: Who,
    strong: Option<Reach>,
}

#[derive(Default)]
struct Cell {
    /// The last weak write, and the last strong one after it.
    writes: [Option<Entry>; 2],
    reads: Vec<Entry>,
}

#[derive(Default)]
struct Oracle {
    sees: HashMap<Who2, Set>,
    fenced: HashMap<Who2, (Reach, Set)>,
    pending: HashMap<(Who2, bool), Set>,
    words: HashMap<(u32, u64), (Set, u32, Reach)>,
    cells: HashMap<(u32, u64), Cell>,
}

type Who2 = (u32, u32);

impl Oracle {
    fn meet(&mut self, threads: &[Who2], more: Set) {
        let all = threads.iter().fold(more, |all, who| all | self.sees.get(who).copied().unwrap_or(0));
        for who in threads {
            self.sees.insert(*who, all);
        }
    }

    /// Whether the access races with the last write, or a read since.
    fn access(&mut self, step: usize, who: Who, place: (u32, u64), does: Does, ordering: Option<Ordering>) -> bool {
        let key = (who.block, who.thread);
        let sees = self.sees.get(&key).copied().unwrap_or(0);
        let strong = ordering.map(|ordering| ordering.reach);
        let cell = self.cells.entry(place).or_default();
        let apart = |entry: &Entry| {
            let both = strong.zip(entry.strong).map(|(one, other)| one.min(other));
            let fine = both.is_some_and(|reach| reach > Reach::Block || entry.who.block == who.block);
            entry.who != who && sees >> entry.step & 1 == 0 && !fine
        };
        let polled = cell.reads.iter().any(|read| read.who == who && read.strong.is_some());
        let mut races = cell.writes.iter().flatten().any(apart) && !polled;
        let entry = Entry { step, who, strong };
        if does == Does::Load {
            cell.reads.push(entry);
        } else {
            races |= cell.reads.iter().any(apart);
            let weak = if strong.is_some() { cell.writes[0] } else { Some(entry) };
            *cell = Cell { writes: [weak, strong.map(|_| entry)], reads: Vec::new() };
        }
        self.sees.insert(key, sees | 1 << step);
        self.synchronize(who, place, does, ordering);
        races
    }

    fn synchronize(&mut self, who: Who, place: (u32, u64), does: Does, ordering: Option<Ordering>) {
        let key = (who.block, who.thread);
        let Some(ordering) = ordering else {
            if does == Does::Store {
                self.words.remove(&place);
            }
            return;
        };
        let found = self.words.get(&place).copied();
        let visible = found.filter(|word| word.1 == who.block || word.2.min(ordering.reach) > Reach::Block);
        if does != Does::Store
            && let Some((set, block, _)) = visible
        {
            if ordering.acquires {
                *self.sees.entry(key).or_default() |= set;
            } else {
                *self.pending.entry((key, block != who.block)).or_default() |= set;
            }
        }
        if does == Does::Load {
            return;
        }
        let own = self.sees.get(&key).copied().unwrap_or(0);
        let fenced = self.fenced.get(&key).map(|&(reach, set)| (reach.min(ordering.reach), set));
        let released = if ordering.releases { Some((ordering.reach, own)) } else { fenced };
        match (released, does) {
            (None, Does::Store) => drop(self.words.remove(&place)),
            (None, _) => {}
            (Some((reach, set)), does) => {
                let before = found.filter(|_| does == Does::Update).map_or(0, |word| word.0);
                self.words.insert(place, (set | before, who.block, reach));
            }
        }
    }
}

/// Runs a program up to its first race. Returns which step that is for the oracle, and for the detector.
fn first_races(steps: &[Step]) -> (Option<usize>, Option<usize>) {
    let mut detector = Detector::new(vec![false; 256].into(), false);
    let mut oracle = Oracle::default();
    let all: Vec<u32> = (0..THREADS).collect();
    (0..2).for_each(|block| detector.begin(block, THREADS, 64));
    for (at, step) in steps.iter().enumerate() {
        let mut expected = false;
        match *step {
            Step::Access(block, thread, word, shared, does, ordering) => {
                let who = Who { block, thread: ACTIVE[thread] };
                let (site, address) = (at as u32, 64 + 4 * word);
                let (bytes, mmio, value, changes) = (4, false, 0, true);
                // Nobody may read what nobody wrote, so that isn't tried here.
                let place = (if shared { block } else { u32::MAX }, address);
                if shared
                    && does == Does::Load
                    && oracle.cells.get(&place).is_none_or(|cell| cell.writes.iter().flatten().next().is_none())
                {
                    continue;
                }
                expected = oracle.access(at, who, place, does, ordering);
                detector.access(who, &Access { site, shared, address, bytes, does, ordering, mmio, value, changes });
            }
            Step::Fence(block, thread, ordering) => {
                let who = Who { block, thread: ACTIVE[thread] };
                let key = (block, who.thread);
                for far in [false, true] {
                    if (!far || ordering.reach > Reach::Block)
                        && let Some(set) = oracle.pending.remove(&(key, far))
                    {
                        *oracle.sees.entry(key).or_default() |= set;
                    }
                }
                let sees = oracle.sees.get(&key).copied().unwrap_or(0);
                oracle.fenced.insert(key, (ordering.reach, sees));
                detector.fence(who, at as u32, ordering);
            }
            Step::Barrier(block) => {
                oracle.meet(&all.iter().map(|&thread| (block, thread)).collect::<Vec<_>>(), 0);
                all.iter().for_each(|&thread| detector.arrive(Who { block, thread }, 0, true));
                detector.barrier(block, 0);
            }
            Step::Warps(block, arrives) => {
                let other = oracle.sees.get(&(block, 32)).copied().filter(|_| arrives).unwrap_or(0);
                oracle.meet(&all[..32].iter().map(|&thread| (block, thread)).collect::<Vec<_>>(), other);
                if arrives {
                    detector.arrive(Who { block, thread: 32 }, 1, false);
                }
                all[..32].iter().for_each(|&thread| detector.arrive(Who { block, thread }, 1, true));
                detector.barrier(block, 1);
            }
            Step::Lanes(block, whole) => {
                let lanes = if whole { 32 } else { 2 };
                oracle.meet(&all[..lanes].iter().map(|&thread| (block, thread)).collect::<Vec<_>>(), 0);
                detector.warp(block, 0, if whole { u32::MAX } else { 3 }, true, at as u32);
            }
        }
        let found = !detector.found().is_empty();
        if expected || found {
            return (expected.then_some(at), found.then_some(at));
        }
    }
    (None, None)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_first_race_is_the_oracles(steps in prop::collection::vec(step(), 1..100)) {
        let (expected, found) = first_races(&steps);
        prop_assert_eq!(expected, found);
    }
}

/// One block of two warps.
struct Program {
    detector: Detector,
    site: u32,
}

impl Program {
    fn new(lenient: bool) -> Self {
        let mut detector = Detector::new(vec![false; 64].into(), lenient);
        detector.begin(0, 64, 4096);
        Self { detector, site: 0 }
    }

    fn access(&mut self, thread: u32, address: u64, bytes: u32, does: Does) {
        self.site += 1;
        let access = Access {
            site: self.site,
            shared: true,
            address,
            bytes,
            does,
            ordering: None,
            mmio: false,
            value: 0,
            changes: true,
        };
        self.detector.access(Who { block: 0, thread }, &access);
    }

    fn copy(&mut self, thread: u32, to_shared: bool, group: u32) {
        self.site += 1;
        let start = BulkStart {
            site: self.site,
            to_shared,
            shared: 0,
            global: 1 << 20,
            bytes: 64,
            mbarrier: 1024,
            sees_mbarrier: true,
            group,
        };
        self.detector.bulk(Who { block: 0, thread }, &start, (0, 1));
    }

    fn pairs(&self) -> Vec<(u32, u32)> {
        self.detector.found().keys().map(|pair| (pair.first, pair.second)).collect()
    }
}

#[test]
fn accesses_of_different_sizes_meet_in_their_bytes() {
    let mut program = Program::new(false);
    program.access(0, 0, 16, Does::Store);
    program.access(32, 15, 1, Does::Load);
    program.access(1, 16, 1, Does::Store);
    program.access(33, 17, 1, Does::Store);
    assert_eq!(program.pairs(), [(1, 2)]);
}

#[test]
fn equal_pairs_are_one_with_a_count() {
    let mut program = Program::new(false);
    for _ in 0..3 {
        program.site = 0;
        program.access(0, 0, 4, Does::Store);
        program.access(32, 0, 4, Does::Load);
    }
    let counts: Vec<_> = program.detector.found().values().map(|example| example.count).collect();
    assert_eq!((program.pairs(), counts), (vec![(1, 2), (2, 1)], vec![3, 2]));
}

#[test]
fn lanes_that_exchange_values_are_ordered_only_leniently() {
    for lenient in [false, true] {
        let mut program = Program::new(lenient);
        program.access(0, 0, 4, Does::Store);
        program.detector.warp(0, 0, 3, false, 60);
        program.access(1, 0, 4, Does::Load);
        assert_eq!(program.pairs().is_empty(), lenient);
    }
}

#[test]
fn a_bulk_copy_reads_late_and_sees_what_a_proxy_fence_shows_it() {
    let run = |fence: bool, wait: Option<bool>| {
        let mut program = Program::new(false);
        program.access(0, 0, 16, Does::Store);
        if fence {
            program.detector.proxy_fence(Who { block: 0, thread: 0 });
        }
        program.copy(0, false, 0);
        if let Some(read) = wait {
            program.detector.bulk_wait(Who { block: 0, thread: 0 }, 1, read);
        }
        program.access(0, 0, 16, Does::Store);
        program.pairs()
    };
    assert_eq!(run(false, Some(true)), [(1, 2)], "no proxy fence");
    assert_eq!(run(true, None), [(2, 3)], "no wait");
    assert_eq!(run(true, Some(true)), []);
}

#[test]
fn who_waits_for_an_mbarrier_has_the_copies_that_arrived_there() {
    for waits in [false, true] {
        let mut program = Program::new(false);
        program.copy(0, true, 0);
        if waits {
            let usage = MbarrierUse::Passed { acquires: true };
            program.detector.mbarrier(Who { block: 0, thread: 40 }, 50, 1024, 1, usage);
        }
        program.access(40, 0, 16, Does::Load);
        assert_eq!(program.pairs().is_empty(), waits);
    }
}

#[test]
fn shared_memory_that_nobody_wrote_is_named() {
    let mut program = Program::new(false);
    program.access(0, 0, 4, Does::Load);
    program.access(0, 4, 4, Does::Store);
    program.access(0, 0, 8, Does::Load);
    assert_eq!(program.pairs(), [(1, 1)]);
}
