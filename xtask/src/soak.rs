//! `cargo xtask soak`: long runs in rounds. The state of each stage is kept in `target/soak/state.json` after each round.

use crate::stage::Stage;
use crate::tally::Counts;
use crate::test::{cargo, second_libfabric, workspace_tests};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of a soak.
#[derive(clap::Args)]
pub struct Options {
    /// Start rounds for this many minutes; otherwise one round of each stage.
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,
    /// Forget the results of earlier soaks.
    #[arg(long)]
    fresh: bool,
    /// Print the table of the results so far, and run nothing.
    #[arg(long)]
    show: bool,
    /// Only these stages [default: all].
    #[arg(value_name = "STAGE", value_parser = clap::builder::PossibleValuesParser::new(STAGES.iter().map(|(name, _)| *name)))]
    stages: Vec<String>,
}

/// Seeds in a round of the stage `seeds`.
const SEEDS: u64 = 100;
/// Seeds in a round of the stage `kills`.
const KILLS: u64 = 500;

/// The name of a stage, and what a round of it does.
type Entry = (&'static str, &'static str);

/// All stages.
const STAGES: &[Entry] = &[
    ("seeds", "100 more seeds of `cargo xtask faults`"),
    ("sizes", "the tests of the workspace with all repetitions and sizes"),
    ("kills", "500 more ranks killed or stopped at seeded moments, half of them on a loaded machine"),
    ("foreign", "foreign clients: every scenario with every number of ranks and every fault"),
    ("fuzz", "live fuzzing, half a minute a target"),
    ("address", "the plugin's tests with the address sanitizer"),
    ("thread", "the plugin's tests with the thread sanitizer"),
    ("aarch64", "all tests that need nothing but a processor, in an emulator of aarch64"),
    ("release", "tarballs of the tree for x86-64 and aarch64, unpacked and tried"),
    ("mpi", "two ranks under each MPI that the system or PyPI has"),
    (
        "mpi-card",
        "a program that checks its data, 50 times under MPICH, Open MPI and Intel MPI on the card, without and with faults",
    ),
    ("mutants", "the tests on 100 more mutants of the code; a mutant that no test fails on is a failure"),
];

/// The command of round `round` of a stage.
fn stage(name: &'static str, round: u64, root: &Path, dist: &Path) -> Stage {
    let script = |path: &str, more: &[&str]| {
        let command = [root.join(path).into_os_string(), dist.into()].into_iter();
        Stage::new(name, command.chain(more.iter().map(|word| OsStr::new(word).to_owned()))).of_tests()
    };
    let stage = match name {
        "seeds" => script("tests/faults/run.sh", &["--first", &(round * SEEDS).to_string()])
            .env("FAULT_SEEDS", SEEDS.to_string()),
        // The stage `kills` has the full number of kills.
        "sizes" => {
            workspace_tests(name, dist, second_libfabric(root).ok().as_deref(), &[], &[]).env("FERROGIN_KILLS", "50")
        }
        "kills" => {
            let test = ["test", "--release", "--locked", "-p", "gpu-scenarios", "--test", "all"];
            Stage::new(name, cargo(&[&test[..], &["faults::", "--", "--show-output"]].concat()))
                .of_tests()
                .env("FERROGIN_DIST", dist)
                .env("FERROGIN_KILLS", KILLS.to_string())
                .env("FERROGIN_KILLS_FIRST", (round * KILLS).to_string())
        }
        "foreign" => script("tests/foreign/run.sh", &[]),
        "fuzz" => script("fuzz/run.sh", &[]).env("FUZZ_SECONDS", "30"),
        "address" | "thread" => script("tests/nccl/sanitize.sh", &[name]),
        "release" => Stage::new(name, cargo(&["xtask", "release", "--snapshot"])),
        "mpi-card" => script("tests/mpi/run.sh", &[]),
        "mutants" => script("tests/mutants/run.py", &[&round.to_string()]),
        "aarch64" => script("scripts/check-aarch64.sh", &[]).env("FERROGIN_AARCH64_TESTS", "1"),
        _ => script("tests/gpu/mpi.sh", &[]),
    };
    stage.env("FERROGIN_SOAK", "1").limit(Duration::from_secs(3600))
}

/// The results of a stage in all soaks since `--fresh`.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
struct Results {
    rounds: u64,
    passed: u64,
    failed: u64,
    skipped: u64,
    seconds: f64,
    failures: Vec<String>,
}

type State = BTreeMap<String, Results>;

/// The stage that has run for the shortest time; `None` if there are none.
fn next(stages: &[Entry], state: &State) -> Option<Entry> {
    let seconds = |entry: &Entry| state.get(entry.0).map_or(0.0, |results| results.seconds);
    stages.iter().copied().min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
}

/// Runs rounds of the stages until the time is over, and prints the table.
pub fn run(root: &Path, dist: &Path, options: &Options) -> ExitCode {
    let place = root.join("target/soak");
    let file = place.join("state.json");
    let mut state: State = match std::fs::read(&file) {
        Ok(text) if !options.fresh => match serde_json::from_slice(&text) {
            Ok(state) => state,
            Err(error) => {
                eprintln!("{}: {error}; `--fresh` starts over", file.display());
                return ExitCode::from(2);
            }
        },
        _ => State::new(),
    };
    let wanted = |name: &str| options.stages.is_empty() || options.stages.iter().any(|stage| stage == name);
    let mut stages: Vec<Entry> = STAGES.iter().copied().filter(|(name, _)| !options.show && wanted(name)).collect();
    let began = Instant::now();
    while let Some(entry) = next(&stages, &state) {
        match options.minutes {
            Some(minutes) if began.elapsed() >= Duration::from_secs(minutes * 60) => break,
            Some(_) => {}
            None => stages.retain(|other| *other != entry),
        }
        if let Err(error) = round(entry, root, dist, &place, &mut state) {
            eprintln!("{}: {error}", file.display());
            return ExitCode::FAILURE;
        }
    }
    print!("{}", table(&state));
    if state.values().any(|results| results.failed > 0) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs the next round of a stage, and writes the state.
fn round((name, what): Entry, root: &Path, dist: &Path, place: &Path, state: &mut State) -> std::io::Result<()> {
    std::fs::create_dir_all(place)?;
    let results = state.entry(name.to_string()).or_default();
    println!("==> {name}, round {}: {what}", results.rounds + 1);
    let outcome = stage(name, results.rounds, root, dist).run(root, place);
    let Counts { passed, failed, skipped } = outcome.tally.counts;
    println!(
        "==> {name}: {passed} passed, {failed} failed, {skipped} skipped after {:.0?}; {}",
        outcome.time,
        outcome.log.display()
    );
    for skip in &outcome.tally.skips {
        println!("skipped: {skip}");
    }
    std::fs::write(place.join(format!("{name}-tests.txt")), outcome.tally.tests.join("\n") + "\n")?;
    results.rounds += 1;
    results.passed += passed;
    results.failed += failed;
    results.skipped += skipped;
    results.seconds += outcome.time.as_secs_f64();
    if failed > 0 {
        // The next round of the stage overwrites its output.
        let kept = place.join(format!("{name}-failed-{}.log", results.rounds));
        std::fs::copy(&outcome.log, &kept)?;
        results.failures.extend(outcome.tally.failures.iter().map(|failure| format!("{failure} ({})", kept.display())));
    }
    // A soak that is killed while it writes leaves the old state.
    let new = place.join("state.json.new");
    std::fs::write(&new, serde_json::to_vec_pretty(state)?)?;
    std::fs::rename(new, place.join("state.json"))
}

/// The results, a line a stage, and the failures.
fn table(state: &State) -> String {
    let mut text =
        format!("{:<10} {:>7} {:>9} {:>7} {:>8} {:>9}\n", "stage", "rounds", "passed", "failed", "skipped", "minutes");
    for (name, results) in state {
        let Results { rounds, passed, failed, skipped, seconds, .. } = results;
        text += &format!("{name:<10} {rounds:>7} {passed:>9} {failed:>7} {skipped:>8} {:>9.1}\n", seconds / 60.0);
    }
    for failure in state.values().flat_map(|results| &results.failures) {
        text += &format!("failed: {failure}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_with_the_least_time_is_next() {
        let of = |seconds| Results { seconds, ..Results::default() };
        let state = State::from([("seeds".to_string(), of(9.0)), ("fuzz".to_string(), of(3.0))]);
        let [seeds, fuzz, mpi] = ["seeds", "fuzz", "mpi"].map(|name| (name, ""));
        assert_eq!(next(&[seeds, fuzz], &state), Some(fuzz));
        assert_eq!(next(&[seeds, fuzz, mpi], &state), Some(mpi));
        assert_eq!(next(&[], &state), None);
    }

    #[test]
    fn state_is_read_back_and_shown() {
        let results = Results {
            rounds: 2,
            passed: 199,
            failed: 1,
            seconds: 90.0,
            failures: vec!["seed 7".into()],
            ..Results::default()
        };
        let state = State::from([("seeds".to_string(), results)]);
        let text = serde_json::to_vec(&state).unwrap();
        assert_eq!(serde_json::from_slice::<State>(&text).unwrap(), state);
        let table = table(&state);
        assert!(table.contains("seeds            2       199       1        0       1.5"), "{table}");
        assert!(table.ends_with("failed: seed 7\n"), "{table}");
    }

    #[test]
    fn each_stage_has_a_command() {
        for (name, _) in STAGES {
            assert!(!stage(name, 0, Path::new("/"), Path::new("/dist")).command.is_empty());
        }
    }
}
