//! Two processes on one host, over shared memory.

use std::sync::atomic::Ordering;

use efa_dp_direct::wire::CompStatus;
use efa_dp_direct::wqe::RemoteMem;
use ferrogin_test_support::child::full_name;
use softefa_rig::peer::{PEER_BUFFER, Peer, serve};
use softefa_rig::*;

/// Not a test: what the second process runs.
#[test]
fn peer() {
    serve();
}

fn at(memory: RemoteMem, offset: u64) -> RemoteMem {
    RemoteMem { addr: memory.addr + offset, ..memory }
}

#[test]
fn writes_and_reads_cross_processes() {
    let Some(rig) = Rig::for_test("writes_and_reads_cross_processes") else { return };
    let mut a = End::open(&rig);
    let buffer = rig.buffer(PEER_BUFFER);
    let mut peer = Peer::start(&[]);
    peer.connect(&a.name());
    let to = a.connect(&peer.name);
    buffer.word(0).store(42, Ordering::Relaxed);
    a.post(to, write(at(peer.memory, 80), buffer.sge(0, 8)));
    assert_eq!(peer.ask("remote 1"), "1");
    assert_eq!(peer.ask("word 10"), "42");
    a.wait_done(1);
    assert_eq!(a.next_status().1, CompStatus::Ok);
    buffer.fill(5);
    a.post(to, write(peer.memory, buffer.sge(0, PEER_BUFFER as u32)));
    a.wait_done(2);
    assert_eq!(peer.ask("matches 5"), "true");
    assert_eq!(peer.ask("remote 2"), "2");
    assert_eq!(peer.ask("fill 6"), "ok");
    a.post(to, read(peer.memory, buffer.sge(0, PEER_BUFFER as u32)));
    a.wait_done(3);
    assert!(buffer.matches(6));
    // The other direction opens its own connection.
    let command = format!("write {} {} {PEER_BUFFER} 7", buffer.at as u64, buffer.region.rkey);
    assert_eq!(peer.ask(&command), "1 0");
    assert!(buffer.matches(7));
    assert_eq!((a.local(), a.errors(), a.remote()), (3, 0, 1));
    peer.finish();
}

#[test]
fn closing_card_answers_first() {
    let Some(rig) = Rig::for_test("closing_card_answers_first") else { return };
    let mut a = End::open(&rig);
    let buffer = rig.buffer(64);
    for n in 1..=4 {
        let mut peer = Peer::start(&[]);
        peer.connect(&a.name());
        let to = a.connect(&peer.name);
        // The peer exits as soon as it has the write: the answer that it still owes must not be lost.
        assert_eq!(peer.ask("exit_after 1"), "ok");
        a.post(to, write(peer.memory, buffer.sge(0, 8)));
        assert_eq!(a.next_status().1, CompStatus::Ok, "peer {n}");
        peer.finish_without_word();
    }
}

#[test]
fn refusals_reach_requester() {
    let Some(rig) = Rig::for_test("refusals_reach_requester") else { return };
    let mut a = End::open(&rig);
    let buffer = rig.buffer(PEER_BUFFER);
    let mut peer = Peer::start(&[]);
    let to = a.connect(&peer.name);
    a.post(to, write(peer.memory, buffer.sge(0, 8)));
    assert_eq!(a.next_status().1, CompStatus::RemoteUnknownPeer, "it has not inserted our address");
    peer.connect(&a.name());
    a.post(to, write(at(peer.memory, PEER_BUFFER as u64), buffer.sge(0, 8)));
    assert_eq!(a.next_status().1, CompStatus::RemoteBadAddress);
    a.post(to, write(at(peer.memory, 8), buffer.sge(0, PEER_BUFFER as u32)));
    assert_eq!(a.next_status().1, CompStatus::RemoteBadAddress, "in many pieces");
    a.post(to, read(at(peer.memory, 8), buffer.sge(0, PEER_BUFFER as u32)));
    assert_eq!(a.next_status().1, CompStatus::RemoteBadAddress);
    a.post(to, write(peer.memory, buffer.sge(0, 8)));
    assert_eq!(a.next_status().1, CompStatus::Ok);
    assert_eq!(peer.ask("remote 1"), "1");
    a.wait_done(5);
    assert_eq!((a.local(), a.errors()), (1, 4));
    peer.finish();
}

#[test]
fn requests_to_killed_peer_fail() {
    let Some(rig) = Rig::for_test("requests_to_killed_peer_fail") else { return };
    let mut a = End::open(&rig);
    let buffer = rig.buffer(PEER_BUFFER);
    let mut peer = Peer::start(&[]);
    peer.connect(&a.name());
    let to = a.connect(&peer.name);
    a.post(to, write(peer.memory, buffer.sge(0, 8)));
    a.wait_done(1);
    assert_eq!(a.next_status().1, CompStatus::Ok);
    // Stopped first, so that requests are under way when it dies.
    peer.stop();
    for _ in 0..20 {
        a.post(to, write(peer.memory, buffer.sge(0, 1 << 20)));
    }
    peer.kill();
    for _ in 0..20 {
        assert_eq!(a.next_status().1, CompStatus::LocalUnresponsiveRemote);
    }
    a.wait_done(21);
    a.post(to, write(peer.memory, buffer.sge(0, 8)));
    assert_eq!(a.next_status().1, CompStatus::LocalUnresponsiveRemote, "stays unresponsive");
    a.wait_done(22);
    assert_eq!((a.local(), a.errors()), (1, 21));
}

#[test]
fn connect_to_missing_card_fails() {
    let Some(rig) = Rig::for_test("connect_to_missing_card_fails") else { return };
    let mut a = End::open(&rig);
    let buffer = rig.buffer(64);
    let mut peer = Peer::start(&[]);
    let to = a.connect(&peer.name);
    peer.kill();
    a.post(to, write(peer.memory, buffer.sge(0, 8)));
    assert_eq!(a.next_status().1, CompStatus::LocalUnreachableRemote);
}

#[test]
fn address_of_another_version_is_refused() {
    let Some(rig) = Rig::for_test("address_of_another_version_is_refused") else { return };
    let a = End::open(&rig);
    let mut name = a.name();
    name[1] += 1;
    assert_eq!(a.insert(&name), (0, u64::MAX));
}

/// The same tests over the wire between hosts.
#[test]
fn everything_works_over_tcp() {
    if !have_libfabric("everything_works_over_tcp") {
        return;
    }
    let tests = [
        "writes_and_reads_cross_processes",
        "refusals_reach_requester",
        "requests_to_killed_peer_fail",
        "closing_card_answers_first",
    ];
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--test-threads=1"]).args(tests.map(full_name)).env("SOFTEFA_WIRE", "tcp");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("4 passed"), "{text}");
}
