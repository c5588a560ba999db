//! The scenarios with emulated signals, under faults that reorder and delay.

use crate::common::{dist, must_pass_all, not_over_efa, repeated, report};
use crate::on_gpu::{gpu, on_gpu};
use mini_nccl::launch::Job;
use scenario_runner::scenario::SCENARIOS;

const FAULTS: &str = "seed=7,reorder=512,reread=0.5,delay_us=0..50";

fn all_pass_emulated(job: Job) {
    let job = job.env("FERROGIN_SIGNALS", "emulated").env("NCCL_DEBUG", "INFO").env("SOFTEFA_FAULTS", FAULTS);
    let outcome = job.run().expect("the job starts");
    must_pass_all(&outcome, SCENARIOS.len());
    assert!(outcome.text().contains(" emulated signal"), "{}", report(&outcome));
}

#[test]
fn scenarios_pass_with_emulated_signals() {
    passes_on_cpu_threads("scenarios_pass_with_emulated_signals", 2, "combining", "2");
}

#[test]
#[ignore = "make check"]
fn scenarios_of_four_ranks_pass_with_emulated_signals() {
    passes_on_cpu_threads("scenarios_of_four_ranks_pass_with_emulated_signals", 4, "locked", "1");
}

fn passes_on_cpu_threads(name: &str, ranks: usize, policy: &str, layout: &str) {
    let Some(dist) = dist(name) else { return };
    if not_over_efa(name, "cards below verbs take the faults of their own tests") {
        return;
    }
    all_pass_emulated(repeated(&dist, ranks, 200).args(["--backend-version", layout]).env("FERROGIN_POST", policy));
}

#[test]
#[ignore = "make check"]
fn kernels_pass_with_emulated_signals() {
    let Some(dist) = gpu("kernels_pass_with_emulated_signals") else { return };
    for (ranks, api, threads) in [(2, "cuda", "one"), (4, "c", "warp")] {
        let options = ["--api", api, "--threads", threads];
        all_pass_emulated(on_gpu(&dist, repeated(&dist, ranks, 60).args(options)));
    }
}
