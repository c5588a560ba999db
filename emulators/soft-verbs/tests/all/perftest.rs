//! perftest's programs between two processes. They assume that an unknown card lacks `ibv_wr_*`; release 4.5 knows two
//! EFA cards.

use std::process::Command;

use crate::{have, on_card, server_and_client};

/// Runs both sides of a program over SRD queue pairs with the first GID. Each ping-pong iteration waits for both
/// processes to be scheduled.
fn perftest(test: &str, program: &str, faults: &str) {
    let iterations = if program.ends_with("lat") { "100" } else { "1000" };
    if !have(test, program, "perftest") {
        return;
    }
    let command = |port: &str| -> Command {
        let mut command = on_card(program);
        command.args(["-c", "SRD", "-x", "0", "-d", "rdmap0s0", "-n", iterations, "-p", port]);
        command.env("SOFTEFA_FAULTS", faults);
        command
    };
    let (_, client) = server_and_client(command, |port| {
        let mut command = command(port);
        command.arg("127.0.0.1");
        command
    });
    // A results row: bytes, iterations and more.
    let figures = |line: &str| line.split_whitespace().nth(1) == Some(iterations);
    assert!(client.lines().any(figures), "{client}");
}

#[test]
fn sends_by_the_old_calls() {
    perftest("sends_by_the_old_calls", "ib_send_lat", "seed=1");
}

#[test]
fn sends_with_latencies() {
    perftest("sends_with_latencies", "ib_send_lat", "device=efa1,seed=1,reorder=32");
}

#[test]
fn streams_of_sends() {
    perftest("streams_of_sends", "ib_send_bw", "device=efa1,seed=1,reorder=32");
}

#[test]
fn reads_with_latencies() {
    perftest("reads_with_latencies", "ib_read_lat", "device=efa1,seed=1,reorder=32");
}

#[test]
fn streams_of_reads() {
    perftest("streams_of_reads", "ib_read_bw", "device=efa1,seed=1,reorder=32");
}
