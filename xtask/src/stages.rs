//! What `make test`, `make check` and a soak run.
//!
//! Workspace tests that only run in `make check` declare `#[ignore = "make check"]`.

use crate::runner::Stage;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

/// fuzz-harness has its own stage: it turns on a feature of the emulators, which would then be compiled twice and
/// documented with their private parts.
const WORKSPACE_TESTS: &[&str] = &["test", "--release", "--workspace", "--exclude", "fuzz-harness", "--locked"];

/// `make test`: every crate's tests, and those of the clients in other languages with one configuration each.
pub fn test(root: &Path, dist: &Path, shuffle: Option<u64>) -> Vec<Stage> {
    let script = |name, path| script(name, root, path, dist);
    let seed = shuffle.map(|seed| format!("--shuffle-seed={seed}"));
    let for_tests: Vec<&str> = seed.iter().flat_map(|seed| ["-Zunstable-options", seed]).collect();
    let mut tests = workspace_tests("cargo test", dist, &["--lib", "--bins", "--tests"], &for_tests);
    if seed.is_some() {
        // libtest only shuffles if unstable options are allowed; cargo and rustc don't see the variable.
        let runner = format!("CARGO_TARGET_{}_UNKNOWN_LINUX_GNU_RUNNER", std::env::consts::ARCH.to_uppercase());
        tests = tests.env(runner.leak(), "env RUSTC_BOOTSTRAP=1");
    }
    vec![
        build_of_tests(),
        script("python", "python/test.sh"),
        script("NCCL's device code", "tests/foreign/run.sh")
            .env("FOREIGN_RELEASES", "2.32.3")
            .env("FOREIGN_RANKS", "2")
            .env("SOFTEFA_FAULTS", "seed=7,reorder=64,qp_caps=0"),
        tests.after("build of the tests"),
    ]
}

/// `make check`: everything else that a change must pass. Also returns what is skipped, as `name: why`.
pub fn check(root: &Path, dist: &Path) -> (Vec<Stage>, Vec<String>) {
    let script = |name, path| script(name, root, path, dist);
    let format = cargo(&["fmt", "--all", "--check"]);
    let lint = cargo(&["clippy", "--release", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    let docs =
        cargo(&["doc", "--quiet", "--release", "--workspace", "--exclude", "fuzz-harness", "--no-deps", "--locked"]);
    // Outside the workspace, because of tonic.
    let beside_tonic = cargo(&[
        "check",
        "--locked",
        "--all-targets",
        "--manifest-path",
        "services/host-rpc/compare/Cargo.toml",
        "--target-dir",
        "target/compare",
    ]);
    let python = root.join("python/test.sh");
    let mut skips = Vec::new();
    // Includes the tests of `make test`, on the second libfabric.
    let mut tests = workspace_tests("cargo test", dist, &["--lib", "--bins", "--tests"], &["--include-ignored"]);
    match second_libfabric(root) {
        Ok(path) => tests = tests.env("FERROGIN_LIBFABRIC_ALT", path),
        Err(why) => skips.push(format!("tests on a second libfabric: {why}")),
    }
    let mut stages = vec![
        Stage::test("format", format),
        build_of_tests(),
        script("CUDA kernels", "tests/cuda/run.sh"),
        // Stages whose processes poll run one after the other, alongside stages that build.
        tests.after("build of the tests"),
        Stage::of_tests("fuzz corpora", cargo(&["test", "--release", "--locked", "-p", "fuzz-harness"]))
            .after("cargo test"),
        Stage::test("lint", lint),
        script("models", "device-kernels/tests/models.sh"),
        script("NCCL's device code", "tests/foreign/run.sh").after("cargo test"),
        script("bitcode", "tests/bitcode/run.sh"),
        script("aarch64", "scripts/check-aarch64.sh"),
        Stage::test("host-rpc beside tonic", beside_tonic),
        Stage::test("licences", [root.join("scripts/notices.py").into_os_string(), "--check".into()]),
        Stage::test("documentation", docs).after("lint").env("RUSTDOCFLAGS", "-D warnings"),
        workspace_tests("examples in the documentation", dist, &["--doc"], &[]).after("documentation"),
        script("model of the channel's wake-up", "services/channel/tests/models.sh").after("models"),
        script("benches", "benches/check.sh").after("lint"),
        script("mlx5 instructions", "emulators/soft-mlx5/benches/check.sh").after("lint"),
        script("book", "tests/book/run.sh").after("lint"),
        Stage::of_tests("more of python", [python.as_os_str(), "--check".as_ref(), dist.as_os_str()])
            .after("cargo test"),
        script("packages", "tests/packages/run.sh").after("cargo test"),
        script("libfabric programs", "tests/libfabric/run.sh").after("cargo test"),
        script("MPI programs", "tests/mpi/run.sh").after("libfabric programs"),
        script("programs of other projects", "tests/programs/run.sh").after("MPI programs"),
        script("expert-parallel kernels", "tests/ep/run.sh").after("programs of other projects"),
        script("kernels with mistakes", "tests/check/run.sh").after("expert-parallel kernels"),
    ];
    // Over libfabric's own provider `efa`, with the software card below verbs.
    let scenarios =
        cargo(&["test", "--release", "--locked", "-p", "scenario-runner", "--test", "all", "--", "--include-ignored"]);
    let over_efa = [
        script("NCCL's device code over efa", "tests/foreign/run.sh").after("NCCL's device code"),
        Stage::of_tests("scenarios over efa", scenarios)
            .env("FERROGIN_DIST", dist)
            .after("NCCL's device code over efa"),
    ];
    for stage in over_efa {
        if std::env::var_os("FERROGIN_LIBFABRIC").is_some() {
            stages.push(stage.env("FERROGIN_PROVIDER", "efa"));
        } else {
            let why = "FERROGIN_LIBFABRIC names no libfabric with the GDA operations (2.6 or newer)";
            skips.push(format!("{}: {why}", stage.name));
        }
    }
    (stages, skips)
}

/// A soak's stages, and what a round of each does.
pub const SOAK: &[(&str, &str)] = &[
    ("seeds", "the scenarios on cards with faults, 100 seeds"),
    ("sizes", "the tests of the workspace with all repetitions and sizes"),
    ("kills", "500 ranks killed or stopped at seeded moments, half of them on a loaded machine"),
    ("foreign", "NCCL's device code: every scenario with every number of ranks and every fault"),
    ("ep", "nccl_ep's and DeepEP's kernels: every type, layout, routing and number of ranks"),
    ("check", "ferrogin check on kernels with mistakes, 20 seeds"),
    ("fuzz", "live fuzzing, half a minute a target"),
    ("address", "the plugin's tests with the address sanitizer"),
    ("thread", "the plugin's tests with the thread sanitizer"),
    ("aarch64", "all tests that need nothing but a processor, in an emulator of aarch64"),
    ("release", "tarballs of the tree for x86-64 and aarch64, unpacked and run"),
    ("mpi", "two ranks under each MPI that the system or PyPI has"),
    ("mpi-card", "a program that checks its data, 50 times under each MPI on the card, without and with faults"),
];

/// Round `round` of a soak stage. The seeds depend on the round.
pub fn soak(name: &'static str, round: u64, root: &Path, dist: &Path) -> Stage {
    let script = |path: &str, more: &str| {
        let words = more.split_whitespace().map(OsString::from);
        Stage::of_tests(name, [root.join(path).into_os_string(), dist.into()].into_iter().chain(words))
    };
    let campaign = |test: &str| {
        let arguments = ["test", "--release", "--locked", "-p", "scenario-runner", "--test", "all", test];
        Stage::of_tests(name, cargo(&[&arguments[..], &["--", "--include-ignored"]].concat()))
            .env("FERROGIN_DIST", dist)
    };
    let stage = match name {
        "seeds" => campaign("seeds::").env("FERROGIN_SEEDS_FIRST", (round * 100).to_string()),
        // The stage `kills` does the full number of kills.
        "sizes" => workspace_tests(name, dist, &[], &["--include-ignored"]).env("FERROGIN_KILLS", "50"),
        "kills" => {
            campaign("faults::").env("FERROGIN_KILLS", "500").env("FERROGIN_KILLS_FIRST", (round * 500).to_string())
        }
        "foreign" => script("tests/foreign/run.sh", ""),
        "ep" => script("tests/ep/run.sh", ""),
        "check" => script("tests/check/run.sh", ""),
        "fuzz" => script("tests/fuzz/run.sh", "").env("FUZZ_SECONDS", "30"),
        "address" | "thread" => script("tests/nccl/sanitize.sh", name),
        "aarch64" => script("scripts/check-aarch64.sh", "").env("FERROGIN_AARCH64_TESTS", "1"),
        "release" => Stage::test(name, ["make", "release", "SNAPSHOT=1"]),
        "mpi" => script("tests/gpu/mpi.sh", ""),
        _ => script("tests/mpi/run.sh", ""),
    };
    stage.env("FERROGIN_SOAK", "1")
}

/// Returns a test script, which gets `make build`'s directory.
fn script(name: &'static str, root: &Path, path: &str, dist: &Path) -> Stage {
    Stage::of_tests(name, [root.join(path).as_os_str(), dist.as_os_str()])
}

/// Returns a cargo command with `arguments`.
fn cargo(arguments: &[&str]) -> Vec<OsString> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    std::iter::once(cargo).chain(arguments.iter().map(OsString::from)).collect()
}

/// Builds the workspace's tests and the examples, which some tests start.
fn build_of_tests() -> Stage {
    Stage::test("build of the tests", cargo(&[WORKSPACE_TESTS, &["--no-run"]].concat()))
}

/// Returns the workspace's tests, with additional arguments for cargo and for the test programs.
fn workspace_tests(name: &'static str, dist: &Path, for_cargo: &[&str], for_tests: &[&str]) -> Stage {
    let command = cargo(&[WORKSPACE_TESTS, &["--no-fail-fast"], for_cargo, &["--"], for_tests].concat());
    // The processes of a multi-process test wait for each other.
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get()).max(4);
    Stage::of_tests(name, command).env("FERROGIN_DIST", dist).env("RUST_TEST_THREADS", threads.to_string())
}

/// Returns a libfabric newer than the system's: FERROGIN_LIBFABRIC_ALT, or the one that the script fetches.
fn second_libfabric(root: &Path) -> Result<OsString, String> {
    if let Some(path) = std::env::var_os("FERROGIN_LIBFABRIC_ALT") {
        return Ok(path);
    }
    let script = root.join("scripts/fetch-libfabric-alt.sh");
    let output = Command::new(&script).stdin(Stdio::null()).output().map_err(|error| format!("{script:?}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(text(&output.stdout).into())
    } else {
        Err(text(&output.stderr).lines().last().unwrap_or("the script failed").to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_stage_waits_for_an_earlier_one_of_its_run() {
        let (root, dist) = (Path::new("/"), Path::new("/dist"));
        for stages in [test(root, dist, Some(1)), check(root, dist).0] {
            let mut names = HashSet::new();
            for stage in stages {
                assert!(stage.after.is_none_or(|name| names.contains(name)), "{}", stage.name);
                assert!(names.insert(stage.name), "{} is there twice", stage.name);
            }
        }
    }
}
