//! Fences and orders of the shipped module, removed in turn: with weak memory and a simulated card, some seed shows each removal.
//!
//! A *site* is an instruction with an order, between the nearest strong accesses before and after it in the text. Copies of one
//! line of the source, which the compiler has inlined in several functions, are one site, and are removed together.
//! `removals.txt` lists all sites with their verdicts.

use crate::arena::Arena;
use crate::native::{ENDPOINTS, ENTRIES, FUNCTIONS, NRANKS, Side};
use crate::shipped;
use efa_dp_direct::wqe::words::phase_scale;
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::{Random, soak};
use soft_gpu_ptx::{Launch, Loaded, Memory, Module, Process, Program, Range, run};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SEEDS: u64 = 200;
/// Threads that post, and steps of each.
const THREADS: usize = 4;
const POSTS: usize = 10;
/// Words of a step: what it does, its arguments, and from word 16 on its result.
const STEP: usize = 18;
const LOAD: u64 = 100;
const STORE: u64 = 101;
const END: u64 = 102;

/// An instruction with an order, between its neighbours.
type Site = [String; 3];

/// The strong access in a line of PTX.
fn strong(line: &str) -> Option<&str> {
    let word = line.trim().trim_start_matches('@').split_whitespace().find(|word| {
        word.starts_with("fence") || ["ld.", "st.", "atom.", "red."].iter().any(|start| word.starts_with(start))
    })?;
    let word = word.trim_end_matches(';');
    let orders = ["fence", "relaxed", "acquire", "release", "acq_rel"];
    orders.iter().any(|order| word.contains(order)).then_some(word)
}

fn has_order(form: &str) -> bool {
    ["fence", "acquire", "release", "acq_rel"].iter().any(|order| form.contains(order))
}

/// The sites of a text, each with its lines.
fn sites(text: &str) -> BTreeMap<Site, Vec<usize>> {
    let mut found: Vec<(usize, &str)> = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.contains(".func") || line.contains(".entry") {
            found.push((at, "-"));
        } else if let Some(form) = strong(line) {
            found.push((at, form));
        }
    }
    found.push((usize::MAX, "-"));
    let mut sites: BTreeMap<Site, Vec<usize>> = BTreeMap::new();
    for three in found.windows(3) {
        let (at, form) = three[1];
        if has_order(form) {
            sites.entry([form, three[0].1, three[2].1].map(String::from)).or_default().push(at);
        }
    }
    sites
}

/// What is done to a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The fence is removed, or the access is relaxed.
    None,
    /// The scope is that of the block.
    Block,
    /// The kernel ends in an error where it gets to the site.
    Trap,
}

/// The text with the change in these lines.
fn changed(text: &str, lines: &[usize], change: Change) -> String {
    let mut changed = String::with_capacity(text.len());
    for (at, line) in text.lines().enumerate() {
        if !lines.contains(&at) {
            changed += line;
        } else if change == Change::Trap {
            changed += "trap;";
        } else if change == Change::Block {
            changed += &line.replace(".sys", ".cta").replace(".gpu", ".cta");
        } else if !line.contains("fence") {
            changed +=
                &line.replace(".acq_rel", ".relaxed").replace(".acquire", ".relaxed").replace(".release", ".relaxed");
        }
        changed.push('\n');
    }
    changed
}

/// A kernel whose threads do the steps of their lists.
fn kernel() -> String {
    let mut text = String::from(".version 8.2\n.target sm_70\n.address_size 64\n");
    let mut calls = String::new();
    for (kind, function) in FUNCTIONS.iter().enumerate().filter(|(_, function)| function.result == 32) {
        let name = function.name;
        let list = |of: &dyn Fn(usize, u32) -> String| {
            function.parameters.iter().enumerate().map(|(at, &bits)| of(at, bits)).collect::<Vec<_>>().join(", ")
        };
        let parameters = list(&|at, bits| format!(".param .b{bits} a{at}"));
        let names = list(&|at, _| format!("a{at}"));
        let _ = writeln!(text, ".extern .func (.param .b32 r) {name}({parameters});");
        let _ = writeln!(calls, "setp.ne.u64 %p, %k, {kind}; @%p bra $not{kind};\n{{\n.param .b32 r;");
        for (at, bits) in function.parameters.iter().enumerate() {
            let register = if *bits == 64 { "%d" } else { "%s" };
            let _ = writeln!(
                calls,
                ".param .b{bits} a{at}; ld.global.b{bits} {register}, [%w+{}]; st.param.b{bits} [a{at}], {register};",
                at * 8 + 8
            );
        }
        let _ = writeln!(calls, "call (r), {name}, ({names});");
        let _ = writeln!(calls, "ld.param.b32 %s, [r]; st.global.b32 [%w+128], %s;\n}}\nbra $next;\n$not{kind}:");
    }
    let _ = write!(
        text,
        ".visible .entry work(.param .u64 lists)\n{{\n.reg .pred %p; .reg .b64 %w; .reg .b64 %d; .reg .b64 %a; .reg .b64 %k; .reg .b32 %s; .reg .b32 %t;\n\
         mov.u32 %s, %tid.x; mov.u32 %t, %ctaid.x; add.u32 %s, %s, %t; mul.wide.u32 %d, %s, 8;\n\
         ld.param.u64 %w, [lists]; add.u64 %w, %w, %d; ld.global.b64 %w, [%w];\n\
         $step: ld.global.b64 %k, [%w];\n\
         setp.eq.u64 %p, %k, {END}; @%p bra $end;\n\
         setp.ne.u64 %p, %k, {LOAD}; @%p bra $noload; ld.global.b64 %a, [%w+8]; ld.global.b64 %d, [%a]; st.global.b64 [%w+128], %d; bra $next;\n\
         $noload: setp.ne.u64 %p, %k, {STORE}; @%p bra $nostore; ld.global.b64 %a, [%w+8]; ld.global.b64 %d, [%w+16]; st.global.b64 [%a], %d; bra $next;\n\
         $nostore:\n{calls}\ntrap;\n$next: add.u64 %w, %w, {}; bra $step;\n$end: ret;\n}}\n",
        STEP * 8
    );
    text
}

fn function(name: &str) -> u64 {
    FUNCTIONS.iter().position(|function| function.name == name).expect("the function is in the list") as u64
}

/// What a step's result has to be.
#[derive(Clone, Copy, Debug)]
enum Expect {
    Any,
    Equal(u64),
    AtLeast(u64),
}

/// A step before addresses are known: arguments are from a context, a window, the data words, or a value.
#[derive(Clone, Copy, Debug)]
enum Word {
    Value(u64),
    Context,
    Window,
    /// A word of the data that threads write and the card reads.
    Data(u64),
    /// A word that the card sets when it has completed the post of this number.
    Done(u64),
    /// A word that a peer writes before it raises the signal.
    Arrived(u64),
    /// Memory for a request of a flush.
    Request(u64),
}

type Step = (u64, Vec<Word>, Expect);

/// The steps of all threads under one seed, and what the card has to find.
struct Work {
    policy: u32,
    wide: bool,
    one_block: bool,
    steps: Vec<Vec<Step>>,
    /// Ring and slot without phase and value, and the post that it is of.
    slots: HashMap<(usize, Vec<u64>), (usize, Option<u64>)>,
    requests: usize,
}

const NUMBERS: u64 = (THREADS * POSTS) as u64;

/// The word of a slot in the pool is replaced by the value.
fn canonical(slot: &[u8], pool: u64) -> (Vec<u64>, bool) {
    let mut words: Vec<u64> =
        slot.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
    let bit = u64::from(ENTRIES.wrapping_mul(phase_scale(ENTRIES)));
    let phase = words[0] & bit != 0;
    words[0] &= !bit;
    let end = pool + 8 * u64::from(ENTRIES) * ENDPOINTS as u64;
    for word in &mut words {
        if (pool..end).contains(word) {
            // SAFETY: a word of the leaked pool, which is only accessed atomically.
            *word = unsafe { AtomicU64::from_ptr(*word as *mut u64) }.load(Ordering::SeqCst);
        }
    }
    (words, phase)
}

fn pool() -> u64 {
    std::ptr::from_ref(vec![0u64; ENTRIES as usize * ENDPOINTS].leak()).cast::<u64>() as u64
}

impl Work {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (policy, wide) =
            [(POLICY_COMBINING, true), (POLICY_COMBINING, false), (POLICY_LOCKED, false)][seed as usize % 3];
        let one_block = (seed / 3).is_multiple_of(2);
        // One thread alone, in the exclusive mode.
        let lone = seed % 8 == 7;
        let mode = if lone {
            0x200
        } else if one_block && policy == POLICY_COMBINING && (seed / 6).is_multiple_of(2) {
            0x100
        } else {
            0
        };
        let steps =
            (0..if lone { 1 } else { THREADS as u64 }).map(|thread| Self::thread(&mut random, thread, mode)).collect();
        let mut work = Self { policy, wide, one_block, steps, slots: HashMap::new(), requests: 0 };
        work.expect_slots();
        work
    }

    fn thread(random: &mut Random, thread: u64, mode: u64) -> Vec<Step> {
        use Word::{Arrived, Context, Data, Done, Request, Value, Window};
        let mut steps: Vec<Step> = Vec::new();
        let first = thread * POSTS as u64;
        let mut flushed = first;
        let mut signals = Vec::new();
        for number in first..first + POSTS as u64 {
            let flags = Value(mode | if random.one_in(4) { 2 } else { 0 });
            let peer = Value(u64::from(random.below(NRANKS)));
            let value = 0x1111_0000 + number;
            let post = match random.below(4) {
                0 => {
                    steps.push((STORE, vec![Data(number), Value(value)], Expect::Any));
                    let offset = Value(number * 8);
                    let list = vec![Context, peer, Window, offset, Window, offset, Value(8), Value(0), flags];
                    (function("fgin_put"), list)
                }
                1 => (function("fgin_signal"), vec![Context, peer, Value(1 | 1 << 32), flags]),
                _ => {
                    let list = vec![Context, peer, Window, Value(number * 8), Value(value), Value(8), Value(0), flags];
                    (function("fgin_put_value"), list)
                }
            };
            // The requests of signals are equal: the card cannot tell whose it has completed.
            if post.0 == function("fgin_signal") {
                signals.push(number);
            }
            steps.push((post.0, post.1, Expect::Equal(0)));
            let seen = flushed + u64::from(random.below((number + 1 - flushed) as u32));
            let arrived = number + 1 - first;
            match random.below(6) {
                0 | 1 => {
                    steps.push((LOAD, vec![Done(seen)], Expect::Any));
                    if random.one_in(2) {
                        steps.push((function("fgin_flush"), vec![Context], Expect::Equal(0)));
                    } else {
                        steps.push((function("fgin_flush_async"), vec![Context, Request(thread)], Expect::Equal(0)));
                        steps.push((LOAD, vec![Done(seen)], Expect::Any));
                        steps.push((function("fgin_wait_request"), vec![Context, Request(thread)], Expect::Equal(0)));
                    }
                    for done in (flushed..=number).filter(|number| !signals.contains(number)) {
                        steps.push((LOAD, vec![Done(done)], Expect::Equal(1)));
                    }
                    flushed = number + 1;
                }
                2 => {
                    steps.push((LOAD, vec![Arrived(0)], Expect::Any));
                    let list = vec![Context, Value(0), Value(arrived)];
                    steps.push((function("fgin_wait_signal"), list, Expect::Equal(0)));
                    steps.push((LOAD, vec![Arrived(0)], Expect::AtLeast(arrived)));
                }
                3 => {
                    steps.push((LOAD, vec![Arrived(1)], Expect::Any));
                    let list = vec![Context, Value(0), Value(arrived)];
                    steps.push((function("fgin_wait_counter"), list, Expect::Equal(0)));
                    steps.push((LOAD, vec![Arrived(1)], Expect::AtLeast(arrived)));
                }
                _ => {}
            }
        }
        steps.push((function("fgin_flush"), vec![Context], Expect::Equal(0)));
        steps.push((END, Vec::new(), Expect::Any));
        steps
    }

    /// Posts natively, one after the other, and keeps the slots.
    fn expect_slots(&mut self) {
        let pool = pool();
        let side = Side::new(self.policy, self.wide, pool, 0);
        let rings = &side.context.rings;
        let waits = ["fgin_flush", "fgin_flush_async", "fgin_wait_request", "fgin_wait_signal", "fgin_wait_counter"];
        let mut number = 0;
        for (kind, list, _) in self.steps.iter().flatten() {
            let Some(function) = FUNCTIONS.get(*kind as usize).filter(|function| !waits.contains(&function.name))
            else {
                continue;
            };
            let source = (function.name == "fgin_put").then_some(number as u64);
            let before: Vec<u32> = rings.iter().map(|ring| ring.cursors()[0]).collect();
            // No aggregation: the batch would fill.
            let list: Vec<u64> = list
                .iter()
                .enumerate()
                .map(|(at, &word)| {
                    let value = self.word(&side, word, [0; 4]);
                    if at + 1 == list.len() { value & !2 } else { value }
                })
                .collect();
            assert_eq!((function.native)(&list)[0], 0, "{}", function.name);
            for (at, ring) in rings.iter().enumerate() {
                for idx in before[at]..ring.cursors()[0] {
                    let (words, _) = canonical(&ring.slot(idx as usize), pool);
                    self.slots.insert((at, words), (number, source));
                    self.requests += 1;
                }
                ring.completed.store(u64::from(ring.cursors()[0]), Ordering::SeqCst);
            }
            number += 1;
        }
        assert_eq!(number, self.steps.len() * POSTS);
    }

    fn word(&self, side: &Side, word: Word, [data, done, arrived, requests]: [u64; 4]) -> u64 {
        match word {
            Word::Value(value) => value,
            Word::Context => side.context.context.as_ptr() as u64,
            Word::Window => side.windows[0],
            Word::Data(at) => data + at * 8,
            Word::Done(at) => done + at * 8,
            Word::Arrived(at) => arrived + at * 8,
            Word::Request(at) => requests + at * 128,
        }
    }
}

/// Requests that the card has fetched and not completed, and what was wrong.
#[derive(Default)]
struct Fetched {
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
    pool: u64,
    process: Process,
    data: Arena,
    state: Mutex<(Fetched, Random)>,
    stop: AtomicBool,
}

const DONE: usize = NUMBERS as usize;
const ARRIVED: usize = 2 * DONE;
const REQUESTS: usize = ARRIVED + 2;

impl Card<'_> {
    fn areas(&self) -> [u64; 4] {
        [0, DONE, ARRIVED, REQUESTS].map(|at| self.data.address() + at as u64 * 8)
    }

    /// Fetches what a doorbell gives.
    fn fetch(&self, state: &mut Fetched, at: usize) -> Result<(), String> {
        let ring = &self.side.context.rings[at];
        let rung = ring.doorbell.load(Ordering::SeqCst);
        let new = rung.wrapping_sub(state.counts[at]);
        if new == 0 || new > ENTRIES {
            return Err(format!("ring {at}: doorbell {rung} after {}", state.counts[at]));
        }
        for idx in state.counts[at]..rung {
            let slot = ring.slot(idx as usize);
            let (words, phase) = canonical(&slot, self.pool);
            let Some(&(_, source)) = self.work.slots.get(&(at, words)) else {
                return Err(format!("ring {at}: the bytes of request {idx} are of no post"));
            };
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
        state.counts[at] = rung;
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

    fn step(&self, address: Option<u64>) {
        let (state, random) = &mut *self.state.lock().expect("no thread panics with the card");
        let rings = &self.side.context.rings;
        let at = rings.iter().position(|ring| address == Some(ring.doorbell.as_ptr() as u64));
        let mut result = at.map_or(Ok(()), |at| self.fetch(state, at));
        if random.one_in(if address.is_some() { 24 } else { 2 }) && !state.open.is_empty() && result.is_ok() {
            let which = random.index(state.open.len());
            result = self.complete(state, which);
        }
        let raises = random.one_in(16) || address.is_none();
        if raises && state.raised < POSTS as u64 {
            state.raised += 1;
            self.data.set(ARRIVED, state.raised);
            self.data.set(ARRIVED + 1, state.raised);
            self.side.context.signals[0].fetch_add(1, Ordering::SeqCst);
            self.side.context.counters[0].fetch_add(1, Ordering::SeqCst);
        }
        state.idle = if address.is_none() && state.open.is_empty() { state.idle + 1 } else { 0 };
        if state.idle > 60 && result.is_ok() {
            let rings: Vec<_> =
                rings.iter().map(|ring| (ring.cursors(), ring.completed.load(Ordering::SeqCst))).collect();
            result = Err(format!(
                "all threads wait, and the card has nothing to complete; it has fetched {:?} of {rings:?}",
                state.counts
            ));
        }
        if let Err(wrong) = result
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

/// Runs the work on the module; what was wrong.
fn wrong(loaded: &Loaded, work: &Work, seed: u64) -> Option<String> {
    let pool = pool();
    let card = Card {
        work,
        side: Side::new(work.policy, work.wide, pool, 0),
        pool,
        // SAFETY: the kernel reaches the leaked context and pool, and arenas that live as long.
        process: unsafe { Process::new() },
        data: Arena::new(REQUESTS + THREADS * 16),
        state: Mutex::new((Fetched { counts: vec![0; ENDPOINTS], ..Fetched::default() }, Random::new(seed))),
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
    let threads = work.steps.len() as u32;
    let shape = if work.one_block { ([1, 1, 1], [threads, 1, 1]) } else { ([threads, 1, 1], [1, 1, 1]) };
    let mut launch = Launch::new(shape.0, shape.1, lists.address().to_le_bytes().to_vec());
    launch.seed = seed;
    launch.weak = true;
    launch.watchdog = Some(Duration::from_secs(20));
    let kernel = loaded.program().kernel("work").expect("the kernel");
    let ended = run(loaded, kernel, &launch, &card, &card.stop).map_err(|trap| trap.to_string());
    let (state, _) = card.state.into_inner().expect("no thread panics with the card");
    if state.wrong.is_some() {
        return state.wrong;
    }
    if let Err(trap) = ended {
        return Some(trap);
    }
    if state.found != work.requests || !state.open.is_empty() {
        return Some(format!("the card has fetched {} requests of {}", state.found, work.requests));
    }
    expected.into_iter().find_map(|(at, expect, kind)| {
        let found = lists.get(at);
        let good = match expect {
            Expect::Any => true,
            Expect::Equal(value) => found == value,
            Expect::AtLeast(value) => found >= value,
        };
        let name = FUNCTIONS.get(kind as usize).map_or("a load", |function| function.name);
        (!good).then(|| format!("{name}: {found}, not {expect:?}"))
    })
}

fn load(text: &str) -> Loaded {
    let module = |name: &str, text: &str| Module::parse(name, text).unwrap_or_else(|error| panic!("{error}"));
    let modules = vec![module("work", &kernel()), module("ferrogin_device.ptx", text)];
    Arc::new(Program::link(modules).unwrap_or_else(|error| panic!("{error}"))).load(&[])
}

/// The first seed that shows the removal, and what is wrong with it.
fn shown(text: &str, works: &[Work]) -> Option<(u64, String)> {
    let loaded = load(text);
    (0..SEEDS).zip(works).find_map(|(seed, work)| wrong(&loaded, work, seed).map(|wrong| (seed, wrong)))
}

/// A line of `removals.txt`.
struct Line<'a> {
    change: &'a str,
    site: [&'a str; 3],
    verdict: &'a str,
}

fn table() -> Vec<Line<'static>> {
    let lines = TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| match line.split('\t').collect::<Vec<_>>()[..] {
            [change, form, before, after, verdict] => Line { change, site: [form, before, after], verdict },
            _ => panic!("removals.txt: {line}"),
        })
        .collect()
}

const TABLE: &str = include_str!("../../removals.txt");

#[test]
fn the_shipped_module_is_right_under_all_seeds() {
    let works: Vec<Work> = (0..SEEDS).map(Work::new).collect();
    assert_eq!(shown(&shipped::text(), &works), None);
}

#[test]
fn the_table_of_removals_lists_every_site() {
    let text = shipped::text();
    let mut expected: Vec<String> = Vec::new();
    for change in ["none", "cta"] {
        let sites = sites(&text).into_keys().filter(|site| change == "none" || !site[0].contains(".cta"));
        expected.extend(sites.map(|site| format!("{change}\t{}", site.join("\t"))));
    }
    let listed: Vec<String> = table().iter().map(|line| format!("{}\t{}", line.change, line.site.join("\t"))).collect();
    assert_eq!(listed, expected, "the module has changed: removals.txt says how to make it again");
}

/// Each removal that the table calls found is found. A long run tries all sites, and prints the table.
#[test]
fn removals_have_the_verdicts_of_the_table() {
    let text = shipped::text();
    let works: Vec<Work> = (0..SEEDS).map(Work::new).collect();
    let sites = sites(&text);
    let mut differences = Vec::new();
    let mut tried = 0;
    for Line { change, site, verdict } in table().into_iter().filter(|line| soak() || line.verdict == "found") {
        let Some(lines) = sites.get(&site.map(String::from)) else { continue };
        let kind = if change == "cta" { Change::Block } else { Change::None };
        let shown_by = shown(&changed(&text, lines, kind), &works);
        let now = match &shown_by {
            Some(_) => "found",
            None if shown(&changed(&text, lines, Change::Trap), &works).is_some() => "unseen",
            None => "unreached",
        };
        tried += 1;
        println!("{change}\t{}\t{now}", site.join("\t"));
        if now != verdict {
            differences.push(format!("{change} {site:?}: {now}, not {verdict}: {shown_by:?}"));
        }
    }
    println!("{tried} removals tried");
    assert!(tried > 0 && differences.is_empty(), "{differences:#?}");
}
