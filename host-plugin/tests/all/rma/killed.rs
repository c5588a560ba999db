//! Ranks that are killed or close: the others' requests to them complete, or fail and name the rank, and the others
//! close without it.

use super::{TCP, ranks, register, transfer};
use crate::harness::{plugin_path, rma_alone};
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until, wait_until};
use ferrogin_test_support::{Random, child, of_process, repetitions};
use mini_nccl::launch::{Job, Output, Running, Signal as Kill};
use mini_nccl::rma::{RmaComm, RmaPlugin, Signal};
use mini_nccl::{Bootstrap, Error};
use std::path::Path;
use std::sync::{Arc, Barrier};

/// One of them isn't a neighbour of the killed one in the ring.
const RANKS: usize = 4;
const PLUGIN: &str = "FERROGIN_TEST_RMA_PLUGIN";
const ROLE: &str = "FERROGIN_TEST_RMA_ROLE";
const BUSY: &str = "busy";
const IDLE: &str = "idle";
/// A directory where a file named after an event ends all ranks' wait for it.
const EVENTS: &str = "FERROGIN_TEST_RMA_EVENTS";
const KILLED: &str = "killed";
const CLOSE: &str = "close";

/// Waits for one of the job's files, and polls meanwhile like NCCL.
fn wait_for_event(name: &str, mut poll: impl FnMut()) {
    let file = Path::new(&std::env::var_os(EVENTS).expect("set")).join(name);
    poll_until(name, || {
        poll();
        file.exists()
    });
}

/// Puts with signals to all ranks until one fails, then does NCCL's teardown. An `idle` rank has no open requests when
/// a rank is killed.
fn rank(plugin: &Path, idle: bool) {
    let plugin = RmaPlugin::load(plugin).expect("the plugin");
    let bootstrap = Arc::new(Bootstrap::from_env(HANG_LIMIT).expect("the other ranks"));
    let comm = RmaComm::init(&plugin, bootstrap, 0).expect("a communicator");
    let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
    let other = comm.create_context(1).expect("a context");
    let put = |peer| {
        let signal = Signal { word: memory.at(8 * comm.rank()), value: 1, strong: peer % 2 == 0 };
        context.put(transfer(peer, memory.at(512), memory.at(1024 + 8 * comm.rank()), 8), Some(signal))
    };
    let round = || -> Result<(), Error> {
        let requests = (0..RANKS).map(put).collect::<Result<Vec<_>, _>>()?;
        requests.iter().try_for_each(|request| context.wait(request))
    };
    let mut rounds = 0;
    let error = loop {
        if let Err(error) = round() {
            break error;
        }
        rounds += 1;
        if rounds == 20 {
            println!("puts to all ranks have completed");
            if idle {
                wait_for_event(KILLED, || context.progress().expect("progress of a context without requests"));
            }
        }
    };
    assert!(context.has_error().expect("an answer"), "{error}");
    println!("failed: {error}");
    // NCCL keeps polling. If a rank closed too early, that would be the failure that others see.
    wait_for_event(CLOSE, || {
        other.progress().expect("progress of a context without requests");
        assert!(context.progress().is_err());
    });
    assert!(!other.has_error().expect("an answer"));
    drop((context, other));
    drop(memory);
    drop(comm);
    println!("closed");
}

/// Kills one rank of a job, and returns when the others have closed.
fn kill_one(test: &str, plugin: &Path, seed: u64, settings: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("the path of the test's program");
    let events = of_process(std::env::temp_dir(), &format!("ferrogin-{test}-{seed}"));
    std::fs::create_dir_all(&events).expect("a directory");
    let happened = |event: &str| std::fs::write(events.join(event), "").expect("a file");
    let role = if seed.is_multiple_of(2) { BUSY } else { IDLE };
    let victim = Random::new(seed).index(RANKS);
    let mut job = Job::new(&program, RANKS)
        .args(["--exact", &child::full_name(test), "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(PLUGIN, plugin)
        .env(ROLE, role)
        .env(EVENTS, &events)
        .env("FERROGIN_DEVICE", "cpu")
        .output(Output::Capture)
        .grace(HANG_LIMIT);
    for (name, value) in settings {
        job = job.env(name, value);
    }
    let mut running = job.start().expect("a job");
    let wait_for_all = |job: &Running, what: &str, ranks: &[usize], text: &str| {
        wait_until(what, || {
            let lines = job.captured();
            ranks.iter().all(|rank| lines.iter().any(|line| line.rank == Some(*rank) && line.text.contains(text)))
        });
    };
    let others: Vec<_> = (0..RANKS).filter(|rank| *rank != victim).collect();
    wait_for_all(&running, "all ranks put", &[0, 1, 2, 3], "have completed");
    running.signal(victim, Kill::SIGKILL);
    happened(KILLED);
    wait_for_all(&running, "the failure of each other rank", &others, "failed: ");
    happened(CLOSE);
    let outcome = running.wait();
    let _ = std::fs::remove_dir_all(&events);
    for rank in others {
        let says = |text: &str| {
            outcome.lines.iter().filter(|line| line.rank == Some(rank)).any(|line| line.text.contains(text))
        };
        let named = says(&format!("rank {victim} ended")) || says(&format!("to rank {victim} failed"));
        assert!(
            named && says("closed"),
            "seed {seed}, {settings:?}: rank {rank} after the end of rank {victim}:\n{}",
            outcome.text()
        );
    }
}

fn kill(test: &str, settings: impl Fn(u64) -> Vec<(&'static str, String)>) {
    if let Some(plugin) = std::env::var_os(PLUGIN) {
        return rank(Path::new(&plugin), std::env::var(ROLE).is_ok_and(|role| role == IDLE));
    }
    let Some(plugin) = plugin_path(test) else { return };
    for seed in 0..repetitions("FERROGIN_RMA_KILLS", 4, 100) {
        let settings = settings(seed);
        let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
        kill_one(test, &plugin, seed, &settings);
    }
}

#[test]
#[ignore = "make check"]
fn killed_rank_fails_the_others_which_close_without_it() {
    kill("killed_rank_fails_the_others_which_close_without_it", |seed| {
        vec![("FERROGIN_PROVIDER", "softefa".to_owned()), ("SOFTEFA_FAULTS", format!("seed={seed},reorder=64"))]
    });
}

#[test]
#[ignore = "make check"]
fn rank_killed_over_tcp_fails_the_others_which_close_without_it() {
    kill("rank_killed_over_tcp_fails_the_others_which_close_without_it", |_| {
        TCP.map(|(name, value)| (name, value.to_owned())).to_vec()
    });
}

/// Rank 2 isn't a neighbour of rank 0 in the ring.
#[test]
#[ignore = "make check"]
fn request_to_a_rank_that_closed_fails_by_name() {
    let test = "request_to_a_rank_that_closed_fails_by_name";
    rma_alone(test, &[vec![], TCP.to_vec()], 16, |plugin| {
        let all = Arc::new(Barrier::new(RANKS));
        ranks(&plugin, RANKS, move |comm| {
            let (context, memory) = (comm.create_context(1).expect("a context"), register(&comm, 4096));
            let rank = comm.rank();
            let put = |peer| context.put(transfer(peer, memory.at(0), memory.at(8 * (1 + rank)), 8), None);
            let finish = |peer| put(peer).and_then(|request| context.wait(&request));
            (0..RANKS).for_each(|peer| finish(peer).expect("a put to an open rank"));
            comm.barrier().expect("all ranks");
            if rank == 0 {
                drop(context);
                drop((memory, comm));
                all.wait();
                all.wait();
                return;
            }
            all.wait();
            finish(rank % 3 + 1).expect("a put to another rank");
            while finish(0).is_ok() {}
            assert!(context.has_error().expect("an answer"), "rank {rank}");
            all.wait();
        });
        let log = mini_nccl::log::take();
        for rank in 1..RANKS {
            let closed = format!("rank 0 closed its communicator while requests of rank {rank} to it were outstanding");
            let by_provider = format!("from rank {rank} to rank 0 failed");
            let named = log.iter().any(|line| {
                let line = format!("{line:?}");
                line.contains(&closed) || line.contains(&by_provider)
            });
            assert!(named, "rank {rank}: {log:#?}");
        }
    });
}
