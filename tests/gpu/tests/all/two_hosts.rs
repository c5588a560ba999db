//! Two ranks on two hosts, which are network namespaces here. Abstract sockets do not cross them, so the cards must connect by
//! address.

use crate::common::{dist, not_over_efa};
use ferrogin_test_support::skip;
use gpu_scenarios::scenario::SCENARIOS;
use std::process::{Command, Stdio};

/// The script of a new user and network namespace, which ends with the script; "$@" is the program.
const SCRIPT: &str = r#"
unshare --net sleep 300 & peer=$!
trap 'kill $peer' EXIT
until [ "$(readlink /proc/$peer/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
{ ip link add va type veth peer name vb netns $peer && ip addr add 192.0.2.1/24 dev va && ip link set va up &&
  ip link set lo up && nsenter -t $peer -n ip addr add 192.0.2.2/24 dev vb &&
  nsenter -t $peer -n ip link set vb up && nsenter -t $peer -n ip link set lo up; } || exit 77
FERROGIN_RANK=1 timeout 200 nsenter -t $peer -n "$@" 2>&1 & other=$!
FERROGIN_RANK=0 timeout 200 "$@" 2>&1 || exit 1
wait $other
"#;

/// Runs scenarios between two hosts; `arguments` are for the program. Nothing happens where the machine has no namespaces.
fn across(test: &str, arguments: &[&str], variables: &[(&str, &str)], expected: usize) {
    let Some(dist) = dist(test) else { return };
    if not_over_efa(test, "it chooses its providers itself") {
        return;
    }
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "bash", "-c", SCRIPT, "bash"]);
    command.arg(env!("CARGO_BIN_EXE_gpu-scenarios")).args(arguments);
    for (variable, _) in std::env::vars_os() {
        if ["FERROGIN_", "SOFTEFA_", "FI_"].iter().any(|prefix| variable.to_string_lossy().starts_with(prefix)) {
            command.env_remove(variable);
        }
    }
    command
        .env("NCCL_GIN_PLUGIN", dist.join("libnccl-gin-ferrogin.so"))
        .env("FERROGIN_PROVIDER", "softefa")
        .env("FERROGIN_DEVICE", "cpu")
        .env("FERROGIN_NRANKS", "2")
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
        skip(test, "this machine allows no pair of interfaces, or has no `ip` (apt-get install iproute2)");
        return;
    }
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("PASS ").count(), expected, "{text}");
}

#[test]
fn scenarios_pass_across_network_namespaces() {
    across("scenarios_pass_across_network_namespaces", &["--reps", "300"], &[], SCENARIOS.len());
}

/// The control plane is libfabric's own provider `efa` over SRD, on a software card below verbs. libfabric's shared memory would be another way
/// to a peer of one host.
#[test]
fn ranks_meet_across_network_namespaces_over_efa() {
    let test = "ranks_meet_across_network_namespaces_over_efa";
    let Some(card) = ferrogin_test_support::verbs(test) else { return };
    let [sysfs, libraries] = card.each_ref().map(|(name, value)| (*name, &**value));
    for faults in ["seed=1", "seed=2,reorder=64,reread=0.2"] {
        let control = [("FERROGIN_CONTROL", "efa"), ("FI_EFA_ENABLE_SHM_TRANSFER", "0")];
        let variables = [&[sysfs, libraries, ("SOFTEFA_FAULTS", faults)][..], &control].concat();
        across(test, &["--reps", "20", "--only", "put-signal", "--only", "contexts"], &variables, 2);
    }
}
