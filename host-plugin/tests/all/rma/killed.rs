//! Ranks that are killed: the others' contexts fail, and close without them.

use super::{register, transfer};
use crate::harness::plugin_path;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use ferrogin_test_support::{Random, child, repetitions};
use mini_nccl::Bootstrap;
use mini_nccl::launch::{Job, Output, Signal as Kill};
use mini_nccl::rma::{RmaComm, RmaPlugin, Signal};
use std::path::Path;
use std::sync::Arc;

const RANKS: usize = 3;
const ROLE: &str = "FERROGIN_TEST_RMA_PLUGIN";

/// Puts with signals to all ranks until one of them fails, then NCCL's teardown.
fn rank(plugin: &Path) {
    let plugin = RmaPlugin::load(plugin).expect("the plugin");
    let bootstrap = Arc::new(Bootstrap::from_env(HANG_LIMIT).expect("the other ranks"));
    let comm = RmaComm::init(&plugin, bootstrap, 0).expect("a communicator");
    let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
    let signal = |peer| Signal { word: memory.at(8 * comm.rank()), value: 1, strong: peer % 2 == 0 };
    let mut rounds = 0;
    let error = 'failed: loop {
        for peer in 0..comm.nranks() {
            let put = transfer(peer, memory.at(512), memory.at(1024 + 8 * comm.rank()), 8);
            match context.put(put, Some(signal(peer))).and_then(|request| context.wait(&request)) {
                Ok(()) => {}
                Err(error) => break 'failed error,
            }
        }
        rounds += 1;
        if rounds == 20 {
            println!("running");
        }
    };
    assert!(context.has_error().expect("an answer"), "{error}");
    drop(context);
    drop(memory);
    drop(comm);
    println!("closed after: {error}");
}

#[test]
#[ignore = "make check"]
fn killed_rank_fails_the_others_which_close_without_it() {
    let test = "killed_rank_fails_the_others_which_close_without_it";
    if let Some(plugin) = std::env::var_os(ROLE) {
        return rank(Path::new(&plugin));
    }
    let Some(plugin) = plugin_path(test) else { return };
    let program = std::env::current_exe().expect("the path of the test's program");
    let kills = repetitions("FERROGIN_RMA_KILLS", 4, 200);
    for seed in 0..kills {
        let mut random = Random::new(seed);
        let victim = random.index(RANKS);
        let job = Job::new(&program, RANKS)
            .args(["--exact", &child::full_name(test), "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, &plugin)
            .env("FERROGIN_DEVICE", "cpu")
            .env("FERROGIN_PROVIDER", "softefa")
            .env("SOFTEFA_FAULTS", format!("seed={seed},reorder=64"))
            .output(Output::Capture)
            .grace(HANG_LIMIT);
        let mut running = job.start().expect("a job");
        let all_run = |lines: &[mini_nccl::launch::Line]| {
            let running = |rank| lines.iter().any(|line| line.rank == Some(rank) && line.text.ends_with("running"));
            (0..RANKS).all(running)
        };
        wait_until("all ranks put", || all_run(&running.captured()));
        running.signal(victim, Kill::SIGKILL);
        let outcome = running.wait();
        for rank in (0..RANKS).filter(|rank| *rank != victim) {
            let closed =
                outcome.lines.iter().any(|line| line.rank == Some(rank) && line.text.contains("closed after: "));
            assert!(
                closed,
                "seed {seed}: rank {rank} after the end of rank {victim}:
{}",
                outcome.text()
            );
        }
    }
}
