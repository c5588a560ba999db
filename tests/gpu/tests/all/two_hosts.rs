//! Two ranks on two hosts, which are network namespaces here. Abstract sockets do not cross them, so the cards must connect by
//! address.

use crate::common::dist;
use gpu_scenarios::scenario::SCENARIOS;
use std::process::{Command, Stdio};

/// The script of a new user and network namespace, which ends with the script; $1 is the program.
const SCRIPT: &str = r#"
unshare --net sleep 300 & peer=$!
trap 'kill $peer' EXIT
until [ "$(readlink /proc/$peer/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
{ ip link add va type veth peer name vb netns $peer && ip addr add 192.0.2.1/24 dev va && ip link set va up &&
  ip link set lo up && nsenter -t $peer -n ip addr add 192.0.2.2/24 dev vb &&
  nsenter -t $peer -n ip link set vb up && nsenter -t $peer -n ip link set lo up; } || exit 77
FERROGIN_RANK=1 timeout 200 nsenter -t $peer -n "$1" --reps 300 2>&1 & other=$!
FERROGIN_RANK=0 timeout 200 "$1" --reps 300 2>&1 || exit 1
wait $other
"#;

#[test]
fn scenarios_pass_across_network_namespaces() {
    let name = "scenarios_pass_across_network_namespaces";
    let Some(dist) = dist(name) else { return };
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "bash", "-c", SCRIPT, "bash"]);
    command.arg(env!("CARGO_BIN_EXE_gpu-scenarios"));
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
        .env("FERROGIN_BOOTSTRAP", "192.0.2.1:7700");
    let succeeds = |program: &str, args: &[&str]| {
        let status = Command::new(program).args(args).stdin(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !succeeds("unshare", &["--user", "--map-root-user", "--net", "true"]) {
        println!("SKIP {name}: this machine allows no network namespace");
        return;
    }
    let output = command.stdin(Stdio::null()).output().expect("unshare starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) {
        println!("SKIP {name}: this machine allows no pair of interfaces, or has no `ip` (apt-get install iproute2)");
        return;
    }
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("PASS ").count(), SCENARIOS.len(), "{text}");
}
