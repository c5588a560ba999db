//! Ranks that destroy contexts with requests under way. Nothing that was posted is lost, and no process ends.

use super::{TCP, ranks, register, transfer};
use crate::harness::{plugin_path, rma_alone, second_libfabric};
use ferrogin_ffi::rma::MR_FLAG_SIGNAL_NEVER_RESET;
use ferrogin_test_support::wait::HANG_LIMIT;
use ferrogin_test_support::{Random, child, repetitions};
use mini_nccl::launch::{Job, Output};
use mini_nccl::rma::{Place, RmaComm, RmaMemory, RmaPlugin, Signal};
use mini_nccl::{Bootstrap, DeviceMemory};
use std::path::Path;
use std::sync::Arc;

const PLUGIN: &str = "FERROGIN_TEST_RMA_PLUGIN";
const ROUNDS: &str = "FERROGIN_TEST_RMA_ROUNDS";
/// Maximum number of small operations from a rank to another in a round, more than twice a stream's window.
const OPERATIONS: usize = 600;
/// Size of the large put at the end, which is on its way for a while.
const LARGE: usize = 1 << 20;
/// A fault with which the card drops what an endpoint hasn't delivered when it's closed, on both wires.
const CARDS: [&[(&str, &str)]; 2] = [
    &[("FERROGIN_PROVIDER", "softefa"), ("SOFTEFA_FAULTS", "close_drops,reorder=64"), ("SOFTEFA_WIRE", "shm")],
    &[("FERROGIN_PROVIDER", "softefa"), ("SOFTEFA_FAULTS", "close_drops,reorder=64"), ("SOFTEFA_WIRE", "tcp")],
];

/// Returns how many small operations `sender` posts to `receiver` in a round.
fn count(round: u64, sender: usize, receiver: usize) -> usize {
    Random::new(round << 16 | (sender << 8 | receiver) as u64).of(&[0, 1, 20, 100, OPERATIONS])
}

/// A rank's memory in a round.
struct Round {
    words: RmaMemory,
    targets: RmaMemory,
    sources: RmaMemory,
}

impl Round {
    fn new(comm: &RmaComm) -> Self {
        let nranks = comm.nranks();
        let words = Arc::new(DeviceMemory::alloc(8 * nranks).expect("memory"));
        let round = Self {
            words: comm.register(&words, MR_FLAG_SIGNAL_NEVER_RESET).expect("a registration"),
            targets: register(comm, nranks * (8 * OPERATIONS + LARGE)),
            sources: register(comm, 8 * OPERATIONS + LARGE),
        };
        (0..OPERATIONS).for_each(|n| round.sources.memory().store(8 * n, n as u64 + 1));
        round.sources.memory().store(8 * OPERATIONS + LARGE - 8, 7);
        round
    }

    /// Where `sender`'s bytes begin in `targets`.
    fn place(sender: usize) -> usize {
        sender * (8 * OPERATIONS + LARGE)
    }

    /// Posts all operations of a round and destroys the context, without a single test.
    fn post(&self, comm: &RmaComm, round: u64) {
        let context = comm.create_context(1).expect("a context");
        let (rank, nranks) = (comm.rank(), comm.nranks());
        let word = Signal { word: self.words.at(8 * rank), value: 1, strong: round.is_multiple_of(2) };
        for peer in (1..nranks).map(|n| (rank + n) % nranks) {
            let count = count(round, rank, peer);
            for n in 0..count {
                let put = transfer(peer, self.sources.at(8 * n), self.targets.at(Self::place(rank) + 8 * n), 8);
                let alone = transfer(peer, Place::NONE, Place::NONE, 0);
                let (put, signal) = [(put, None), (put, Some(word)), (alone, Some(word))][n % 3];
                // The last one's hint says that another one follows, which never does.
                let put = mini_nccl::rma::Transfer { aggregate: n % 8 > 3 || n + 1 == count, ..put };
                let _ = context.put(put, signal).expect("a request");
            }
            if count > 1 {
                let (from, to) = (8 * OPERATIONS, Self::place(rank) + 8 * OPERATIONS);
                let _ = context.put(transfer(peer, self.sources.at(from), self.targets.at(to), LARGE), Some(word));
            }
        }
    }

    /// Checks that everything of the other ranks has arrived. They may not have returned from destroyContext yet.
    fn check(&self, comm: &RmaComm, round: u64) {
        for sender in (0..comm.nranks()).filter(|sender| *sender != comm.rank()) {
            let (count, start) = (count(round, sender, comm.rank()), Self::place(sender));
            let signals = (0..count).filter(|n| n % 3 > 0).count() as u64 + u64::from(count > 1);
            let found = self.words.memory().load(8 * sender);
            assert_eq!(found, signals, "round {round}: signals from rank {sender} to rank {}", comm.rank());
            let lost =
                (0..count).filter(|n| n % 3 < 2 && self.targets.memory().load(start + 8 * n) != *n as u64 + 1).count();
            assert_eq!(lost, 0, "round {round}: lost puts from rank {sender} to rank {}", comm.rank());
            let last = self.targets.memory().load(start + 8 * OPERATIONS + LARGE - 8);
            assert_eq!(last, if count > 1 { 7 } else { 0 }, "round {round}: the large put from rank {sender}");
        }
    }
}

/// Runs the rounds as one rank of a job. Every fourth round has a new communicator.
fn rank(plugin: &Path, rounds: u64) {
    let plugin = RmaPlugin::load(plugin).expect("the plugin");
    let bootstrap = Arc::new(Bootstrap::from_env(HANG_LIMIT).expect("the other ranks"));
    for first in (0..rounds).step_by(4) {
        let comm = RmaComm::init(&plugin, bootstrap.clone(), 0).expect("a communicator");
        for round in first..rounds.min(first + 4) {
            let memory = Round::new(&comm);
            memory.post(&comm, round);
            memory.check(&comm, round);
        }
    }
    let warnings: Vec<_> = mini_nccl::log::take().into_iter().map(|line| format!("{line:?}")).collect();
    assert!(!warnings.iter().any(|line| line.contains("destroyed a context")), "{warnings:#?}");
    println!("all rounds are complete");
}

/// Runs the rounds with several numbers of ranks and settings.
fn close(test: &str, rounds: u64, sizes: &[usize], all: &[Vec<(&str, &str)>]) {
    if let Some(plugin) = std::env::var_os(PLUGIN) {
        return rank(Path::new(&plugin), std::env::var(ROUNDS).expect("set").parse().expect("a number"));
    }
    let Some(plugin) = plugin_path(test) else { return };
    let program = std::env::current_exe().expect("the path of the test's program");
    for (ranks, settings) in sizes.iter().flat_map(|ranks| all.iter().map(move |settings| (*ranks, settings))) {
        let mut job = Job::new(&program, ranks)
            .args(["--exact", &child::full_name(test), "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(PLUGIN, &plugin)
            .env(ROUNDS, rounds.to_string())
            .env("FERROGIN_DEVICE", "cpu")
            .output(Output::Capture);
        for (name, value) in settings {
            job = job.env(name, value);
        }
        let outcome = job.run().expect("a job");
        let complete = outcome.lines.iter().filter(|line| line.text.contains("all rounds are complete")).count();
        assert!(
            outcome.success() && complete == ranks,
            "{ranks} ranks, {settings:?}: {:?}\n{}",
            outcome.failure,
            outcome.text()
        );
    }
}

#[test]
fn destroyed_contexts_lose_nothing_that_was_posted() {
    let all = [CARDS[0].to_vec(), TCP.to_vec()];
    close("destroyed_contexts_lose_nothing_that_was_posted", 8, &[3], &all);
}

#[test]
#[ignore = "make check"]
fn many_destroyed_contexts_lose_nothing_on_a_card_that_drops() {
    let rounds = repetitions("FERROGIN_RMA_CLOSES", 20, 100);
    let all = CARDS.map(<[_]>::to_vec);
    close("many_destroyed_contexts_lose_nothing_on_a_card_that_drops", rounds, &[2, 4, 8], &all);
}

/// Also what two faults of libfabric's tcp would break: see docs/found-elsewhere.md.
#[test]
#[ignore = "make check"]
fn many_destroyed_contexts_lose_nothing_over_tcp() {
    let test = "many_destroyed_contexts_lose_nothing_over_tcp";
    let other = second_libfabric(test);
    let all: Vec<_> = std::iter::once(TCP.to_vec())
        .chain(other.iter().map(|path| [&TCP[..], &[("FERROGIN_LIBFABRIC", path)]].concat()))
        .collect();
    close(test, repetitions("FERROGIN_RMA_CLOSES", 20, 100), &[2, 4, 8], &all);
}

/// The other ranks keep their contexts, and don't poll them.
#[test]
#[ignore = "make check"]
fn wait_for_ranks_that_neither_destroy_nor_poll_ends_with_a_line() {
    let test = "wait_for_ranks_that_neither_destroy_nor_poll_ends_with_a_line";
    rma_alone(test, &[vec![]], 16, |plugin| {
        // With more than the window of 256 signals, the rest waits for acknowledgements.
        let nothing = "without hearing that ranks 1, 2 had nothing under way to it, so signals of theirs may be lost";
        for (signals, lost) in [(0, nothing), (300, "with 88 undelivered parts of requests to ranks 1, 2")] {
            ranks(&plugin, 3, move |comm| {
                let (memory, context) = (register(&comm, 4096), comm.create_context(1).expect("a context"));
                comm.barrier().expect("all ranks");
                if comm.rank() == 0 {
                    for peer in (0..signals).flat_map(|_| [1, 2]) {
                        let signal = Signal { word: memory.at(8), value: 1, strong: true };
                        let alone = transfer(peer, Place::NONE, Place::NONE, 0);
                        let _ = context.put(alone, Some(signal)).expect("a signal");
                    }
                    drop(context);
                    comm.barrier().expect("all ranks");
                    return;
                }
                comm.barrier().expect("all ranks");
            });
            let is_of_rank_0 = |line: &mini_nccl::log::Line| line.is_warn() && line.text.contains("rank 0 destroyed");
            let lines: Vec<_> = mini_nccl::log::take().into_iter().filter(is_of_rank_0).collect();
            let expected = format!("rank 0 destroyed a context {lost}: the wait for them ended after 7 s; check that");
            assert!(lines.len() == 1 && lines[0].text.contains(&expected), "{lines:#?}");
        }
    });
}
