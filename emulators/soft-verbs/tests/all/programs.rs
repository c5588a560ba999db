//! rdma-core's and libfabric's own programs on the card.

use crate::{Running, have, on_card, run, server_and_client};

#[test]
fn ibv_devices_lists_each_card() {
    if !have("ibv_devices_lists_each_card", "ibv_devices", "ibverbs-utils") {
        return;
    }
    let mut command = on_card("ibv_devices");
    command.env("SOFTEFA_NICS", "2");
    let text = run(command);
    assert!(text.contains("rdmap0s0") && text.contains("rdmap1s0") && !text.contains("rdmap2s0"), "{text}");
}

#[test]
fn ibv_devinfo_shows_the_card() {
    if !have("ibv_devinfo_shows_the_card", "ibv_devinfo", "ibverbs-utils") {
        return;
    }
    let shown = |address: &str| {
        let mut command = on_card("ibv_devinfo");
        command.arg("-v").env("SOFTEFA_IFADDR", address);
        let text = run(command);
        // "GID[  0]:\t\tfe80::1234:..." or "GID[  0]:\t\t5e04:7f00:..."
        let gid = text.split_once("GID[  0]:").and_then(|(_, rest)| rest.split_whitespace().next()).map(str::to_owned);
        (gid.unwrap_or_default(), text)
    };
    let (gid, text) = shown("");
    for part in ["0x1d0f", "PORT_ACTIVE", "Unspecified"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(gid.starts_with("fe80::") || gid.starts_with("fe80:0000:0000:0000:"), "{text}");
    // The GID of a card that other hosts can reach contains its address.
    let (gid, text) = shown("127.0.0.1");
    assert!(gid.starts_with("5e04:7f00:0001:") || gid.starts_with("5e04:7f00:1:"), "{text}");
}

#[test]
fn invalid_setting_is_refused_with_its_fix() {
    if !have("invalid_setting_is_refused_with_its_fix", "ibv_devices", "ibverbs-utils") {
        return;
    }
    for (name, value) in [("SOFTEFA_FAULTS", "sed=1"), ("SOFTEFA_WIRE", "verbs"), ("SOFTEFA_IFADDR", "eth0")] {
        let mut command = on_card("ibv_devices");
        command.env(name, value);
        let output = Running::start(command).output();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(name), "{name}: {text}");
    }
}

#[test]
fn fi_info_lists_the_endpoints_of_efa() {
    if !have("fi_info_lists_the_endpoints_of_efa", "fi_info", "libfabric-bin") {
        return;
    }
    let mut command = on_card("fi_info");
    command.args(["-p", "efa"]);
    let text = run(command);
    assert!(text.contains("rdmap0s0-rdm") && text.contains("rdmap0s0-dgrm"), "{text}");
}

/// Runs libfabric's ping-pong between two processes, checking the data (`-c`).
fn pingpong(test: &str, endpoint: &str, faults: &str) {
    pingpong_with(test, endpoint, &[("SOFTEFA_FAULTS", faults)]);
}

fn pingpong_with(test: &str, endpoint: &str, variables: &[(&str, &str)]) {
    if !have(test, "fi_pingpong", "libfabric-bin") {
        return;
    }
    let command = |port_flag: &str, port: &str, peer: &[&str]| {
        let mut command = on_card("fi_pingpong");
        command.args(["-p", "efa", "-e", endpoint, "-c", port_flag, port]).args(peer).envs(variables.iter().copied());
        command
    };
    let (server, client) =
        server_and_client(|port| command("-B", port, &[]), |port| command("-P", port, &["127.0.0.1"]));
    for text in [client, server] {
        let last = if endpoint == "rdm" { "1m " } else { "4k " };
        assert!(text.lines().any(|line| line.starts_with(last) && line.contains("=10")), "{text}");
    }
}

#[test]
fn fi_pingpong_over_srd_has_right_data() {
    pingpong("fi_pingpong_over_srd_has_right_data", "rdm", "seed=1");
}

#[test]
fn fi_pingpong_over_srd_has_right_data_with_reordering() {
    pingpong("fi_pingpong_over_srd_has_right_data_with_reordering", "rdm", "seed=1,reorder=64");
}

#[test]
fn fi_pingpong_over_tcp_has_right_data() {
    pingpong_with(
        "fi_pingpong_over_tcp_has_right_data",
        "rdm",
        &[("SOFTEFA_FAULTS", "seed=1"), ("SOFTEFA_WIRE", "tcp")],
    );
}

#[test]
fn fi_pingpong_over_ud_has_right_data() {
    pingpong("fi_pingpong_over_ud_has_right_data", "dgram", "seed=1");
}
