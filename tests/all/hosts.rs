//! Runs the tool between ranks on two hosts, which are network namespaces here.

use crate::tool::{command, dist};
use ferrogin_test_support::ranks_on_hosts;
use ferrogin_test_support::wait::HANG_LIMIT;

/// Runs the tool over `provider`, as one rank on each of two hosts, and checks that the output contains `expected`.
fn passes(test: &str, provider: &str, arguments: &[&str], expected: &[&str]) {
    let Some(plugin) = dist(test) else { return };
    let mut command = command();
    command.args(arguments).env("NCCL_GIN_PLUGIN", &plugin).env("FERROGIN_DIST", plugin.parent().expect("dist/"));
    command.env("FERROGIN_PROVIDER", provider).env("FERROGIN_DEVICE", "cpu");
    let Some(output) = ranks_on_hosts(test, (2, 1), &command) else { return };
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    for part in expected {
        assert!(text.contains(part), "no {part}: {text}");
    }
}

#[test]
#[ignore = "make check"]
fn demo_runs_between_hosts() {
    passes("demo_runs_between_hosts", "softefa", &["demo", "--reps", "300"], &["PASS (a)", "PASS (b)", "PASS (c)"]);
}

#[test]
#[ignore = "make check"]
fn perf_runs_between_hosts() {
    let arguments = "perf put put-signal get rma-put rma-put-signal -b 8 -e 64K -f 8192 -n 20 -w 1 --verify";
    passes("perf_runs_between_hosts", "softefa", &Vec::from_iter(arguments.split(' ')), &["rma-put-signal", " 65536 "]);
}

#[test]
#[ignore = "make check"]
fn rma_plugin_runs_between_hosts_over_tcp() {
    let arguments = "perf rma-put rma-put-signal -b 8 -e 64K -f 8192 -n 20 -w 1 --verify";
    let test = "rma_plugin_runs_between_hosts_over_tcp";
    passes(test, "tcp", &Vec::from_iter(arguments.split(' ')), &["rma-put-signal", " 65536 "]);
}

#[test]
#[ignore = "make check"]
fn validation_runs_between_hosts() {
    let report = std::env::temp_dir().join(format!("ferrogin-hosts-{}.tar.gz", std::process::id()));
    let limit = HANG_LIMIT.as_secs().to_string();
    let arguments = ["validate", "--quick", "--limit", &limit, "--output", &report.to_string_lossy()];
    passes("validation_runs_between_hosts", "softefa", &arguments, &["The GIN plugin runs here: yes"]);
    std::fs::remove_file(report).expect("a report");
}
