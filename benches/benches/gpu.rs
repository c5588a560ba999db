//! Kernels on a GPU post to a card that only counts: ferrogin's device code through each of its headers, and NCCL's
//! own, on the same kind of queue in one run. The parts of a post are also measured separately.
//!
//! `benches/gpu/run.sh` compiles the kernels and starts the bench. There are two cards. With `Memory::Gpu`, a queue's
//! doorbell is the low half of its completion counter in GPU memory, so requests complete in no time. With
//! `Memory::Host`, rings, doorbells and counters are host memory mapped into the GPU, and a host thread advances the
//! counters.
#![allow(unsafe_code)]

use cudarc::driver::sys as cu;
use ferrogin_bench::card::{Part, Values, block_spec, window_spec};
use ferrogin_ffi::block::{Image, Plan};
use ferrogin_ffi::ext::POLICY_COMBINING;
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

const DEVICE_CODE: &str = include_str!("../../device-kernels/ptx/ferrogin_device.ptx");

/// The builds of `posts.cu`; the last one is the baseline.
const BUILDS: [(&str, &str); 3] = [("gin", "gin.cuh"), ("nccl", "nccl_gin.cuh"), ("own", "NCCL's own")];
/// The operations of `posts.cu`, in the same order.
const OPERATIONS: [&str; 4] = ["putValue", "put of 1 KiB", "putValue, 16 a doorbell", "putValue and flush"];
/// Name, blocks, threads per block, and whether each block has its own queue.
const SHAPES: [(&str, u32, u32, bool); 6] = [
    ("one thread", 1, 1, false),
    ("one warp", 1, 32, false),
    ("8 blocks, one queue", 8, 1, false),
    ("32 blocks, one queue", 32, 1, false),
    ("132 blocks, one queue", 132, 1, false),
    ("132 blocks, a queue each", 132, 1, true),
];
const CONTEXTS: u32 = 132;
/// Most threads in one launch.
const THREADS: usize = 132 * 32;
/// The parts of `parts.cu`, in the same order, with their thread counts.
const PARTS: [(&str, u32); 14] = [
    ("fence.acq_rel.sys", 1),
    ("fence.sc.sys", 1),
    ("fence.acq_rel.gpu", 1),
    ("atom.add relaxed", 1),
    ("atom.cas acq_rel", 1),
    ("ld.acquire.sys of a counter", 1),
    ("doorbell", 1),
    ("doorbell and fence", 1),
    ("request: 8 st.mmio, fence", 1),
    ("request: 8 st.relaxed.sys, fence", 1),
    ("request: 4 st.v2, fence", 1),
    ("request: 8 st.wt, fence", 1),
    ("request: st.mmio of 8 threads, fence", 8),
    ("request: st of 8 threads, fence", 8),
];

type Outcome<T> = Result<T, String>;

fn check(call: &str, result: cu::CUresult) -> Outcome<()> {
    if result == cu::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{call} failed: {result:?}")) }
}

/// Calls a driver function and checks the result.
macro_rules! cuda {
    ($function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the driver is loaded, every pointer is to a live variable of the type the call takes, and every
        // handle came from the driver.
        check(stringify!($function), unsafe { cu::$function($($arg),*) })
    }};
}

/// Makes the first GPU's primary context current on this thread. Returns the GPU's name for the header.
fn open() -> Outcome<String> {
    // SAFETY: the call loads NVIDIA's driver library, whose initialisers any process may run.
    if !unsafe { cu::is_culib_present() } {
        return Err("no CUDA driver is here".into());
    }
    let (mut device, mut context, mut name, mut version) = (0, null_mut(), [0; 64], 0);
    cuda!(cuInit(0))?;
    cuda!(cuDeviceGet(&mut device, 0))?;
    cuda!(cuDevicePrimaryCtxRetain(&mut context, device))?;
    cuda!(cuCtxSetCurrent(context))?;
    cuda!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
    cuda!(cuDriverGetVersion(&mut version))?;
    // SAFETY: the array ends with a NUL byte, because the driver was given all bytes but the last.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(format!("{name}, driver of CUDA {}.{}", version / 1000, version % 1000 / 10))
}

/// Loads `name.cubin`, or links `name.ptx` with the device code.
fn load(modules: &Path, name: &str) -> Outcome<cu::CUmodule> {
    let mut module = null_mut();
    let read = |file: &Path| std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()));
    let image = modules.join(format!("{name}.cubin"));
    if image.exists() {
        cuda!(cuModuleLoadData(&mut module, read(&image)?.as_ptr().cast()))?;
        return Ok(module);
    }
    let kernels = read(&modules.join(format!("{name}.ptx")))?;
    let (mut link, mut image, mut size) = (null_mut(), null_mut(), 0);
    cuda!(cuLinkCreate_v2(0, null_mut(), null_mut(), &mut link))?;
    for (text, name) in [(kernels, c"kernels"), (DEVICE_CODE.into(), c"device code")] {
        let text = CString::new(text).map_err(|error| error.to_string())?;
        let bytes = text.as_bytes_with_nul();
        let (data, kind) = (bytes.as_ptr().cast_mut().cast(), cu::CUjitInputType::CU_JIT_INPUT_PTX);
        cuda!(cuLinkAddData_v2(link, kind, data, bytes.len(), name.as_ptr(), 0, null_mut(), null_mut()))?;
    }
    cuda!(cuLinkComplete(link, &mut image, &mut size))?;
    cuda!(cuModuleLoadData(&mut module, image))?;
    cuda!(cuLinkDestroy(link))?;
    Ok(module)
}

fn function(module: cu::CUmodule, name: &CStr) -> Outcome<cu::CUfunction> {
    let mut function = null_mut();
    cuda!(cuModuleGetFunction(&mut function, module, name.as_ptr()))?;
    Ok(function)
}

/// Runs a kernel to completion. Narrower parameters are in the low halves of their words.
fn launch<const N: usize>(kernel: cu::CUfunction, blocks: u32, threads: u32, mut parameters: [u64; N]) -> Outcome<()> {
    let mut at: [*mut c_void; N] = parameters.each_mut().map(|word| (&raw mut *word).cast());
    cuda!(cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, null_mut(), at.as_mut_ptr(), null_mut()))?;
    cuda!(cuCtxSynchronize())
}

/// Where a card's queues are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Gpu,
    Host,
}

/// Zeroed memory, handed out in multiples of 128 bytes and freed when the process exits.
struct Arena {
    base: u64,
    host: *mut u8,
    used: usize,
    size: usize,
}

impl Arena {
    fn new(memory: Memory, size: usize) -> Outcome<Arena> {
        let (mut base, mut host) = (0, null_mut());
        match memory {
            Memory::Gpu => cuda!(cuMemAlloc_v2(&mut base, size))?,
            Memory::Host => {
                cuda!(cuMemHostAlloc(&mut host, size, cu::CU_MEMHOSTALLOC_DEVICEMAP))?;
                cuda!(cuMemHostGetDevicePointer_v2(&mut base, host, 0))?;
            }
        }
        cuda!(cuMemsetD8_v2(base, 0, size))?;
        Ok(Arena { base, host: host.cast(), used: 0, size })
    }

    fn place(&mut self, bytes: usize) -> u64 {
        let at = self.used;
        self.used += bytes.next_multiple_of(128);
        assert!(self.used <= self.size, "the arena has room for all queues");
        self.base + at as u64
    }
}

fn write(to: u64, image: &Image) -> Outcome<()> {
    let bytes = image.bytes();
    cuda!(cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()))
}

fn words(from: u64, count: usize) -> Outcome<Vec<u64>> {
    let mut words = vec![0u64; count];
    cuda!(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), from, count * 8))?;
    Ok(words)
}

/// Contexts in GPU memory, with queues that only count.
struct Card {
    handle: u64,
    window: u64,
    counters: Arena,
    /// Offsets in `counters` of each queue's doorbell and counter, for the host thread; empty if the counters are the
    /// doorbells.
    queues: Vec<(usize, usize)>,
}

/// A card's host memory, for the host thread.
struct Queues<'a>(&'a Card);

// SAFETY: the memory is mapped until the process ends, and every access is atomic.
unsafe impl Sync for Queues<'_> {}

impl Card {
    fn new(memory: Memory) -> Outcome<Card> {
        let contexts = CONTEXTS as usize;
        let mut rest = Arena::new(Memory::Gpu, contexts * (64 << 10) + (1 << 20))?;
        let mut rings = Arena::new(memory, contexts * 4 * (32 << 10))?;
        let mut counters = Arena::new(memory, contexts * 4 * 2 * 128)?;
        let mut queues = Vec::new();
        let spec = block_spec(POLICY_COMBINING, Values::Inline, (contexts, 1), |part, bytes| match (part, memory) {
            (Part::Ring, _) => rings.place(bytes),
            (Part::Counter, _) => counters.place(bytes),
            (Part::Doorbell(counter), Memory::Gpu) => counter,
            (Part::Doorbell(counter), Memory::Host) => {
                let doorbell = counters.place(bytes);
                queues.push(((doorbell - counters.base) as usize, (counter - counters.base) as usize));
                doorbell
            }
            (Part::Rest, _) => rest.place(bytes),
        });
        let plan = Plan::new(&spec);
        let block = rest.place(plan.size());
        write(block, &plan.fill(&spec, block).map_err(|error| error.to_string())?)?;
        let tables = window_spec();
        let window = rest.place(tables.size());
        write(window, &tables.fill(window))?;
        Ok(Card { handle: block + plan.handles_offset() as u64, window, counters, queues })
    }

    /// Total requests completed on all queues.
    fn completed(&self) -> Outcome<u64> {
        let all = words(self.counters.base, self.counters.used / 8)?;
        // In host memory, each counter is followed by its doorbell.
        let step = if self.queues.is_empty() { 16 } else { 32 };
        Ok(all.iter().step_by(step).map(|count| count & 0xffff_ffff).sum())
    }

    /// Runs `act`, while a host thread advances the counters if they need one.
    fn alive<T>(&self, act: impl FnOnce() -> T) -> T {
        let (queues, stop) = (Queues(self), AtomicBool::new(false));
        if self.queues.is_empty() {
            return act();
        }
        std::thread::scope(|scope| {
            let (queues, stopped) = (&queues, &stop);
            scope.spawn(move || {
                let card = queues.0;
                while !stopped.load(Ordering::Relaxed) {
                    for (doorbell, counter) in &card.queues {
                        let (from, to) =
                            (card.counters.host.wrapping_add(*doorbell), card.counters.host.wrapping_add(*counter));
                        // SAFETY: the doorbell is a line of the mapped host memory.
                        let rung = unsafe { AtomicU32::from_ptr(from.cast()) }.load(Ordering::Acquire);
                        // SAFETY: the counter is a line of the mapped host memory.
                        unsafe { AtomicU64::from_ptr(to.cast()) }.store(rung.into(), Ordering::Release);
                    }
                    std::thread::yield_now();
                }
            });
            let result = act();
            stop.store(true, Ordering::Relaxed);
            result
        })
    }
}

/// Median, minimum and maximum.
fn spread(mut samples: Vec<f64>) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    (samples[samples.len() / 2], samples[0], samples[samples.len() - 1])
}

/// A build of `posts.cu`, with its own card.
struct Build {
    name: &'static str,
    card: Card,
    posts: cu::CUfunction,
}

struct Bench {
    modules: PathBuf,
    /// Uses small counts and prints no figures.
    is_check: bool,
    runs: usize,
    /// Runs before the measured ones.
    warmup: usize,
    times: u64,
    checked: u64,
}

impl Bench {
    /// Nanoseconds from the first start to the last end among `threads` threads.
    fn elapsed(&self, threads: usize) -> Outcome<f64> {
        let times = words(self.times, 2 * threads)?;
        let begin = times.iter().step_by(2).min().copied().unwrap_or(0);
        let end = times.iter().skip(1).step_by(2).max().copied().unwrap_or(0);
        Ok(end.saturating_sub(begin).max(1) as f64)
    }

    /// Measures all shapes and operations on cards with one kind of memory.
    fn posts(&mut self, memory: Memory) -> Outcome<()> {
        let mut builds = Vec::new();
        for (file, name) in BUILDS {
            let module = load(&self.modules, file)?;
            let card = Card::new(memory)?;
            launch(function(module, c"setup")?, 1, 1, [card.handle, card.window, CONTEXTS.into()])?;
            builds.push(Build { name, card, posts: function(module, c"posts")? });
        }
        if !self.is_check {
            println!(
                "\n{:<26} {:<24} {:<14} {:>12} {:>25} {:>7}",
                "posts/s", "operation", "device code", "median", "least to most", "ratio"
            );
        }
        let most = if self.is_check && memory == Memory::Host { 3 } else { SHAPES.len() };
        for (shape, blocks, threads, has_queues) in SHAPES.into_iter().take(most) {
            for (number, operation) in OPERATIONS.iter().enumerate() {
                let count: u32 = match (self.is_check, blocks * threads) {
                    // More posts than the ring has slots.
                    (true, 1) => 272,
                    (true, _) => 16,
                    (false, 1) => 32_000,
                    (false, _) => 3_200,
                };
                let mut rates = vec![Vec::new(); builds.len()];
                for run in 0..self.runs + self.warmup {
                    for (build, rates) in builds.iter().zip(&mut rates) {
                        let rate = self.post(build, (blocks, threads, has_queues), (number as u32, count))?;
                        if run >= self.warmup {
                            rates.push(rate);
                        }
                    }
                }
                if self.is_check {
                    continue;
                }
                let all: Vec<_> = rates.into_iter().map(spread).collect();
                let baseline = all.last().map_or(1.0, |(median, ..)| *median);
                for (build, (median, least, most)) in builds.iter().zip(all) {
                    let range = format!("{least:.0} to {most:.0}");
                    println!(
                        "{shape:<26} {operation:<24} {:<14} {median:>12.0} {range:>25} {:>7.2}",
                        build.name,
                        median / baseline
                    );
                }
            }
        }
        Ok(())
    }

    /// Does one run and returns posts per second. Fails if the card didn't count every post.
    fn post(&mut self, build: &Build, shape: (u32, u32, bool), (operation, count): (u32, u32)) -> Outcome<f64> {
        let ((blocks, threads, has_queues), card) = (shape, &build.card);
        let before = card.completed()?;
        card.alive(|| {
            let spread = u64::from(has_queues);
            let parameters = [card.handle, card.window, spread, operation.into(), count.into(), self.times];
            launch(build.posts, blocks, threads, parameters)
        })?;
        let posts = u64::from(blocks * threads) * u64::from(count);
        let counted = card.completed()? - before;
        if counted != posts {
            return Err(format!(
                "{}, {}: the card counted {counted} of {posts} posts",
                build.name, OPERATIONS[operation as usize]
            ));
        }
        self.checked += posts;
        Ok(posts as f64 * 1e9 / self.elapsed((blocks * threads) as usize)?)
    }

    /// Measures the parts of a post on one kind of memory.
    fn parts(&mut self, memory: Memory) -> Outcome<()> {
        let kernel = function(load(&self.modules, "parts")?, c"parts")?;
        let (mut arena, rounds) = (Arena::new(memory, 1 << 20)?, Arena::new(Memory::Gpu, 128)?.place(8));
        let (ring, word) = (arena.place(256 * 64), arena.place(8));
        let count = if self.is_check { 16 } else { 10_000 };
        if !self.is_check {
            println!("\n{:<40} {:>12} {:>25}", format!("ns, {memory:?} memory"), "median", "least to most");
        }
        for (part, (name, threads)) in PARTS.iter().enumerate() {
            let mut samples = Vec::new();
            for run in 0..self.runs + self.warmup {
                launch(kernel, 1, *threads, [part as u64, count, ring, word, self.times, rounds])?;
                if words(rounds, 1)? != [count] {
                    return Err(format!("{name}: not all rounds ran"));
                }
                if run >= self.warmup {
                    samples.push(self.elapsed(1)? / count as f64);
                }
            }
            self.checked += count;
            let (median, least, most) = spread(samples);
            if !self.is_check {
                println!("{name:<40} {median:>12.1} {:>25}", format!("{least:.1} to {most:.1}"));
            }
        }
        Ok(())
    }
}

fn run(modules: PathBuf, is_check: bool) -> Outcome<u64> {
    let (runs, warmup) = if is_check { (1, 0) } else { (9, 1) };
    let mut bench = Bench { modules, is_check, runs, warmup, times: 0, checked: 0 };
    bench.times = Arena::new(Memory::Gpu, THREADS * 16)?.place(THREADS * 16);
    for memory in [Memory::Gpu, Memory::Host] {
        if !is_check {
            println!("\nCard of {memory:?} memory, medians of {runs} runs; ratios to NCCL's own device code.");
        }
        bench.posts(memory)?;
        bench.parts(memory)?;
    }
    Ok(bench.checked)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let is_check = args.iter().any(|arg| arg == "--check");
    let modules = args.iter().position(|arg| arg == "--modules").and_then(|at| args.get(at + 1));
    let Some(modules) = modules.map(PathBuf::from) else {
        println!("SKIP gpu: it needs --modules DIR, which benches/gpu/build.sh fills; benches/gpu/run.sh does both");
        return ExitCode::SUCCESS;
    };
    let machine = match open() {
        Ok(machine) => machine,
        Err(why) => {
            println!("SKIP gpu: {why}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{machine}");
    match run(modules, is_check) {
        Ok(checked) => {
            println!("PASS gpu: the cards counted each post, {checked} posts and rounds");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("FAIL gpu: {why}");
            ExitCode::FAILURE
        }
    }
}
