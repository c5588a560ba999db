//! `cargo xtask gpu-cost`: what the device code's operations cost, as counted by the software GPU's interpreter.
#![allow(unsafe_code)]

use efa_dp_direct::wqe::Destination;
use ferrogin_ffi::block::EmulatedSpec;
use ferrogin_ffi::ext::{EmulatedPeer, POLICY_COMBINING, POLICY_LOCKED};
use ferrogin_ptx::CHECKED_IN;
use plain_context::{EndpointSpec, Spec, TestContext, WindowSpec};
use soft_gpu_ptx::{Cost, Launch, Loaded, Module, Places, Process, Program, Time, cost};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The arguments of `cargo xtask gpu-cost`.
#[derive(Debug, clap::Args)]
pub struct CostArgs {
    /// Operations to run [default: all].
    operations: Vec<Operation>,
    /// How many threads of a block make the call at the same time.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32], value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Vec<u32>,
    /// The seed for the threads' interleaving.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A PTX file with the functions of `ferrogin/gin.h`, instead of the checked-in one.
    #[arg(long)]
    module: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Operation {
    Put,
    PutAggregate,
    PutSignal,
    PutValue,
    PutValueSignal,
    Get,
    Signal,
    /// In sharing mode CTA
    PutSignalCta,
    PutValueSignalCta,
    SignalCta,
    /// In sharing mode THREAD, which a kernel calls, too
    PutSignalThread,
    PutValueSignalThread,
    SignalThread,
    /// The threads of each warp post together, as lanes
    PutWarp,
    PutValueWarp,
    PutValueSignalWarp,
    SignalWarp,
    /// As a kernel posts: the fast path, and the call behind it where something is left to do
    KernelPutSignal,
    KernelPutValueSignal,
    KernelSignal,
    /// The same with an emulated signal
    KernelPutMemorySignal,
    KernelPutValueMemorySignal,
    KernelMemorySignal,
    /// A flush of a context with no post since the last flush
    FlushIdle,
    /// A flush after puts that have completed
    Flush,
    /// A wait for a signal that has arrived
    WaitSignal,
    /// The same with an emulated signal whose word is in host memory, as it is without GDRCopy
    WaitMemorySignal,
    /// A put that checks whether its queue has room, as at least each 16th does
    PutCheck,
    /// One more round of a put that waits for room
    PutRound,
    /// One more round of a flush that waits
    FlushRound,
    /// One more round of a wait for a signal
    WaitSignalRound,
    /// The same with an emulated signal
    WaitMemorySignalRound,
}

const ENTRIES: u32 = 4096;
/// The most posts that no other post checks the room for.
const UNCHECKED: u32 = 16;
/// `FGIN_TIMEOUT`
const TIMEOUT: u64 = 4;
const NRANKS: u32 = 2;
/// Words in the wrapper's memory before the results.
const ARGUMENTS: usize = 16;
const AGGREGATE: u64 = 2;
const CTA: u64 = 0x100;
const THREAD: u64 = 0x200;
/// Signal 0, raised by 1.
const SIGNAL: u64 = 1 << 32 | 1;

impl Operation {
    /// Returns the function's name, and its arguments' widths.
    fn function(self) -> (&'static str, &'static [u32]) {
        match self {
            Self::Put
            | Self::PutAggregate
            | Self::PutSignal
            | Self::PutSignalCta
            | Self::PutSignalThread
            | Self::PutCheck
            | Self::PutRound => ("fgin_put", &[64, 32, 64, 64, 64, 64, 64, 64, 32]),
            Self::PutValue | Self::PutValueSignal | Self::PutValueSignalCta | Self::PutValueSignalThread => {
                ("fgin_put_value", &[64, 32, 64, 64, 64, 32, 64, 32])
            }
            Self::Get => ("fgin_get", &[64, 32, 64, 64, 64, 64, 64, 32]),
            Self::Signal | Self::SignalCta | Self::SignalThread => ("fgin_signal", &[64, 32, 64, 32]),
            Self::PutWarp => ("fgin_warp_put", &[64, 32, 32, 64, 64, 64, 64, 64, 64, 32]),
            Self::PutValueWarp | Self::PutValueSignalWarp => {
                ("fgin_warp_put_value", &[64, 32, 32, 64, 64, 64, 32, 64, 32])
            }
            Self::SignalWarp => ("fgin_warp_signal", &[64, 32, 32, 64, 32]),
            Self::KernelPutSignal | Self::KernelPutMemorySignal => {
                ("fgin_fast_put", &[64, 32, 64, 64, 64, 64, 64, 32, 32, 32, 32, 32])
            }
            Self::KernelPutValueSignal | Self::KernelPutValueMemorySignal => {
                ("fgin_fast_put_value", &[64, 32, 64, 64, 64, 32, 32, 32, 32])
            }
            Self::KernelSignal | Self::KernelMemorySignal => ("fgin_fast_signal", &[64, 32, 32, 32, 32]),
            Self::FlushIdle | Self::Flush | Self::FlushRound => ("fgin_flush", &[64]),
            Self::WaitSignal | Self::WaitMemorySignal | Self::WaitSignalRound | Self::WaitMemorySignalRound => {
                ("fgin_wait_signal", &[64, 32, 64])
            }
        }
    }

    fn arguments(self, context: u64, window: u64, threads: u32) -> Vec<u64> {
        let lanes = u64::from(u32::MAX >> (32 - threads.min(32)));
        let together = u64::from(threads > 1);
        let put = |action, flags| vec![context, 1, window, 0, window, 4096, 4096, action, flags];
        let put_value = |flags| vec![context, 1, window, 0, 7, 8, SIGNAL, flags];
        let signal = |flags| vec![context, 1, SIGNAL, flags];
        match self {
            Self::Put | Self::PutCheck | Self::PutRound => put(0, 0),
            Self::PutAggregate => put(0, AGGREGATE),
            Self::PutSignal => put(SIGNAL, 0),
            Self::PutValue => vec![context, 1, window, 0, 7, 8, 0, 0],
            Self::PutValueSignal => put_value(0),
            Self::Get => vec![context, 1, window, 0, window, 4096, 4096, 0],
            Self::Signal => signal(0),
            Self::PutSignalCta => put(SIGNAL, CTA),
            Self::PutValueSignalCta => put_value(CTA),
            Self::SignalCta => signal(CTA),
            Self::PutSignalThread => put(SIGNAL, THREAD),
            Self::PutValueSignalThread => put_value(THREAD),
            Self::SignalThread => signal(THREAD),
            Self::PutWarp => vec![context, lanes, 1, window, 0, window, 4096, 4096, 0, 0],
            Self::PutValueWarp => vec![context, lanes, 1, window, 0, 7, 8, 0, 0],
            Self::PutValueSignalWarp => vec![context, lanes, 1, window, 0, 7, 8, SIGNAL, 0],
            Self::SignalWarp => vec![context, lanes, 1, SIGNAL, 0],
            Self::KernelPutSignal | Self::KernelPutMemorySignal => {
                vec![context, 1, window, 0, window, 4096, 4096, 1, 0, 0, 0, together]
            }
            Self::KernelPutValueSignal | Self::KernelPutValueMemorySignal => {
                vec![context, 1, window, 0, 7, 8, 1, 0, together]
            }
            Self::KernelSignal | Self::KernelMemorySignal => vec![context, 1, 1, 0, together],
            Self::FlushIdle | Self::Flush | Self::FlushRound => vec![context],
            Self::WaitSignal | Self::WaitMemorySignal => vec![context, 0, 0],
            Self::WaitSignalRound | Self::WaitMemorySignalRound => vec![context, 0, 1],
        }
    }

    /// Returns the code that makes the call behind the fast path, if its result asks for one: what `ferrogin/post.cuh`
    /// compiles to.
    fn continuation(self) -> Option<String> {
        // The bytes are an argument of the fast path.
        let bytes = match self {
            Self::KernelPutSignal => "ld.global.b32 %s, [%w+48]",
            Self::KernelPutValueSignal => "ld.global.b32 %s, [%w+40]",
            Self::KernelSignal => "mov.b32 %s, 0",
            _ => return None,
        };
        let mut call = String::from("ld.param.b32 %s, [r]; setp.eq.u32 %p, %s, 0; @%p bra DONE;\n{\n.param .b32 e;\n");
        for (at, offset) in [16, 8, 24, 32, 40].into_iter().enumerate() {
            let _ = writeln!(call, ".param .b64 c{at}; ld.param.b64 %d, [r+{offset}]; st.param.b64 [c{at}], %d;");
        }
        for (at, load) in [(5, bytes), (6, "ld.param.b32 %s, [r]")] {
            let _ = writeln!(call, ".param .b32 c{at}; {load}; st.param.b32 [c{at}], %s;");
        }
        call.push_str(
            "ld.param.b32 %s, [r]; and.b32 %s, %s, 7; setp.gt.u32 %p, %s, 4; @%p bra FALLBACK;\n\
             call (e), fgin_continue, (c0, c1, c2, c3, c4, c5, c6); bra CALLED;\n\
             FALLBACK:\ncall (e), fgin_fallback, (c0, c1, c2, c3, c4, c5, c6);\n\
             CALLED:\nld.param.b32 %s, [e];\n}\nDONE:\n",
        );
        Some(call)
    }

    /// Returns whether only one thread may make the call at a time.
    fn is_of_one_thread(self) -> bool {
        self.is_round()
            || matches!(self, Self::PutCheck | Self::PutSignalThread | Self::PutValueSignalThread | Self::SignalThread)
    }

    /// Returns whether it's a round of a wait that goes on.
    fn is_round(self) -> bool {
        matches!(self, Self::PutRound | Self::FlushRound | Self::WaitSignalRound | Self::WaitMemorySignalRound)
    }

    /// Returns whether the context's signals are emulated.
    fn is_emulated(self) -> bool {
        matches!(
            self,
            Self::KernelPutMemorySignal
                | Self::KernelPutValueMemorySignal
                | Self::KernelMemorySignal
                | Self::WaitMemorySignal
                | Self::WaitMemorySignalRound
        )
    }

    /// Returns the preceding calls, which are not counted: one absorbs the cost of a first call.
    fn before(self) -> (Self, u32) {
        match self {
            Self::Flush | Self::FlushRound => (Self::Put, 1),
            Self::PutCheck | Self::PutRound => (Self::Put, UNCHECKED),
            Self::WaitSignalRound => (Self::WaitSignal, 1),
            Self::WaitMemorySignalRound => (Self::WaitMemorySignal, 1),
            other => (other, 1),
        }
    }

    /// Returns the slots of its queues. A put waits for room once they're full.
    fn entries(self) -> u32 {
        if self == Self::PutRound { UNCHECKED } else { ENTRIES }
    }
}

/// Makes a kernel per function: all threads call it with the same words, and each stores its result.
fn wrappers() -> String {
    let parameters: Vec<_> = (0..7).map(|at| format!(".param .b{} c{at}", if at < 5 { 64 } else { 32 })).collect();
    let parameters = parameters.join(", ");
    let mut text = format!(
        ".version 8.2\n.target sm_70\n.address_size 64\n.extern .func (.param .b32 e) fgin_continue({parameters});\n\
         .extern .func (.param .b32 e) fgin_fallback({parameters});\n"
    );
    for operation in [
        Operation::Put,
        Operation::PutValue,
        Operation::Get,
        Operation::Signal,
        Operation::PutWarp,
        Operation::PutValueWarp,
        Operation::SignalWarp,
        Operation::KernelPutSignal,
        Operation::KernelPutValueSignal,
        Operation::KernelSignal,
        Operation::Flush,
        Operation::WaitSignal,
    ] {
        let (name, widths) = operation.function();
        let list = |of: &dyn Fn(usize, u32) -> String| {
            widths.iter().enumerate().map(|(at, &bits)| of(at, bits)).collect::<Vec<_>>().join(", ")
        };
        let parameters = list(&|at, bits| format!(".param .b{bits} a{at}"));
        let names = list(&|at, _| format!("a{at}"));
        let mut loads = String::new();
        for (at, bits) in widths.iter().enumerate() {
            let register = if *bits == 64 { "%d" } else { "%s" };
            let from = at * 8;
            let _ = writeln!(
                loads,
                ".param .b{bits} a{at}; ld.global.b{bits} {register}, [%w+{from}]; st.param.b{bits} [a{at}], {register};"
            );
        }
        let results = ARGUMENTS * 8;
        let continuation = operation.continuation();
        let (result, rest) = match &continuation {
            None => (".param .b32 r", "ld.param.b32 %s, [r];\n"),
            Some(rest) => (".param .align 8 .b8 r[48]", rest.as_str()),
        };
        let _ = write!(
            text,
            ".extern .func ({result}) {name}({parameters});\n\
             .visible .entry call_{name}(.param .u64 words)\n{{\n\
             .reg .b64 %w, %d, %t; .reg .b32 %s; .reg .pred %p;\nld.param.u64 %w, [words];\n{{\n{result};\n{loads}\
             call (r), {name}, ({names});\n{rest}cvt.u64.u32 %d, %s;\n\
             mov.u32 %s, %tid.x; mul.wide.u32 %t, %s, 8; add.u64 %t, %t, %w; st.global.b64 [%t+{results}], %d;\n\
             }}\nret;\n}}\n"
        );
    }
    text
}

fn context(policy: u32, entries: u32, is_emulated: bool) -> TestContext {
    // Data, values in wide requests, and the signal, whose values go through slots.
    let slots = plain_context::leak([0u64; ENTRIES as usize]) as u64;
    let n_signals = u32::from(!is_emulated);
    let endpoints = &[(false, 0), (true, 0), (false, slots)][..2 + n_signals as usize];
    let endpoint =
        |&(wide, value_base)| EndpointSpec { entries, wide, max_batch: entries.min(32), value_base, start: 0 };
    let peers = |base: u64| (0..NRANKS).map(|rank| (base + u64::from(rank) * 0x100_0000, 0x66 + rank)).collect();
    let spec = Spec {
        policy,
        nranks: NRANKS,
        rail: 0,
        endpoints: endpoints.iter().map(endpoint).collect(),
        n_counters: 0,
        n_signals,
        targets: (0..(1 + n_signals as u16) * NRANKS as u16)
            .map(|at| Destination { ah: 10 + at, qpn: 20 + at, qkey: 0x3000_0000 })
            .collect(),
        value_lkey: 0x77,
        scratch: WindowSpec { lkey: 0x88, addr: 0x4000_0000, peers: peers(0x5000_0000) },
    };
    let emulated = is_emulated.then(|| EmulatedSpec {
        words: plain_context::leak(0u64) as u64,
        n_signals: 1,
        peers: vec![EmulatedPeer { n_signals: 1, generation: 1 }; NRANKS as usize],
    });
    plain_context::make_with(&spec, &plain_context::Extras { emulated, ..plain_context::NO_EXTRAS })
}

/// How an operation is run.
#[derive(Clone, Copy)]
struct How {
    policy: u32,
    threads: u32,
    seed: u64,
}

/// Returns what one round of a wait costs. The rounds end by a time limit in instructions: the cost of one more is the
/// difference to the next larger one.
fn measure_round(loaded: &Loaded, operation: Operation, how: How) -> Result<Vec<Cost>, String> {
    // In the first rounds, the wait begins.
    let limits = (500..).step_by(8).map(|limit| measure(loaded, operation, how, limit));
    let mut known: Option<Cost> = None;
    for costs in limits.take(200) {
        let [now] = costs?[..] else { return Err("a round is measured with one thread".to_owned()) };
        match known {
            Some(before) if before != now => return Ok(vec![difference(now, before)]),
            _ => known = Some(now),
        }
    }
    Err("the wait's rounds don't end".to_owned())
}

fn difference(more: Cost, less: Cost) -> Cost {
    Cost {
        instructions: more.instructions - less.instructions,
        loads: more.loads - less.loads,
        stores: more.stores - less.stores,
        atomics: more.atomics - less.atomics,
        host_reads: more.host_reads - less.host_reads,
        fences: [0, 1, 2].map(|scope| more.fences[scope] - less.fences[scope]),
        doorbells: more.doorbells - less.doorbells,
        reservation: None,
        doorbell: None,
        end: more.end - less.end,
    }
}

/// Runs the operation on its own context, whose waits end after `limit` instructions. Returns each thread's cost.
fn measure(loaded: &Loaded, operation: Operation, how: How, limit: u64) -> Result<Vec<Cost>, String> {
    let How { policy, threads, seed } = how;
    let context = context(policy, operation.entries(), operation.is_emulated());
    context.context.set_timeout_ns(limit);
    let peers = (0..NRANKS).map(|rank| (0x2000_0000 + u64::from(rank) * 0x100_0000, 0x66 + rank)).collect();
    let window = plain_context::window(&WindowSpec { lkey: 0x55, addr: 0x1000_0000, peers }, 0).0 as u64;
    // A window's tables are in the kernels' memory too.
    let mut gpu = context.of_kernels.clone();
    gpu.push(window..window + 16 + 16 * (1 + u64::from(NRANKS)));
    let doorbells: Vec<u64> = context.rings.iter().map(|ring| ring.doorbell.as_ptr() as u64).collect();
    let mut costs = Vec::new();
    let (before, times) = operation.before();
    for at in 0..=times {
        let (is_last, measured) = (at == times, operation);
        let operation = if is_last { operation } else { before };
        // The card has completed all requests, unless the operation waits for it.
        for ring in context.rings.iter().filter(|_| !measured.is_round()) {
            ring.completed.store(u64::from(ring.cursors()[0] & 0x7fff_ffff), Ordering::SeqCst);
        }
        let mut words = operation.arguments(context.context.as_ptr() as u64, window, threads);
        words.resize(ARGUMENTS + threads as usize, u64::MAX);
        let words = words.leak().as_mut_ptr();
        let (name, _) = operation.function();
        let kernel = loaded.program().kernel(&format!("call_{name}")).ok_or_else(|| format!("no wrapper of {name}"))?;
        let mut launch = Launch::new([1, 1, 1], [threads, 1, 1], (words as u64).to_le_bytes().to_vec());
        launch.seed = seed;
        launch.time = Time::Instructions;
        launch.watchdog = Some(Duration::from_secs(60));
        // SAFETY: the context and the words are leaked, and only atomics in them are referenced while the kernel runs.
        let memory = unsafe { Process::new() };
        let stop = AtomicBool::new(false);
        let places = Places { doorbells: &doorbells, gpu: &gpu };
        costs = cost(loaded, kernel, &launch, &memory, &stop, places).map_err(|trap| trap.to_string())?;
        // SAFETY: the words are leaked, and no kernel is running now.
        let results = unsafe { std::slice::from_raw_parts(words.wrapping_add(ARGUMENTS), threads as usize) };
        let wanted = if is_last && measured.is_round() { TIMEOUT } else { 0 };
        if let Some(bad) = results.iter().find(|result| **result != wanted) {
            return Err(format!("{name} returned {bad}"));
        }
    }
    Ok(costs)
}

/// Returns a line of the table: the operation, then the cells.
fn line(name: &str, cells: [&str; 8]) -> String {
    let [trips, instr, loads, stores, atomics, host, bells, fences] = cells;
    format!("{name:<30}{trips:>8}{instr:>6}{loads:>6}{stores:>6}{atomics:>5}{host:>5}{bells:>5}{fences:>9}\n")
}

/// Formats a row: the longest chains of any thread, and the means of the counts.
fn row(name: &str, costs: &[Cost]) -> String {
    let chains = [|cost: &Cost| cost.reservation, |cost: &Cost| cost.doorbell, |cost: &Cost| Some(cost.end)];
    let counts = [
        |cost: &Cost| cost.instructions,
        |cost: &Cost| cost.loads,
        |cost: &Cost| cost.stores,
        |cost: &Cost| cost.atomics,
        |cost: &Cost| cost.host_reads,
        |cost: &Cost| cost.doorbells,
        |cost: &Cost| cost.fences[0],
        |cost: &Cost| cost.fences[1],
        |cost: &Cost| cost.fences[2],
    ];
    let longest = |chain: fn(&Cost) -> Option<u32>| {
        costs.iter().filter_map(chain).max().map_or("-".into(), |longest| longest.to_string())
    };
    let mean = |count: fn(&Cost) -> u64| {
        let sum: u64 = costs.iter().map(count).sum();
        let mean = sum as f64 / costs.len() as f64;
        match mean {
            mean if mean.fract() == 0.0 || mean >= 100.0 => format!("{mean:.0}"),
            mean => format!("{mean:.2}"),
        }
    };
    let [instr, loads, stores, atomics, host, bells, fences @ ..] = counts.map(mean);
    let (trips, fences) = (chains.map(longest).join("/"), fences.join("/"));
    line(name, [&trips, &instr, &loads, &stores, &atomics, &host, &bells, &fences])
}

fn table(root: &Path, args: &CostArgs) -> Result<String, String> {
    let path = args.module.clone().unwrap_or_else(|| root.join(CHECKED_IN));
    let name = path.display().to_string();
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{name}: {error}"))?;
    let parse = |name: &str, text: &str| Module::parse(name, text).map_err(|error| error.to_string());
    let modules = vec![parse("gpu-cost", &wrappers())?, parse(&name, &text)?];
    let loaded = Arc::new(Program::link(modules).map_err(|error| error.to_string())?).load(&[]);
    let all = <Operation as clap::ValueEnum>::value_variants();
    let operations = if args.operations.is_empty() { all } else { &args.operations };
    let mut table = line("", ["trips", "instr", "loads", "store", "atom", "host", "bell", "fences"]);
    for (policy, policy_name) in [(POLICY_COMBINING, "combining"), (POLICY_LOCKED, "locked")] {
        for &threads in &args.threads {
            let group = format!("{policy_name}, {threads} thread{}", if threads == 1 { "" } else { "s" });
            let _ = writeln!(table, "{group}:");
            for operation in operations.iter().filter(|operation| threads == 1 || !operation.is_of_one_thread()) {
                let value = clap::ValueEnum::to_possible_value(operation);
                let name = value.as_ref().map_or("", |value| value.get_name());
                let how = How { policy, threads, seed: args.seed };
                let costs = if operation.is_round() {
                    measure_round(&loaded, *operation, how)
                } else {
                    measure(&loaded, *operation, how, 0)
                };
                let costs = costs.map_err(|problem| format!("{group}, {name}: {problem}"))?;
                table += &row(name, &costs);
            }
        }
    }
    Ok(table)
}

/// Prints the table.
pub fn run(root: &Path, args: &CostArgs) -> ExitCode {
    match table(root, args) {
        Ok(table) => {
            print!("{table}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("gpu-cost: {problem}");
            ExitCode::FAILURE
        }
    }
}
