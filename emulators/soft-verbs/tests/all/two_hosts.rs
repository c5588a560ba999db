//! Cards on two hosts, which are network namespaces here. Abstract sockets don't cross them, so the cards connect by
//! the addresses that `SOFTEFA_IFADDR` puts into their GIDs.

use std::process::Output;

use crate::{Running, have, set_card};

/// The script for a new user and network namespace, which lasts as long as the script. $1 is a script that makes the
/// second host, where the server runs. The other arguments are the server's command; the client's is the same followed
/// by the server's address.
const SCRIPT: &str = r#"
. "$1"; shift
SOFTEFA_IFADDR=${ADDRESSES:+192.0.2.2} nsenter -t $peer -n "$@" 2>&1 & server=$!
until there cat /proc/net/tcp /proc/net/tcp6 | grep -q ' 0A '; do
  kill -0 $server || exit 1
  sleep 0.01
done
SOFTEFA_IFADDR=${ADDRESSES:+192.0.2.1} "$@" 192.0.2.2 2>&1 || exit 1
wait $server
"#;

/// Runs a server and a client on two hosts; returns `None` if the machine has no namespaces.
fn on_two_hosts(test: &str, program: &[&str], variables: &[(&str, &str)]) -> Option<Output> {
    let mut command = ferrogin_test_support::in_new_network(test)?;
    set_card(&mut command);
    command.args(["bash", "-c", SCRIPT, "bash"]);
    command.arg(ferrogin_test_support::workspace().join("tests/second-host.sh")).args(program);
    command.envs(variables.iter().copied());
    let output = Running::start(command).output();
    if output.status.code() == Some(77) {
        ferrogin_test_support::skip(
            test,
            "this machine allows no pair of interfaces, or has no `ip` (Debian: iproute2)",
        );
        return None;
    }
    Some(output)
}

#[test]
fn fi_pingpong_reaches_another_host() {
    let test = "fi_pingpong_reaches_another_host";
    if !have(test, "fi_pingpong", "libfabric-bin") {
        return;
    }
    for variables in [
        [("SOFTEFA_FAULTS", "seed=1"), ("ADDRESSES", "set")],
        [("SOFTEFA_FAULTS", "seed=1,reorder=64"), ("SOFTEFA_WIRE", "tcp")],
    ] {
        let program = ["fi_pingpong", "-p", "efa", "-e", "rdm", "-c"];
        let Some(output) = on_two_hosts(test, &program, &variables) else { return };
        let text = crate::text(&output);
        let good = text.lines().filter(|line| line.starts_with("1m ") && line.contains("=10")).count();
        assert_eq!(good, 2, "{text}");
    }
}

#[test]
fn program_without_libfabric_reaches_another_host() {
    let test = "program_without_libfabric_reaches_another_host";
    if !have(test, "ib_send_lat", "perftest") {
        return;
    }
    let program = ["ib_send_lat", "-c", "SRD", "-x", "0", "-d", "rdmap0s0", "-n", "100"];
    let Some(output) = on_two_hosts(test, &program, &[("ADDRESSES", "set")]) else { return };
    let text = crate::text(&output);
    assert_eq!(text.matches("99% percentile").count(), 2, "{text}");
}

#[test]
fn card_without_address_of_its_host_names_the_setting() {
    let test = "card_without_address_of_its_host_names_the_setting";
    if !have(test, "ib_send_lat", "perftest") {
        return;
    }
    let program = ["timeout", "60", "ib_send_lat", "-c", "SRD", "-x", "0", "-d", "rdmap0s0", "-n", "100"];
    let Some(output) = on_two_hosts(test, &program, &[]) else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && text.contains("SOFTEFA_IFADDR"), "{text}");
}
