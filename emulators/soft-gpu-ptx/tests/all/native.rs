//! Each `fgin_*` function of the shipped module on the interpreter, next to the same function as native code: after
//! every call, results, ring bytes, cursors and doorbells must be equal.

use crate::arena::Arena;
use crate::shipped;
use efa_dp_direct::wqe::Destination;
use ferrogin_ffi::block::EmulatedSpec;
use ferrogin_ffi::ext::{EmulatedPeer, POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_test_support::wait::HANG_LIMIT;
use ferrogin_test_support::{Random, repetitions};
use plain_context::{EndpointSpec, Extras, NO_EXTRAS, Spec, TestContext, VALUE, WindowSpec, leak, make_with, window};
use soft_gpu_ptx::{Launch, Loaded, Module, Process, Program, run};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The result of the fast-path functions: the continuation's kind, its word, the endpoint, the two addresses, and the
/// keys.
#[repr(C)]
struct Continuation([u64; WORDS]);

/// Words in the longest result, and bits in a [`Continuation`].
pub const WORDS: usize = 6;
pub const CONTINUATION: u32 = 384;

/// A function: its name, the widths of its parameters and result, and the native call.
pub struct Function {
    pub name: &'static str,
    pub parameters: &'static [u32],
    pub result: u32,
    pub native: fn(&[u64]) -> [u64; WORDS],
}

macro_rules! bits {
    (u32) => {
        32
    };
    (u64) => {
        64
    };
    (i32) => {
        32
    };
    (Number) => {
        64
    };
    (Continuation) => {
        CONTINUATION
    };
}

macro_rules! words {
    ($result:expr, i32) => {
        [u64::from($result as u32), 0, 0, 0, 0, 0]
    };
    ($result:expr, Number) => {
        [$result, 0, 0, 0, 0, 0]
    };
    ($result:expr, Continuation) => {
        $result.0
    };
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $ty:ident),*) -> $result:ident;)*) => {
        unsafe extern "C" {
            $(fn $name($($argument: $ty),*) -> $result;)*
        }
        pub const FUNCTIONS: &[Function] = &[$(Function {
            name: stringify!($name),
            parameters: &[$(bits!($ty)),*],
            result: bits!($result),
            native: |arguments| {
                let mut arguments = arguments.iter();
                $(let $argument = *arguments.next().expect("an argument") as $ty;)*
                // SAFETY: the test passes leaked contexts, windows and buffers, or null where the function checks for
                // null.
                let result = unsafe { $name($($argument),*) };
                words!(result, $result)
            },
        }),*];
    };
}

/// A 64-bit result.
type Number = u64;

// Pointers are `u64` here, so the interpreter and the native code get the same numbers.
functions! {
    fgin_open(handle: u64, context: u32, out: u64) -> i32;
    fgin_put(ctx: u64, peer: u32, dst: u64, dst_off: u64, src: u64, src_off: u64, bytes: u64, action: u64, flags: u32) -> i32;
    fgin_put_value(ctx: u64, peer: u32, dst: u64, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32) -> i32;
    fgin_get(ctx: u64, peer: u32, remote: u64, remote_off: u64, local: u64, local_off: u64, bytes: u64, flags: u32) -> i32;
    fgin_signal(ctx: u64, peer: u32, action: u64, flags: u32) -> i32;
    fgin_put_signal_at(ctx: u64, peer: u32, dst: u64, dst_off: u64, src: u64, src_off: u64, bytes: u64, word: u64, word_off: u64, amount: u64, counter: u64, flags: u32) -> i32;
    fgin_put_value_signal_at(ctx: u64, peer: u32, dst: u64, dst_off: u64, value: u64, bytes: u32, word: u64, word_off: u64, amount: u64, flags: u32) -> i32;
    fgin_signal_at(ctx: u64, peer: u32, word: u64, word_off: u64, amount: u64, flags: u32) -> i32;
    fgin_warp_put(ctx: u64, lanes: u32, peer: u32, dst: u64, dst_off: u64, src: u64, src_off: u64, bytes: u64, action: u64, flags: u32) -> i32;
    fgin_warp_put_value(ctx: u64, lanes: u32, peer: u32, dst: u64, dst_off: u64, value: u64, bytes: u32, action: u64, flags: u32) -> i32;
    fgin_warp_signal(ctx: u64, lanes: u32, peer: u32, action: u64, flags: u32) -> i32;
    fgin_ring(ctx: u64) -> i32;
    fgin_ring_waiting(ctx: u64) -> i32;
    fgin_flush(ctx: u64) -> i32;
    fgin_settle(ctx: u64) -> i32;
    fgin_flush_part(ctx: u64, rank: u32, size: u32) -> i32;
    fgin_flush_async(ctx: u64, out: u64) -> i32;
    fgin_wait_request(ctx: u64, request: u64) -> i32;
    fgin_test_request(ctx: u64, request: u64, done: u64) -> i32;
    fgin_set_timeout(ctx: u64, ns: u64) -> i32;
    fgin_read_signal(ctx: u64, id: u32, out: u64) -> i32;
    fgin_wait_signal(ctx: u64, id: u32, least: u64) -> i32;
    fgin_reset_signal(ctx: u64, id: u32) -> i32;
    fgin_read_counter(ctx: u64, id: u32, out: u64) -> i32;
    fgin_wait_counter(ctx: u64, id: u32, least: u64) -> i32;
    fgin_reset_counter(ctx: u64, id: u32) -> i32;
    fgin_fast_put(ctx: u64, peer: u32, dst: u64, dst_off: u64, src: u64, src_off: u64, bytes: u64, has_signal: u32, signal: u32, has_counter: u32, counter: u32, flags: u32) -> Continuation;
    fgin_fast_put_value(ctx: u64, peer: u32, dst: u64, dst_off: u64, value: u64, bytes: u32, has_signal: u32, signal: u32, flags: u32) -> Continuation;
    fgin_fast_signal(ctx: u64, peer: u32, has_signal: u32, signal: u32, flags: u32) -> Continuation;
    fgin_fast_flush(ctx: u64, rank: u32, size: u32, abort: u64, clock: u32, limit: u64) -> Number;
    fgin_continue(poster: u64, word: u64, remote: u64, local: u64, keys: u64, bytes: u32, next: u32) -> i32;
    fgin_fallback(poster: u64, word: u64, remote: u64, local: u64, keys: u64, bytes: u32, next: u32) -> i32;
}

/// Returns the text of a kernel `call_NAME` for each function, which takes arguments from, and writes results to, an
/// array of words.
fn wrappers() -> String {
    let mut text = String::from(".version 8.2\n.target sm_70\n.address_size 64\n");
    for function in FUNCTIONS {
        let name = function.name;
        let result = match function.result {
            CONTINUATION => ".param .align 8 .b8 r[48]",
            64 => ".param .b64 r",
            _ => ".param .b32 r",
        };
        let list = |of: &dyn Fn(usize, u32) -> String| {
            function.parameters.iter().enumerate().map(|(at, &bits)| of(at, bits)).collect::<Vec<_>>().join(", ")
        };
        let parameters = list(&|at, bits| format!(".param .b{bits} a{at}"));
        let names = list(&|at, _| format!("a{at}"));
        let _ = write!(
            text,
            ".extern .func ({result}) {name}({parameters});\n.visible .entry call_{name}(.param .u64 words)\n{{\n.reg .b64 %w; .reg .b64 %d; .reg .b32 %s;\nld.param.u64 %w, [words];\n{{\n{result};\n"
        );
        for (at, bits) in function.parameters.iter().enumerate() {
            let register = if *bits == 64 { "%d" } else { "%s" };
            let _ = writeln!(
                text,
                ".param .b{bits} a{at}; ld.global.b{bits} {register}, [%w+{}]; st.param.b{bits} [a{at}], {register};",
                at * 8
            );
        }
        let _ = writeln!(text, "call (r), {name}, ({names});");
        if function.result == CONTINUATION {
            for at in 0..WORDS {
                let _ = writeln!(text, "ld.param.b64 %d, [r+{}]; st.global.b64 [%w+{}], %d;", at * 8, 128 + at * 8);
            }
        } else {
            let (bits, register) = if function.result == 64 { (64, "%d") } else { (32, "%s") };
            let _ = writeln!(text, "ld.param.b{bits} {register}, [r]; st.global.b{bits} [%w+128], {register};");
        }
        text += "}\nret;\n}\n";
    }
    text
}

/// The size of a put that takes three requests and waits for the card between them.
const HUGE: u64 = (2 << 30) + 5;
pub const STRONG: u64 = 0x400;
pub const ENTRIES: u32 = 16;
pub const MAX_BATCH: u32 = 4;
pub const NRANKS: u32 = 3;
pub const SIGNALS: u32 = 2;
const COUNTERS: u32 = 1;
pub const ENDPOINTS: usize = 2 + (SIGNALS + COUNTERS) as usize;

/// One of the two contexts, and the buffers for its calls.
pub struct Side {
    pub context: TestContext,
    pub windows: [u64; 2],
    out: Arena,
    request: Arena,
    /// This rank's signals, if they are emulated.
    pub words: &'static [AtomicU64],
}

impl Side {
    pub fn new(policy: u32, wide: bool, pool: u64, start: u32) -> Self {
        Self::with_signals(SIGNALS, &NO_EXTRAS, &[], (policy, wide, pool, start))
    }

    pub fn emulated(parts: (u32, bool, u64, u32)) -> Self {
        let words: &[AtomicU64] = (0..SIGNALS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().leak();
        let peers = vec![EmulatedPeer { n_signals: SIGNALS, generation: 77 }; NRANKS as usize];
        let emulated = Some(EmulatedSpec { words: words.as_ptr() as u64, n_signals: SIGNALS, peers });
        Self::with_signals(0, &Extras { emulated, rank: 1, ..NO_EXTRAS }, words, parts)
    }

    pub fn with_signals(
        signals: u32,
        extras: &Extras,
        words: &'static [AtomicU64],
        (policy, wide, pool, start): (u32, bool, u64, u32),
    ) -> Self {
        let endpoints = (0..(2 + COUNTERS + signals) as usize).map(|at| {
            let wide = at == VALUE && wide;
            let has_slots = at == VALUE && !wide || at >= 3;
            let value_base = if has_slots { pool + (at * ENTRIES as usize * 8) as u64 } else { 0 };
            EndpointSpec { entries: ENTRIES, wide, max_batch: MAX_BATCH, value_base, start }
        });
        let targets = 0..((1 + signals) * NRANKS) as u16;
        let peers =
            |base: u64, key: u32| (0..NRANKS).map(|rank| (base + u64::from(rank) * 0x100_0000, key + rank)).collect();
        let spec = Spec {
            policy,
            nranks: NRANKS,
            rail: 0,
            endpoints: endpoints.collect(),
            n_counters: COUNTERS,
            n_signals: signals,
            targets: targets
                .map(|at| Destination { ah: 10 + at, qpn: 20 + at, qkey: 0x3000_0000 + u32::from(at) })
                .collect(),
            value_lkey: 0x77,
            scratch: WindowSpec { lkey: 0x88, addr: 0x4000_0000, peers: peers(0x5000_0000, 0x99) },
        };
        let context = make_with(&spec, extras);
        let windows = [0x1000_0000, 0x7000_0000]
            .map(|addr| window(&WindowSpec { lkey: 0x55, addr, peers: peers(addr * 2, 0x66) }, 0).0 as u64);
        Self { context, windows, out: Arena::new(16), request: Arena::new(16), words }
    }

    /// Completes all requests as the card does, and adds to signals and counters as others do.
    fn complete(&self, arrived: u64) {
        for ring in &self.context.rings {
            ring.completed.store(u64::from(ring.cursors()[0] & 0x7fff_ffff), Ordering::SeqCst);
        }
        for count in self.context.signals.iter().chain(&self.context.counters) {
            count.fetch_add(arrived, Ordering::SeqCst);
        }
        for word in self.words {
            word.fetch_add(arrived, Ordering::SeqCst);
        }
    }

    fn argument(&self, argument: Argument) -> u64 {
        let context = self.context.context.as_ptr();
        match argument {
            Argument::Value(value) => value,
            Argument::Context => context as u64,
            // SAFETY: the context is leaked, and no thread writes its pointers.
            Argument::Handle => unsafe { (*context).routes.dev as u64 },
            Argument::Window(at) => self.windows[at],
            // SAFETY: the context is leaked, and no thread writes its pointers.
            Argument::Poster(offset) => unsafe { (*context).routes.endpoints as u64 }.wrapping_add(offset),
            Argument::Out => self.out.address(),
            Argument::Request => self.request.address(),
        }
    }

    /// Returns everything that a card or caller can see.
    fn seen(&self, opened: bool) -> Vec<Vec<u64>> {
        let words = self.words.iter().map(|word| word.load(Ordering::SeqCst)).collect();
        let mut seen = vec![self.request.all(), words];
        let mut out = self.out.all();
        if opened {
            assert_eq!(out[0], self.context.context.as_ptr() as u64);
            out[0] = 0;
        }
        seen.push(out);
        for ring in &self.context.rings {
            seen.push(ring.cursors().map(u64::from).to_vec());
            seen.push(vec![u64::from(ring.doorbell.load(Ordering::SeqCst))]);
            seen.extend((0..ENTRIES as usize).map(|slot| ring.slot(slot).into_iter().map(u64::from).collect()));
        }
        seen
    }
}

#[derive(Clone, Copy, Debug)]
enum Argument {
    Value(u64),
    Context,
    Handle,
    Window(usize),
    /// The address of an endpoint, as an offset from the first.
    Poster(u64),
    Out,
    Request,
}

/// Returns arguments for a function, most of them valid.
fn arguments(random: &mut Random, name: &str, emulated: bool) -> Vec<Argument> {
    use Argument::{Context, Handle, Out, Request, Value, Window};
    let rare = |random: &mut Random, usual: Argument, bad: u64| if random.one_in(40) { Value(bad) } else { usual };
    let peer = {
        let peer = random.below(NRANKS);
        rare(random, Value(peer.into()), u64::from(NRANKS))
    };
    let signal = random.below(SIGNALS);
    let slot = if random.one_in(2) { 0 } else { u64::from(signal) + 1 };
    let counter = if random.one_in(4) { 1u64 << 16 } else { 0 };
    let amount = if emulated { random.of(&[1, 1, 1, 3, 6000]) } else { 1 };
    let add = if slot == 0 { 0 } else { amount };
    let action = rare(random, Value(slot | counter | add << 32), 77);
    let only_signal = Value(slot | add << 32);
    let aggregate = u64::from(random.one_in(4));
    let flags = Value((aggregate * 2) | random.of(&[0, 0, 0, 0x100, 0x200]) | random.of(&[0, 0, 0, STRONG]));
    let word = Value(8 * u64::from(random.below(1 << 17)));
    let word = rare(random, word, 12);
    let add_at = Value(random.of(&[0, 1, 5000, u64::MAX]));
    let bytes = {
        let bytes = u64::from(random.below(5000));
        rare(random, Value(bytes), HUGE)
    };
    let size = {
        let size = random.of(&[1u64, 2, 4, 8]);
        rare(random, Value(size), 3)
    };
    let (one, other) = (Window(random.index(2)), Window(random.index(2)));
    let (one, other) = (rare(random, one, 0), rare(random, other, 0));
    let (off1, off2) = (Value(random.below(1 << 20).into()), Value(random.below(1 << 20).into()));
    let value = Value(random.next_u64());
    let id = {
        let id = signal;
        rare(random, Value(id.into()), 9)
    };
    let of_counter = rare(random, Value(0), 9);
    let has = u64::from(slot != 0);
    let fast_flags = Value((2 * aggregate) | u64::from(random.one_in(4)));
    match name {
        "fgin_open" => vec![rare(random, Handle, 0), Value(random.below(2).into()), Out],
        "fgin_put" => vec![rare(random, Context, 0), peer, one, off1, other, off2, bytes, action, flags],
        "fgin_put_value" => vec![Context, peer, one, off1, value, size, action, flags],
        "fgin_get" => vec![Context, peer, one, off1, other, off2, bytes, flags],
        "fgin_signal" => vec![Context, peer, if random.one_in(9) { action } else { only_signal }, flags],
        // The thread is its warp's only lane.
        "fgin_warp_put" => vec![rare(random, Context, 0), Value(1), peer, one, off1, other, off2, bytes, action, flags],
        "fgin_warp_put_value" => vec![Context, Value(1), peer, one, off1, value, size, action, flags],
        "fgin_warp_signal" => vec![Context, Value(1), peer, if random.one_in(9) { action } else { only_signal }, flags],
        "fgin_put_signal_at" => {
            vec![Context, peer, one, off1, other, off2, bytes, one, word, add_at, Value(counter), flags]
        }
        "fgin_put_value_signal_at" => vec![Context, peer, one, off1, value, size, other, word, add_at, flags],
        "fgin_signal_at" => vec![Context, peer, one, word, add_at, flags],
        "fgin_flush" | "fgin_settle" | "fgin_ring" | "fgin_ring_waiting" => vec![Context],
        "fgin_flush_part" => vec![Context, Value(random.below(4).into()), Value(random.of(&[0, 1, 4]))],
        "fgin_fast_flush" => {
            let (rank, size, clock) = (random.below(4).into(), random.of(&[1, 4]), random.below(3).into());
            vec![Context, Value(rank), Value(size), Value(0), Value(clock), Value(60_000_000_000)]
        }
        "fgin_flush_async" => vec![Context, Request],
        "fgin_wait_request" => vec![Context, Request],
        "fgin_test_request" => vec![Context, Request, Out],
        "fgin_set_timeout" => vec![Context, Value(60_000_000_000 + u64::from(random.below(1000)))],
        "fgin_read_signal" => vec![Context, id, Out],
        "fgin_wait_signal" => vec![Context, id, Value(random.below(3).into())],
        "fgin_reset_signal" => vec![Context, id],
        "fgin_read_counter" => vec![Context, of_counter, Out],
        "fgin_wait_counter" => vec![Context, of_counter, Value(random.below(3).into())],
        "fgin_reset_counter" => vec![Context, of_counter],
        "fgin_fast_put" => {
            let ids = [has, signal.into(), counter >> 16, 0].map(Value);
            [&[Context, peer, one, off1, other, off2, bytes], &ids[..], &[fast_flags]].concat()
        }
        "fgin_fast_put_value" => {
            vec![Context, peer, one, off1, value, size, Value(has), Value(signal.into()), fast_flags]
        }
        "fgin_fast_signal" => vec![Context, peer, Value(has), Value(signal.into()), fast_flags],
        other => panic!("{other} has no arguments here"),
    }
}

/// Where an argument of a call behind the fast path comes from: a word of the fast path's result, or an argument of the
/// fast path.
#[derive(Clone, Copy)]
pub enum Source {
    Result(usize),
    Argument(usize),
    Zero,
}

/// The calls behind the fast path: the one for requests that take it, and the one for all other operations.
pub const BEHIND: [&str; 2] = ["fgin_continue", "fgin_fallback"];
/// Widths of the parameters of both.
pub const BEHIND_PARAMETERS: [u32; 7] = [64, 64, 64, 64, 64, 32, 32];

/// Returns the index of the call that the fast path's result asks for.
pub fn behind(next: u64) -> usize {
    usize::from(next & 7 > 4)
}

/// Returns where the arguments of a call behind the fast path come from.
pub fn continuation(name: &str) -> [Source; 7] {
    use Source::{Argument, Result, Zero};
    let bytes = match name {
        "fgin_fast_put" => Argument(6),
        "fgin_fast_put_value" => Argument(5),
        _ => Zero,
    };
    [Result(2), Result(1), Result(3), Result(4), Result(5), bytes, Result(0)]
}

fn continued(name: &str, fast: &[Argument], result: [u64; WORDS]) -> Vec<Argument> {
    let argument = |&source: &Source| match source {
        Source::Result(2) => Argument::Poster(result[2]),
        Source::Result(at) => Argument::Value(result[at]),
        Source::Argument(at) => fast[at],
        Source::Zero => Argument::Value(0),
    };
    continuation(name).iter().map(argument).collect()
}

/// A card that completes requests during a call, unless it is switched off (true).
pub struct Card(pub AtomicBool);

impl Card {
    /// Completes requests during a call.
    pub fn completes<T>(&self, side: &Side, call: impl FnOnce() -> T) -> T {
        let off = self.0.load(Ordering::SeqCst);
        let rings = side.context.rings.iter().map(|ring| (ring.doorbell, ring.completed)).collect::<Vec<_>>();
        let result = std::thread::scope(|scope| {
            if !off {
                scope.spawn(|| {
                    while !self.0.load(Ordering::SeqCst) {
                        for (doorbell, completed) in &rings {
                            // Deferred requests have already been completed between calls.
                            let rung = doorbell.load(Ordering::SeqCst) & 0x7fff_ffff;
                            let done = completed.load(Ordering::SeqCst) as u32;
                            if rung.wrapping_sub(done) & 0x7fff_ffff < 1 << 30 {
                                completed.store(rung.into(), Ordering::SeqCst);
                            }
                        }
                        std::thread::yield_now();
                    }
                });
            }
            let result = call();
            self.0.store(true, Ordering::SeqCst);
            result
        });
        self.0.store(off, Ordering::SeqCst);
        result
    }
}

/// Calls a function on the interpreter, or natively if there is none. Returns the result, with the endpoint as an
/// offset.
fn call(
    interpreter: Option<(&Loaded, bool)>,
    function: &Function,
    arguments: &[Argument],
    side: &Side,
    what: &str,
) -> [u64; WORDS] {
    let name = function.name;
    let values: Vec<u64> = arguments.iter().map(|&argument| side.argument(argument)).collect();
    // A signal may wait for its own put, or for all posts.
    let waits = !side.words.is_empty() && ["put", "signal"].iter().any(|part| name.contains(part));
    let has_card = waits || arguments.iter().any(|argument| matches!(argument, Argument::Value(HUGE)));
    let card = Card(AtomicBool::new(!has_card));
    let found = if let Some((loaded, weak)) = interpreter {
        let words = Arena::new(16 + WORDS);
        values.iter().enumerate().for_each(|(at, &value)| words.set(at, value));
        let kernel = loaded.program().kernel(&format!("call_{name}")).expect("the wrapper");
        let mut launch = Launch::new([1, 1, 1], [1, 1, 1], words.address().to_le_bytes().to_vec());
        launch.watchdog = Some(HANG_LIMIT);
        launch.weak = weak;
        // SAFETY: kernels only reach leaked memory and the test's arenas, through pointers and atomics; both live until
        // the test ends.
        let memory = unsafe { Process::new() };
        let ended =
            card.completes(side, || run(loaded, kernel, &launch, &memory, &AtomicBool::new(false)).map_err(Box::new));
        if let Err(trap) = ended {
            panic!("{what}: {name} {arguments:x?}: {trap}");
        }
        std::array::from_fn(|at| words.get(16 + at))
    } else {
        card.completes(side, || (function.native)(&values))
    };
    if function.result != CONTINUATION {
        return found;
    }
    let [rest, word, poster, remote, local, keys] = found;
    match rest {
        // The other words have no meaning.
        0 => [0; WORDS],
        _ => [rest, word, poster.wrapping_sub(side.argument(Argument::Poster(0))), remote, local, keys],
    }
}

/// Checks that the native and interpreted results, and everything visible, are equal.
fn same(name: &str, arguments: &[Argument], found: [[u64; WORDS]; 2], sides: &[Side; 2], what: &str) {
    assert_eq!(found[1], found[0], "{what}: the result of {name} {arguments:x?}");
    let opened = name == "fgin_open" && found[0][0] == 0;
    let seen = sides.each_ref().map(|side| side.seen(opened));
    for (part, (native, interpreted)) in seen[0].iter().zip(&seen[1]).enumerate() {
        assert_eq!(native, interpreted, "{what}: part {part} after {name} {arguments:x?}");
    }
    if opened {
        sides.iter().for_each(|side| side.out.set(0, 0));
    }
}

#[test]
fn each_function_does_on_the_interpreter_what_it_does_natively() {
    let module = |name: &str, text: &str| Module::parse(name, text).unwrap_or_else(|error| panic!("{error}"));
    let modules = vec![module("wrappers", &wrappers()), module("ferrogin_device.ptx", &shipped::text())];
    let program = Arc::new(Program::link(modules).unwrap_or_else(|error| panic!("{error}")));
    let loaded = program.load(&[]);
    let mut called = BTreeSet::new();
    let mut good = BTreeSet::new();
    let kinds = [(POLICY_COMBINING, true), (POLICY_COMBINING, false), (POLICY_LOCKED, false)];
    for (policy, wide, emulated) in
        [false, true].into_iter().flat_map(|emulated| kinds.map(|(policy, wide)| (policy, wide, emulated)))
    {
        for seed in 1..=repetitions("SOFTGPU_CALLS", 6, 400) {
            let mut random = Random::new(seed);
            let pool = leak([0u64; ENTRIES as usize * ENDPOINTS]) as u64;
            let start = random.of(&[0, 13, 0x7fff_fff0, 0xffff_fff0]);
            let parts = (policy, wide, pool, start);
            let sides = [(); 2].map(|()| match emulated {
                true => Side::emulated(parts),
                false => Side::new(policy, wide, pool, start),
            });
            for at in 0..150 {
                let function = &FUNCTIONS[random.index(FUNCTIONS.len())];
                if BEHIND.contains(&function.name) {
                    continue;
                }
                let arguments = arguments(&mut random, function.name, emulated);
                sides.iter().for_each(|side| side.complete(3));
                let what = format!("policy {policy}, wide {wide}, emulated {emulated}, seed {seed}, call {at}");
                let interpreter = Some((&loaded, seed % 2 == 0));
                let mut found = [
                    call(None, function, &arguments, &sides[0], &what),
                    call(interpreter, function, &arguments, &sides[1], &what),
                ];
                same(function.name, &arguments, found, &sides, &what);
                called.insert(function.name);
                if found[0][0] == 0 && function.result == 32 {
                    good.insert(function.name);
                }
                if function.result == CONTINUATION && found[1][0] != 0 {
                    let name = BEHIND[behind(found[1][0])];
                    let next = FUNCTIONS.iter().find(|function| function.name == name).expect("a function");
                    for (at, side) in sides.iter().enumerate() {
                        if found[at][0] != 0 {
                            let rest = continued(function.name, &arguments, found[at]);
                            found[at] = call([None, interpreter][at], next, &rest, side, &what);
                        }
                    }
                    same(next.name, &arguments, found, &sides, &what);
                    if found[1][0] == 0 {
                        good.insert(next.name);
                    }
                    called.insert(next.name);
                }
            }
        }
    }
    let exported: BTreeSet<&str> = FUNCTIONS.iter().map(|function| function.name).collect();
    let text = shipped::text();
    let count = text.lines().filter(|line| line.starts_with(".visible .func")).count();
    assert_eq!(exported.len(), count, "the shipped module has a function that this test does not call");
    assert_eq!(called, exported);
    let never: Vec<_> = FUNCTIONS
        .iter()
        .filter(|function| function.result == 32 && !good.contains(function.name))
        .map(|function| function.name)
        .collect();
    assert!(never.is_empty(), "never without an error: {never:?}");
}
