//! Ranks that are killed, stopped or close while the others put, get and signal, with FERROGIN_ON_PEER_FAILURE=isolate:
//! the others' requests to them fail by name, and those among the others go on with right data.
#![allow(unsafe_code)]

use super::{TCP, finish, polling, ranks, register, transfer};
use crate::harness::{plugin_path, rma_alone, second_libfabric};
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until, wait_until};
use ferrogin_test_support::{Random, child, repetitions};
use mini_nccl::launch::{Job, Output, Signal as Kill};
use mini_nccl::rma::{Place, Request, RmaComm, RmaContext, RmaMemory, RmaPlugin, Signal};
use mini_nccl::{Bootstrap, Error};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const POLICY: &str = "FERROGIN_ON_PEER_FAILURE";
const ISOLATE: (&str, &str) = (POLICY, "isolate");
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

/// What happens to which ranks in a run: one or two, in order.
fn plan(seed: u64) -> (Vec<usize>, End) {
    let end = [End::Killed, End::Closes, End::Stopped][(seed % 3) as usize];
    let mut random = Random::new(seed);
    let first = random.index(RANKS);
    let mut victims = vec![first];
    if seed / 3 % 2 == 1 {
        victims.push((first + 1 + random.index(RANKS - 1)) % RANKS);
        victims.sort_unstable();
    }
    (victims, end)
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
    let (victims, end) = plan(seed);
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
        after += u64::from(this.lost.len() == victims.len());
        idle.progress().expect("progress of a context without requests");
        if rounds == 5 + seed % 20 {
            println!("all ranks have put");
            if victims.contains(&comm.rank()) && end == End::Closes {
                drop((context, idle));
                drop((memory, comm));
                return;
            }
        }
    }
    assert_eq!(this.lost.iter().copied().collect::<Vec<_>>(), victims);
    this.finish(rounds);
    assert!(!context.has_error().expect("an answer") && !idle.has_error().expect("an answer"));
    drop((context, idle));
    let log = mini_nccl::log::take();
    assert!(!log.iter().any(|line| line.text.contains("destroyed a context")), "{log:#?}");
    drop((memory, comm));
    println!("done");
}

/// Returns a job of `test`'s ranks.
fn job(test: &str, plugin: &Path, ranks: usize) -> Job {
    let program = std::env::current_exe().expect("the path of the test's program");
    Job::new(&program, ranks)
        .args(["--exact", &child::full_name(test), "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(PLUGIN, plugin)
        .env("FERROGIN_DEVICE", "cpu")
        .output(Output::Capture)
}

fn run(test: &str, plugin: &Path, seed: u64, settings: &[(&str, &str)]) {
    let (victims, end) = plan(seed);
    let mut job = job(test, plugin, RANKS).env(SEED, seed.to_string()).grace(HANG_LIMIT);
    for (name, value) in settings.iter().chain(&[ISOLATE, ("FERROGIN_TIMEOUT", "5")]) {
        job = job.env(name, value);
    }
    let mut running = job.start().expect("a job");
    let says = |lines: &[mini_nccl::launch::Line], rank: usize, text: &str| {
        lines.iter().any(|line| line.rank == Some(rank) && line.text.contains(text))
    };
    wait_until("all ranks put", || (0..RANKS).all(|rank| says(&running.captured(), rank, "all ranks have put")));
    for victim in &victims {
        match end {
            End::Killed => running.signal(*victim, Kill::SIGKILL),
            End::Stopped => running.signal(*victim, Kill::SIGSTOP),
            End::Closes => {}
        }
    }
    let others: Vec<_> = (0..RANKS).filter(|rank| !victims.contains(rank)).collect();
    wait_until("the others end", || {
        others.iter().all(|rank| ["done", "panicked"].iter().any(|text| says(&running.captured(), *rank, text)))
    });
    victims.iter().for_each(|victim| running.signal(*victim, Kill::SIGKILL));
    let outcome = running.wait();
    for rank in others {
        let learned = |victim: &usize| says(&outcome.lines, rank, &format!("learned of {victim}"));
        assert!(
            says(&outcome.lines, rank, "done") && victims.iter().all(learned),
            "seed {seed}, {settings:?}: rank {rank} after {victims:?} were lost ({end:?}):\n{}",
            outcome.text()
        );
    }
    // Printed directly, so that the test runner doesn't capture it.
    let _ = writeln!(std::io::stdout(), "{test}: seed {seed}: {victims:?} {end:?}");
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

/// Waits until a rank knows that another one is lost, from a context without requests.
fn wait_for_loss(context: &RmaContext, rank: usize, lost: usize) {
    let line = format!("rank {rank}: rank {lost} is lost");
    poll_until("news of the loss", || {
        context.progress().expect("progress of a context without requests");
        mini_nccl::log::all().iter().any(|logged| logged.text.contains(&line))
    });
}

/// Repeats a call until it fails, and returns the error.
fn failure<T>(mut call: impl FnMut() -> Result<T, Error>) -> String {
    let mut error = None;
    poll_until("a failure", || {
        error = call().err();
        error.is_some()
    });
    error.expect("an error").to_string()
}

/// The card says that the address is bad, whether the peer has ended or not.
#[test]
fn bad_address_ends_the_context_unless_the_rank_has_ended() {
    let test = "bad_address_ends_the_context_unless_the_rank_has_ended";
    rma_alone(test, &[vec![ISOLATE, ("SOFTEFA_FAULTS", "error_every=1,error_status=7")]], 16, |plugin| {
        for ends in [true, false] {
            ranks(&plugin, 2, move |comm| {
                let (memory, context) = (register(&comm, 4096), comm.create_context(1).expect("a context"));
                let idle = comm.create_context(1).expect("a context");
                comm.barrier().expect("all ranks");
                if comm.rank() == 1 {
                    return if ends { drop((context, idle)) } else { comm.barrier().expect("all ranks") };
                }
                let put = transfer(1, memory.at(0), memory.at(64), 8);
                let put = context.put(put, None).expect("a put");
                if ends {
                    wait_for_loss(&idle, 0, 1);
                }
                let error = failure(|| context.test(&put));
                let lost = error.contains("rank 1 is lost, so requests of rank 0 to it fail");
                let failed = error.contains("a put from rank 0 to rank 1 failed");
                assert_eq!((lost, failed, context.has_error().expect("an answer")), (ends, !ends, !ends), "{error}");
                if !ends {
                    comm.barrier().expect("all ranks");
                }
            });
        }
    });
}

/// Its process runs, but the first rank's card says otherwise.
#[test]
fn rank_that_the_others_go_on_without_learns_it() {
    let test = "rank_that_the_others_go_on_without_learns_it";
    rma_alone(test, &[vec![ISOLATE, ("SOFTEFA_FAULTS", "error_every=1,error_status=9")]], 16, |plugin| {
        ranks(&plugin, 3, |comm| {
            let (memory, context) = (register(&comm, 4096), comm.create_context(1).expect("a context"));
            comm.barrier().expect("all ranks");
            match comm.rank() {
                0 => {
                    let put = transfer(1, memory.at(0), memory.at(64), 8);
                    let put = context.put(put, None).expect("a put");
                    let error = failure(|| context.test(&put));
                    assert!(error.contains("rank 1 is lost, so requests of rank 0 to it fail"), "{error}");
                }
                1 => {
                    let error = failure(|| context.progress());
                    assert!(error.contains("the other ranks have given up on this one, rank 1"), "{error}");
                }
                rank => wait_for_loss(&context, rank, 1),
            }
            assert_eq!(context.has_error().expect("an answer"), comm.rank() == 1);
            comm.barrier().expect("all ranks");
        });
    });
}

/// Over TCP, nothing ends the requests to a rank that doesn't answer.
#[test]
#[ignore = "make check"]
fn lost_ranks_requests_that_fill_the_queue_end_the_context() {
    let test = "lost_ranks_requests_that_fill_the_queue_end_the_context";
    rma_alone(test, &[[&TCP[..], &[ISOLATE, ("FERROGIN_TIMEOUT", "5")]].concat()], 16, |plugin| {
        let is_over = Arc::new(AtomicBool::new(false));
        ranks(&plugin, 3, move |comm| {
            let (memory, context) = (register(&comm, 4096), comm.create_context(1).expect("a context"));
            comm.barrier().expect("all ranks");
            let get = |peer| context.get(transfer(peer, memory.at(0), memory.at(64), 8)).expect("a get");
            if comm.rank() == 0 {
                // Only connected peers take requests.
                finish(&context, vec![get(1)]);
            }
            polling(&context, || comm.barrier().expect("all ranks"));
            if comm.rank() == 0 {
                for request in (0..600).map(|_| get(1)).collect::<Vec<_>>() {
                    let error = failure(|| context.test(&request));
                    assert!(error.contains("rank 1 is lost, so"), "{error}");
                }
                let get = get(2);
                let error = failure(|| context.test(&get));
                assert!(error.contains("rank 2 may not be to blame"), "{error}");
                assert!(context.has_error().expect("an answer"));
                is_over.store(true, Ordering::SeqCst);
            } else {
                poll_until("the end of the first rank's context", || {
                    if comm.rank() == 2 {
                        let _ = context.progress();
                    }
                    is_over.load(Ordering::SeqCst)
                });
            }
            comm.barrier().expect("all ranks");
        });
    });
}

#[test]
fn ranks_with_different_policies_are_named() {
    let test = "ranks_with_different_policies_are_named";
    if let Some(plugin) = std::env::var_os(PLUGIN) {
        let bootstrap = Arc::new(Bootstrap::from_env(HANG_LIMIT).expect("the other rank"));
        let (rank, policies) = (bootstrap.rank(), ["abort", "isolate"]);
        // SAFETY: no other thread accesses the environment: the plugin isn't loaded yet.
        unsafe { std::env::set_var(POLICY, policies[rank]) };
        let plugin = RmaPlugin::load(Path::new(&plugin)).expect("the plugin");
        let error = RmaComm::init(&plugin, bootstrap, 0).map(drop).expect_err("different policies").to_string();
        let has = |rank: usize| format!("rank {rank} has {POLICY}={}", policies[rank]);
        assert!(error.contains(&format!("{}, and {}", has(1 - rank), has(rank))), "{error}");
        return;
    }
    let Some(plugin) = plugin_path(test) else { return };
    let outcome = job(test, &plugin, 2).env("FERROGIN_PROVIDER", "softefa").run().expect("a job");
    assert!(outcome.success() && outcome.text().contains("1 passed"), "{}", outcome.text());
}
