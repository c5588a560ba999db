//! Doorbells per post when many threads post on one endpoint: `cargo bench -p ferrogin-benches --bench doorbells`.
//!
//! Eight threads post back to back; the card completes rung requests at once. Each of five rounds runs both posting
//! policies and NCCL's device code in turn, in one process, for FERROGIN_BENCH_MS (500) milliseconds each. Rates are
//! also shown relative to NCCL's. With `--check` the program prints PASS if the combining policy's best round takes
//! less than half a doorbell per post, and otherwise FAIL: threads that the scheduler happens to run one after another
//! don't contend.
#![allow(unsafe_code)]

use efa_dp_direct::arch;
use ferrogin_bench::card::{Card, Values};
use ferrogin_bench::nccl::{self, Build, Loop, Nccl, POSTS};
use ferrogin_bench::target_dir;
use ferrogin_device::post::model::{Backend, Geometry, Model, Words};
use ferrogin_device::post::{combining, locked};
use ferrogin_device::wait::NoLimits;
use ferrogin_ffi::ext::POLICY_COMBINING;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

const THREADS: usize = 8;
const ROUNDS: u32 = 5;
const ENTRIES: u32 = 256;
const MAX_BATCH: u32 = 16;
/// Limit on the combining policy's doorbells per post.
const BUDGET: f64 = 0.5;

/// A card that completes rung requests at once, and counts doorbells.
struct Endpoint {
    words: Words,
    card: Line,
    ring: *mut [u64; 8],
}

/// What only the active combiner, or the poster that holds the lock, writes.
#[derive(Default)]
#[repr(align(128))]
struct Line {
    /// Doorbell and completion count.
    rung: AtomicU32,
    rings: AtomicU64,
}

// SAFETY: only a poster that the policy admitted writes the ring, through stores that are allowed to race.
unsafe impl Sync for Endpoint {}

impl Endpoint {
    fn new() -> Self {
        let ring = vec![[0u64; 8]; ENTRIES as usize].leak().as_mut_ptr();
        Endpoint { words: Words::new(0), card: Line::default(), ring }
    }

    fn post(&self, by_lock: bool, value: u64) {
        let write = |idx: u32| {
            let slot = self.ring.wrapping_add((idx % ENTRIES) as usize).cast::<u64>();
            for i in 0..8 {
                // SAFETY: a word of the ring, which is never freed.
                unsafe { arch::mmio_store_u64(slot.wrapping_add(i), value) };
            }
        };
        let posted = if by_lock {
            locked::post(Model(self), NoLimits, false, write)
        } else {
            combining::post(Model(self), NoLimits, false, write)
        };
        assert!(posted.is_ok());
    }
}

impl Backend for Endpoint {
    fn words(&self) -> &Words {
        &self.words
    }
    fn geometry(&self) -> Geometry {
        Geometry { sq_size: ENTRIES, max_batch: MAX_BATCH, slots: 0 }
    }
    fn completed(&self) -> u32 {
        self.card.rung.load(Acquire)
    }
    fn fence(&self) {
        arch::fence_system();
    }
    fn doorbell(&self, count: u32) {
        self.card.rings.store(self.card.rings.load(Relaxed) + 1, Relaxed);
        self.card.rung.store(count, Release);
    }
}

/// Posts per second, and doorbells per post.
#[derive(Clone, Copy, Default)]
struct Measured {
    rate: f64,
    doorbells: f64,
}

/// Runs `work`, which posts [`POSTS`] times, in a loop on all threads for `time`. Returns the total posts and the
/// seconds they took.
fn all_at_once(time: Duration, work: impl Fn() + Sync) -> (u64, f64) {
    let start = Barrier::new(THREADS);
    let stop = AtomicBool::new(false);
    let run = || {
        start.wait();
        let (began, mut posts) = (Instant::now(), 0);
        while !stop.load(Relaxed) {
            work();
            posts += POSTS as u64;
            if began.elapsed() > time {
                stop.store(true, Relaxed);
            }
        }
        (posts, began, Instant::now())
    };
    let runs: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let (began, ended) = (runs.iter().map(|run| run.1).min(), runs.iter().map(|run| run.2).max());
    let seconds = began.zip(ended).map_or(0.0, |(began, ended)| (ended - began).as_secs_f64());
    (runs.iter().map(|run| run.0).sum(), seconds)
}

fn ours(by_lock: bool, time: Duration) -> Measured {
    let endpoint = Endpoint::new();
    let (posts, seconds) = all_at_once(time, || (0..POSTS).for_each(|i| endpoint.post(by_lock, i as u64)));
    assert_eq!(endpoint.card.rung.load(Acquire), posts as u32, "all posts were rung");
    Measured { rate: posts as f64 / seconds, doorbells: endpoint.card.rings.load(Relaxed) as f64 / posts as f64 }
}

fn measure_nccl(library: &Path, time: Duration) -> Result<Measured, Box<dyn std::error::Error>> {
    let card = Card::new(POLICY_COMBINING, Values::Inline)?;
    let nccl = Nccl::open(library, &card)?;
    // SAFETY: posts.cpp defines the function with this type.
    let put: Loop = unsafe { nccl.function("nccl_inline_put") }?;
    // SAFETY: posts.cpp defines the function with this type.
    let doorbells: unsafe extern "C" fn() -> u64 = unsafe { nccl.function("nccl_doorbells") }?;
    let list = nccl::posts(&card);
    // SAFETY: the function reads a counter and has no precondition.
    let before = unsafe { doorbells() };
    let (posts, seconds) = all_at_once(time, || {
        // SAFETY: the card keeps the context and windows alive during the bench, and any thread may post.
        unsafe { put(nccl.handle(), list.as_ptr(), POSTS as u32 - 1, POSTS as u32) }
    });
    // SAFETY: the function reads a counter and has no precondition.
    let rings = unsafe { doorbells() } - before;
    Ok(Measured { rate: posts as f64 / seconds, doorbells: rings as f64 / posts as f64 })
}

fn main() -> ExitCode {
    let check = std::env::args().any(|arg| arg == "--check");
    let millis = std::env::var("FERROGIN_BENCH_MS").ok().and_then(|text| text.parse().ok()).unwrap_or(500);
    let time = Duration::from_millis(millis);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = target_dir("bench-doorbells")
        .map_err(|error| error.to_string())
        .and_then(|dir| nccl::make(&root, &dir, Build::Threads).map_err(|error| error.to_string()));
    if let Err(error) = &library {
        println!("SKIP the baseline, NCCL {}: {error}", nccl::RELEASE);
    }
    println!("{THREADS} threads on one endpoint, {millis} ms each");
    println!("{:<12}{:>20}{:>14}{:>14}", "", "doorbells per post", "M posts/s", "of NCCL's");
    let mut fewest = f64::MAX;
    for _ in 0..ROUNDS {
        let baseline = library.as_ref().ok().and_then(|library| match measure_nccl(library, time) {
            Ok(result) => Some(result),
            Err(error) => {
                println!("SKIP the baseline: {error}");
                None
            }
        });
        let (combining, locked) = (ours(false, time), ours(true, time));
        fewest = fewest.min(combining.doorbells);
        for (name, result) in [("combining", Some(combining)), ("locked", Some(locked)), ("NCCL", baseline)] {
            let Some(Measured { rate, doorbells }) = result else { continue };
            let ratio = baseline.map_or("-".into(), |baseline| format!("{:.2}", rate / baseline.rate));
            println!("{name:<12}{doorbells:>20.3}{:>14.2}{ratio:>14}", rate / 1e6);
        }
    }
    if !check {
        return ExitCode::SUCCESS;
    }
    let passed = fewest < BUDGET;
    println!(
        "{} doorbells per post of {THREADS} threads: {fewest:.3}, less than {BUDGET}",
        if passed { "PASS" } else { "FAIL" }
    );
    println!("doorbells: {} passed, {} failed, 0 skipped", u32::from(passed), u32::from(!passed));
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
