//! A simulated card, and the run of one work on it.

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

/// The module whose fences and orders are removed.
const MODULE: &str = "ferrogin_device.ptx";
/// Instructions of a work that ends are a tenth of it at most.
const WATCHDOG: Duration = Duration::from_nanos(5_000_000);

/// Requests that the card has fetched and not completed, and what was wrong.
#[derive(Default)]
struct Fetched {
    /// Requests that are rung, and those of them that the card has read.
    rung: Vec<u32>,
    counts: Vec<u32>,
    open: Vec<(usize, Vec<u8>)>,
    found: usize,
    raised: u64,
    idle: u32,
    wrong: Option<String>,
}

/// A card that acts on each MMIO store of a kernel, and when all threads wait.
struct Card<'a> {
    work: &'a Work,
    side: Side,
    /// The numbers of the rings' first requests.
    first: Vec<u32>,
    /// The bytes of a slot that no post has written, of each ring.
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

    /// A doorbell. The card reads the requests at once, or later.
    fn ring(&self, state: &mut Fetched, at: usize) -> Result<(), String> {
        let rung = self.side.context.rings[at].doorbell.load(Ordering::SeqCst);
        let new = rung.wrapping_sub(state.rung[at]);
        if new == 0 || new > ENTRIES {
            return Err(format!("ring {at}: doorbell {rung} after {}", state.rung[at]));
        }
        state.rung[at] = rung;
        Ok(())
    }

    /// Checks that a store has not written more requests beyond the doorbell than the card takes.
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

    /// Reads the requests that are rung.
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

    /// Completes a request, and reads its value again, as for a retransmission.
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

    /// A peer's signal, and a counter of this rank.
    fn raise(&self, state: &mut Fetched) {
        state.raised += 1;
        self.data.set(ARRIVED, state.raised);
        self.data.set(ARRIVED + 1, state.raised);
        let counts = self.side.context.signals.iter().chain(&self.side.context.counters);
        for count in counts.copied().chain(self.side.words) {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The request that the card completes at an MMIO store or when all threads wait, of those that are open.
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

    /// The card acts after an MMIO store to the address; without one, all threads wait.
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
        // The last stores of a lane that waits for others leave it after some hundred turns.
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

// SAFETY: the raw pointers are to leaked memory. Only the thread that runs the kernel uses a card.
unsafe impl Sync for Card<'_> {}

// SAFETY: the ranges are those of `Process`; the kernel reaches the leaked context and pool, and arenas that live as long.
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

/// A work that is ready to run: the card, and the memory of the steps.
struct Ready<'a> {
    card: Card<'a>,
    lists: Arena,
    /// The word of each step's result, what it has to be, and what the step did.
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
            // SAFETY: the kernel reaches the leaked context and pool, and arenas that live as long.
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
        // The seed alone decides when a wait ends by its time, and when the watchdog ends the kernel.
        launch.time = Time::Instructions;
        launch.watchdog = Some(WATCHDOG);
        Self { card, lists, expected, launch }
    }

    /// What was wrong.
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

/// Runs the work on the module. What it did, or what was wrong.
pub fn outcome(loaded: &Loaded, work: &Work, seed: u64) -> Result<Statistics, String> {
    let ready = Ready::new(work, seed);
    let kernel = loaded.program().kernel("work").expect("the kernel");
    let ended = run(loaded, kernel, &ready.launch, &ready.card, &ready.card.stop);
    let statistics = ended.as_ref().map_or(Statistics::default(), |statistics| *statistics);
    ready.check(ended.map(|_| ())).map(|()| statistics)
}

/// Runs the work as [`outcome`] does. The lines of the module that it has executed, from 0 on, or what was wrong.
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
