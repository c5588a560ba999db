//! A seed's workloads: what each thread calls, what the calls must return, and the requests that the card must find.

use crate::native::{self, ENDPOINTS, ENTRIES, FUNCTIONS, NRANKS, STRONG, Side};
use efa_dp_direct::queue::{SQ_WQ_OFFSET, WqV0};
use efa_dp_direct::wqe::words::phase_scale;
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::Random;
use plain_context::NO_EXTRAS;
use std::collections::HashMap;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Threads that post, and posts per thread.
pub const THREADS: usize = 4;
pub const POSTS: usize = 10;
/// The number of signals in a context with many endpoints.
pub const MANY: u32 = 16;
pub const NUMBERS: u64 = (THREADS * POSTS) as u64;
/// Words per step: its kind, its arguments, and from word 16 on its result.
pub const STEP: usize = 18;
/// Steps that aren't calls.
pub const LOAD: u64 = 100;
pub const STORE: u64 = 101;
pub const END: u64 = 102;
const POLICIES: [(u32, bool); 3] = [(POLICY_COMBINING, true), (POLICY_COMBINING, false), (POLICY_LOCKED, false)];

pub fn function(name: &str) -> u64 {
    FUNCTIONS.iter().position(|function| function.name == name).expect("the function is in the list") as u64
}

/// The expected result of a step.
#[derive(Clone, Copy, Debug)]
pub enum Expect {
    Any,
    Equal(u64),
    AtLeast(u64),
    /// At least the result of the previous step.
    AtLeastBefore,
    /// Success, or the error of a wait that ended early.
    Ends,
}

/// An argument before addresses are known: a value, a context, a window, or a word of the data.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    Value(u64),
    Context,
    Window,
    /// A word of the data that threads write and the card reads.
    Data(u64),
    /// A word that the card sets when it completes the post of this number.
    Done(u64),
    /// A word that is written before the signal or counter is raised.
    Arrived(u64),
    /// Memory for a flush request, and (`Out`) for a result.
    Request(u64),
    Out(u64),
    /// The count at the last reset of signal 1.
    ResetAt,
}

pub type Step = (u64, Vec<Word>, Expect);

/// What makes the threads reach code that they rarely need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Usual,
    /// Most posts are aggregated.
    Aggregated,
    /// All posts are on one ring.
    Crowded,
    /// A single thread, in exclusive mode, posts more than the rings have room for.
    Lone,
    /// NCCL's device code has posted before and rung the doorbell, or (`Deferred`) left that to others.
    Posted,
    Deferred,
    /// The card completes nothing, and waits time out.
    Stalled,
    /// Endpoints leave the set of used endpoints and enter it again.
    Leaving,
    /// Threads take one endpoint's lock, for a different reason in each operation.
    Locking,
    /// Two threads post on one endpoint, and flush over and over.
    Flushing,
    /// The host has raised the abort flag, so no thread waits.
    Aborted,
    /// Threads post on one endpoint without waiting for anything.
    Ringing,
    /// As `Ringing`, but with the threads of one block, in block mode.
    RingingBlock,
    /// As `Ringing`, but with lanes of warps, which call the functions for posting together.
    RingingWarp,
    /// The card completes the newest request first, and some threads flush while others post.
    Newest,
    /// Threads read and reset signals and counters that keep changing.
    Counting,
    /// Threads post on more endpoints than a flush request has entries for.
    Many,
    /// Signals are words in memory: threads raise them with puts, after puts and after all earlier posts, and wait for
    /// them.
    Emulated,
}

/// The kinds of the usual workloads, by `seed % USUAL.len()`.
const USUAL: [Kind; 11] = [
    Kind::Usual,
    Kind::Crowded,
    Kind::Aggregated,
    Kind::Usual,
    Kind::Posted,
    Kind::Crowded,
    Kind::Deferred,
    Kind::Lone,
    Kind::Stalled,
    Kind::Usual,
    Kind::Crowded,
];
/// The kinds and policies of the aimed workloads, which target a few orderings each, by `seed % AIMED.len()`.
const AIMED: [[(Kind, u32); 8]; 3] = [
    [
        (Kind::Leaving, POLICY_COMBINING),
        (Kind::Locking, POLICY_LOCKED),
        (Kind::Newest, POLICY_COMBINING),
        (Kind::Ringing, POLICY_COMBINING),
        (Kind::RingingBlock, POLICY_COMBINING),
        (Kind::Ringing, POLICY_LOCKED),
        (Kind::Emulated, POLICY_COMBINING),
        (Kind::Many, POLICY_COMBINING),
    ],
    [
        (Kind::Leaving, POLICY_LOCKED),
        (Kind::Flushing, POLICY_LOCKED),
        (Kind::Newest, POLICY_COMBINING),
        (Kind::Ringing, POLICY_COMBINING),
        (Kind::RingingBlock, POLICY_COMBINING),
        (Kind::Ringing, POLICY_LOCKED),
        (Kind::Emulated, POLICY_LOCKED),
        (Kind::Many, POLICY_LOCKED),
    ],
    [
        (Kind::Aborted, POLICY_LOCKED),
        (Kind::Flushing, POLICY_LOCKED),
        (Kind::Counting, POLICY_LOCKED),
        (Kind::Ringing, POLICY_COMBINING),
        (Kind::RingingBlock, POLICY_COMBINING),
        (Kind::RingingWarp, POLICY_COMBINING),
        (Kind::Emulated, POLICY_COMBINING),
        (Kind::Many, POLICY_COMBINING),
    ],
];

/// A ring, and a slot in canonical form.
pub type Slot = (usize, Vec<u64>);

/// A workload: the steps of all threads under one seed, and what the card has to find.
pub struct Work {
    pub kind: Kind,
    /// Which post a `Crowded` workload makes.
    crowd: usize,
    pub policy: u32,
    pub wide: bool,
    /// The rings' initial count.
    pub start: u32,
    /// Blocks, and threads per block.
    pub shape: (u32, u32),
    pub steps: Vec<Vec<Step>>,
    /// The steps' posts, to make natively.
    pub posts: Vec<(u64, Vec<Word>)>,
    /// The post that each slot belongs to, and the data that its request reads.
    pub slots: HashMap<Slot, (usize, Option<u64>)>,
    /// The slots that are only signals, and the posts that must have completed before each.
    pub signals: HashMap<Slot, Vec<usize>>,
    pub requests: usize,
}

/// Returns the address of the count at the last reset of signal 1.
fn reset_at(side: &Side) -> u64 {
    let context = side.context.context.as_ptr();
    // SAFETY: the context is leaked, and no thread writes its pointers.
    let dev = unsafe { (*context).routes.dev };
    // SAFETY: the device handle is leaked, and no thread writes its pointers.
    let handles = unsafe { (*dev).signal_handles };
    // SAFETY: the list is leaked, and has two handles, one per signal.
    let handle = unsafe { *handles.wrapping_add(1) };
    // SAFETY: the handle is leaked.
    unsafe { &raw const (*handle).cntr_offset as u64 }
}

/// Writes requests to a ring as NCCL's device code does when it leaves the doorbell to others.
fn defer(side: &Side, ring: usize, count: u32) {
    let context = side.context.context.as_ptr();
    // SAFETY: the context is leaked, and no thread writes its pointers.
    let endpoints = unsafe { (*context).routes.endpoints };
    // SAFETY: the endpoints are leaked, and `ring` is the number of one of them.
    let queue = unsafe { &raw const (*endpoints.wrapping_add(ring)).queue };
    for field in [offset_of!(WqV0, pc), offset_of!(WqV0, wqes_completed)] {
        let word = queue.cast::<u8>().wrapping_add(SQ_WQ_OFFSET + field).cast_mut();
        // SAFETY: this is an aligned word of the leaked queue, which is only accessed atomically while a kernel runs.
        unsafe { AtomicU32::from_ptr(word.cast()) }.fetch_add(count, Ordering::SeqCst);
    }
}

/// Sets NCCL's mark that doorbells wait for a later request.
fn wait(side: &Side) {
    let context = side.context.context.as_ptr();
    // SAFETY: the context is leaked, and no thread writes its pointers.
    let dev = unsafe { (*context).routes.dev };
    let word = dev.wrapping_byte_add(offset_of!(DevHandle, scratch_pad)).cast();
    // SAFETY: this is an aligned word of the leaked handle, which is only accessed atomically.
    unsafe { AtomicU32::from_ptr(word) }.store(1, Ordering::SeqCst);
}

/// Raises the abort flag, as the host does.
fn abort(side: &Side) {
    let context = side.context.context.as_ptr().cast_mut();
    // SAFETY: the context is leaked, and no thread uses it before the kernel runs.
    unsafe { (*context).abort_flag = std::ptr::from_mut(Box::leak(Box::new(1))) };
}

impl Work {
    /// Returns the number of NCCL's requests on each ring: a few, or all but one.
    pub fn of_nccl(&self) -> u32 {
        match self.kind {
            Kind::Posted => 2,
            Kind::Deferred => [2, ENTRIES - 1][self.crowd % 2],
            _ => 0,
        }
    }

    /// Prepares the context: the device code has posted before, and then NCCL's code, or the host has aborted. Returns
    /// the card's counts.
    pub fn before(&self, side: &Side) -> Vec<u32> {
        let rings = &side.context.rings;
        if self.kind == Kind::Aborted {
            abort(side);
        }
        if self.kind == Kind::Deferred {
            wait(side);
            for name in ["fgin_put", "fgin_put_value", "fgin_signal"] {
                if let Some((kind, list)) = self.posts.iter().find(|(kind, _)| *kind == function(name)) {
                    let mut list: Vec<u64> = list.iter().map(|&word| self.word(side, word, [0; 5])).collect();
                    list.last_mut().into_iter().for_each(|flags| *flags = 0);
                    (FUNCTIONS[*kind as usize].native)(&list);
                }
            }
        }
        let counts = rings.iter().enumerate().map(|(at, ring)| {
            let mut count = ring.cursors()[0];
            match self.kind {
                Kind::Posted => {
                    ring.nccl_posts(self.of_nccl());
                    count += self.of_nccl();
                }
                Kind::Deferred => defer(side, at, self.of_nccl()),
                _ => {}
            }
            ring.completed.store(u64::from(count & 0x7fff_ffff), Ordering::SeqCst);
            count
        });
        counts.collect()
    }
}

/// Returns a slot's words without the phase bit and with pool addresses replaced by the values there; and the phase.
pub fn canonical(slot: &[u8], pool: u64) -> (Vec<u64>, bool) {
    let mut words: Vec<u64> =
        slot.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
    let bit = u64::from(ENTRIES.wrapping_mul(phase_scale(ENTRIES)));
    let phase = words[0] & bit != 0;
    words[0] &= !bit;
    let end = pool + 8 * u64::from(ENTRIES) * ENDPOINTS as u64;
    for word in &mut words {
        if (pool..end).contains(word) {
            // SAFETY: this is a word of the leaked pool, which is only accessed atomically.
            *word = unsafe { AtomicU64::from_ptr(*word as *mut u64) }.load(Ordering::SeqCst);
        }
    }
    (words, phase)
}

pub fn pool() -> u64 {
    std::ptr::from_ref(vec![0u64; ENTRIES as usize * ENDPOINTS].leak()).cast::<u64>() as u64
}

impl Work {
    /// Returns a seed's workloads: a usual one, and aimed ones.
    pub fn of(seed: u64) -> Vec<Self> {
        let aimed = AIMED[seed as usize % AIMED.len()];
        let aimed = aimed.into_iter().zip(1..).map(|((kind, policy), number)| Self::aimed(seed, number, kind, policy));
        std::iter::once(Self::usual(seed)).chain(aimed).collect()
    }

    fn usual(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (policy, wide) = POLICIES[seed as usize % 3];
        let kind = USUAL[seed as usize % USUAL.len()];
        let shape =
            if kind == Kind::Lone { (1, 1) } else { [(1, 4), (4, 1), (1, 4), (4, 1), (2, 2)][seed as usize / 3 % 5] };
        let mode = if kind == Kind::Lone {
            0x200
        } else if shape.0 == 1 && policy == POLICY_COMBINING && (seed / 6).is_multiple_of(2) {
            0x100
        } else {
            0
        };
        let start = if matches!(kind, Kind::Posted | Kind::Deferred) {
            0
        } else {
            random.of(&[0, 0, 13, 0x7fff_fff8, 0xffff_fff8])
        };
        let mut work = Work::empty(kind, policy, wide, start, shape);
        work.crowd = [0, 1, 3][seed as usize / 33 % 3];
        work.fill(|work, thread, posts| work.thread(&mut random, thread, posts, mode));
        work
    }

    fn aimed(seed: u64, number: u64, kind: Kind, policy: u32) -> Self {
        let mut random = Random::new(seed ^ number << 32);
        // Most threads have blocks of their own, so block scope isn't enough for them.
        let shape = match kind {
            Kind::Leaving | Kind::Newest => (random.of(&[2, 4]), 1),
            Kind::Flushing | Kind::Many => (2, 1),
            Kind::RingingBlock => (1, 4),
            _ => (4, 1),
        };
        let start = random.of(&[0, 8, 13]);
        let mut work = Work::empty(kind, policy, false, start, shape);
        work.fill(|work, thread, posts| work.aimed_thread(&mut random, thread, posts));
        work
    }

    fn empty(kind: Kind, policy: u32, wide: bool, start: u32, shape: (u32, u32)) -> Self {
        let (steps, posts, slots, signals) = Default::default();
        Work { kind, crowd: 0, policy, wide, start, shape, steps, posts, slots, signals, requests: 0 }
    }

    /// Collects each thread's steps from `steps`, which takes the thread and its number of posts.
    fn fill(&mut self, mut steps: impl FnMut(&mut Self, u64, u64) -> Vec<Step>) {
        let threads = u64::from(self.shape.0 * self.shape.1);
        for thread in 0..threads {
            let steps = steps(self, thread, NUMBERS / threads);
            self.steps.push(steps);
        }
        self.expect_slots();
    }

    fn thread(&mut self, random: &mut Random, thread: u64, posts: u64, mode: u64) -> Vec<Step> {
        use Word::{Arrived, Context, Data, Done, Out, Request, ResetAt, Value, Window};
        let mut steps: Vec<Step> = Vec::new();
        let first = thread * posts;
        let mut flushed = first;
        let mut signals = Vec::new();
        let stalled = self.kind == Kind::Stalled;
        let ends = if stalled { Expect::Ends } else { Expect::Equal(0) };
        if stalled {
            steps.push((function("fgin_set_timeout"), vec![Context, Value(2_000)], Expect::Equal(0)));
        }
        if self.kind == Kind::Deferred && random.one_in(2) {
            steps.push((function("fgin_flush_async"), vec![Context, Request(thread)], ends));
            let list = vec![Context, Request(thread), Out(thread)];
            steps.push((function("fgin_test_request"), list, ends));
            steps.push((function("fgin_flush"), vec![Context], ends));
        }
        for number in first..first + posts {
            let aggregates = match self.kind {
                Kind::Aggregated | Kind::Lone => !random.one_in(4),
                Kind::Crowded => random.one_in(2),
                _ => random.one_in(4),
            };
            let flags = Value(mode | if aggregates { 2 } else { 0 });
            let peer = u64::from(random.below(NRANKS));
            let to = Value(peer);
            let offset = Value(number * 8);
            let value = Value(0x1111_0000 + number);
            let fast = mode == 0 && random.one_in(2);
            // Bit 0: lanes post together if they get there at the same time.
            let fast_flags = Value(if aggregates { 2 } else { 0 } | u64::from(random.one_in(3)));
            // Every third time, all threads of a block post together, as lanes of a warp that make the same call.
            let at = (number - first) as usize;
            let by_lanes = at % 3 == 2;
            // The plain post, and the fast-path call that posts the same.
            let post = match self.kind {
                Kind::Crowded => self.crowd,
                _ if by_lanes => [0, 3, 1][at / 3 % 3],
                _ => random.index(6),
            };
            let (post, other) = match post {
                0 => {
                    steps.push((STORE, vec![Data(number), value], Expect::Any));
                    let list = vec![Context, to, Window, offset, Window, offset, Value(8), Value(0), flags];
                    let quick = [Context, to, Window, offset, Window, offset, Value(8)];
                    (("fgin_put", list), ("fgin_fast_put", [&quick[..], &[Value(0); 4], &[fast_flags]].concat()))
                }
                1 => {
                    let quick = vec![Context, to, Value(1), Value(0), fast_flags];
                    // A signal raised by two takes the slow path, which posts in exclusive mode too.
                    let amount = if self.kind == Kind::Lone { 2 } else { 1 };
                    let action = Value(1 | amount << 32);
                    (("fgin_signal", vec![Context, to, action, flags]), ("fgin_fast_signal", quick))
                }
                2 => {
                    let list = vec![Context, to, Window, offset, Window, offset, Value(8), flags];
                    (("fgin_get", list.clone()), ("fgin_get", list))
                }
                _ => {
                    let list = vec![Context, to, Window, offset, value, Value(8), Value(0), flags];
                    let quick = vec![Context, to, Window, offset, value, Value(8), Value(0), Value(0), fast_flags];
                    (("fgin_put_value", list), ("fgin_fast_put_value", quick))
                }
            };
            // All signal requests look the same, so the card can't tell whose it has completed.
            if post.0 == "fgin_signal" {
                signals.push(number);
            }
            let lanes = Value((1 << self.shape.1) - 1);
            steps.push(if by_lanes {
                let list = [&post.1[..1], &[lanes], &post.1[1..]].concat();
                (function(&post.0.replace("fgin", "fgin_warp")), list, ends)
            } else {
                let (name, list) = if fast { other } else { post.clone() };
                (function(name), list, ends)
            });
            self.posts.push((function(post.0), post.1));
            let seen = flushed + u64::from(random.below((number + 1 - flushed) as u32));
            let arrived = number + 1 - first;
            match random.below(8) {
                0 | 1 => {
                    steps.push((LOAD, vec![Done(seen)], Expect::Any));
                    match random.below(4) {
                        0 | 1 => steps.push((function("fgin_flush"), vec![Context], ends)),
                        2 => steps.push((function("fgin_flush_part"), vec![Context, Value(0), Value(1)], ends)),
                        _ => {
                            steps.push((function("fgin_flush_async"), vec![Context, Request(thread)], ends));
                            steps.push((LOAD, vec![Done(seen)], Expect::Any));
                            // A flush that has ended covers the posts before it.
                            for _ in 0..random.below(6) {
                                let list = vec![Context, Request(thread), Out(thread)];
                                steps.push((LOAD, vec![Done(seen)], Expect::Any));
                                steps.push((function("fgin_test_request"), list, ends));
                                if !stalled && !signals.contains(&seen) {
                                    steps.push((LOAD, vec![Out(thread)], Expect::Any));
                                    steps.push((LOAD, vec![Done(seen)], Expect::AtLeastBefore));
                                }
                            }
                            steps.push((function("fgin_wait_request"), vec![Context, Request(thread)], ends));
                        }
                    }
                    for done in (flushed..=number).filter(|number| !stalled && !signals.contains(number)) {
                        steps.push((LOAD, vec![Done(done)], Expect::Equal(1)));
                    }
                    flushed = number + 1;
                }
                kind @ (2 | 3) => {
                    let (at, name) = if kind == 2 { (0, "fgin_wait_signal") } else { (1, "fgin_wait_counter") };
                    steps.push((LOAD, vec![Arrived(at)], Expect::Any));
                    steps.push((function(name), vec![Context, Value(0), Value(arrived.min(POSTS as u64))], ends));
                    if !stalled {
                        steps.push((LOAD, vec![Arrived(at)], Expect::AtLeast(arrived.min(POSTS as u64))));
                    }
                }
                kind @ (4 | 5) => {
                    let (at, name) = if kind == 4 { (0, "fgin_read_signal") } else { (1, "fgin_read_counter") };
                    steps.push((LOAD, vec![Arrived(at)], Expect::Any));
                    steps.push((function(name), vec![Context, Value(0), Out(thread)], Expect::Equal(0)));
                    steps.push((LOAD, vec![Out(thread)], Expect::Any));
                    steps.push((LOAD, vec![Arrived(at)], Expect::AtLeastBefore));
                }
                6 | 7 if thread == 0 => {
                    steps.push((LOAD, vec![Arrived(0)], Expect::Any));
                    steps.push((function("fgin_reset_signal"), vec![Context, Value(1)], Expect::Equal(0)));
                    steps.push((LOAD, vec![ResetAt], Expect::Any));
                    steps.push((LOAD, vec![Arrived(0)], Expect::AtLeastBefore));
                }
                6 => steps.push((function("fgin_ring"), vec![Context], ends)),
                7 => steps.push((function("fgin_ring_waiting"), vec![Context], ends)),
                _ => {}
            }
        }
        steps.push((function("fgin_flush"), vec![Context], ends));
        steps.push((END, Vec::new(), Expect::Any));
        steps
    }

    /// Makes a context for the workload.
    pub fn side(&self, pool: u64) -> Side {
        let parts = (self.policy, self.wide, pool, self.start);
        match self.kind {
            Kind::Emulated => Side::emulated(parts),
            Kind::Many => Side::with_signals(MANY, &NO_EXTRAS, &[], parts),
            _ => Side::new(parts.0, parts.1, parts.2, parts.3),
        }
    }

    /// Returns the posts that a post's signal covers: the put of the same call, and for a strong signal all earlier
    /// posts of the thread.
    fn covered(&self, number: usize, list: &[u64]) -> Vec<usize> {
        let name = |number: usize| FUNCTIONS[self.posts[number].0 as usize].name;
        let of_thread = NUMBERS as usize / (self.shape.0 * self.shape.1) as usize;
        let is_strong = list.last().is_some_and(|flags| flags & STRONG != 0);
        let first = if is_strong { number - number % of_thread } else { number };
        (first..=number).filter(|&number| name(number) != "fgin_signal_at").collect()
    }

    /// Makes all posts natively, one after another, and records the slots.
    fn expect_slots(&mut self) {
        let pool = pool();
        let side = self.side(pool);
        let rings = &side.context.rings;
        for (number, (kind, list)) in self.posts.iter().enumerate() {
            let function = &FUNCTIONS[*kind as usize];
            let source = ["fgin_put", "fgin_put_signal_at"].contains(&function.name).then_some(number as u64);
            let before: Vec<u32> = rings.iter().map(|ring| ring.cursors()[0]).collect();
            // No aggregation, or the batch would fill up.
            let list: Vec<u64> = list
                .iter()
                .enumerate()
                .map(|(at, &word)| {
                    let value = self.word(&side, word, [0; 5]);
                    if at + 1 == list.len() { value & !2 } else { value }
                })
                .collect();
            // An emulated signal waits for the card, as does the second request of a signal raised by two.
            let waits = matches!(self.kind, Kind::Emulated | Kind::Lone);
            let ended = native::Card(AtomicBool::new(!waits)).completes(&side, || (function.native)(&list)[0]);
            assert_eq!(ended, 0, "{}", function.name);
            let covered = self.covered(number, &list);
            for (at, ring) in rings.iter().enumerate() {
                let new = ring.cursors()[0].wrapping_sub(before[at]);
                for idx in (0..new).map(|more| before[at].wrapping_add(more)) {
                    let (words, _) = canonical(&ring.slot(idx as usize), pool);
                    // Indexed signals can't be told apart.
                    let is_signal = idx != before[at] || function.name == "fgin_signal_at";
                    if is_signal && function.name.ends_with("signal_at") {
                        self.signals.insert((at, words.clone()), covered.clone());
                    }
                    self.slots.insert((at, words), (number, source.filter(|_| !is_signal)));
                    self.requests += 1;
                }
                ring.completed.store(u64::from(ring.cursors()[0] & 0x7fff_ffff), Ordering::SeqCst);
            }
        }
        assert_eq!(self.posts.len() as u64, NUMBERS);
    }

    pub fn word(&self, side: &Side, word: Word, [data, done, arrived, requests, out]: [u64; 5]) -> u64 {
        match word {
            Word::Value(value) => value,
            Word::Context => side.context.context.as_ptr() as u64,
            Word::Window => side.windows[0],
            Word::Data(at) => data + at * 8,
            Word::Done(at) => done + at * 8,
            Word::Arrived(at) => arrived + at * 8,
            Word::Request(at) => requests + at * 128,
            Word::Out(at) => out + at * 8,
            Word::ResetAt => reset_at(side),
        }
    }
}
