//! Ranks on two and four hosts, simulated as network namespaces.

use crate::common::{dist, not_over_efa, seconds};
use ferrogin_test_support::ranks_on_hosts;
use ferrogin_test_support::wait::HANG_LIMIT;
use scenario_runner::scenario::SCENARIOS;
use std::process::Command;

/// Runs scenarios on `hosts` hosts with `each` ranks; the program gets `arguments`. Does nothing if the machine has no
/// namespaces.
fn across(test: &str, (hosts, each): (usize, usize), arguments: &[&str], variables: &[(&str, &str)], expected: usize) {
    let Some(dist) = dist(test) else { return };
    if not_over_efa(test, "it chooses its providers itself") {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_scenario-runner"));
    command.args(["--deadline", &seconds(HANG_LIMIT)]).args(arguments);
    for (variable, _) in std::env::vars_os() {
        if ["FERROGIN_", "SOFTEFA_", "FI_"].iter().any(|prefix| variable.to_string_lossy().starts_with(prefix)) {
            command.env_remove(variable);
        }
    }
    command
        .env("NCCL_GIN_PLUGIN", dist.join("libnccl-gin-ferrogin.so"))
        .env("FERROGIN_PROVIDER", "softefa")
        .env("FERROGIN_DEVICE", "cpu")
        .env("NCCL_DEBUG", "INFO")
        .env("FERROGIN_TIMEOUT", seconds(HANG_LIMIT))
        .envs(variables.iter().copied());
    let Some(output) = ranks_on_hosts(test, (hosts, each), &command) else { return };
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("PASS ").count(), expected, "{text}");
    // Each rank has its own card, and each card's address is inserted once, however many contexts and signals there
    // are.
    let inserted: Vec<_> = text.lines().filter(|line| line.contains(" peer addresses")).collect();
    let each_card = format!(" {} peer addresses", hosts * each);
    assert!(!inserted.is_empty() && inserted.iter().all(|line| line.contains(&each_card)), "{inserted:?}");
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_across_network_namespaces() {
    across("scenarios_pass_across_network_namespaces", (2, 1), &["--reps", "300"], &[], SCENARIOS.len());
}

/// Cards use shared memory within a host, and addresses across hosts.
#[test]
fn two_hosts_of_two_ranks_pass_scenarios() {
    across("two_hosts_of_two_ranks_pass_scenarios", (2, 2), FEW, &[], 3);
}

#[test]
fn hosts_meet_over_ipv6_with_secret() {
    let variables = [
        ("FERROGIN_BOOTSTRAP", "[fd00::1]:7700"),
        ("NCCL_SOCKET_FAMILY", "AF_INET6"),
        ("FERROGIN_SECRET", "00112233445566778899aabbccddeeff"),
    ];
    across("hosts_meet_over_ipv6_with_secret", (2, 1), &["--reps", "20", "--only", "put-signal"], &variables, 1);
}

#[test]
#[ignore = "make check"]
fn four_hosts_pass_scenarios() {
    across("four_hosts_pass_scenarios", (4, 1), FEW, &[], 3);
}

/// Scenarios in which every rank posts to every other, or on several contexts.
const FEW: &[&str] = &["--reps", "20", "--only", "put-signal", "--only", "all-pairs", "--only", "contexts"];
