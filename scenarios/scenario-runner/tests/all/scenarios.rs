//! All scenarios between processes, on both wires, with both layouts, both policies and both launchers.

use crate::common::{
    child, dist, must_pass, not_over_efa, over_efa, passes, repeated, report, reps, role, scenarios, wires,
};
use ferrogin_test_support::skip;
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::Bootstrap;
use mini_nccl::launch::{Job, Launcher, Outcome, find_mpirun};
use scenario_runner::runner::CpuThreads;
use scenario_runner::scenario::{self, SCENARIOS};
use scenario_runner::world::{Config, World};
use std::time::Duration;

fn run(job: Job) -> Outcome {
    let outcome = job.run().expect("the job starts");
    must_pass(&outcome);
    outcome
}

#[test]
fn all_scenarios_pass_between_two_ranks() {
    let Some(dist) = dist("all_scenarios_pass_between_two_ranks") else { return };
    for layout in ["2", "1", "0"] {
        let outcome = run(repeated(&dist, 2, 400).args(["--backend-version", layout]));
        assert_eq!(passes(&outcome), SCENARIOS.len());
    }
}

#[test]
#[ignore = "make check"]
fn all_scenarios_pass_between_four_ranks() {
    let Some(dist) = dist("all_scenarios_pass_between_four_ranks") else { return };
    for layout in ["2", "1"] {
        let outcome = run(repeated(&dist, 4, 1000).args(["--backend-version", layout]));
        assert_eq!(passes(&outcome), SCENARIOS.len());
    }
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_with_three_ranks_and_deep_queues() {
    let Some(dist) = dist("scenarios_pass_with_three_ranks_and_deep_queues") else { return };
    run(repeated(&dist, 3, 300).args(["--queue-depth", "0"]));
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_over_tcp() {
    let Some(dist) = dist("scenarios_pass_over_tcp") else { return };
    if not_over_efa("scenarios_pass_over_tcp", "cards below verbs reach each other on one host") {
        return;
    }
    let outcome = run(repeated(&dist, 2, 1000).env("SOFTEFA_WIRE", "tcp"));
    assert_eq!(passes(&outcome), SCENARIOS.len());
}

const SMALL: &str = "sq_size=16,max_batch=4";
const UNORDERED: &str = "seed=7,reorder=32,delay_us=0..200,reread=0.2";

/// All scenarios on cards with faults.
fn passes_with_faults(test: &str, cards: &[(&str, &str, u64, String)]) {
    let Some(dist) = dist(test) else { return };
    for (wire, layout, full, faults) in cards.iter().filter(|(wire, ..)| wires().contains(wire)) {
        let job = repeated(&dist, 2, *full).args(["--backend-version", layout]);
        let outcome = run(job.env("SOFTEFA_WIRE", wire).env("SOFTEFA_FAULTS", faults));
        assert_eq!(passes(&outcome), SCENARIOS.len());
    }
}

/// A card that delivers late and in any order, reads sources again, and has small queues.
#[test]
fn scenarios_pass_with_faults() {
    let test = "scenarios_pass_with_faults";
    passes_with_faults(test, &[("shm", "1", 200, format!("{UNORDERED},{SMALL}"))]);
}

/// The same over TCP, with other queues, and with counters that wrap during the run.
#[test]
#[ignore = "make check"]
fn scenarios_pass_with_all_faults() {
    // Counters wrap at 2^31, after most of the repetitions.
    let wrap = format!("cntr_start={}", (1 << 31) - reps(800) * 4 / 5);
    let cards = [
        ("shm", "2", 200, format!("{UNORDERED},qp_caps=0")),
        ("shm", "1", 800, wrap.clone()),
        ("shm", "2", 800, format!("{wrap},wqe_size=64,{SMALL}")),
        ("tcp", "1", 200, UNORDERED.to_owned()),
        ("tcp", "2", 500, SMALL.to_owned()),
    ];
    passes_with_faults("scenarios_pass_with_all_faults", &cards);
}

/// At the end of a storm, a rank waits for all of the others' values. One rank's card is so slow that this takes longer
/// than the deadline. No deadline outlasts every pause of the machine, so a longer one follows.
#[test]
#[ignore = "make check"]
fn wait_for_slow_rank_outlasts_deadline_while_signals_arrive() {
    let name = "wait_for_slow_rank_outlasts_deadline_while_signals_arrive";
    if let Some(role) = role() {
        return storm_with_slow_rank(role.parse().expect("seconds"));
    }
    let Some(dist) = dist(name) else { return };
    let mut reports = Vec::new();
    for seconds in ["5", "20"] {
        let outcome = child(&dist, name, seconds, 2).env("SOFTEFA_WIRE", "shm").run().expect("the job starts");
        if outcome.success() {
            return;
        }
        let failure = outcome.failure.as_deref().unwrap_or_default();
        reports.push(format!("deadline of {seconds} s: {failure}\n{}", report(&outcome)));
    }
    panic!("{}", reports.join("\n"));
}

#[allow(unsafe_code)]
fn storm_with_slow_rank(seconds: u64) {
    let bootstrap = Bootstrap::from_env(HANG_LIMIT).unwrap();
    if bootstrap.rank() == 1 {
        let delay = 5000 * seconds;
        let faults = format!("sq_size=16,max_batch=4,delay_us={delay}..{delay}");
        // SAFETY: the only other thread is the test runner's, which waits and doesn't use the environment.
        unsafe { std::env::set_var("SOFTEFA_FAULTS", faults) };
    }
    let config = Config { deadline: Duration::from_secs(seconds), ..Config::from_env() };
    let world = World::open(&config, bootstrap, Box::new(CpuThreads)).unwrap();
    scenario::run(&world, scenario::find("value-storm").unwrap(), 40).unwrap();
    world.close().unwrap();
}

/// On a card without hardware completion counters, `init` fails, so that NCCL goes on without the plugin, and names the
/// fix.
#[test]
fn init_fails_without_counters() {
    let Some(dist) = dist("init_fails_without_counters") else { return };
    let outcome = scenarios(&dist, 2).env("SOFTEFA_FAULTS", "no_counters").run().expect("the job starts");
    let text = outcome.text();
    let fix = if over_efa() { "update the EFA driver" } else { "set FI_EFA_USE_HW_CNTR=1" };
    assert!(!outcome.success() && text.contains("init failed") && text.contains(fix), "{text}");
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_with_locked_policy() {
    let Some(dist) = dist("scenarios_pass_with_locked_policy") else { return };
    run(repeated(&dist, 2, 1000).env("FERROGIN_POST", "locked"));
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_on_second_libfabric() {
    let name = "scenarios_pass_on_second_libfabric";
    let Some(dist) = dist(name) else { return };
    if not_over_efa(name, "there is one libfabric for efa") {
        return;
    }
    let Some(other) = std::env::var_os("FERROGIN_LIBFABRIC_ALT") else {
        skip(name, "FERROGIN_LIBFABRIC_ALT is not set: scripts/fetch-libfabric-alt.sh fetches one");
        return;
    };
    for wire in ["shm", "tcp"] {
        run(repeated(&dist, 2, 1000).env("FERROGIN_LIBFABRIC", &other).env("SOFTEFA_WIRE", wire));
    }
}

fn passes_under_mpirun(name: &str, ranks: usize) {
    let Some(dist) = dist(name) else { return };
    if find_mpirun().is_none() {
        skip(name, "mpirun is not on PATH (apt-get install openmpi-bin)");
        return;
    }
    let outcome = run(repeated(&dist, ranks, 300).launcher(Launcher::Mpirun));
    assert_eq!(passes(&outcome), SCENARIOS.len());
}

#[test]
fn scenarios_pass_under_mpirun() {
    passes_under_mpirun("scenarios_pass_under_mpirun", 2);
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_between_four_ranks_of_mpirun() {
    passes_under_mpirun("scenarios_pass_between_four_ranks_of_mpirun", 4);
}

/// Only the plugin and the provider are set: the plugin finds the device, and the provider in its own directory.
#[test]
fn scenarios_pass_with_default_settings() {
    let name = "scenarios_pass_with_default_settings";
    let Some(dist) = dist(name) else { return };
    if not_over_efa(name, "kernels run on a GPU by default with an EFA card") {
        return;
    }
    if std::path::Path::new("/dev/nvidiactl").exists() {
        skip(name, "with a GPU FERROGIN_DEVICE=auto is not the CPU, where these programs run");
        return;
    }
    run(scenarios(&dist, 2).env_remove("FERROGIN_DEVICE").args(["--only", "value-signal", "--reps", "50"]));
}
