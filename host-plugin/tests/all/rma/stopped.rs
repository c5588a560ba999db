//! Ranks that are killed or stopped while the others post to them. The others close as soon as they fail, and each of
//! them names the rank.

use super::{TCP, register, transfer};
use crate::harness::{plugin_path, second_libfabric};
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use ferrogin_test_support::{Random, child, repetitions};
use mini_nccl::launch::{Job, Output, Signal as Kill};
use mini_nccl::rma::{RmaComm, RmaPlugin, Signal};
use mini_nccl::{Bootstrap, Error};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const RANKS: usize = 3;
const PLUGIN: &str = "FERROGIN_TEST_RMA_PLUGIN";
const SEED: &str = "FERROGIN_TEST_RMA_SEED";

/// Puts, signals and gets to and from all ranks until one fails, then does NCCL's teardown right away.
fn rank(plugin: &Path, seed: u64) {
    let plugin = RmaPlugin::load(plugin).expect("the plugin");
    let bootstrap = Arc::new(Bootstrap::from_env(HANG_LIMIT).expect("the other ranks"));
    let comm = RmaComm::init(&plugin, bootstrap, 0).expect("a communicator");
    let (memory, other) = (register(&comm, 4 << 20), comm.create_context(1).expect("a context"));
    let context = comm.create_context(1).expect("a context");
    let mut random = Random::new(seed << 8 | comm.rank() as u64);
    let mut round = || -> Result<(), Error> {
        let mut requests = Vec::new();
        for peer in 0..RANKS {
            for _ in 0..random.below(4) {
                let size = random.of(&[0, 8, 4096, 1 << 20]);
                let there = transfer(peer, memory.at(8 * RANKS), memory.at((1 + comm.rank()) << 20), size);
                let signal = Signal { word: memory.at(8 * comm.rank()), value: 1, strong: random.one_in(2) };
                requests.push(match random.below(3) {
                    0 => context.get(there)?,
                    1 => context.put(there, None)?,
                    _ => context.put(there, Some(signal))?,
                });
            }
        }
        requests.iter().try_for_each(|request| context.wait(request))
    };
    let moment = 10 + seed % 20;
    let mut rounds = 0;
    let error = loop {
        if let Err(error) = round() {
            break error;
        }
        rounds += 1;
        if rounds == moment {
            println!("ready");
        }
    };
    assert!(context.has_error().expect("an answer"), "{error}");
    println!("failed: {error}");
    drop((context, other));
    drop((memory, comm));
    println!("closed");
}

/// Kills or stops one rank of a job, and checks what the others say.
fn end_one(test: &str, plugin: &Path, seed: u64, settings: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("the path of the test's program");
    let victim = Random::new(seed).index(RANKS);
    let end = if seed.is_multiple_of(2) { Kill::SIGKILL } else { Kill::SIGSTOP };
    let mut job = Job::new(&program, RANKS)
        .args(["--exact", &child::full_name(test), "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(PLUGIN, plugin)
        .env(SEED, seed.to_string())
        .env("FERROGIN_DEVICE", "cpu")
        .env("FERROGIN_TIMEOUT", "5")
        .output(Output::Capture)
        .grace(HANG_LIMIT);
    for (name, value) in settings {
        job = job.env(name, value);
    }
    let mut running = job.start().expect("a job");
    let others: Vec<_> = (0..RANKS).filter(|rank| *rank != victim).collect();
    let all_say = |lines: &[mini_nccl::launch::Line], ranks: &[usize], text: &str| {
        ranks.iter().all(|rank| lines.iter().any(|line| line.rank == Some(*rank) && line.text.contains(text)))
    };
    wait_until("all ranks put", || all_say(&running.captured(), &[0, 1, 2], "ready"));
    running.signal(victim, end);
    let began = Instant::now();
    wait_until("the others close", || all_say(&running.captured(), &others, "closed"));
    let took = began.elapsed();
    running.signal(victim, Kill::SIGKILL);
    let outcome = running.wait();
    let names = |line: &str| {
        ["ended without", "has completed no request"].iter().any(|what| line.contains(&format!("rank {victim} {what}")))
            || line.contains(&format!("to rank {victim} failed"))
    };
    for rank in others {
        let mut failures =
            outcome.lines.iter().filter(|line| line.rank == Some(rank) && line.text.starts_with("failed: "));
        let failure = failures.next().expect("the failure");
        assert!(
            names(&failure.text),
            "seed {seed}, {settings:?}: rank {rank} after {end} of rank {victim}, {took:?}:\n{}",
            outcome.text()
        );
    }
    // Printed directly, so that the test runner doesn't capture it.
    let _ = writeln!(std::io::stdout(), "{test}: {end} of rank {victim}: the others closed after {took:?}");
}

fn end(test: &str, settings: impl Fn(u64) -> Vec<(&'static str, String)>) {
    if let Some(plugin) = std::env::var_os(PLUGIN) {
        return rank(Path::new(&plugin), std::env::var(SEED).expect("set").parse().expect("a number"));
    }
    let Some(plugin) = plugin_path(test) else { return };
    for seed in 0..repetitions("FERROGIN_RMA_ENDS", 6, 60) {
        let settings = settings(seed);
        let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
        end_one(test, &plugin, seed, &settings);
    }
}

fn over_tcp() -> Vec<(&'static str, String)> {
    TCP.map(|(name, value)| (name, value.to_owned())).to_vec()
}

#[test]
#[ignore = "make check"]
fn killed_or_stopped_rank_is_named_by_the_others() {
    end("killed_or_stopped_rank_is_named_by_the_others", |seed| {
        vec![("FERROGIN_PROVIDER", "softefa".to_owned()), ("SOFTEFA_FAULTS", format!("seed={seed},reorder=64"))]
    });
}

#[test]
#[ignore = "make check"]
fn rank_killed_or_stopped_over_tcp_is_named_by_the_others() {
    end("rank_killed_or_stopped_over_tcp_is_named_by_the_others", |_| over_tcp());
}

#[test]
#[ignore = "make check"]
fn rank_killed_or_stopped_over_newer_tcp_is_named_by_the_others() {
    let test = "rank_killed_or_stopped_over_newer_tcp_is_named_by_the_others";
    let Some(path) = second_libfabric(test) else { return };
    end(test, |_| [over_tcp(), vec![("FERROGIN_LIBFABRIC", path.clone())]].concat());
}
