//! `ferrogin verbs`, with the libraries that `make build` leaves in dist/ (or FERROGIN_DIST).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::command;

fn dist(test: &str) -> Option<PathBuf> {
    ferrogin_test_support::dist(test, &["verbs/libibverbs.so.1", "libnccl-gin-ferrogin.so"])
}

/// Runs the program on a software card, and returns its success and what it wrote.
fn on_card(dist: &Path, program: &[&OsStr], settings: &[(&str, &OsStr)]) -> (bool, String) {
    let mut tool = command();
    tool.args(["verbs", "--"]).args(program).env("FERROGIN_DIST", dist).envs(settings.iter().copied());
    let output = tool.output().expect("the tool starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

#[test]
fn verbs_shows_cards_to_a_program_and_to_nothing_else() {
    let Some(dist) = dist("verbs_shows_cards_to_a_program_and_to_nothing_else") else { return };
    let script = "ls /sys/class/infiniband /sys/class/net && test -e /sys/class/net/lo && readlink -f /sys/class/infiniband/rdmap1s0/device";
    let before = Path::new("/sys/class/infiniband/rdmap1s0").exists();
    let (good, text) = on_card(&dist, &["sh", "-c", script].map(OsStr::new), &[("SOFTEFA_NICS", OsStr::new("2"))]);
    if text.contains("no private /sys/class") {
        let why = "the system allows this user no mount namespace";
        return ferrogin_test_support::skip("verbs_shows_cards_to_a_program_and_to_nothing_else", why);
    }
    assert!(good && text.contains("rdmap0s0") && text.contains("0000:11:00.0") && !text.contains("rdmap2s0"), "{text}");
    assert_eq!(Path::new("/sys/class/infiniband/rdmap1s0").exists(), before);
}

#[test]
fn verbs_without_its_libraries_or_program_says_so() {
    let Some(dist) = dist("verbs_without_its_libraries_or_program_says_so") else { return };
    let (good, text) = on_card(Path::new("/nonexistent"), &[OsStr::new("true")], &[]);
    // The libraries may lie beside the tool.
    assert!(good || text.contains("make build"), "{text}");
    let (good, text) = on_card(&dist, &[OsStr::new("/nonexistent/program")], &[]);
    assert!(!good && text.contains("cannot run /nonexistent/program"), "{text}");
}

#[test]
fn plugin_runs_over_libfabrics_own_efa_provider() {
    let test = "plugin_runs_over_libfabrics_own_efa_provider";
    let Some(dist) = dist(test) else { return };
    let Some(libfabric) = ferrogin_test_support::libfabric_for_gpus(test) else { return };
    let run = |faults: &str| {
        let tool = OsStr::new(env!("CARGO_BIN_EXE_ferrogin"));
        let program = [
            tool,
            OsStr::new("demo"),
            OsStr::new("--launcher"),
            OsStr::new("builtin"),
            OsStr::new("--reps"),
            OsStr::new("100"),
        ];
        let plugin = dist.join("libnccl-gin-ferrogin.so");
        let settings = [
            ("FERROGIN_PROVIDER", OsStr::new("efa")),
            ("FERROGIN_LIBFABRIC", libfabric.as_os_str()),
            ("FERROGIN_DEVICE", OsStr::new("cpu")),
            ("NCCL_GIN_PLUGIN", plugin.as_os_str()),
            ("SOFTEFA_FAULTS", OsStr::new(faults)),
        ];
        on_card(&dist, &program, &settings)
    };
    for faults in ["seed=1", "seed=1,reorder=64,reread=0.2", "qp_caps=0"] {
        let (good, text) = run(faults);
        assert!(good && text.contains("on card rdmap0s0") && text.contains("PASS (c)"), "{faults}: {text}");
    }
    let (good, text) = run("no_counters");
    assert!(!good && text.contains("init failed") && text.contains("completion counter"), "{text}");
}

/// The tool refuses the call without a program.
#[test]
fn verbs_needs_a_program() {
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("verbs").output().expect("the tool starts");
    assert_eq!(output.status.code(), Some(2));
}
