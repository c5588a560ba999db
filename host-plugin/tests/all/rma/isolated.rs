//! Ranks that are killed, stopped or close while the others put, get and signal, with FERROGIN_ON_PEER_FAILURE=isolate:
//! the others' requests to them fail by name, and those among the others go on with right data.

use super::{TCP, register, transfer};
use crate::harness::{plugin_path, second_libfabric};
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until, wait_until};
use ferrogin_test_support::{Random, child, repetitions};
use mini_nccl::launch::{Job, Output, Signal as Kill};
use mini_nccl::rma::{Place, Request, RmaComm, RmaContext, RmaMemory, RmaPlugin, Signal};
use mini_nccl::{Bootstrap, Error};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

const RANKS: usize = 4;
/// Rounds among the others after they know of the loss.
const ROUNDS_AFTER: u64 = 30;
const PLUGIN: &str = "FERROGIN_TEST_RMA_PLUGIN";
const SEED: &str = "FERROGIN_TEST_RMA_SEED";

/// A rank's memory: by sender, a word that counts signals, and the bytes of a small and a large put, which are the
/// number of the round; bytes for gets; and what it puts, and got.
const SMALL: usize = 64;
const PATTERN: usize = 128;
const GOT: usize = 192;
const SOURCE: usize = 1 << 16;
const LARGE: usize = 2 << 16;
const LARGE_SIZE: usize = 40_000;
/// Added to the word of a sender that has finished.
const FINISHED: u64 = 1 << 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    Stopped,
    Closes,
}

/// What happens to which rank in a run.
fn plan(seed: u64) -> (usize, End) {
    let end = [End::Killed, End::Closes, End::Stopped][(seed % 3) as usize];
    (Random::new(seed).index(RANKS), end)
}

struct Rank<'a> {
    comm: &'a RmaComm,
    context: &'a RmaContext,
    memory: &'a RmaMemory,
    /// Other ranks, and those of them that are lost.
    others: Vec<usize>,
    lost: BTreeSet<usize>,
}

impl Rank<'_> {
    /// Where a sender's large put goes.
    fn large(sender: usize) -> usize {
        LARGE + sender * (1 << 16)
    }

    /// Returns whether a call succeeded. Otherwise its error names the peer.
    fn succeeded<T>(&mut self, peer: usize, result: Result<T, Error>) -> Option<T> {
        let error = match result {
            Ok(value) => return Some(value),
            Err(error) => error.to_string(),
        };
        let named = format!("rank {peer} is lost, so requests of rank {} to it fail", self.comm.rank());
        assert!(error.contains(&named), "a request to rank {peer}: {error}");
        if self.lost.insert(peer) {
            println!("learned of {peer}");
        }
        None
    }

    /// Puts, gets and signals to and from all other ranks, and waits.
    fn round(&mut self, round: u64) {
        let (rank, memory) = (self.comm.rank(), self.memory);
        [SOURCE, SOURCE + LARGE_SIZE - 8].into_iter().for_each(|at| memory.memory().store(at, round));
        let mut requests: Vec<(usize, Request)> = Vec::new();
        for peer in self.others.clone() {
            let was_lost = self.lost.contains(&peer);
            let large = transfer(peer, memory.at(SOURCE), memory.at(Self::large(rank)), LARGE_SIZE);
            let small = transfer(peer, memory.at(SOURCE), memory.at(SMALL + 8 * rank), 8);
            let get = transfer(peer, memory.at(GOT + 8 * peer), memory.at(PATTERN), 8);
            let signal = Signal { word: memory.at(8 * rank), value: 1, strong: true };
            let posted = [
                self.context.put(large, None),
                self.context.put(small, Some(signal)),
                self.context.get(get),
                self.context.put(transfer(peer, Place::NONE, Place::NONE, 0), None),
                self.context.flush(0, memory, peer),
            ];
            for result in posted {
                let request = self.succeeded(peer, result);
                assert!(!was_lost || request.is_none(), "rank {rank} posted to rank {peer}, which it knows to be lost");
                requests.extend(request.map(|request| (peer, request)));
            }
        }
        for (peer, request) in requests {
            let result = self.context.wait(&request);
            self.succeeded(peer, result);
        }
        for peer in self.others.clone() {
            if !self.lost.contains(&peer) {
                assert_eq!(memory.memory().load(GOT + 8 * peer), 1000 + peer as u64, "rank {rank} got from {peer}");
            }
            let signals = memory.memory().load(8 * peer) % FINISHED;
            let [small, first, last] = [SMALL + 8 * peer, Self::large(peer), Self::large(peer) + LARGE_SIZE - 8]
                .map(|at| memory.memory().load(at));
            assert!(small >= signals && first >= signals && last >= signals, "rank {rank}: a strong signal of {peer}");
        }
    }

    /// Tells the other ranks how many rounds there were, and waits until they do, too.
    fn finish(&mut self, rounds: u64) {
        let (rank, memory) = (self.comm.rank(), self.memory);
        let others: Vec<_> = self.others.iter().copied().filter(|peer| !self.lost.contains(peer)).collect();
        for peer in &others {
            let put = transfer(*peer, memory.at(SOURCE), memory.at(SMALL + 8 * rank), 8);
            let signal = Signal { word: memory.at(8 * rank), value: FINISHED, strong: true };
            let put = self.context.put(put, Some(signal)).expect("a put to a rank that runs");
            self.context.wait(&put).expect("a put to a rank that runs");
        }
        for peer in others {
            poll_until("the last signal of each other rank", || {
                self.context.progress().expect("progress");
                memory.memory().load(8 * peer) >= FINISHED
            });
            let signals = memory.memory().load(8 * peer) - FINISHED;
            let [small, last] =
                [SMALL + 8 * peer, Self::large(peer) + LARGE_SIZE - 8].map(|at| memory.memory().load(at));
            assert!(
                signals > 0 && signals == small && signals == last,
                "rank {rank}: {signals} of {peer}, {small}, {last}"
            );
        }
        println!("finished {rounds} rounds");
    }
}

/// One rank of a job.
fn rank(plugin: &Path, seed: u64) {
    let (victim, end) = plan(seed);
    let plugin = RmaPlugin::load(plugin).expect("the plugin");
    let bootstrap = Arc::new(Bootstrap::from_env(HANG_LIMIT).expect("the other ranks"));
    let comm = RmaComm::init(&plugin, bootstrap, 0).expect("a communicator");
    let (memory, idle) = (register(&comm, LARGE + (RANKS << 16)), comm.create_context(1).expect("a context"));
    let context = comm.create_context(1).expect("a context");
    memory.memory().store(PATTERN, 1000 + comm.rank() as u64);
    comm.barrier().expect("all ranks");
    let others = (0..RANKS).filter(|rank| *rank != comm.rank()).collect();
    let mut this = Rank { comm: &comm, context: &context, memory: &memory, others, lost: BTreeSet::new() };
    let (mut rounds, mut after) = (0, 0);
    while after < ROUNDS_AFTER {
        rounds += 1;
        this.round(rounds);
        after += u64::from(!this.lost.is_empty());
        idle.progress().expect("progress of a context without requests");
        if rounds == 5 + seed % 20 {
            println!("all ranks have put");
            if comm.rank() == victim && end == End::Closes {
                drop((context, idle));
                drop((memory, comm));
                return;
            }
        }
    }
    assert_eq!(this.lost.iter().copied().collect::<Vec<_>>(), [victim]);
    this.finish(rounds);
    assert!(!context.has_error().expect("an answer") && !idle.has_error().expect("an answer"));
    drop((context, idle));
    let log = mini_nccl::log::take();
    assert!(!log.iter().any(|line| line.text.contains("destroyed a context")), "{log:#?}");
    drop((memory, comm));
    println!("done");
}

fn run(test: &str, plugin: &Path, seed: u64, settings: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("the path of the test's program");
    let (victim, end) = plan(seed);
    let mut job = Job::new(&program, RANKS)
        .args(["--exact", &child::full_name(test), "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(PLUGIN, plugin)
        .env(SEED, seed.to_string())
        .env("FERROGIN_ON_PEER_FAILURE", "isolate")
        .env("FERROGIN_DEVICE", "cpu")
        .env("FERROGIN_TIMEOUT", "5")
        .output(Output::Capture)
        .grace(HANG_LIMIT);
    for (name, value) in settings {
        job = job.env(name, value);
    }
    let mut running = job.start().expect("a job");
    let says = |lines: &[mini_nccl::launch::Line], rank: usize, text: &str| {
        lines.iter().any(|line| line.rank == Some(rank) && line.text.contains(text))
    };
    wait_until("all ranks put", || (0..RANKS).all(|rank| says(&running.captured(), rank, "all ranks have put")));
    match end {
        End::Killed => running.signal(victim, Kill::SIGKILL),
        End::Stopped => running.signal(victim, Kill::SIGSTOP),
        End::Closes => {}
    }
    let others: Vec<_> = (0..RANKS).filter(|rank| *rank != victim).collect();
    wait_until("the others end", || {
        others.iter().all(|rank| ["done", "panicked"].iter().any(|text| says(&running.captured(), *rank, text)))
    });
    running.signal(victim, Kill::SIGKILL);
    let outcome = running.wait();
    for rank in others {
        assert!(
            says(&outcome.lines, rank, "done") && says(&outcome.lines, rank, &format!("learned of {victim}")),
            "seed {seed}, {settings:?}: rank {rank} after rank {victim} was lost ({end:?}):\n{}",
            outcome.text()
        );
    }
    // Printed directly, so that the test runner doesn't capture it.
    let _ = writeln!(std::io::stdout(), "{test}: seed {seed}: rank {victim} {end:?}");
}

fn isolate(test: &str, rounds: u64, settings: impl Fn(u64) -> Vec<(&'static str, String)>) {
    if let Some(plugin) = std::env::var_os(PLUGIN) {
        return rank(Path::new(&plugin), std::env::var(SEED).expect("set").parse().expect("a number"));
    }
    let Some(plugin) = plugin_path(test) else { return };
    let first = std::env::var("FERROGIN_RMA_FIRST_LOSS").map_or(0, |first| first.parse().expect("a number"));
    for seed in first..first + repetitions("FERROGIN_RMA_LOSSES", rounds, 60) {
        let settings = settings(seed);
        let settings: Vec<_> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
        run(test, &plugin, seed, &settings);
    }
}

#[test]
#[ignore = "make check"]
fn lost_rank_ends_only_the_requests_to_it() {
    isolate("lost_rank_ends_only_the_requests_to_it", 6, |seed| {
        let wire = if seed % 2 == 0 { "shm" } else { "tcp" };
        let faults = format!("seed={seed},reorder=64");
        vec![("FERROGIN_PROVIDER", "softefa".to_owned()), ("SOFTEFA_WIRE", wire.to_owned()), ("SOFTEFA_FAULTS", faults)]
    });
}

fn over_tcp() -> Vec<(&'static str, String)> {
    TCP.map(|(name, value)| (name, value.to_owned())).to_vec()
}

#[test]
#[ignore = "make check"]
fn lost_rank_ends_only_the_requests_to_it_over_tcp() {
    isolate("lost_rank_ends_only_the_requests_to_it_over_tcp", 6, |_| over_tcp());
}

#[test]
#[ignore = "make check"]
fn lost_rank_ends_only_the_requests_to_it_over_newer_tcp() {
    let test = "lost_rank_ends_only_the_requests_to_it_over_newer_tcp";
    let Some(path) = second_libfabric(test) else { return };
    isolate(test, 3, |_| [over_tcp(), vec![("FERROGIN_LIBFABRIC", path.clone())]].concat());
}
