//! `cargo xtask test`: all stages of the test run, two at a time.
//!
//! A stage that waits for timers leaves its core to a stage that builds. Each stage writes its output to `target/test-logs/`.

use crate::stage::{Outcome, Stage};
use crate::tally::{Tally, without_passed_tests};
use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

/// Stages that run at the same time.
const WORKERS: usize = 2;

/// Tests that `--quick` leaves out, by a part of their names: each takes more than about two seconds.
const SLOW: &[&str] = &[
    "abi_fuzz::",
    "all_scenarios_pass_between_four_ranks",
    "all_tests_pass_with_memory_of_a_gpu",
    "callbacks_end_when_peer_dies",
    "checked_in_ptx_is_what_its_compiler_makes",
    "clean_set_ups",
    "close_is_confirmed",
    "demo_passes",
    "docs::copied",
    "doctor_finds_limits",
    "doctor_finds_what_only",
    "every_failed_status",
    "failing_steps_are_reported",
    "failures::",
    "four_peers",
    "idle::",
    "invalid_arguments_of_open",
    "job_outlives_the_metrics",
    "kernel_examples_pass_as_ptx",
    "killed_peer_is_reported",
    "killed::",
    "leaks::",
    "leftovers::",
    "limits::",
    "malformed_peers_over",
    "metrics_are_exact",
    "missing_peer_is_reported",
    "missing_rank_ends",
    "next_client",
    "on_gpu::",
    "perf_measures_every_operation_as_ptx",
    "rank_closed",
    "rank_hanging",
    "rank_killed_or_stopped",
    "ranks_meet_across",
    "scenarios_pass_across",
    "scenarios_pass_on_second",
    "scenarios_pass_over_tcp",
    "scenarios_pass_under_mpirun",
    "scenarios_pass_with",
    "schedules::",
    "stopped_peer",
    "unknown_backend_versions",
    "validation_below_verbs",
    "validation_of_the_software_card",
    "validation_on_a_software_gpu",
    "values::",
];

/// The stages in the order in which they start.
fn stages(root: &Path, dist: &Path, libfabric: Option<&Path>) -> Vec<Stage> {
    let script = |name, path: &str| Stage::new(name, [root.join(path).as_os_str(), dist.as_os_str()]).of_tests();
    let build = cargo(&["test", "--quiet", "--release", "--workspace", "--locked", "--no-run"]);
    let docs = cargo(&["doc", "--quiet", "--release", "--workspace", "--no-deps", "--locked"]);
    vec![
        format(),
        Stage::new("build of the tests", build),
        script("CUDA kernels", "tests/cuda/run.sh"),
        // Stages whose processes poll come after each other, beside stages that build.
        workspace_tests("cargo test", dist, libfabric, &[], &[]).after("build of the tests"),
        lint().after("build of the tests"),
        script("models", "device-kernels/tests/models.sh"),
        script("foreign clients", "tests/foreign/run.sh").after("cargo test"),
        script("aarch64", "scripts/check-aarch64.sh"),
        Stage::new("documentation", docs).after("lint").env("RUSTDOCFLAGS", "-D warnings"),
        script("model of the channel's wake-up", "channel/tests/models.sh").after("models"),
        script("instructions of a post", "benches/check.sh").after("lint"),
        script("mlx5 instructions", "soft-mlx5/benches/check.sh").after("lint"),
        script("book", "tests/book/run.sh").after("lint"),
        script("faults", "tests/faults/run.sh").after("cargo test"),
        script("python", "python/test.sh").after("cargo test"),
        script("libfabric programs", "tests/libfabric/run.sh").after("cargo test"),
        script("MPI programs", "tests/mpi/run.sh").after("libfabric programs"),
    ]
}

/// The stages of `--quick`.
fn quick_stages(dist: &Path) -> Vec<Stage> {
    let skips: Vec<&str> = SLOW.iter().flat_map(|name| ["--skip", name]).collect();
    vec![
        format(),
        // No doc tests: they are compiled anew each time.
        workspace_tests("cargo test", dist, None, &["--lib", "--bins", "--tests"], &skips),
        lint(),
    ]
}

/// The command of cargo with `arguments`.
pub fn cargo(arguments: &[&str]) -> Vec<OsString> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    std::iter::once(cargo).chain(arguments.iter().map(OsString::from)).collect()
}

fn format() -> Stage {
    Stage::new("format", cargo(&["fmt", "--all", "--check"]))
}

fn lint() -> Stage {
    Stage::new(
        "lint",
        cargo(&["clippy", "--release", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]),
    )
}

/// The tests of the workspace, with more arguments for cargo and for the test programs.
pub fn workspace_tests(
    name: &'static str,
    dist: &Path,
    libfabric: Option<&Path>,
    for_cargo: &[&str],
    for_tests: &[&str],
) -> Stage {
    let arguments = ["test", "--release", "--workspace", "--locked", "--no-fail-fast"];
    let arguments = [&arguments, for_cargo, &["--", "--show-output"], for_tests].concat();
    // Many tests wait for a time-out.
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get()).max(4);
    let stage = Stage::new(name, cargo(&arguments)).of_tests().env("FERROGIN_DIST", dist);
    let stage = stage.env("RUST_TEST_THREADS", threads.to_string());
    match libfabric {
        Some(path) => stage.env("FERROGIN_LIBFABRIC_ALT", path),
        None => stage,
    }
}

/// The stages over libfabric's own provider `efa`, the one of FERROGIN_LIBFABRIC.
fn stages_over_efa(root: &Path, dist: &Path) -> [Stage; 2] {
    let tests = ["test", "--release", "--locked", "-p", "gpu-scenarios", "--test", "all", "--", "--show-output"];
    let scenarios = Stage::new("scenarios over efa", cargo(&tests)).of_tests().env("FERROGIN_DIST", dist);
    let clients = root.join("tests/foreign/run.sh");
    let clients = Stage::new("foreign clients over efa", [clients.as_os_str(), dist.as_os_str()]).of_tests();
    [clients.after("foreign clients"), scenarios.after("foreign clients over efa")]
        .map(|stage| stage.env("FERROGIN_PROVIDER", "efa"))
}

/// Runs the stages whose names contain one of `only`, or all.
pub fn run(root: &Path, dist: &Path, quick: bool, only: &[String]) -> ExitCode {
    let mut tally = Tally::default();
    let mut stages = if quick {
        quick_stages(dist)
    } else {
        let libfabric = second_libfabric(root);
        if let Err(reason) = &libfabric {
            tally.skip(format!("tests on a second libfabric: {reason}"));
        }
        let mut stages = stages(root, dist, libfabric.ok().as_deref());
        if std::env::var_os("FERROGIN_LIBFABRIC").is_some() {
            stages.extend(stages_over_efa(root, dist));
        } else {
            for stage in stages_over_efa(root, dist) {
                tally.skip(format!(
                    "{}: FERROGIN_LIBFABRIC names no libfabric with the GDA operations (2.6 or newer)",
                    stage.name
                ));
            }
        }
        stages
    };
    if !only.is_empty() {
        stages.retain(|stage| only.iter().any(|part| stage.name.contains(part)));
        let names: HashSet<&str> = stages.iter().map(|stage| stage.name).collect();
        stages.iter_mut().for_each(|stage| stage.after = stage.after.filter(|name| names.contains(name)));
    }
    if stages.is_empty() {
        eprintln!("no stage has a name with one of {only:?}");
        return ExitCode::from(2);
    }
    let logs = root.join("target/test-logs");
    if let Err(error) = std::fs::create_dir_all(&logs) {
        eprintln!("{}: {error}", logs.display());
        return ExitCode::FAILURE;
    }
    let began = Instant::now();
    tally += run_stages(stages, root, &logs);
    let list = logs.join("tests.txt");
    let lines: BTreeSet<String> = tally.tests.iter().map(|name| format!("{:<5} {name}\n", place(name))).collect();
    if let Err(error) = std::fs::write(&list, String::from_iter(lines)) {
        eprintln!("{}: {error}", list.display());
    }
    println!(
        "{} stages in {:.0?}; outputs and the list of tests are in {}",
        if quick { "quick" } else { "all" },
        began.elapsed(),
        logs.display()
    );
    println!("{}", tally.summary());
    if tally.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Where a test of `make test` runs: also in `--quick`, or not.
fn place(name: &str) -> &'static str {
    let slow = SLOW.iter().any(|part| name.contains(part)) || name.starts_with("cargo test: doc ");
    if name.starts_with("cargo test: ") && !slow { "quick" } else { "test" }
}

/// What the workers share.
struct Schedule {
    waiting: Vec<Stage>,
    ended: HashSet<&'static str>,
    tally: Tally,
    failed: Vec<(Stage, Tally)>,
}

impl Schedule {
    /// The first stage that need not wait.
    fn next(&mut self) -> Option<Stage> {
        let ready = |stage: &Stage| stage.after.is_none_or(|name| self.ended.contains(name));
        let at = self.waiting.iter().position(ready)?;
        Some(self.waiting.remove(at))
    }
}

/// Runs all stages, `WORKERS` at a time, each after the one that it waits for. Then the tests that failed run once more, alone.
fn run_stages(stages: Vec<Stage>, root: &Path, logs: &Path) -> Tally {
    let (ended, tally, failed) = Default::default();
    let schedule = Mutex::new(Schedule { waiting: stages, ended, tally, failed });
    let lock = || schedule.lock().unwrap_or_else(PoisonError::into_inner);
    let changed = Condvar::new();
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                let mut now = lock();
                while !now.waiting.is_empty() {
                    let Some(stage) = now.next() else {
                        now = changed.wait(now).unwrap_or_else(PoisonError::into_inner);
                        continue;
                    };
                    drop(now);
                    println!("==> {}: starts", stage.name);
                    let outcome = stage.run(root, logs);
                    // The lock keeps the lines of one stage together.
                    now = lock();
                    report(&stage, &outcome);
                    now.ended.insert(stage.name);
                    match outcome.success {
                        true => now.tally += outcome.tally,
                        false => now.failed.push((stage, outcome.tally)),
                    }
                    changed.notify_all();
                }
            });
        }
    });
    let Schedule { mut tally, failed, .. } = schedule.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (stage, mut failed) in failed {
        if let Some(second) = stage.second_try(&failed) {
            println!("==> {}: starts", second.name);
            let outcome = second.run(root, logs);
            report(&second, &outcome);
            if outcome.success {
                failed.pass_alone();
            }
        }
        tally += failed;
    }
    tally
}

/// Prints the result of a stage, and what failed in it.
fn report(stage: &Stage, outcome: &Outcome) {
    let Outcome { tally, success, log, time } = outcome;
    if !success {
        match std::fs::read(log) {
            Ok(output) => print!("{}", without_passed_tests(&String::from_utf8_lossy(&output))),
            Err(error) => println!("{}: {error}", log.display()),
        }
    }
    let crate::tally::Counts { passed, failed, skipped } = tally.counts;
    let result = if *success { "passed" } else { "FAILED" };
    println!("==> {}: {result} after {time:.0?} ({passed} passed, {failed} failed, {skipped} skipped)", stage.name);
}

/// A newer libfabric than the system's: FERROGIN_LIBFABRIC_ALT, or the one that the script fetches.
pub fn second_libfabric(root: &Path) -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("FERROGIN_LIBFABRIC_ALT") {
        return Ok(path.into());
    }
    let script = root.join("scripts/fetch-libfabric-alt.sh");
    let output = Command::new(&script).stdin(Stdio::null()).output().map_err(|error| format!("{script:?}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().into());
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(text.lines().last().unwrap_or("the script failed").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tally::Counts;

    #[test]
    fn each_stage_waits_for_an_earlier_one_of_the_list() {
        let stages = stages(Path::new("/"), Path::new("/dist"), None);
        for (at, stage) in stages.iter().enumerate() {
            assert!(
                stage.after.is_none_or(|name| stages[..at].iter().any(|stage| stage.name == name)),
                "{}",
                stage.name
            );
        }
    }

    #[test]
    fn slow_tests_and_scripts_are_not_in_the_quick_run() {
        assert_eq!(place("cargo test: all tests/all/main.rs values::arrive"), "test");
        assert_eq!(place("cargo test: soft_nic src/lib.rs wire::hello"), "quick");
        assert_eq!(place("foreign clients: NCCL 2.31.2, 2 ranks, put"), "test");
    }

    #[test]
    fn stage_starts_after_the_one_it_waits_for() {
        let place = std::env::temp_dir().join(format!("xtask-test-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let stages = vec![
            Stage::new("first", ["sh", "-c", "sleep 0.3; touch first"]),
            Stage::new("second", ["test", "-e", "first"]).after("first"),
            Stage::new("third", ["true"]),
        ];
        let tally = run_stages(stages, &place, &place);
        std::fs::remove_dir_all(&place).unwrap();
        assert_eq!((tally.counts.passed, tally.counts.failed), (3, 0), "{:?}", tally.failures);
    }

    #[test]
    fn test_that_fails_is_tried_once_more() {
        let place = std::env::temp_dir().join(format!("xtask-again-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let script = "test -e $0 || { touch $0; echo 'FAIL a'; echo '0 passed, 1 failed, 0 skipped'; exit 1; }; \
            echo 'PASS a'; echo '1 passed, 0 failed, 0 skipped'";
        let stages = vec![
            Stage::new("starved", ["sh", "-c", script, "second"]).of_tests(),
            Stage::new("broken", ["sh", "-c", "echo 'FAIL b'; echo '0 passed, 1 failed, 0 skipped'; exit 1"])
                .of_tests(),
        ];
        let tally = run_stages(stages, &place, &place);
        std::fs::remove_dir_all(&place).unwrap();
        assert_eq!(tally.counts, Counts { passed: 1, failed: 1, skipped: 0 });
        let summary = tally.summary();
        assert!(
            summary.contains("failed beside other tests, passed alone: starved: a\nfailed: broken: b\n"),
            "{summary}"
        );
    }
}
