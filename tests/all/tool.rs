//! The tool's subcommands, with the plugin that `make build` leaves in dist/ (or FERROGIN_DIST).

use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn dist(test: &str) -> Option<PathBuf> {
    let plugin = "libnccl-gin-ferrogin.so";
    Some(ferrogin_test_support::dist(test, &[plugin])?.join(plugin))
}

/// The tool, without this process's settings.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
    for (name, _) in std::env::vars_os() {
        if ["FERROGIN_", "SOFTEFA_", "SOFTGPU_", "FI_", "NCCL_"]
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    // No wait for another rank times out just because the machine is busy.
    command.env("FERROGIN_TIMEOUT", HANG_LIMIT.as_secs().to_string()).stdin(Stdio::null());
    command
}

pub fn ferrogin(plugin: &Path, args: &[&str], settings: &[(&str, &str)]) -> (Output, String) {
    let mut command = command();
    command.args(args).env("NCCL_GIN_PLUGIN", plugin).envs(settings.iter().copied());
    let output = command.output().expect("the tool starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

#[test]
fn demo_passes_three_phases_and_measures() {
    demo_passes("demo_passes_three_phases_and_measures", &["--ranks", "2"]);
}

#[test]
#[ignore = "make check"]
fn demo_of_four_ranks_passes_three_phases_and_measures() {
    demo_passes("demo_of_four_ranks_passes_three_phases_and_measures", &["--ranks", "4"]);
}

fn demo_passes(test: &str, args: &[&str]) {
    let Some(plugin) = dist(test) else { return };
    let (output, text) = ferrogin(&plugin, &[&["demo", "--reps", "300"], args].concat(), &[]);
    assert!(output.status.success(), "{text}");
    for phase in ["PASS (a)", "PASS (b)", "PASS (c)"] {
        assert_eq!(text.matches(phase).count(), 1, "{text}");
    }
    let table = text.split("operation ").nth(1).expect("a table").lines().skip(1);
    let rows: Vec<_> = table.filter(|line| !line.is_empty()).collect();
    assert_eq!(rows.len(), 8, "{text}");
    for row in rows {
        let rate: f64 = row.split_whitespace().rev().nth(1).and_then(|word| word.parse().ok()).expect("a rate");
        assert!(rate > 0.0, "{row}");
    }
}

/// Without these options, Open MPI refuses to run as root, or with more ranks than cores.
pub const MPIRUN: [&str; 4] = ["--allow-run-as-root", "--oversubscribe", "-np", "2"];

#[test]
fn demo_runs_ranks_of_launcher() {
    let Some(plugin) = dist("demo_runs_ranks_of_launcher") else { return };
    if mini_nccl::launch::find_mpirun().is_none() {
        ferrogin_test_support::skip("demo_runs_ranks_of_launcher", "mpirun is not on PATH");
        return;
    }
    let run = |args: &[&str]| {
        let mut command = Command::new("mpirun");
        command.args(MPIRUN).arg(env!("CARGO_BIN_EXE_ferrogin")).arg("demo").args(args).env("NCCL_GIN_PLUGIN", &plugin);
        let output = command.stdin(Stdio::null()).output().expect("mpirun starts");
        (output.status.code(), [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()))
    };
    let (code, [stdout, stderr]) = run(&["--reps", "100"]);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    assert!(stdout.matches("PASS (c)").count() == 1 && stdout.contains("2 ranks on card softefa0"), "{stdout}");
    let (code, [stdout, stderr]) = run(&["--ranks", "3"]);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    assert!(stderr.contains("--ranks 3, but the launcher that started this process started 2"), "{stderr}");
}

/// The reader of standard output has gone away.
#[test]
fn closed_output_ends_tool_quietly() {
    let Some(plugin) = dist("closed_output_ends_tool_quietly") else { return };
    let demo = ["demo", "--reps", "100"];
    for args in [&["doctor"][..], &["ptx"], &["--help"], &demo, &["perf", "put", "-e", "8", "-n", "10"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrogin"));
        command.args(args).env("NCCL_GIN_PLUGIN", &plugin).env("FERROGIN_PROVIDER", "softefa").stdin(Stdio::null());
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = command.stdout(writer).stderr(Stdio::piped()).output().expect("the tool ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
        assert!(!output.status.success(), "{args:?}: {:?}", output.status);
    }
}

/// A rank, the launcher, and the commands without ranks.
#[test]
fn full_output_is_an_error() {
    let Some(plugin) = dist("full_output_is_an_error") else { return };
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("the device");
    let demo = ["demo", "--reps", "100"];
    let perf = ["perf", "put", "-e", "8", "-n", "10"];
    let json = [&perf[..], &["--json", "-"]].concat();
    for args in [&demo[..], &perf, &json, &["ptx"]] {
        let mut command = command();
        command.args(args).env("NCCL_GIN_PLUGIN", &plugin).env("FERROGIN_PROVIDER", "softefa").stdout(full());
        let output = command.stderr(Stdio::piped()).output().expect("the tool ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("standard output") && !stderr.contains("panicked"), "{args:?}: {stderr}");
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
    }
}

/// If SIGCHLD is ignored, which programs inherit, the kernel discards the exit status of children. Runs bash, as dash
/// doesn't ignore it.
#[test]
fn parent_may_ignore_sigchld() {
    let Some(plugin) = dist("parent_may_ignore_sigchld") else { return };
    let doctor = ["doctor", "--only", "plugin", "--only", "libfabric"];
    let demo = ["demo", "--reps", "100"];
    for args in [&doctor[..], &demo, &["perf", "put", "-e", "8", "-n", "10"]] {
        let mut shell = Command::new("bash");
        shell.args(["-c", "trap '' CHLD; exec \"$@\"", "bash", env!("CARGO_BIN_EXE_ferrogin")]).args(args);
        shell.env("NCCL_GIN_PLUGIN", &plugin).env("FERROGIN_PROVIDER", "softefa").stdin(Stdio::null());
        let output = shell.output().expect("the tool ends");
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && !text.contains("exit code"), "{args:?}: {text}");
    }
}

/// The rank whose signal is lost waits until FERROGIN_TIMEOUT is over.
#[test]
#[ignore = "make check"]
fn demo_failure_is_reported() {
    let Some(plugin) = dist("demo_failure_is_reported") else { return };
    let (output, text) =
        ferrogin(&plugin, &["demo"], &[("SOFTEFA_FAULTS", "error_every=50"), ("FERROGIN_TIMEOUT", "10")]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("FAIL") && text.contains("NCCL WARN") && !text.contains("PASS (b)"), "{text}");
}

#[test]
fn doctor_passes_where_init_passes() {
    let Some(plugin) = dist("doctor_passes_where_init_passes") else { return };
    for faults in ["qp_caps=0", "narrow_only", "refuse_tclass", "ignore_tclass", "no_hmem"] {
        let settings = [("FERROGIN_PROVIDER", "softefa"), ("SOFTEFA_FAULTS", faults)];
        let (output, text) = ferrogin(&plugin, &["doctor", "--only", "plugin"], &settings);
        assert!(output.status.success(), "{faults}: {text}");
    }
}

#[test]
fn doctor_reports_mlx5_cards_or_reason_for_none() {
    let (_, text) = ferrogin(Path::new("/nonexistent/x.so"), &["doctor", "--all", "--only", "rdma"], &[]);
    let lines: Vec<_> = text.lines().filter(|line| line.contains(" mlx5 card ")).collect();
    assert!(!lines.is_empty(), "{text}");
    // An empty library hides rdma-core's.
    let empty = std::env::temp_dir().join(format!("ferrogin-no-mlx5-{}", std::process::id()));
    std::fs::create_dir_all(&empty).expect("a directory");
    std::fs::write(empty.join("libmlx5.so.1"), b"").expect("a file");
    std::fs::write(empty.join("libibverbs.so.1"), b"").expect("a file");
    let path = empty.to_string_lossy().into_owned();
    let (_, text) =
        ferrogin(Path::new("/nonexistent/x.so"), &["doctor", "--all", "--only", "rdma"], &[("LD_LIBRARY_PATH", &path)]);
    std::fs::remove_dir_all(&empty).expect("the directory goes");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("mlx5 card unknown: cannot load libibverbs.so.1"), "{text}");
    assert!(words.contains("apt-get install libibverbs1 ibverbs-providers"), "{text}");
}

/// The software card lists its settings when it refuses an unknown one.
#[test]
fn doctor_lists_settings_of_software_card() {
    let Some(plugin) = dist("doctor_lists_settings_of_software_card") else { return };
    let (_, text) = ferrogin(&plugin, &["probe", "plugin"], &[("FERROGIN_PROVIDER", "softefa"), ("SOFTEFA_TYPO", "1")]);
    let report = text.lines().find(|line| line.contains("SOFTEFA_TYPO") && line.contains("SOFTEFA_NICS"));
    let report = report.unwrap_or_else(|| panic!("no line with the card's settings: {text}"));
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
    let mut settings: Vec<&str> =
        report.split(|c| !is_name(c)).filter(|word| word.starts_with("SOFTEFA_") && *word != "SOFTEFA_TYPO").collect();
    settings.sort_unstable();
    let mut expected = ferrogin_ffi::settings::SOFTWARE_CARD;
    expected.sort_unstable();
    assert_eq!(settings, expected, "{report}");
}

#[test]
fn unknown_arguments_are_refused() {
    let (output, text) = ferrogin(Path::new(""), &["demo", "--ranks", "1"], &[]);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let (output, text) = ferrogin(Path::new(""), &["fly"], &[]);
    assert_eq!(output.status.code(), Some(2), "{text}");
}

#[test]
fn run_starts_ranks_with_their_variables_and_prefixes_their_output() {
    let script = "echo rank=$FERROGIN_RANK of=$FERROGIN_NRANKS secret=${#FERROGIN_SECRET}; echo late >&2";
    let output = command().args(["run", "-n", "3", "--", "sh", "-c", script]).output().expect("the tool starts");
    assert!(output.status.success(), "{output:?}");
    let mut lines: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, [0, 1, 2].map(|rank| format!("[{rank}] rank={rank} of=3 secret=32")));
    assert!(String::from_utf8_lossy(&output.stderr).contains("[2] late\n"), "{output:?}");
}

/// The kernel kills the ranks along with their launcher, which gets no chance to do it.
#[test]
fn ranks_end_with_a_killed_launcher() {
    let mut command = command();
    command.args(["run", "-n", "2", "--", "sh", "-c", "echo $$; exec sleep infinity"]).stdout(Stdio::piped());
    let mut launcher = command.spawn().expect("the tool starts");
    let output = BufReader::new(launcher.stdout.take().expect("a pipe")).lines();
    let ranks: Vec<String> = output.take(2).map(|line| line.expect("a line").split_off("[0] ".len())).collect();
    launcher.kill().expect("it runs");
    launcher.wait().expect("its status");
    for rank in ranks {
        // A rank that its new parent has not reaped yet has an empty command line.
        let command = || std::fs::read(format!("/proc/{rank}/cmdline")).unwrap_or_default();
        wait_until("the end of a rank", || !command().starts_with(b"sleep"));
    }
}

/// The other rank would sleep forever.
#[test]
fn run_ends_all_ranks_when_one_fails() {
    let script = "test $FERROGIN_RANK = 1 && exit 7; exec sleep infinity";
    let output = command().args(["run", "-n", "2", "sh", "-c", script]).output().expect("the tool starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{text}");
    assert!(text.contains("ferrogin run: rank 1: exit code 7; rank 0: killed"), "{text}");
    let missing = command().args(["run", "/nonexistent/program"]).output().expect("the tool starts");
    assert_eq!(missing.status.code(), Some(127), "{missing:?}");
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nonexistent/program"), "{missing:?}");
}
