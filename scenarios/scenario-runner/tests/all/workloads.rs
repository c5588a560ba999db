//! Programs whose signals are words in memory (FERROGIN_SIGNALS=emulated), on a card with faults: the scenarios'
//! workloads, which are the patterns of NCCL's barriers, DeepEP and nccl_ep, on CPU threads and as kernels; and a
//! campaign of mixed signals on CPU threads. Each checks all bytes and counts against a reference.
#![allow(unsafe_code)]

mod campaign;
mod killed;

use crate::common::{dist, must_pass, must_pass_all, not_over_efa, repeated, report, scenarios, seconds};
use crate::on_gpu::{gpu, on_gpu};
use ferrogin_device::{Context, Span, Window as DeviceWindow};
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::soak;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use mini_nccl::launch::Job;
use mini_nccl::{Bootstrap, Comm, DeviceMemory, GinContext, Plugin};
use scenario_runner::scenario::WORKLOADS;
use scenario_runner::world::plugin_from_env;
use std::sync::Arc;

const FAULTS: &str = "seed=21,reorder=512,reread=0.5,delay_us=0..50";
/// Delays that let a thread see any order. The longer ones are for a machine so busy that the thread would otherwise
/// look too late.
const SLOW: [&str; 3] = [
    "seed=21,reorder=512,reread=0.5,delay_us=0..20000",
    "seed=21,reorder=512,reread=0.5,delay_us=0..100000",
    "seed=21,reorder=512,reread=0.5,delay_us=0..500000",
];

/// Runs all workloads, on small rings.
fn all_pass(job: Job) {
    let names = WORKLOADS.iter().flat_map(|workload| ["--only", workload.name]);
    let job = job.args(["--queue-depth", "16"]).args(names).env("FERROGIN_SIGNALS", "emulated");
    let outcome = job.env("SOFTEFA_FAULTS", FAULTS).run().expect("the job starts");
    must_pass_all(&outcome, WORKLOADS.len());
}

fn pass_on_cpu_threads(name: &str, ranks: usize, full: u64, policy: &str, layout: &str) {
    let Some(dist) = dist(name) else { return };
    if not_over_efa(name, "verbs have no faults") {
        return;
    }
    all_pass(repeated(&dist, ranks, full).args(["--backend-version", layout]).env("FERROGIN_POST", policy));
}

#[test]
fn workloads_pass_on_cpu_threads() {
    pass_on_cpu_threads("workloads_pass_on_cpu_threads", 2, 200, "combining", "2");
}

#[test]
#[ignore = "make check"]
fn workloads_of_four_ranks_pass_on_cpu_threads() {
    pass_on_cpu_threads("workloads_of_four_ranks_pass_on_cpu_threads", 4, 600, "locked", "1");
}

#[test]
#[ignore = "make check"]
fn workloads_pass_as_kernels() {
    let Some(dist) = gpu("workloads_pass_as_kernels") else { return };
    for (ranks, api, threads, full) in [(2, "cuda", "one", 200), (4, "c", "warp", 80)] {
        all_pass(on_gpu(&dist, repeated(&dist, ranks, full).args(["--api", api, "--threads", threads])));
    }
}

/// Checks that a workload with a deliberate fault fails because of a byte or a count. A soak run also takes the `long`
/// faults, and checks that the workload passes on the same card without the fault.
fn finds(job: impl Fn() -> Job, workload: &str, usual: &[&str], long: &[&str]) {
    for &spoil in usual.iter().chain(long.iter().filter(|_| soak())) {
        let is_order = ["weak", "flush"].contains(&spoil);
        let cards = if is_order { &SLOW[..] } else { &[FAULTS] };
        let run = |spoil: &str, deadline: &str, card: &str| {
            let job = job().args(["--only", workload, "--reps", "6", "--queue-depth", "16"]);
            // One thread per channel of `deepep`, so that it looks at nothing else meanwhile.
            let job = if is_order && workload == "deepep" { job.args(["--lanes", "17"]) } else { job };
            let job = job.args(["--spoil", spoil, "--deadline", deadline]).env("FERROGIN_SIGNALS", "emulated");
            job.env("SOFTEFA_FAULTS", card).run().expect("the job starts")
        };
        // A lost signal makes its waiter late, except in `deepep`, where the next signal reveals it.
        let patience = seconds(HANG_LIMIT);
        let (deadline, found) = match spoil {
            "lost" if workload != "deepep" => ("5", ": waited for "),
            _ => (&*patience, ": expected "),
        };
        let mut outcome = run(spoil, deadline, cards[0]);
        for card in &cards[1..] {
            if outcome.success() {
                outcome = run(spoil, deadline, card);
            }
        }
        let found = outcome.text().contains(found);
        assert!(!outcome.success() && found, "{workload} with the fault {spoil}: {}", report(&outcome));
        if soak() {
            must_pass(&run("nothing", &patience, cards[0]));
        }
    }
}

/// Does the same for several workloads, on CPU threads.
fn find(name: &str, faults: &[(&str, &[&str], &[&str])]) {
    let Some(dist) = dist(name) else { return };
    if not_over_efa(name, "verbs have no faults") {
        return;
    }
    for (workload, usual, long) in faults {
        finds(|| scenarios(&dist, 2), workload, usual, long);
    }
}

#[test]
fn workloads_find_lost_and_doubled_signals() {
    let faults: [(&str, &[&str], &[&str]); 2] =
        [("deepep", &["lost"], &[]), ("deepep-indexed", &["doubled"], &["lost"])];
    find("workloads_find_lost_and_doubled_signals", &faults);
}

#[test]
#[ignore = "make check"]
fn workloads_find_deliberate_faults() {
    let faults: [(&str, &[&str], &[&str]); 3] = [
        ("deepep", &["weak", "doubled", "reset", "flush"], &[]),
        ("nccl-ep", &["weak", "reset"], &["lost", "doubled"]),
        ("barriers", &["lost"], &["weak", "doubled"]),
    ];
    find("workloads_find_deliberate_faults", &faults);
}

#[test]
#[ignore = "make check"]
fn kernels_find_deliberate_faults() {
    let Some(dist) = gpu("kernels_find_deliberate_faults") else { return };
    finds(|| on_gpu(&dist, scenarios(&dist, 2)), "deepep", &["weak", "flush"], &["lost", "doubled", "reset"]);
}

/// One rank of a job, run by a thread of the test's child process.
struct Rank {
    comm: Comm,
    memory: Arc<DeviceMemory>,
    window: DeviceWindow,
    contexts: GinContext,
    rank: u32,
}

/// What a job needs.
#[derive(Clone, Copy)]
struct Needs {
    ranks: usize,
    contexts: i32,
    signals: i32,
    /// Bytes of the window.
    bytes: usize,
    depth: i32,
}

/// Runs `body` on every rank of a job that has this process to itself, so that only the job's settings apply to the
/// process.
fn ranks(needs: Needs, body: impl Fn(&Rank) + Sync) {
    let body = &body;
    std::thread::scope(|scope| {
        for bootstrap in Bootstrap::threads(needs.ranks, HANG_LIMIT) {
            scope.spawn(move || {
                let plugin = Plugin::find(&plugin_from_env()).expect("the plugin");
                let comm = Comm::init(&plugin, Arc::new(bootstrap), 0).expect("the ranks connect");
                let memory = Arc::new(DeviceMemory::alloc(needs.bytes).expect("memory"));
                let window = comm.register(&memory, 0).expect("a window");
                let contexts = comm.create_context(&GinConfigV14 {
                    n_signals: needs.signals,
                    n_counters: 0,
                    n_contexts: needs.contexts,
                    queue_depth: needs.depth,
                    traffic_class: -1,
                    backend_version: 2,
                    rank_stride: 1,
                });
                let contexts = contexts.expect("contexts");
                comm.barrier().expect("all ranks");
                let rank = comm.rank() as u32;
                let at = DeviceWindow(window.gin_handle());
                let one = Rank { comm, memory, window: at, contexts, rank };
                body(&one);
                one.comm.barrier().expect("all ranks");
                assert!(!one.contexts.query_last_error().expect("queryLastError"), "rank {rank}: an error");
                let Rank { comm, contexts, .. } = one;
                window.deregister().expect("deregMrSym");
                contexts.destroy().expect("destroyContext");
                comm.close().expect("closeColl");
            });
        }
    });
}

// SAFETY: any thread may use the contexts' handle and the window.
unsafe impl Sync for Rank {}

impl Rank {
    fn context(&self, id: u32) -> Context<'_> {
        // SAFETY: `createContext` returned the handle, and the contexts live as long as this rank.
        let context = unsafe { Context::from_handle(self.contexts.handle(), id) }.expect("a context");
        context.set_timeout_ns(HANG_LIMIT.as_nanos() as u64);
        context
    }

    fn at(&self, offset: usize) -> Span {
        self.window.at(offset as u64)
    }

    /// Polls until `is_done`, with the device code's pauses.
    fn poll(&self, context: &Context<'_>, what: &str, mut is_done: impl FnMut() -> bool) {
        let mut round = 0u32;
        wait_until(what, || {
            context.relax(round);
            round = round.saturating_add(1);
            is_done()
        });
    }
}
