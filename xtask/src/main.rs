//! Tasks of the ferrogin repository: `cargo xtask test`, `cargo xtask faults`.

mod faults;
mod stage;
mod tally;

use stage::Stage;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use tally::Tally;

const USAGE: &str = "usage: cargo xtask test | faults

test   checks format and lints, and runs the tests of the workspace and all test scripts with the plugin in dist/ (or FERROGIN_DIST);
       the last line has the numbers of passed, failed and skipped tests
faults runs the scenarios on cards with faults, once for each seed; `cargo xtask faults --help` prints its options";

/// Test scripts beside `cargo test`. A script gets the directory of the built files, prints `PASS name`, `FAIL name` or
/// `SKIP name: reason` for each test, and a last line `label: P passed, F failed, S skipped`. The most important scripts come first:
/// after [`MINUTES`] the run skips the others and counts them.
const SCRIPTS: &[(&str, &str)] = &[
    ("CUDA kernels", "tests/cuda/run.sh"),
    ("instructions of a post", "benches/check.sh"),
    ("mlx5 instructions", "soft-mlx5/benches/check.sh"),
    ("foreign clients", "tests/foreign/run.sh"),
    ("models", "device-kernels/tests/models.sh"),
    ("faults", "tests/faults/run.sh"),
    ("libfabric programs", "tests/libfabric/run.sh"),
    ("model of the channel's wake-up", "channel/tests/models.sh"),
    ("fuzz", "fuzz/run.sh"),
    ("address sanitizer", "tests/nccl/sanitize.sh"),
    ("aarch64", "scripts/check-aarch64.sh"),
];

/// The run starts no script after this time, so that it also ends on a slow machine.
const MINUTES: u64 = 35;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["test"] => test(),
        ["faults", ref options @ ..] => faults::run(options, &root()),
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// The repository that this program was built from.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

fn test() -> ExitCode {
    let root = root();
    let dist = std::env::var_os("FERROGIN_DIST").map_or(root.join("dist"), PathBuf::from);
    let began = Instant::now();
    let minutes = std::env::var("FERROGIN_TEST_MINUTES").ok().and_then(|text| text.parse().ok()).unwrap_or(MINUTES);
    let minutes = Duration::from_secs(minutes * 60);
    let mut tally = Tally::default();
    let mut out = std::io::stdout();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let cargo = |args: &[&str]| {
        let mut command = Command::new(&cargo);
        command.args(args).current_dir(&root);
        command
    };
    Stage::new("format", cargo(&["fmt", "--all", "--check"])).run(&mut tally, &mut out);
    let clippy = ["clippy", "--release", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    Stage::new("lint", cargo(&clippy)).run(&mut tally, &mut out);

    let mut tests = cargo(&["test", "--release", "--workspace", "--locked", "--no-fail-fast", "--", "--show-output"]);
    tests.env("FERROGIN_DIST", &dist);
    match second_libfabric(&root) {
        Ok(path) => {
            tests.env("FERROGIN_LIBFABRIC_ALT", path);
        }
        Err(reason) => tally.skip(format!("tests on a second libfabric: {reason}")),
    }
    Stage::new("cargo test", tests).of_tests().run(&mut tally, &mut out);

    for (name, script) in SCRIPTS {
        if began.elapsed() > minutes {
            tally.skip(format!(
                "{name} ({script}): the limit of {} minutes is over; raise FERROGIN_TEST_MINUTES",
                minutes.as_secs() / 60
            ));
            continue;
        }
        let mut command = Command::new(root.join(script));
        command.arg(&dist).current_dir(&root);
        Stage::new(name, command).of_tests().run(&mut tally, &mut out);
    }
    println!("{}", tally.summary());
    if tally.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A newer libfabric than the system's: FERROGIN_LIBFABRIC_ALT, or the one that the script fetches.
fn second_libfabric(root: &Path) -> Result<PathBuf, String> {
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
