//! The scenarios on cards with faults, one run per seed.
//!
//! The seed determines the faults, the wire, the queue sizes, the posting policy and the layout. Most runs must deliver
//! every byte despite the faults. In some runs requests fail, and each rank that posted one must report it. In a few
//! runs a card stops responding, and all ranks must exit.
//!
//! `FERROGIN_SEEDS_FIRST=17 FERROGIN_SEEDS=1 cargo test --release -p scenario-runner --test all seeds::campaign --
//! --ignored` repeats seed 17.

use crate::common::{dist, not_over_efa, report, scenarios};
use ferrogin_test_support::{Random, repetitions};
use mini_nccl::launch::Outcome;
use std::fmt::Write as _;
use std::path::Path;

/// How a run should end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// All data arrives.
    Exact,
    /// Requests fail, and each rank that posted one reports it.
    Errors,
    /// A card stops responding, and all ranks exit.
    Death,
}

#[derive(Debug)]
struct Run {
    kind: Kind,
    faults: String,
    wire: &'static str,
    post: &'static str,
    layout: &'static str,
    depth: u32,
    reps: u32,
}

impl Run {
    fn of_seed(seed: u64) -> Run {
        let mut random = Random::new(seed);
        let kind = match seed % 40 {
            n if n % 8 == 5 => Kind::Errors,
            18 => Kind::Death,
            _ => Kind::Exact,
        };
        let mut faults = format!("seed={seed}");
        let mut fault =
            |text: &str| write!(faults, "{}{text}", if text.is_empty() { "" } else { "," }).expect("a string");
        fault(random.of(&["", "reorder=2", "reorder=8", "reorder=16", "reorder=64"]));
        let delay = random.of(&["", "", "delay_us=0..5", "delay_us=0..50", "delay_us=20..200"]);
        fault(delay);
        fault(random.of(&["", "reread=0.01", "reread=0.2", "reread=1"]));
        // Counters start near either end of the range, or anywhere.
        let start = [0x7fff_ffff - random.below(600), random.below(0x8000_0000), 0x8000_0000 - 4096 - random.below(64)];
        if !random.one_in(4) {
            fault(&format!("cntr_start={}", random.of(&start)));
        }
        fault(&format!("sq_size={},max_batch={}", random.of(&[4096, 16, 32, 64]), random.of(&[1, 2, 4, 16])));
        fault(random.of(&["", "wqe_size=64"]));
        fault(random.of(&["", "qp_caps=0"]));
        match kind {
            Kind::Exact => {}
            Kind::Errors => {
                let (every, status) = (5 + random.below(400), random.of(&[7, 8, 9, 11, 12, 13]));
                fault(&format!("error_every={every},error_status={status}"));
            }
            Kind::Death => fault(&format!("die_after={}", 1 + random.below(300))),
        }
        Run {
            kind,
            wire: random.of(&["shm", "shm", "shm", "tcp"]),
            post: random.of(&["combining", "combining", "locked"]),
            layout: random.of(&["1", "2"]),
            depth: random.of(&[8, 16, 64]),
            // A run with long delays has fewer repetitions.
            reps: if delay.ends_with("200") { 6 } else { random.of(&[12, 20, 30]) },
            faults,
        }
    }

    fn outcome(&self, dist: &Path) -> Outcome {
        let job = scenarios(dist, 2)
            .args(["--reps", &self.reps.to_string(), "--queue-depth", &self.depth.to_string()])
            .args(["--backend-version", self.layout])
            .env("FERROGIN_POST", self.post)
            .env("SOFTEFA_WIRE", self.wire)
            .env("SOFTEFA_FAULTS", &self.faults);
        // A rank whose requests failed stops waiting after this time, in seconds.
        let job = if self.kind == Kind::Exact { job } else { job.args(["--deadline", "10"]) };
        job.run().expect("the job starts")
    }

    /// Returns what is wrong with how the run ended.
    fn problem(&self, outcome: &Outcome) -> Option<String> {
        let text = outcome.text();
        if let Some(word) = ["panicked", "is a bug in softefa", "expected 0x"].iter().find(|word| text.contains(**word))
        {
            return Some(format!("the output has {word:?}"));
        }
        let prints = |rank, words: &[&str]| {
            let mut lines = outcome.lines.iter().filter(|line| line.rank == Some(rank));
            lines.any(|line| words.iter().any(|word| line.text.contains(word)))
        };
        let posters: Vec<usize> = (0..2).filter(|rank| prints(*rank, &["fails by error_every"])).collect();
        let reported = ["queryLastError reports an error", "the card completed a work request in error"];
        let silent = posters.iter().find(|rank| !prints(**rank, &reported));
        match (self.kind, outcome.success()) {
            (Kind::Exact, true) => None,
            (Kind::Exact, false) => Some("the run failed".to_owned()),
            (Kind::Errors, passed) if passed != posters.is_empty() => {
                Some(format!("requests of ranks {posters:?} failed, and success of the run is {passed}"))
            }
            (Kind::Errors, _) => {
                silent.map(|rank| format!("a request of rank {rank} failed, but rank {rank} did not report it"))
            }
            // A card that stops during the last step may have completed all requests.
            (Kind::Death, _) => None,
        }
    }
}

fn run_seeds(test: &str, seeds: std::ops::Range<u64>) {
    let Some(dist) = dist(test) else { return };
    if not_over_efa(test, "the faults are those of cards without libfabric's own queues") {
        return;
    }
    for seed in seeds {
        let run = Run::of_seed(seed);
        let outcome = run.outcome(&dist);
        if let Some(problem) = run.problem(&outcome) {
            panic!("seed {seed}, {run:?}: {problem}\n{}", report(&outcome));
        }
    }
}

#[test]
fn first_seeds_lose_nothing_and_report_errors() {
    run_seeds("first_seeds_lose_nothing_and_report_errors", 0..6);
}

#[test]
#[ignore = "make check"]
fn campaign_of_seeds_loses_nothing_and_reports_errors() {
    let first = repetitions("FERROGIN_SEEDS_FIRST", 0, 0);
    let seeds = first..first + repetitions("FERROGIN_SEEDS", 60, 100);
    run_seeds("campaign_of_seeds_loses_nothing_and_reports_errors", seeds);
}
