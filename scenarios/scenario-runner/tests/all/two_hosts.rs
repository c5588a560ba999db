//! Ranks on two and on four hosts, which are network namespaces here. Abstract sockets do not cross them, so the cards must connect by
//! address.

use crate::common::{dist, not_over_efa, seconds};
use ferrogin_test_support::skip;
use ferrogin_test_support::wait::HANG_LIMIT;
use scenario_runner::scenario::SCENARIOS;
use std::process::{Command, Stdio};

/// The script of a new user and network namespace, which ends with the script. $1 is the number of hosts, $2 the ranks of each, and the rest
/// the program.
const SCRIPT: &str = r#"
hosts=$1 each=$2; shift 2
trap 'kill ${pids[@]} 2>/dev/null' EXIT
for host in $(seq $hosts); do
  unshare --net sleep 3600 & pids+=($!)
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
done
# Two hosts have a wire, more have a switch.
if [ $hosts = 2 ]; then
  ip link add eth0 netns ${pids[0]} type veth peer name eth0 netns ${pids[1]} || exit 77
else
  ip link add name br0 type bridge && ip link set br0 up || exit 77
fi
for host in $(seq $hosts); do
  pid=${pids[host - 1]}
  if [ $hosts != 2 ]; then
    ip link add v$host type veth peer name eth0 netns $pid && ip link set v$host master br0 up || exit 77
  fi
  { nsenter -t $pid -n ip addr add 192.0.2.$host/24 dev eth0 && nsenter -t $pid -n ip link set eth0 up &&
    nsenter -t $pid -n ip addr add fd00::$host/64 dev eth0 nodad &&
    nsenter -t $pid -n ip link set lo up; } || exit 77
done
for rank in $(seq 0 $((hosts * each - 1))); do
  FERROGIN_RANK=$rank timeout 1200 nsenter -t ${pids[rank / each]} -n "$@" 2>&1 & ranks+=($!)
done
for rank in ${ranks[@]}; do wait $rank || failed=1; done
exit ${failed:-0}
"#;

/// Runs scenarios between `hosts` with `each` ranks; `arguments` are for the program. Nothing happens where the machine has no namespaces.
fn across(test: &str, (hosts, each): (usize, usize), arguments: &[&str], variables: &[(&str, &str)], expected: usize) {
    let Some(dist) = dist(test) else { return };
    if not_over_efa(test, "it chooses its providers itself") {
        return;
    }
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "bash", "-c", SCRIPT, "bash"]);
    command.args([hosts, each].map(|number| number.to_string()));
    command.arg(env!("CARGO_BIN_EXE_scenario-runner")).args(["--deadline", &seconds(HANG_LIMIT)]).args(arguments);
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
        .env("FERROGIN_NRANKS", (hosts * each).to_string())
        .env("FERROGIN_BOOTSTRAP", "192.0.2.1:7700")
        .envs(variables.iter().copied());
    let succeeds = |program: &str, args: &[&str]| {
        let status = Command::new(program).args(args).stdin(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !succeeds("unshare", &["--user", "--map-root-user", "--net", "true"]) {
        skip(test, "this machine allows no network namespace");
        return;
    }
    let output = command.stdin(Stdio::null()).output().expect("unshare starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) {
        skip(test, "this machine allows no pair of interfaces or no bridge, or has no `ip` (apt-get install iproute2)");
        return;
    }
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("PASS ").count(), expected, "{text}");
    // Each rank has a card of its own, and each card is inserted once, whatever the number of contexts and signals.
    let inserted: Vec<_> = text.lines().filter(|line| line.contains(" peer addresses")).collect();
    let each_card = format!(" {} peer addresses", hosts * each);
    assert!(!inserted.is_empty() && inserted.iter().all(|line| line.contains(&each_card)), "{inserted:?}");
}

#[test]
#[ignore = "make check"]
fn scenarios_pass_across_network_namespaces() {
    across("scenarios_pass_across_network_namespaces", (2, 1), &["--reps", "300"], &[], SCENARIOS.len());
}

/// Within a host the cards take shared memory, and across hosts the address.
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
