//! Calls over mlx5 queue pairs of the software card, or of the ConnectX card in FERROGIN_MLX5.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use crate::calls::{ECHO, LIMIT, TransportFactory, calls, server};
use crate::peer::Peer;
use ferrogin_test_support::wait;
use host_rpc::mlx5::{Config, ConnectError, Connection, Connector, HELLO};
use host_rpc::{Client, Payload, RpcError, ServerHandle, Settings, Transport, TransportError};
use mlx5::device::Device;
use mlx5::wire::Syndrome;
use mlx5::wqe::With;
use soft_mlx5::Settings as CardSettings;
use soft_mlx5::cq_writer::CompressedLayout;

/// Returns a card; those of every other pair have the compressed layout that rdma-core creates.
fn card(seed: u64) -> Arc<dyn Device> {
    let compressed_layout = if seed & 2 == 0 { CompressedLayout::Enhanced } else { CompressedLayout::Basic };
    soft_mlx5::open(CardSettings { seed: Some(seed), compressed_layout, ..CardSettings::default() }).unwrap()
}

pub fn pair(seed: u64, config: &Config) -> (Connection, Connection) {
    let (a, b) = (Connector::new(&card(seed), config).unwrap(), Connector::new(&card(seed + 1), config).unwrap());
    let (hello_a, hello_b) = (a.hello(), b.hello());
    (a.connect(&hello_b, "the server").unwrap(), b.connect(&hello_a, "the client").unwrap())
}

/// Connections of these sizes, each between its own two cards.
struct Cards {
    config: Config,
    seed: AtomicU64,
}

impl TransportFactory for Cards {
    type End = Connection;

    fn pair(&self) -> (Connection, Connection) {
        pair(self.seed.fetch_add(2, Ordering::Relaxed), &self.config)
    }
}

/// Returns the default sizes; few and small slots, so that every ring wraps, most bodies go through windows and
/// compressed blocks are common; and the same without compression.
fn sizes(_: &str) -> [Cards; 3] {
    let small = Config { eager: 1024, sends: 4, receives: 8, compression: true };
    let configs = [Config::default(), small, Config { compression: false, ..small }];
    configs.map(|config| Cards { config, seed: AtomicU64::new(1000) })
}

calls!(over_mlx5, sizes);

fn connected(seed: u64, config: &Config, settings: &Settings) -> (ServerHandle, Client) {
    let (here, there) = pair(seed, config);
    let running = server(settings.clone());
    running.attach(there);
    (running, Client::new(here, settings.clone()))
}

#[test]
fn long_bodies_go_through_windows() {
    let settings = Settings { piece: 8 << 20, inline: 4096, ..Settings::default() };
    let (_running, client) = connected(3, &Config::default(), &settings);
    let bytes: Arc<Vec<u8>> = Arc::new((0..20 << 20_u32).map(|at| (at % 251) as u8).collect());
    for len in [1 << 20, 3 << 20] {
        let body = bytes[..len].to_vec();
        assert!(client.call(ECHO, body.clone(), LIMIT).wait().unwrap().into_vec() == body);
    }
    let answer = client.call(ECHO, Arc::clone(&bytes), LIMIT).wait().unwrap();
    assert!(answer.bytes() == *bytes);
    assert_eq!(Arc::strong_count(&bytes), 1, "the body is no longer shared");
}

/// Receives the next message at one end.
fn receive(end: &Connection) -> Result<Vec<u8>, TransportError> {
    let (sender, receiver) = mpsc::channel();
    end.receive(Box::new(move |result| sender.send(result).unwrap()));
    wait::receive("a callback", &receiver)
}

#[test]
fn messages_and_callbacks_keep_their_order() {
    let (a, b) = pair(7, &Config { eager: 256, sends: 3, receives: 4, compression: true });
    let (sender, receiver) = mpsc::channel();
    let lens = |number: usize| [10, 5000, 0, 256, 257, 70_000][number % 6];
    for number in 0..120 {
        let sender = sender.clone();
        let bytes = Payload::from(vec![number as u8; lens(number)]);
        a.send(bytes, Box::new(move |result| sender.send((number, result)).unwrap()));
    }
    for number in 0..120 {
        assert!(receive(&b).unwrap() == vec![number as u8; lens(number)], "message {number}");
    }
    for number in 0..120 {
        assert_eq!(wait::receive("a callback", &receiver), (number, Ok(())));
    }
}

#[test]
fn close_sends_queued_messages_and_ends_both_ends() {
    let (a, b) = pair(9, &Config::default());
    a.send(Payload::from(vec![1; 100_000]), Box::new(|result| result.unwrap()));
    a.close(LIMIT);
    assert_eq!(receive(&b).unwrap().len(), 100_000);
    assert_eq!(receive(&b), Err(TransportError::Closed));
    assert_eq!(receive(&a), Err(TransportError::Closed));
    let (sender, receiver) = mpsc::channel();
    b.send(Payload::from(vec![1]), Box::new(move |result| sender.send(result).unwrap()));
    assert_eq!(wait::receive("a callback", &receiver), Err(TransportError::Closed));
}

/// A close loses no message, however late the peer receives them.
#[test]
fn messages_sent_before_a_close_wait_for_their_receives() {
    for Cards { config, .. } in sizes("") {
        let (a, b) = pair(31, &config);
        let lens = |number: usize| [10, 5000, 0, 1025, 70_000][number % 5];
        for number in 0..100 {
            a.send(Payload::from(vec![number as u8; lens(number)]), Box::new(|result| result.unwrap()));
        }
        assert!(!a.is_closed());
        a.close(LIMIT);
        wait::wait_until("the close", || a.is_closed());
        drop(a);
        for number in 0..100 {
            assert!(receive(&b).unwrap() == vec![number as u8; lens(number)], "message {number}");
        }
        assert_eq!(receive(&b), Err(TransportError::Closed));
    }
}

#[test]
fn invalid_hellos_and_sizes_are_rejected() {
    let config = Config { eager: 64, ..Config::default() };
    let other = Connector::new(&card(11), &config).unwrap();
    let own = Connector::new(&card(12), &config).unwrap();
    let (mut hello, of_other) = (own.hello(), other.hello());
    hello[1] = b'2';
    assert!(matches!(other.connect(&hello, "a malformed peer"), Err(ConnectError::Hello)));
    assert!(matches!(own.connect(&[0; HELLO], "a malformed peer"), Err(ConnectError::Hello)));
    assert_ne!(of_other, [0; HELLO]);
    for bad in [Config { sends: 1, ..config }, Config { eager: 8, ..config }, Config { eager: u32::MAX, ..config }] {
        assert!(matches!(Connector::new(&card(13), &bad), Err(ConnectError::Config(_))));
    }
}

#[test]
fn every_call_ends_when_peer_dies() {
    let mut child = example(&["server"]);
    let address = first_line(&mut child);
    let stream = TcpStream::connect(address.trim()).unwrap();
    let connector = Connector::new(&card(15), &Config::default()).unwrap();
    let client = Client::new(connector.connect_over(stream, "the example").unwrap(), Settings::default());
    client.call(ECHO, b"hello".to_vec(), LIMIT).wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let error = client.call(ECHO, vec![0; 1 << 20], LIMIT).wait().unwrap_err();
    assert!(matches!(error, RpcError::Disconnected { .. }), "{error}");
}

/// No work request is outstanding, so none fails: the connection probes its peer.
#[test]
fn idle_end_detects_dead_peer() {
    let mut child = example(&["server"]);
    let address = first_line(&mut child);
    let stream = TcpStream::connect(address.trim()).unwrap();
    let connector = Connector::new(&card(19), &Config::default()).unwrap();
    let end = connector.connect_over(stream, "the example").unwrap();
    receive(&end).expect("the server's hello");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(receive(&end), Err(TransportError::Failed(_))));
}

/// The window of a long message is valid until the message that invalidates it, and no longer.
#[test]
fn window_is_invalid_after_reply() {
    for (late, before_reply) in
        [(LateAccess::Read, true), (LateAccess::Read, false), (LateAccess::Write, true), (LateAccess::Write, false)]
    {
        let connector = Connector::new(&card(23), &Config::default()).unwrap();
        let mut peer = Peer::new(card(24), &connector.hello());
        let end = connector.connect(&peer.hello(), "the peer").unwrap();
        let body: Vec<u8> = (0..300_000_u32).map(|at| (at * 3) as u8).collect();
        let (sender, finished) = mpsc::channel();
        // If the peer breaks the connection, the test does not wait for this callback.
        end.send(Payload::from(body.clone()), Box::new(move |result| drop(sender.send(result))));
        let (length, rkey) = peer.receive_rts();
        assert_eq!(length, body.len() as u64);
        assert!(peer.read(rkey, length).unwrap() == body, "the window is readable");
        if !before_reply {
            assert!(finished.try_recv().is_err(), "the send does not finish before the window is invalidated");
            peer.reply(b"a reply", With::Invalidate(rkey));
            assert_eq!(wait::receive("a callback", &finished), Ok(()));
            assert_eq!(receive(&end).unwrap(), b"a reply");
        }
        let outcome = match late {
            LateAccess::Read => peer.read(rkey, 8).map(drop),
            LateAccess::Write => peer.write(rkey),
        };
        // The window allows reads only, and none after the invalidation.
        let open = before_reply && matches!(late, LateAccess::Read);
        assert_eq!(outcome, if open { Ok(()) } else { Err(Syndrome::RemoteAccess) });
    }
}

#[derive(Clone, Copy)]
enum LateAccess {
    Read,
    Write,
}

#[test]
fn invalidating_wrong_key_breaks_connection() {
    let connector = Connector::new(&card(25), &Config::default()).unwrap();
    let mut peer = Peer::new(card(26), &connector.hello());
    let end = connector.connect(&peer.hello(), "the peer").unwrap();
    end.send(Payload::from(vec![1; 100_000]), Box::new(drop));
    let (_, rkey) = peer.receive_rts();
    // Posted before the end, because a later receive would only end with `Closed`.
    let (sender, outcome) = mpsc::channel();
    end.receive(Box::new(move |result| sender.send(result).unwrap()));
    // The key of another bind of the same window: the card rejects the invalidation, and both ends fail.
    peer.reply(b"a reply", With::Invalidate(rkey ^ 1));
    assert!(matches!(wait::receive("a callback", &outcome), Err(TransportError::Failed(_))));
}

fn example(args: &[&str]) -> std::process::Child {
    let here = std::env::current_exe().unwrap();
    let examples = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples");
    let mut command = Command::new(examples.join("mlx5_echo"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the example starts")
}

fn first_line(child: &mut std::process::Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line
}

#[test]
fn example_echoes_between_two_processes() {
    let mut server = example(&["server"]);
    let address = first_line(&mut server);
    let output = example(&["client", address.trim(), "hello there"]).wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hello there\n");
    server.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(server.wait().unwrap().success());
}

#[test]
fn two_processes_echo_short_and_long_bodies() {
    let mut child = example(&["server"]);
    let address = first_line(&mut child);
    let stream = TcpStream::connect(address.trim()).unwrap();
    let connector = Connector::new(&card(21), &Config::default()).unwrap();
    let client = Client::new(connector.connect_over(stream, "the example").unwrap(), Settings::default());
    for (bytes, at_a_time, calls) in [(64, 1, 50), (64, 32, 1000), (1 << 20, 1, 5), (1 << 20, 4, 12)] {
        let body = |number: usize| (0..bytes).map(|at| (at * 7 + at / 256 + number) as u8).collect::<Vec<u8>>();
        let mut calls_open = VecDeque::new();
        for number in 0..calls {
            if calls_open.len() == at_a_time {
                let (number, call): (usize, host_rpc::Call) = calls_open.pop_front().unwrap();
                assert!(call.wait().unwrap().into_vec() == body(number), "call {number} of {bytes} bytes");
            }
            calls_open.push_back((number, client.call(ECHO, body(number), LIMIT)));
        }
        for (number, call) in calls_open {
            assert!(call.wait().unwrap().into_vec() == body(number), "call {number} of {bytes} bytes");
        }
    }
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
}

/// A stream that ends early is an error, not a hang.
#[test]
fn missing_hello_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    drop(listener.accept().unwrap());
    let connector = Connector::new(&card(17), &Config::default()).unwrap();
    assert!(matches!(connector.connect_over(stream, "the peer"), Err(ConnectError::Exchange(_))));
}
