use super::*;
use crate::connection::{Stream, connect_once};
use crate::hub::connect_to_hub;
use crate::message::Header;
use crate::tests::{own_port, unique};
use ferrogin_test_support::peer::Peer as Process;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use ferrogin_test_support::{child, untrusted};
use std::io::{ErrorKind, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

fn rank_0(nranks: usize, address: String) -> Identity {
    Identity { rank: 0, nranks, address }
}

fn hello(rank: usize, nranks: usize, address: &str) -> Peer {
    let identity = Identity { rank, nranks, address: address.to_owned() };
    connect_to_hub(&identity, Instant::now() + HANG_LIMIT, HANG_LIMIT).unwrap()
}

/// A connection to rank 0 on which a program sends `bytes`.
fn connect(address: &str, bytes: &[u8]) -> Stream {
    let mut stream = connect_once(address, Instant::now() + HANG_LIMIT).unwrap();
    assert!(bytes.is_empty() || stream.write(bytes).unwrap() == bytes.len());
    stream
}

/// The report that rank 0 sends to a process that it refuses.
fn report(peer: &mut Peer) -> String {
    let (header, text) = peer.receive(Instant::now() + HANG_LIMIT).unwrap();
    assert_eq!(header.kind, MessageKind::Abort);
    String::from_utf8(text).unwrap()
}

#[test]
fn connections_without_hello_do_not_delay_ranks() {
    let (identity, now) = (rank_0(2, own_port()), Instant::now());
    let mut rendezvous = Rendezvous::open(&identity, now, HANG_LIMIT).unwrap();
    let header = |kind, length| Header { kind, sequence: 0, length }.emit(&[1; 16]);
    let hello_bytes = header(MessageKind::Hello, 16);
    let others = [
        vec![],
        hello_bytes[..39].to_vec(),
        b"GET / HTTP/1.1\r\nHost: example\r\nAccept: */*\r\n\r\n".to_vec(),
        header(MessageKind::Hello, 64 << 20),
        header(MessageKind::Hello, 0),
        header(MessageKind::Block, 16),
    ];
    let _others = others.map(|bytes| connect(&identity.address, &bytes));
    drop(connect(&identity.address, &[]));
    let _rank_1 = hello(1, 2, &identity.address);
    // The first two connections may still send a hello.
    wait_until("rank 1 and the end of the others", || rendezvous.poll(now).unwrap() && rendezvous.silent.len() == 2);
}

/// Rank 0 stops at its deadline, names the missing rank, and says which process it refused.
#[test]
fn wrong_hellos_over_tcp_are_refused_and_reported_at_deadline() {
    let (identity, now) = (rank_0(3, own_port()), Instant::now());
    let mut rendezvous = Rendezvous::open(&identity, now, HANG_LIMIT).unwrap();
    let _rank_1 = hello(1, 3, &identity.address);
    for (rank, nranks, problem) in [
        (3, 3, "as rank 3 of 3"),
        (0, 3, "as rank 0 of 3"),
        (1, 3, "two processes connected as rank 1"),
        (2, 4, "rank 2 was started as one of 4 ranks, but rank 0 as one of 3"),
    ] {
        let mut other = hello(rank, nranks, &identity.address);
        wait_until("refusal", || {
            assert!(!rendezvous.poll(now).unwrap());
            rendezvous.refused.as_ref().is_some_and(|text| text.contains(problem))
        });
        assert!(report(&mut other).contains(problem));
    }
    let error = rendezvous.poll(now + HANG_LIMIT).unwrap_err();
    let BootstrapError::Timeout { missing, .. } = &error else { panic!("{error}") };
    assert!(missing.starts_with("rank 2 (") && missing.contains("rank 2 was started as one of 4 ranks"), "{error}");
    // Nothing of this keeps the right process out.
    let mut rendezvous = Rendezvous { deadline: now + 2 * HANG_LIMIT, ..rendezvous };
    let _rank_2 = hello(2, 3, &identity.address);
    wait_until("rank 2", || rendezvous.poll(now).unwrap());
}

/// The user's own process is wrong, as no other one connects to a Unix socket: all ranks end at once.
#[test]
fn wrong_hello_over_unix_socket_ends_job() {
    let (identity, now) = (rank_0(3, unique("wrong-hello")), Instant::now());
    let mut rendezvous = Rendezvous::open(&identity, now, HANG_LIMIT).unwrap();
    let mut rank_1 = hello(1, 3, &identity.address);
    let mut rank_2 = hello(2, 4, &identity.address);
    assert!(!rendezvous.poll(now).unwrap());
    let error = rendezvous.poll(now).unwrap_err().to_string();
    for text in [error, report(&mut rank_1), report(&mut rank_2)] {
        assert!(text.contains("rank 2 was started as one of 4 ranks, but rank 0 as one of 3"), "{text}");
    }
}

#[test]
fn oldest_silent_connections_are_dropped() {
    let (identity, now) = (rank_0(2, unique("silent")), Instant::now());
    let mut rendezvous = Rendezvous::open(&identity, now, HANG_LIMIT).unwrap();
    let mut others = Vec::new();
    for _ in 0..SILENT_MAX + 10 {
        others.push(connect(&identity.address, &[]));
        assert!(!rendezvous.poll(now).unwrap());
    }
    assert_eq!(rendezvous.silent.len(), SILENT_MAX + 1);
    let _rank_1 = hello(1, 2, &identity.address);
    assert!(rendezvous.poll(now).unwrap());
}

#[test]
fn silent_connections_do_not_take_the_last_descriptors() {
    child::run("silent_connections_do_not_take_the_last_descriptors", &[], || {
        let (identity, now) = (rank_0(2, unique("descriptors")), Instant::now());
        let mut rendezvous = Rendezvous::open(&identity, now, HANG_LIMIT).unwrap();
        let _silent = start_holder(&identity.address, 50, false);
        let _rank_1 = hello(1, 2, &identity.address);
        assert!(untrusted::limit_descriptors(30));
        wait_until("rank 1", || rendezvous.poll(now).unwrap());
    });
}

/// A process that holds the connections that [`hold_connections`] opens.
fn start_holder(address: &str, count: usize, as_nobody: bool) -> Process {
    let mut process = untrusted::start("hold_connections", &format!("{count} {address}"), as_nobody);
    process.wait_for("connections");
    process
}

/// What the process of [`start_holder`] runs.
#[test]
fn hold_connections() {
    let Some(task) = untrusted::task() else { return };
    let (count, address) = task.split_once(' ').unwrap();
    // Not `connect_once`, which checks the user at the other end.
    let name = SocketAddr::from_abstract_name(address).unwrap();
    let held: Vec<_> = (0..count.parse().unwrap()).map(|_| UnixStream::connect_addr(&name).unwrap()).collect();
    println!("connections {}", held.len());
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
fn deadline_passes_while_another_user_connects() {
    let as_nobody = untrusted::have_second_user("deadline_passes_while_another_user_connects");
    let (identity, now) = (rank_0(2, unique("other-user")), Instant::now());
    let mut rendezvous = Rendezvous::open(&identity, now, HANG_LIMIT).unwrap();
    let _other = start_holder(&identity.address, 10, as_nobody);
    assert!(!rendezvous.poll(now).unwrap());
    let error = rendezvous.poll(now + HANG_LIMIT).unwrap_err();
    assert!(matches!(&error, BootstrapError::Timeout { missing, .. } if missing == "rank 1"), "{error}");
    // The first call looked at one connection, the second one at none.
    let waiting = std::iter::from_fn(|| {
        let result = rendezvous.listener.accept();
        let is_none = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
        (!result.as_ref().is_err_and(is_none)).then_some(result)
    });
    assert_eq!(waiting.count(), 9);
}
