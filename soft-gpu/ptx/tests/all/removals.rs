//! Fences and orders of the shipped module, removed in turn: with weak memory and a simulated card, some seed shows each removal.
//!
//! A *site* is an instruction with an order, between the nearest strong accesses before and after it in the text. Copies of one
//! line of the source, which the compiler has inlined in several functions, are one site, and are removed together.
//! `removals.txt` lists all sites with their verdicts, and docs/software-gpu.md the reasons of those that no seed shows.

use crate::arena::Arena;
use crate::native::{ENDPOINTS, ENTRIES, FUNCTIONS, NRANKS, Side, Source, UNFINISHED, sources};
use crate::shipped;
use efa_dp_direct::queue::{SQ_WQ_OFFSET, WqV0};
use efa_dp_direct::wqe::words::phase_scale;
use ferrogin_device::Status;
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::{Random, repetitions, soak};
use soft_gpu_ptx::{Launch, Loaded, Memory, Module, Process, Program, Range, run};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Threads that post, and steps of each.
const THREADS: usize = 4;
const POSTS: usize = 10;
/// Words of a step: what it does, its arguments, and from word 16 on its result.
const STEP: usize = 18;
const TIMEOUT: u64 = Status::Timeout as u64;
const POISONED: u64 = Status::Poisoned as u64;
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

fn list(parameters: &[u32], of: impl Fn(usize, u32) -> String) -> String {
    parameters.iter().enumerate().map(|(at, &bits)| of(at, bits)).collect::<Vec<_>>().join(", ")
}

/// A kernel whose threads do the steps of their lists.
fn kernel() -> String {
    let mut text = String::from(".version 8.2\n.target sm_70\n.address_size 64\n");
    let mut calls = String::new();
    let load = |at: usize, bits: u32, from: usize| {
        let register = if bits == 64 { "%d" } else { "%s" };
        format!(
            ".param .b{bits} a{at}; ld.global.b{bits} {register}, [%w+{}]; st.param.b{bits} [a{at}], {register};\n",
            from * 8 + 8
        )
    };
    for (kind, function) in FUNCTIONS.iter().enumerate() {
        let (name, parameters) = (function.name, function.parameters);
        let result = if function.result == UNFINISHED { ".param .align 8 .b8 r[48]" } else { ".param .b32 r" };
        let names = list(parameters, |at, _| format!("a{at}"));
        let _ = writeln!(
            text,
            ".extern .func ({result}) {name}({});",
            list(parameters, |at, bits| format!(".param .b{bits} a{at}"))
        );
        let _ = writeln!(calls, "setp.ne.u64 %p, %k, {kind}; @%p bra $not{kind};\n{{\n{result};");
        parameters.iter().enumerate().for_each(|(at, &bits)| calls += &load(at, bits, at));
        let _ = writeln!(calls, "call (r), {name}, ({names});");
        if function.result == UNFINISHED {
            // What is left is done by the other function.
            calls += "ld.param.b64 %a, [r]; st.global.b64 [%w+128], %a;\nsetp.eq.u64 %p, %a, 0; @%p bra $next;\n{\n.param .b32 c;\n";
            let next = name.replace("fast", "continue");
            let parameters =
                FUNCTIONS.iter().find(|function| function.name == next).expect("its continuation").parameters;
            for (at, (&bits, source)) in parameters.iter().zip(sources(name)).enumerate() {
                let register = if bits == 64 { "%d" } else { "%s" };
                let from = match source {
                    Source::Result(word) => format!("ld.param.b{bits} {register}, [r+{}]", word * 8),
                    Source::Argument(at) => format!("ld.global.b{bits} {register}, [%w+{}]", at * 8 + 8),
                };
                let _ = writeln!(calls, ".param .b{bits} a{at}; {from}; st.param.b{bits} [a{at}], {register};");
            }
            let names = list(parameters, |at, _| format!("a{at}"));
            let _ = writeln!(
                calls,
                "call (c), {next}, ({names}); ld.param.b32 %s, [c]; cvt.u64.u32 %d, %s; st.global.b64 [%w+128], %d;\n}}"
            );
        } else {
            let _ = writeln!(calls, "ld.param.b32 %s, [r]; st.global.b32 [%w+128], %s;");
        }
        let _ = writeln!(calls, "}}\nbra $next;\n$not{kind}:");
    }
    let _ = write!(
        text,
        ".visible .entry work(.param .u64 lists)\n{{\n.reg .pred %p; .reg .b64 %w; .reg .b64 %d; .reg .b64 %a; .reg .b64 %k; .reg .b32 %s; .reg .b32 %t; .reg .b32 %u;\n\
         mov.u32 %s, %tid.x; mov.u32 %t, %ctaid.x; mov.u32 %u, %ntid.x; mad.lo.u32 %s, %t, %u, %s; mul.wide.u32 %d, %s, 8;\n\
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
    /// The result of the step before, or more.
    AtLeastBefore,
    /// Success, or an error of a wait that does not end.
    Ends,
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
    /// Memory for a request of a flush, and for a result.
    Request(u64),
    Out(u64),
    /// The count at the last reset of signal 1.
    ResetAt,
}

type Step = (u64, Vec<Word>, Expect);

/// What makes the threads get to code that they seldom need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usual,
    /// Most posts are aggregated.
    Aggregated,
    /// All posts are on one ring.
    Crowded,
    /// One thread alone, in the exclusive mode, posts more than the rings have room for.
    Lone,
    /// NCCL's device code has posted before, and has rung, or left that to others.
    Posted,
    Deferred,
    /// The card completes nothing, and waits end by their time.
    Stalled,
}

/// The steps of all threads under one seed, and what the card has to find.
struct Work {
    kind: Kind,
    /// The kind of posts of a crowd.
    crowd: usize,
    policy: u32,
    wide: bool,
    /// The number of the first post.
    start: u32,
    /// Blocks, and threads of a block.
    shape: (u32, u32),
    steps: Vec<Vec<Step>>,
    /// The posts of the steps, for native calls.
    posts: Vec<(u64, Vec<Word>)>,
    /// Ring and slot without phase and value, and the post that it is of.
    slots: HashMap<(usize, Vec<u64>), (usize, Option<u64>)>,
    requests: usize,
}

/// The address of the count at the last reset of signal 1.
fn reset_at(side: &Side) -> u64 {
    let context = side.context.context.as_ptr();
    // SAFETY: the context is leaked, and no thread writes its pointers.
    let dev = unsafe { (*context).routes.dev };
    // SAFETY: the device handle is leaked, and no thread writes its pointers.
    let handles = unsafe { (*dev).signal_handles };
    // SAFETY: the list is leaked, and has a handle for each of two signals.
    let handle = unsafe { *handles.wrapping_add(1) };
    // SAFETY: the handle is leaked.
    unsafe { &raw const (*handle).cntr_offset as u64 }
}

/// NCCL's device code has written requests of the ring, and leaves the doorbell to others.
fn defer(side: &Side, ring: usize, count: u32) {
    let context = side.context.context.as_ptr();
    // SAFETY: the context is leaked, and no thread writes its pointers.
    let endpoints = unsafe { (*context).routes.endpoints };
    // SAFETY: the endpoints are leaked, and the number is that of one of them.
    let queue = unsafe { &raw const (*endpoints.wrapping_add(ring)).queue };
    for field in [offset_of!(WqV0, pc), offset_of!(WqV0, wqes_completed)] {
        let word = queue.cast::<u8>().wrapping_add(SQ_WQ_OFFSET + field).cast_mut();
        // SAFETY: an aligned word of the leaked queue, which is only accessed atomically while a kernel runs.
        unsafe { AtomicU32::from_ptr(word.cast()) }.fetch_add(count, Ordering::SeqCst);
    }
}

/// NCCL's device code says that doorbells wait for a later request.
fn wait(side: &Side) {
    let context = side.context.context.as_ptr();
    // SAFETY: the context is leaked, and no thread writes its pointers.
    let dev = unsafe { (*context).routes.dev };
    let word = dev.wrapping_byte_add(offset_of!(DevHandle, scratch_pad)).cast();
    // SAFETY: an aligned word of the leaked handle, which is only accessed atomically.
    unsafe { AtomicU32::from_ptr(word) }.store(1, Ordering::SeqCst);
}

impl Work {
    /// Requests of NCCL's device code on each ring: few, or all but one.
    fn of_nccl(&self) -> u32 {
        match self.kind {
            Kind::Posted => 2,
            Kind::Deferred => [2, ENTRIES - 1][self.crowd % 2],
            _ => 0,
        }
    }

    /// The device code has posted on rings before, and NCCL's code after it. The counts of the card.
    fn before(&self, side: &Side) -> Vec<u32> {
        let rings = &side.context.rings;
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
        let kinds = [
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
        let kind = kinds[seed as usize % kinds.len()];
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
        let mut work = Work {
            kind,
            crowd: [0, 1, 3][seed as usize / 33 % 3],
            policy,
            wide,
            start,
            shape,
            steps: Vec::new(),
            posts: Vec::new(),
            slots: HashMap::new(),
            requests: 0,
        };
        let posts = (THREADS * POSTS) as u64 / u64::from(shape.0 * shape.1);
        for thread in 0..u64::from(shape.0 * shape.1) {
            let steps = work.thread(&mut random, thread, posts, mode);
            work.steps.push(steps);
        }
        work.expect_slots();
        work
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
            steps.push((function("fgin_set_timeout"), vec![Context, Value(20_000)], Expect::Equal(0)));
        }
        if self.kind == Kind::Deferred && random.one_in(2) {
            steps.push((function("fgin_flush_async"), vec![Context, Request(thread)], ends));
            let list = vec![Context, Request(thread), Out(thread)];
            steps.push((function("fgin_test_request"), list, ends));
            steps.push((function("fgin_flush"), vec![Context], ends));
        }
        for number in first..first + posts {
            let aggregates = match self.kind {
                Kind::Aggregated => !random.one_in(4),
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
            let how = Value(if aggregates { 2 } else { 0 } | u64::from(random.one_in(3)));
            // All threads of a block post each third time together, as lanes of a warp that make the same call.
            let at = (number - first) as usize;
            let by_lanes = at % 3 == 2;
            // The plain post, and the fast functions that post the same.
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
                    (("fgin_put", list), ("fgin_fast_put", [&quick[..], &[Value(0); 4], &[how]].concat()))
                }
                1 => {
                    let quick = vec![Context, to, Value(1), Value(0), how];
                    (("fgin_signal", vec![Context, to, Value(1 | 1 << 32), flags]), ("fgin_fast_signal", quick))
                }
                2 => {
                    let list = vec![Context, to, Window, offset, Window, offset, Value(8), flags];
                    (("fgin_get", list.clone()), ("fgin_get", list))
                }
                _ => {
                    let list = vec![Context, to, Window, offset, value, Value(8), Value(0), flags];
                    let quick = vec![Context, to, Window, offset, value, Value(8), Value(0), Value(0), how];
                    (("fgin_put_value", list), ("fgin_fast_put_value", quick))
                }
            };
            // The requests of signals are equal: the card cannot tell whose it has completed.
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
                            // A flush that has ended has the posts before it.
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

    /// Posts natively, one after the other, and keeps the slots.
    fn expect_slots(&mut self) {
        let pool = pool();
        let side = Side::new(self.policy, self.wide, pool, self.start);
        let rings = &side.context.rings;
        for (number, (kind, list)) in self.posts.iter().enumerate() {
            let function = &FUNCTIONS[*kind as usize];
            let source = (function.name == "fgin_put").then_some(number as u64);
            let before: Vec<u32> = rings.iter().map(|ring| ring.cursors()[0]).collect();
            // No aggregation: the batch would fill.
            let list: Vec<u64> = list
                .iter()
                .enumerate()
                .map(|(at, &word)| {
                    let value = self.word(&side, word, [0; 5]);
                    if at + 1 == list.len() { value & !2 } else { value }
                })
                .collect();
            assert_eq!((function.native)(&list)[0], 0, "{}", function.name);
            for (at, ring) in rings.iter().enumerate() {
                let new = ring.cursors()[0].wrapping_sub(before[at]);
                for idx in (0..new).map(|more| before[at].wrapping_add(more)) {
                    let (words, _) = canonical(&ring.slot(idx as usize), pool);
                    self.slots.insert((at, words), (number, source));
                    self.requests += 1;
                }
                ring.completed.store(u64::from(ring.cursors()[0] & 0x7fff_ffff), Ordering::SeqCst);
            }
        }
        assert_eq!(self.posts.len() as u64, NUMBERS);
    }

    fn word(&self, side: &Side, word: Word, [data, done, arrived, requests, out]: [u64; 5]) -> u64 {
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
        for count in self.side.context.signals.iter().chain(&self.side.context.counters) {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn act(&self, state: &mut Fetched, random: &mut Random, address: Option<u64>) -> Result<(), String> {
        let rings = &self.side.context.rings;
        if let Some(at) = rings.iter().position(|ring| address == Some(ring.doorbell.as_ptr() as u64)) {
            self.ring(state, at)?;
        }
        let at = random.index(rings.len());
        for at in (0..rings.len()).filter(|ring| address.is_none() || *ring == at || !random.one_in(4)) {
            self.fetch(state, at)?;
        }
        let completes = self.work.kind != Kind::Stalled && !state.open.is_empty();
        if completes && random.one_in(if address.is_some() { 24 } else { 2 }) {
            let which = random.index(state.open.len());
            self.complete(state, which)?;
        }
        if (random.one_in(16) || address.is_none()) && state.raised < POSTS as u64 {
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

/// Runs the work on the module; what was wrong.
fn wrong(loaded: &Loaded, work: &Work, seed: u64) -> Option<String> {
    let pool = pool();
    let side = Side::new(work.policy, work.wide, pool, work.start);
    let counts = work.before(&side);
    let card = Card {
        work,
        side,
        first: counts.clone(),
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
    launch.watchdog = Some(Duration::from_secs(5));
    let kernel = loaded.program().kernel("work").expect("the kernel");
    let ended = run(loaded, kernel, &launch, &card, &card.stop).map_err(|trap| trap.to_string());
    let (state, _) = card.state.into_inner().expect("no thread panics with the card");
    if state.wrong.is_some() {
        return state.wrong;
    }
    if let Err(trap) = ended {
        return Some(trap);
    }
    if work.kind != Kind::Stalled && (state.found != work.requests || !state.open.is_empty()) {
        return Some(format!("the card has fetched {} requests of {}", state.found, work.requests));
    }
    expected.iter().enumerate().find_map(|(number, &(at, expect, kind))| {
        let found = lists.get(at);
        let good = match expect {
            Expect::Any => true,
            Expect::Equal(value) => found == value,
            Expect::AtLeast(value) => found >= value,
            Expect::AtLeastBefore => found >= lists.get(expected[number - 1].0),
            Expect::Ends => [0, TIMEOUT, POISONED].contains(&found),
        };
        let name = FUNCTIONS.get(kind as usize).map_or("a load", |function| function.name);
        (!good).then(|| format!("step {number}, {name}: {found}, not {expect:?}"))
    })
}

fn load(text: &str) -> Loaded {
    let module = |name: &str, text: &str| Module::parse(name, text).unwrap_or_else(|error| panic!("{error}"));
    let modules = vec![module("work", &kernel()), module("ferrogin_device.ptx", text)];
    Arc::new(Program::link(modules).unwrap_or_else(|error| panic!("{error}"))).load(&[])
}

/// The first of the seeds that shows the removal, and what is wrong with it.
fn shown(text: &str, works: &[Work], first: Option<u64>) -> Option<(u64, String)> {
    let loaded = load(text);
    let seeds = first.into_iter().chain((0..works.len() as u64).filter(|seed| first != Some(*seed)));
    seeds.map(|seed| (seed, works.get(seed as usize))).find_map(|(seed, work)| {
        let wrong = work.map_or_else(|| wrong(&loaded, &Work::new(seed), seed), |work| wrong(&loaded, work, seed));
        wrong.map(|wrong| (seed, wrong))
    })
}

/// A line of `removals.txt`: the change, the site, the verdict, and the seed or the reason.
#[derive(Clone, Debug)]
struct Line {
    change: Change,
    site: Site,
    verdict: String,
    note: String,
}

impl Line {
    fn read(line: &str) -> Self {
        let fields: Vec<String> = line.split('\t').map(String::from).collect();
        let Ok([change, form, before, after, verdict, note]) = <[String; 6]>::try_from(fields) else {
            panic!("removals.txt: {line:?} has other than 6 fields: run the command in its head");
        };
        let change = match change.as_str() {
            "none" => Change::None,
            "cta" => Change::Block,
            _ => panic!("removals.txt: {line}"),
        };
        Self { change, site: [form, before, after], verdict, note }
    }

    fn key(&self) -> String {
        let change = if self.change == Change::Block { "cta" } else { "none" };
        format!("{change}\t{}", self.site.join("\t"))
    }

    /// Tries the removal.
    fn now(&self, text: &str, lines: &[usize], works: &[Work]) -> (String, Option<(u64, String)>) {
        let shown_by = shown(&changed(text, lines, self.change), works, self.note.parse().ok());
        let verdict = match &shown_by {
            Some(_) => "found",
            None if shown(&changed(text, lines, Change::Trap), works, None).is_some() => "unseen",
            None => "unreached",
        };
        (verdict.into(), shown_by)
    }
}

const TABLE: &str = include_str!("../../removals.txt");

fn is_line(line: &&str) -> bool {
    !line.is_empty() && !line.starts_with('#')
}

fn table() -> Vec<Line> {
    TABLE.lines().filter(is_line).map(Line::read).collect()
}

/// A line for each removal that the module has room for, without a verdict.
fn removals(sites: &BTreeMap<Site, Vec<usize>>) -> Vec<Line> {
    let line = |change, site: &Site| Line { change, site: site.clone(), verdict: String::new(), note: String::new() };
    let narrower = sites.keys().filter(|site| !site[0].contains(".cta")).map(|site| line(Change::Block, site));
    sites.keys().map(|site| line(Change::None, site)).chain(narrower).collect()
}

fn works() -> Vec<Work> {
    (0..repetitions("SOFTGPU_REMOVAL_SEEDS", 200, 200)).map(Work::new).collect()
}

#[test]
fn the_shipped_module_is_right_under_all_seeds() {
    assert_eq!(shown(&shipped::text(), &works(), None), None);
}

/// The sites of the module, each with a verdict, and the reasons of those that no seed shows.
#[test]
fn the_table_of_removals_lists_every_site() {
    if refreshes() {
        return println!("SKIP the_table_of_removals_lists_every_site: the table is made again");
    }
    let expected: Vec<String> = removals(&sites(&shipped::text())).iter().map(Line::key).collect();
    let table = table();
    let listed: Vec<String> = table.iter().map(Line::key).collect();
    assert_eq!(listed, expected, "the module has changed: removals.txt says how to make the table again");
    let docs = ferrogin_test_support::workspace().join("docs/software-gpu.md");
    let docs = std::fs::read_to_string(docs).expect("the page of the software GPU");
    for line in &table {
        let known = match line.verdict.as_str() {
            "found" => line.note.parse::<u64>().is_ok(),
            "unseen" | "unreached" => line.note.split('+').all(|reason| docs.contains(&format!("\n| `{reason}` | "))),
            _ => false,
        };
        assert!(
            known,
            "removals.txt: {line:?} has no verdict, no seed, or a reason that docs/software-gpu.md does not define"
        );
    }
    let count = |verdict: &str| table.iter().filter(|line| line.verdict == verdict).count();
    println!("{} found, {} unseen, {} unreached", count("found"), count("unseen"), count("unreached"));
}

fn refreshes() -> bool {
    std::env::var_os("FERROGIN_REFRESH").is_some()
}

/// The reason of a new line is that of the old one which is most like it; `?` if there is none.
fn similar(line: &Line, old: &[Line]) -> String {
    let alike = |other: &&Line| {
        let same = line.site.iter().zip(&other.site).filter(|(one, other)| one == other).count();
        (other.change == line.change, other.verdict == line.verdict, same)
    };
    let others = old.iter().filter(|other| other.verdict != "found" && other.site[0] == line.site[0]);
    others.max_by_key(alike).map_or("?".into(), |other| other.note.clone())
}

/// The verdicts of now on all lines, in their order.
fn verdicts(lines: &[Line], text: &str) -> Vec<(String, Option<(u64, String)>)> {
    let (works, sites, next) = (works(), sites(text), AtomicUsize::new(0));
    let found = Mutex::new(vec![Default::default(); lines.len()]);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((at, line)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, lines.get(at)?)))
                {
                    let now = line.now(text, sites.get(&line.site).map_or(&[][..], Vec::as_slice), &works);
                    found.lock().expect("no thread panics with the lock")[at] = now;
                }
            });
        }
    });
    found.into_inner().expect("no thread panics with the lock")
}

/// Makes the table again.
fn refresh(text: &str, old: &[Line]) -> String {
    let mut file: String = TABLE.lines().filter(|line| line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    let mut lines = removals(&sites(text));
    let before = |line: &Line| old.iter().find(|other| other.key() == line.key());
    lines.iter_mut().for_each(|line| line.note = before(line).map_or(String::new(), |before| before.note.clone()));
    let verdicts = verdicts(&lines, text);
    for (mut line, (verdict, shown_by)) in lines.into_iter().zip(verdicts) {
        line.verdict = verdict;
        line.note = match (shown_by, before(&line).filter(|before| before.verdict != "found")) {
            (Some((seed, _)), _) => seed.to_string(),
            (None, Some(before)) => before.note.clone(),
            (None, None) => {
                let note = similar(&line, old);
                println!("PROPOSED {}\t{}\t{note}", line.key(), line.verdict);
                note
            }
        };
        let _ = writeln!(file, "{}\t{}\t{}", line.key(), line.verdict, line.note);
    }
    file
}

/// Each removal that the table calls found is found. A soak tries all sites; with `FERROGIN_REFRESH` the table is made again.
#[test]
fn removals_have_the_verdicts_of_the_table() {
    let (text, mut table) = (shipped::text(), table());
    if refreshes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/removals.txt");
        return std::fs::write(path, refresh(&text, &table)).expect("the table");
    }
    let sites = sites(&text);
    table.retain(|line| sites.contains_key(&line.site) && (soak() || line.verdict == "found"));
    let verdicts = verdicts(&table, &text);
    let differences: Vec<String> = table
        .iter()
        .zip(verdicts)
        .filter(|(line, (now, _))| *now != line.verdict)
        .map(|(line, (now, shown_by))| format!("{}: {now}, not {}: {shown_by:?}", line.key(), line.verdict))
        .collect();
    println!("{} removals tried", table.len());
    assert!(!table.is_empty() && differences.is_empty(), "{differences:#?}");
}
