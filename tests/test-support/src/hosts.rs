//! Ranks on several hosts, which are network namespaces here. Abstract sockets don't cross them, so processes must
//! connect by address.

use crate::{skip, wait::HANG_LIMIT};
use std::process::{Command, Output, Stdio};

/// Runs in a new user and network namespace, which ends with the script. $1 is the number of hosts, $2 the ranks per
/// host, $3 the seconds that a rank may take, and the rest the program.
const SCRIPT: &str = r#"
hosts=$1 each=$2 limit=$3; shift 3
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
# The kernel notices a carrier later, and drops what is sent before.
up() { until "$@" | grep -q 'state UP'; do sleep 0.01; done; }
for host in $(seq $hosts); do
  up nsenter -t ${pids[host - 1]} -n ip link show eth0
  [ $hosts = 2 ] || up ip link show v$host
done
for rank in $(seq 0 $((hosts * each - 1))); do
  FERROGIN_RANK=$rank timeout $limit nsenter -t ${pids[rank / each]} -n "$@" 2>&1 & ranks+=($!)
done
for rank in ${ranks[@]}; do wait $rank || failed=1; done
exit ${failed:-0}
"#;

/// A command that runs the arguments added to it in a new user and network namespace. If this machine allows none,
/// `test` is skipped.
pub fn in_new_network(test: &str) -> Option<Command> {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net"]).stdin(Stdio::null());
        command
    };
    if unshare().arg("true").stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        return Some(unshare());
    }
    skip(test, "this machine allows no network namespace");
    None
}

/// Runs `program` as `each` ranks on each of `hosts` hosts, whose addresses are 192.0.2.1, 192.0.2.2 and so on, and
/// fd00::1, fd00::2. FERROGIN_BOOTSTRAP is a port on the first host unless `program` sets it. If this machine allows no
/// namespaces, `test` is skipped.
///
/// # Panics
/// If `unshare` is missing.
pub fn ranks_on_hosts(test: &str, (hosts, each): (usize, usize), program: &Command) -> Option<Output> {
    let mut command = in_new_network(test)?;
    command.args(["bash", "-c", SCRIPT, "bash"]);
    command.args([hosts, each, 5 * HANG_LIMIT.as_secs() as usize].map(|number| number.to_string()));
    command.arg(program.get_program()).args(program.get_args());
    command.env("FERROGIN_BOOTSTRAP", "192.0.2.1:7700").env("FERROGIN_NRANKS", (hosts * each).to_string());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().expect("unshare starts");
    if output.status.code() == Some(77) {
        skip(test, "this machine allows no pair of interfaces or no bridge, or has no `ip` (apt-get install iproute2)");
        return None;
    }
    Some(output)
}
