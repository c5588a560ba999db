//! Calls over mlx5 queue pairs of the software card.

mod calls;
mod peer;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};

use calls::{ECHO, LIMIT, Wire, calls, server};
use host_rpc::mlx5::{Config, Connection, HELLO, OpenError, Opening};
use host_rpc::{Bytes, Client, RpcError, Running, Settings, Transport, TransportError};
use mlx5::device::Device;
use mlx5::wire::Syndrome;
use mlx5::wqe::With;
use peer::Peer;
use soft_mlx5::{Card, Settings as CardSettings};

fn card(seed: u64) -> Arc<dyn Device> {
    Arc::new(Card::open(CardSettings { seed: Some(seed), ..CardSettings::default() }).unwrap())
}

fn pair(seed: u64, config: &Config) -> (Connection, Connection) {
    let (a, b) = (Opening::new(&card(seed), config).unwrap(), Opening::new(&card(seed + 1), config).unwrap());
    let (hello_a, hello_b) = (a.hello(), b.hello());
    (a.connect(&hello_b, "the server").unwrap(), b.connect(&hello_a, "the client").unwrap())
}

/// Connections of such sizes, each between two cards of its own.
struct Cards {
    config: Config,
    seed: AtomicU64,
}

impl Wire for Cards {
    type End = Connection;

    fn pair(&self) -> (Connection, Connection) {
        pair(self.seed.fetch_add(2, Ordering::Relaxed), &self.config)
    }
}

/// As it usually is; with few and small slots, so that every ring wraps, most bodies go through windows and compressed blocks are
/// common; and the same without compression.
fn sizes(_: &str) -> [Cards; 3] {
    let small = Config { eager: 1024, sends: 4, receives: 8, compression: true };
    let configs = [Config::default(), small, Config { compression: false, ..small }];
    configs.map(|config| Cards { config, seed: AtomicU64::new(1000) })
}

calls!(over_mlx5, sizes);

fn connected(seed: u64, config: &Config, settings: &Settings) -> (Running, Client) {
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
    assert_eq!(Arc::strong_count(&bytes), 1, "nobody holds the body any more");
}

/// What one end was told, in order.
fn receive(end: &Connection) -> Result<Vec<u8>, TransportError> {
    let (sender, receiver) = mpsc::channel();
    end.receive(Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv_timeout(LIMIT).expect("a callback")
}

#[test]
fn messages_and_callbacks_keep_their_order() {
    let (a, b) = pair(7, &Config { eager: 256, sends: 3, receives: 4, compression: true });
    let (sender, receiver) = mpsc::channel();
    let lens = |number: usize| [10, 5000, 0, 256, 257, 70_000][number % 6];
    for number in 0..120 {
        let sender = sender.clone();
        let bytes = Bytes::Owned(vec![number as u8; lens(number)]);
        a.send(bytes, Box::new(move |result| sender.send((number, result)).unwrap()));
    }
    for number in 0..120 {
        assert!(receive(&b).unwrap() == vec![number as u8; lens(number)], "message {number}");
    }
    for number in 0..120 {
        assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), (number, Ok(())));
    }
}

#[test]
fn closing_lets_out_what_was_sent_and_ends_both_sides() {
    let (a, b) = pair(9, &Config::default());
    a.send(Bytes::Owned(vec![1; 100_000]), Box::new(|result| result.unwrap()));
    a.close(LIMIT);
    assert_eq!(receive(&b).unwrap().len(), 100_000);
    assert_eq!(receive(&b), Err(TransportError::Closed));
    assert_eq!(receive(&a), Err(TransportError::Closed));
    let (sender, receiver) = mpsc::channel();
    b.send(Bytes::Owned(vec![1]), Box::new(move |result| sender.send(result).unwrap()));
    assert_eq!(receiver.recv_timeout(LIMIT).unwrap(), Err(TransportError::Closed));
}

#[test]
fn a_peer_that_breaks_the_protocol_loses_the_connection() {
    let config = Config { eager: 64, ..Config::default() };
    let other = Opening::new(&card(11), &config).unwrap();
    let own = Opening::new(&card(12), &config).unwrap();
    let (mut hello, of_other) = (own.hello(), other.hello());
    hello[1] = b'2';
    assert!(matches!(other.connect(&hello, "a stranger"), Err(OpenError::Hello)));
    assert!(matches!(own.connect(&[0; HELLO], "a stranger"), Err(OpenError::Hello)));
    assert_ne!(of_other, [0; HELLO]);
    for bad in [Config { sends: 1, ..config }, Config { eager: 8, ..config }, Config { eager: u32::MAX, ..config }] {
        assert!(matches!(Opening::new(&card(13), &bad), Err(OpenError::Config(_))));
    }
}

#[test]
fn a_peer_that_dies_ends_every_call() {
    let mut child = example(&["server"]);
    let address = first_line(&mut child);
    let stream = TcpStream::connect(address.trim()).unwrap();
    let opening = Opening::new(&card(15), &Config::default()).unwrap();
    let client = Client::new(opening.over(stream, "the example").unwrap(), Settings::default());
    client.call(ECHO, b"hello".to_vec(), LIMIT).wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let error = client.call(ECHO, vec![0; 1 << 20], LIMIT).wait().unwrap_err();
    assert!(matches!(error, RpcError::Lost { .. }), "{error}");
}

/// Nothing is under way, so no request fails: the connection looks for its peer by itself.
#[test]
fn a_peer_that_dies_is_noticed_by_an_idle_end() {
    let mut child = example(&["server"]);
    let address = first_line(&mut child);
    let stream = TcpStream::connect(address.trim()).unwrap();
    let opening = Opening::new(&card(19), &Config::default()).unwrap();
    let end = opening.over(stream, "the example").unwrap();
    receive(&end).expect("the server's hello");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(receive(&end), Err(TransportError::Failed(_))));
}

/// The window of a long message is there until the message that gives it back, and not a moment longer.
#[test]
fn a_window_is_dead_after_the_reply() {
    for (late, before_reply) in [(Late::Read, true), (Late::Read, false), (Late::Write, true), (Late::Write, false)] {
        let opening = Opening::new(&card(23), &Config::default()).unwrap();
        let mut peer = Peer::new(card(24), &opening.hello());
        let end = opening.connect(&peer.hello(), "the peer").unwrap();
        let body: Vec<u8> = (0..300_000_u32).map(|at| (at * 3) as u8).collect();
        let (sender, over) = mpsc::channel();
        // Where the peer breaks the connection nobody waits for the end.
        end.send(Bytes::Owned(body.clone()), Box::new(move |result| drop(sender.send(result))));
        let (length, rkey) = peer.offer();
        assert_eq!(length, body.len() as u64);
        assert!(peer.read(rkey, length).unwrap() == body, "the window is open");
        if !before_reply {
            assert!(over.try_recv().is_err(), "the message is not over before the window is given back");
            peer.reply(b"a reply", With::Invalidate(rkey));
            assert_eq!(over.recv_timeout(LIMIT).unwrap(), Ok(()));
            assert_eq!(receive(&end).unwrap(), b"a reply");
        }
        let outcome = match late {
            Late::Read => peer.read(rkey, 8).map(drop),
            Late::Write => peer.write(rkey),
        };
        // Reading is the window's only right, while it has one.
        let open = before_reply && matches!(late, Late::Read);
        assert_eq!(outcome, if open { Ok(()) } else { Err(Syndrome::RemoteAccess) });
    }
}

#[derive(Clone, Copy)]
enum Late {
    Read,
    Write,
}

#[test]
fn a_peer_cannot_take_back_what_it_was_not_lent() {
    let opening = Opening::new(&card(25), &Config::default()).unwrap();
    let mut peer = Peer::new(card(26), &opening.hello());
    let end = opening.connect(&peer.hello(), "the peer").unwrap();
    end.send(Bytes::Owned(vec![1; 100_000]), Box::new(drop));
    let (_, rkey) = peer.offer();
    // Asked before, for what is asked after the end is told only that it is over.
    let (sender, told) = mpsc::channel();
    end.receive(Box::new(move |result| sender.send(result).unwrap()));
    // The tag of another bind of the same window: the card refuses, and both ends learn it.
    peer.reply(b"a reply", With::Invalidate(rkey ^ 1));
    assert!(matches!(told.recv_timeout(LIMIT).unwrap(), Err(TransportError::Failed(_))));
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
fn the_example_talks_to_itself_in_two_processes() {
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
    let opening = Opening::new(&card(21), &Config::default()).unwrap();
    let client = Client::new(opening.over(stream, "the example").unwrap(), Settings::default());
    for (bytes, at_a_time, calls) in [(64, 1, 500), (64, 32, 4000), (1 << 20, 1, 20), (1 << 20, 4, 40)] {
        let body = |number: usize| (0..bytes).map(|at| (at * 7 + at / 256 + number) as u8).collect::<Vec<u8>>();
        let mut asked = VecDeque::new();
        for number in 0..calls {
            if asked.len() == at_a_time {
                let (number, call): (usize, host_rpc::Call) = asked.pop_front().unwrap();
                assert!(call.wait().unwrap().into_vec() == body(number), "call {number} of {bytes} bytes");
            }
            asked.push_back((number, client.call(ECHO, body(number), LIMIT)));
        }
        for (number, call) in asked {
            assert!(call.wait().unwrap().into_vec() == body(number), "call {number} of {bytes} bytes");
        }
    }
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(child.wait().unwrap().success());
}

/// A stream that ends early is an error, not a hang.
#[test]
fn a_hello_that_does_not_come_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    drop(listener.accept().unwrap());
    let opening = Opening::new(&card(17), &Config::default()).unwrap();
    assert!(matches!(opening.over(stream, "nobody"), Err(OpenError::Exchange(_))));
}
