//! A simulated card, and runs of workloads on it.

use super::kernel;
use super::work::{Expect, Kind, NUMBERS, POSTS, STEP, THREADS, Work, canonical, pool};
use crate::arena::Arena;
use crate::native::{ENTRIES, FUNCTIONS, MAX_BATCH, Side};
use ferrogin_device::Status;
use ferrogin_test_support::Random;
use soft_gpu_ptx::{Launch, Loaded, Memory, Module, Process, Program, Range, Statistics, Time, Trap, executed, run};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The module whose fences and orderings are removed.
const MODULE: &str = "ferrogin_device.ptx";
/// A workload that ends takes at most a tenth as many instructions.
const WATCHDOG: Duration = Duration::from_nanos(5_000_000);

/// Requests that the card has fetched but not completed, and what went wrong.
#[derive(Default)]
struct Fetched {
    /// The doorbell value of each ring, and how far the card has read.
    rung: Vec<u32>,
    counts: Vec<u32>,
    open: Vec<(usize, Vec<u8>)>,
    found: usize,
    raised: u64,
    idle: u32,
    wrong: Option<String>,
}

/// A card that acts after each of a kernel's MMIO stores, and when all threads wait.
struct Card<'a> {
    work: &'a Work,
    side: Side,
    /// The number of each ring's first request.
    first: Vec<u32>,
    /// The bytes of an unwritten slot of each ring.
    unwritten: Vec<Vec<u8>>,
    pool: u64,
    process: Process,
    data: Arena,
    state: Mutex<(Fetched, Random)>,
    stop: AtomicBool,
}

const DONE: usize = NUMBERS as usize;
const ARRIVED: usize = 2 * DONE;
const REQUESTS: usize = ARRIVED + 2;
const OUT: usize = REQUESTS + THREADS * 16;

impl Card<'_> {
    fn areas(&self) -> [u64; 5] {
        [0, DONE, ARRIVED, REQUESTS, OUT].map(|at| self.data.address() + at as u64 * 8)
    }

    /// Handles a doorbell. The card reads the requests now or later.
    fn ring(&self, state: &mut Fetched, at: usize) -> Result<(), String> {
        let rung = self.side.context.rings[at].doorbell.load(Ordering::SeqCst);
        let new = rung.wrapping_sub(state.rung[at]);
        if new == 0 || new > ENTRIES {
            return Err(format!("ring {at}: doorbell {rung} after {}", state.rung[at]));
        }
        state.rung[at] = rung;
        Ok(())
    }

    /// Checks that no more requests have been written ahead of the doorbell than the card accepts.
    fn check_batches(&self, state: &Fetched) -> Result<(), String> {
        for (at, ring) in self.side.context.rings.iter().enumerate() {
            let idx = state.rung[at].wrapping_add(MAX_BATCH);
            let slot = ring.slot(idx as usize);
            let is_written = slot != self.unwritten[at] && canonical(&slot, self.pool).1 == (idx & ENTRIES != 0);
            if is_written {
                return Err(format!(
                    "ring {at}: request {idx} is written, and only those below {} are rung",
                    state.rung[at]
                ));
            }
        }
        Ok(())
    }

    /// Reads the requests covered by the doorbell.
    fn fetch(&self, state: &mut Fetched, at: usize) -> Result<(), String> {
        let ring = &self.side.context.rings[at];
        while state.counts[at] != state.rung[at] {
            let idx = state.counts[at];
            state.counts[at] = idx.wrapping_add(1);
            if self.work.kind == Kind::Deferred && idx.wrapping_sub(self.first[at]) < self.work.of_nccl() {
                ring.completed.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            let slot = ring.slot(idx as usize);
            let (words, phase) = canonical(&slot, self.pool);
            let key = (at, words);
            let Some(&(_, source)) = self.work.slots.get(&key) else {
                return Err(format!("ring {at}: the bytes of request {idx} are of no post"));
            };
            let covered = self.work.signals.get(&key).into_iter().flatten();
            if let Some(open) = covered.copied().find(|&number| self.data.get(DONE + number) == 0) {
                return Err(format!("ring {at}: signal {idx} covers post {open}, which has not completed"));
            }
            if phase != (idx & ENTRIES != 0) {
                return Err(format!("ring {at}: the phase of request {idx} is that of the lap before"));
            }
            if let Some(source) = source
                && self.data.get(source as usize) != 0x1111_0000 + source
            {
                return Err(format!("ring {at}: request {idx} has a source without its data"));
            }
            state.open.push((at, slot));
            state.found += 1;
        }
        Ok(())
    }

    /// Completes a request, after reading its value again as for a retransmission.
    fn complete(&self, state: &mut Fetched, which: usize) -> Result<(), String> {
        let (at, slot) = state.open.swap_remove(which);
        let ring = &self.side.context.rings[at];
        let Some(&(number, _)) = self.work.slots.get(&(at, canonical(&slot, self.pool).0)) else {
            return Err(format!("ring {at}: the value of a request has changed before its completion"));
        };
        self.data.set(DONE + number, 1);
        ring.completed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Raises signals, as a peer does, and this rank's counters.
    fn raise(&self, state: &mut Fetched) {
        state.raised += 1;
        self.data.set(ARRIVED, state.raised);
        self.data.set(ARRIVED + 1, state.raised);
        let counts = self.side.context.signals.iter().chain(&self.side.context.counters);
        for count in counts.copied().chain(self.side.words) {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Chooses which open request the card completes at an MMIO store, or when all threads wait.
    fn next(&self, open: usize, random: &mut Random, doorbell: Option<bool>) -> Option<usize> {
        let chance = match (self.work.kind, doorbell) {
            (Kind::Stalled, _) => return None,
            (Kind::Newest, Some(doorbell)) => return (doorbell && open > 1).then(|| open - 1),
            (Kind::Aborted | Kind::Locking | Kind::Ringing | Kind::RingingBlock | Kind::RingingWarp, _) | (_, None) => {
                2
            }
            _ => 24,
        };
        (open != 0 && random.one_in(chance)).then(|| random.index(open))
    }

    /// Lets the card act after an MMIO store to `address`, or without one when all threads wait.
    fn act(&self, state: &mut Fetched, random: &mut Random, address: Option<u64>) -> Result<(), String> {
        let rings = &self.side.context.rings;
        if address.is_some() {
            self.check_batches(state)?;
        }
        let rung = rings.iter().position(|ring| address == Some(ring.doorbell.as_ptr() as u64));
        if let Some(at) = rung {
            self.ring(state, at)?;
        }
        let at = if self.work.kind == Kind::Newest { rung } else { None }.unwrap_or_else(|| random.index(rings.len()));
        for at in (0..rings.len()).filter(|ring| address.is_none() || *ring == at || !random.one_in(4)) {
            self.fetch(state, at)?;
        }
        if let Some(which) = self.next(state.open.len(), random, address.map(|_| rung.is_some())) {
            self.complete(state, which)?;
        }
        let raises = if self.work.kind == Kind::Counting {
            random.one_in(2)
        } else {
            (random.one_in(16) || address.is_none()) && state.raised < POSTS as u64
        };
        if raises {
            self.raise(state);
        }
        state.idle = if address.is_none() && state.open.is_empty() { state.idle + 1 } else { 0 };
        // It may take a few hundred turns until the last stores of a lane that waits for others leave it.
        if state.idle > 900 && self.work.kind != Kind::Stalled {
            let rings: Vec<_> =
                rings.iter().map(|ring| (ring.cursors(), ring.completed.load(Ordering::SeqCst))).collect();
            return Err(format!(
                "all threads wait, and the card has nothing to complete; it has fetched {:?} of {rings:?}",
                state.counts
            ));
        }
        Ok(())
    }

    fn step(&self, address: Option<u64>) {
        let (state, random) = &mut *self.state.lock().expect("no thread panics with the card");
        if let Err(wrong) = self.act(state, random, address)
            && state.wrong.is_none()
        {
            state.wrong = Some(wrong);
            self.stop.store(true, Ordering::SeqCst);
        }
    }
}

// SAFETY: the raw pointers point to leaked memory. Only the thread that runs the kernel uses a card.
unsafe impl Sync for Card<'_> {}

// SAFETY: the ranges are those of `Process`; the kernel reaches the leaked context and pool, and arenas that live as
// long as the card.
unsafe impl Memory for Card<'_> {
    fn generation(&self) -> &AtomicU64 {
        self.process.generation()
    }

    fn range(&self, address: u64) -> Option<Range> {
        self.process.range(address)
    }

    fn stored_mmio(&self, address: u64) {
        self.step(Some(address));
    }

    fn idle(&self) {
        self.step(None);
    }
}

/// A workload that is ready to run: the card, and the steps in memory.
struct Ready<'a> {
    card: Card<'a>,
    lists: Arena,
    /// The word of each step's result, the expected result, and the step's kind.
    expected: Vec<(usize, Expect, u64)>,
    launch: Launch,
}

impl<'a> Ready<'a> {
    fn new(work: &'a Work, seed: u64) -> Self {
        let pool = pool();
        let side = work.side(pool);
        let unwritten = side.context.rings.iter().map(|ring| ring.slot(0)).collect();
        let counts = work.before(&side);
        let card = Card {
            work,
            side,
            first: counts.clone(),
            unwritten,
            pool,
            // SAFETY: the kernel reaches the leaked context and pool, and arenas that live as long as the card.
            process: unsafe { Process::new() },
            data: Arena::new(OUT + THREADS),
            state: Mutex::new((Fetched { rung: counts.clone(), counts, ..Fetched::default() }, Random::new(seed))),
            stop: AtomicBool::new(false),
        };
        let lists = Arena::new(THREADS + STEP * work.steps.iter().map(Vec::len).sum::<usize>());
        let mut at = THREADS;
        let mut expected = Vec::new();
        for (thread, steps) in work.steps.iter().enumerate() {
            lists.set(thread, lists.address() + at as u64 * 8);
            for (kind, list, expect) in steps {
                lists.set(at, *kind);
                for (i, &word) in list.iter().enumerate() {
                    lists.set(at + 1 + i, work.word(&card.side, word, card.areas()));
                }
                expected.push((at + 16, *expect, *kind));
                at += STEP;
            }
        }
        let (blocks, threads) = work.shape;
        let mut launch = Launch::new([blocks, 1, 1], [threads, 1, 1], lists.address().to_le_bytes().to_vec());
        launch.seed = seed;
        launch.weak = true;
        // Only the seed decides when a wait times out, and when the watchdog ends the kernel.
        launch.time = Time::Instructions;
        launch.watchdog = Some(WATCHDOG);
        Self { card, lists, expected, launch }
    }

    /// Returns what went wrong, if anything.
    fn check(self, ended: Result<(), Trap>) -> Result<(), String> {
        let (state, _) = self.card.state.into_inner().expect("no thread panics with the card");
        if let Some(wrong) = state.wrong {
            return Err(wrong);
        }
        ended.map_err(|trap| trap.to_string())?;
        let work = self.card.work;
        let waits = !matches!(work.kind, Kind::Stalled | Kind::Aborted);
        if waits && (state.found != work.requests || !state.open.is_empty()) {
            return Err(format!("the card has fetched {} requests of {}", state.found, work.requests));
        }
        for (number, &(at, expect, kind)) in self.expected.iter().enumerate() {
            let found = self.lists.get(at);
            let good = match expect {
                Expect::Any => true,
                Expect::Equal(value) => found == value,
                Expect::AtLeast(value) => found >= value,
                Expect::AtLeastBefore => found >= self.lists.get(self.expected[number - 1].0),
                Expect::Ends => {
                    [0, Status::Timeout as u64, Status::Poisoned as u64, Status::Aborted as u64].contains(&found)
                }
            };
            if !good {
                let name = FUNCTIONS.get(kind as usize).map_or("a load", |function| function.name);
                return Err(format!("step {number}, {name}: {found}, not {expect:?}"));
            }
        }
        Ok(())
    }
}

/// Runs a workload on the module. Returns what it did, or what went wrong.
pub fn outcome(loaded: &Loaded, work: &Work, seed: u64) -> Result<Statistics, String> {
    let ready = Ready::new(work, seed);
    let kernel = loaded.program().kernel("work").expect("the kernel");
    let ended = run(loaded, kernel, &ready.launch, &ready.card, &ready.card.stop);
    let statistics = ended.as_ref().map_or(Statistics::default(), |statistics| *statistics);
    ready.check(ended.map(|_| ())).map(|()| statistics)
}

/// Runs a workload like [`outcome`]. Returns the module's executed lines, counting from 0, or what went wrong.
pub fn lines(loaded: &Loaded, work: &Work, seed: u64) -> Result<BTreeSet<usize>, String> {
    let ready = Ready::new(work, seed);
    let kernel = loaded.program().kernel("work").expect("the kernel");
    let ended = executed(loaded, kernel, &ready.launch, &ready.card, &ready.card.stop);
    let of_module = |(module, line): &(Arc<str>, u32)| (**module == *MODULE).then_some(*line as usize - 1);
    let lines = ended.as_ref().map_or(BTreeSet::new(), |lines| lines.iter().filter_map(of_module).collect());
    ready.check(ended.map(|_| ())).map(|()| lines)
}

pub fn load(text: &str) -> Loaded {
    let module = |name: &str, text: &str| Module::parse(name, text).unwrap_or_else(|error| panic!("{error}"));
    let modules = vec![module("work", &kernel::text()), module(MODULE, text)];
    Arc::new(Program::link(modules).unwrap_or_else(|error| panic!("{error}"))).load(&[])
}
