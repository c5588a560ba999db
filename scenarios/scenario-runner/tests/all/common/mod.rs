//! Shared parts of the multi-process tests: the built plugin, and jobs that use it.

use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_test_support::wait::HANG_LIMIT;
use ferrogin_test_support::{child, libfabric_for_gpus, repetitions};
use mini_nccl::launch::{Job, Outcome, Output};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The role of a child process that a test starts from its own executable.
pub const ROLE: &str = "FERROGIN_TEST_ROLE";

/// One context with a signal and a counter.
pub const ONE_CONTEXT: GinConfigV14 = GinConfigV14 {
    n_signals: 1,
    n_counters: 1,
    n_contexts: 1,
    queue_depth: 64,
    traffic_class: -1,
    backend_version: 2,
    rank_stride: 1,
};

/// Returns whether the jobs use libfabric's own provider `efa`, with the software card below verbs
/// (FERROGIN_PROVIDER=efa), instead of the provider `softefa`.
pub fn over_efa() -> bool {
    std::env::var("FERROGIN_PROVIDER").is_ok_and(|provider| provider == "efa")
}

/// Returns the directory that `make build` fills. Skips `test` if it lacks the plugin, or if there is no libfabric for
/// the jobs' provider.
pub fn dist(test: &str) -> Option<PathBuf> {
    if over_efa() {
        libfabric_for_gpus(test)?;
    }
    ferrogin_test_support::dist(test, &["libnccl-gin-ferrogin.so", "verbs/libibverbs.so.1", "ferrogin"])
}

/// Returns the software card's wires. Cards below verbs only reach each other on one host.
pub fn wires() -> &'static [&'static str] {
    if over_efa() { &["shm"] } else { &["shm", "tcp"] }
}

/// Skips `test` if the jobs use the provider `efa`.
pub fn not_over_efa(test: &str, why: &str) -> bool {
    if over_efa() {
        ferrogin_test_support::skip(test, format_args!("{why}, and FERROGIN_PROVIDER is efa"));
    }
    over_efa()
}

/// Returns a job with `ranks` ranks of `program`, with the settings that a plugin test on the software card needs and
/// no others.
pub fn on_software_card(program: impl Into<PathBuf>, dist: &Path, ranks: usize) -> Job {
    let job = if over_efa() {
        // `ferrogin verbs` replaces itself with the program.
        Job::new(dist.join("ferrogin"), ranks).args(["verbs", "--"]).arg(program.into())
    } else {
        Job::new(program, ranks)
    };
    let ours = |name: &str| ["FERROGIN_", "SOFTEFA_", "FI_", "NCCL_"].iter().any(|prefix| name.starts_with(prefix));
    let inherited = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).filter(|name| ours(name));
    let job = inherited.fold(job, |job, name| job.env_remove(name));
    let job = match std::env::var_os("FERROGIN_LIBFABRIC").filter(|_| over_efa()) {
        Some(libfabric) => job.env("FERROGIN_PROVIDER", "efa").env("FERROGIN_LIBFABRIC", libfabric),
        None => job.env("FERROGIN_PROVIDER", "softefa"),
    };
    job.env("NCCL_GIN_PLUGIN", dist.join("libnccl-gin-ferrogin.so"))
        .env("FERROGIN_DEVICE", "cpu")
        // No wait for another rank may time out because the machine is busy.
        .env("FERROGIN_TIMEOUT", seconds(HANG_LIMIT))
        .output(Output::Capture)
        // A job has many waits.
        .timeout(15 * HANG_LIMIT)
        .grace(HANG_LIMIT)
}

/// Returns a duration in seconds, as text.
pub fn seconds(time: Duration) -> String {
    time.as_secs().to_string()
}

/// Returns a job that runs the scenarios with `ranks` ranks.
pub fn scenarios(dist: &Path, ranks: usize) -> Job {
    on_software_card(env!("CARGO_BIN_EXE_scenario-runner"), dist, ranks).args(["--deadline", &seconds(HANG_LIMIT)])
}

/// Repetitions of each step: `full` in a soak run, otherwise a twentieth of that. FERROGIN_REPS overrides it.
pub fn reps(full: u64) -> u64 {
    repetitions("FERROGIN_REPS", full / 20, full)
}

/// Like [`scenarios`], with [`reps`] of `full`.
pub fn repeated(dist: &Path, ranks: usize, full: u64) -> Job {
    scenarios(dist, ranks).args(["--reps", &reps(full).to_string()])
}

/// Runs this executable's test `name` in child processes, as `ranks` ranks with the role `role`.
pub fn child(dist: &Path, name: &str, role: &str, ranks: usize) -> Job {
    let program = std::env::current_exe().expect("the path of this test");
    let job = on_software_card(program, dist, ranks).args([
        "--exact",
        &child::full_name(name),
        "--include-ignored",
        "--nocapture",
    ]);
    job.env(ROLE, role)
}

/// Returns the role of this process; `None` in the test's own process.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Asserts that the job passed. The message includes the ranks' output.
pub fn must_pass(outcome: &Outcome) {
    assert!(outcome.success(), "{}\n{}", outcome.failure.as_deref().unwrap_or_default(), report(outcome));
}

/// Asserts that the job passed with `count` `PASS` lines.
pub fn must_pass_all(outcome: &Outcome, count: usize) {
    must_pass(outcome);
    assert_eq!(passes(outcome), count, "{}", report(outcome));
}

/// Returns the number of `PASS` lines.
pub fn passes(outcome: &Outcome) -> usize {
    outcome.lines.iter().filter(|line| line.text.starts_with("PASS ")).count()
}

/// Returns the ranks' output.
pub fn report(outcome: &Outcome) -> String {
    let line =
        |line: &mini_nccl::launch::Line| format!("[{}] {}\n", line.rank.map_or(-1, |rank| rank as i64), line.text);
    outcome.lines.iter().map(line).collect()
}
