//! A card next to processes that are not cards: another user's, ones on TCP without the card's secret, and silent ones
//! by the thousand.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

use efa_dp_direct::wire::CompStatus;
use ferrogin_test_support::child::full_name;
use ferrogin_test_support::peer::{hex, unhex};
use ferrogin_test_support::untrusted::limit_descriptors;
use ferrogin_test_support::{Random, resident_bytes};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr};
use nix::unistd;
use softefa_rig::child::run;
use softefa_rig::peer::Peer;
use softefa_rig::wire::{self, ACK, OURS, WRITE, header};
use softefa_rig::*;

const ATTACKER: &str = "SOFTEFA_TEST_ATTACKER";
/// Neither wire is chosen: the card listens on both.
const BOTH_WIRES: [(&str, &str); 1] = [("SOFTEFA_WIRE", "")];
/// How many silent connections there are, and how many descriptors the card's process may have.
const SILENT: usize = 3000;
const FEW: u64 = 512;

/// An attacker's process, and the lines that it prints.
struct Attacker {
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Attacker {
    /// Starts the process, as the user `nobody` if `as_nobody`, which needs root.
    fn start(does: &str, as_nobody: bool) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(if as_nobody { "setpriv".as_ref() } else { program.as_os_str() });
        if as_nobody {
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
        }
        command.args(["--exact", &full_name("attacker"), "--nocapture", "--test-threads=1"]).env(ATTACKER, does);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        Self { process, lines }
    }

    /// Returns what it says next.
    fn says(&mut self) -> String {
        let mut line = String::new();
        while !line.contains('@') {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the attacker ended");
        }
        line[line.find('@').unwrap() + 1..].trim_end().to_owned()
    }

    fn finish(mut self) {
        drop(self.process.stdin.take());
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn say(line: &str) {
    println!("@{line}");
    std::io::stdout().flush().unwrap();
}

/// What the other process runs.
#[test]
fn attacker() {
    let Ok(does) = std::env::var(ATTACKER) else { return };
    let words: Vec<&str> = does.split(' ').collect();
    let card = unhex(words[1]);
    match words[0] {
        "calls" => call_as_another_user(&card),
        "holds-sockets" => hold(|| connect(&wire::abstract_name(&card)).ok()),
        "holds-tcp" => hold(|| TcpStream::connect(wire::socket_of(&card)).ok()),
        "attacks" => attack(&card, words[2].parse().unwrap(), words[3].parse().unwrap(), words[4].parse().unwrap()),
        "claims" => claim_this_host(&card),
        other => panic!("{other}"),
    }
    let _ = std::io::stdin().read(&mut [0]);
}

fn connect(name: &str) -> nix::Result<OwnedFd> {
    let socket = socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    socket::connect(socket.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?)?;
    Ok(socket)
}

/// Holds as many connections as it can get.
fn hold<T>(mut connect: impl FnMut() -> Option<T>) {
    assert!(limit_descriptors(SILENT as u64 + 100), "no room for {SILENT} descriptors");
    let held: Vec<T> = (0..SILENT).filter_map(|_| connect()).collect();
    say(&held.len().to_string());
    let _ = std::io::stdin().read(&mut [0]);
}

/// Knows everything, even the secret, but is another user.
fn call_as_another_user(card: &[u8]) {
    let names = std::fs::read_to_string("/proc/net/unix").unwrap();
    assert!(names.contains(&wire::abstract_name(card)), "the card listens");
    assert!(!names.contains(&hex(&card[8..16])) && !names.contains(&hex(&card[8..12])), "no secret is in a name");
    let socket = connect(&wire::abstract_name(card)).unwrap();
    let own = wire::address(1, 77);
    let sent = socket::send(socket.as_raw_fd(), &wire::hello(OURS, &own, card, &[1; 16]), MsgFlags::MSG_NOSIGNAL);
    let received = socket::recv(socket.as_raw_fd(), &mut [0; 64], MsgFlags::empty());
    // The card closes at once, so the hello may not have been sent either.
    assert!(matches!(received, Ok(0) | Err(nix::errno::Errno::ECONNRESET)), "{sent:?} {received:?}");
    say("refused");
}

/// Returns the GID that this process would have as a card on the same host.
fn beside(card: &[u8]) -> [u8; 32] {
    let mut own = wire::address(7, 77);
    own[2..6].copy_from_slice(&card[2..6]);
    own
}

/// Knows the card's address without its secret, a queue pair with its QKey, and memory with its key.
fn attack(card: &[u8], addr: u64, rkey: u32, rounds: usize) {
    let own = beside(card);
    let mut random = Random::new(16);
    let mut write = header(WRITE, 8);
    write[4..6].copy_from_slice(&card[16..18]);
    write[8..12].copy_from_slice(&card[20..24]);
    write[12..16].copy_from_slice(&rkey.to_le_bytes());
    write[16..24].copy_from_slice(&addr.to_le_bytes());
    let write = [&write[..], b"attacked"].concat();
    let hello = wire::hello(OURS, &own, card, &[1; 16]);
    let confirm = wire::confirm(&own, card, &[1; 16], &[3; 56]);
    for round in 0..rounds {
        let mut ack = header(ACK, 0);
        ack[40..48].copy_from_slice(&random.next_u64().to_le_bytes());
        if round % 2 == 0 {
            ack[40..48].copy_from_slice(&(round as u64).to_le_bytes());
        }
        let noise: Vec<u8> = (0..random.next_u64() % 600).map(|_| random.next_u64() as u8).collect();
        let message = match round % 5 {
            0 => [&hello[..], &confirm, &write, &ack].concat(),
            1 => hello[..round % hello.len()].to_vec(),
            2 => [&write[..], &ack].concat(),
            3 => wire::welcome(card, &hello, &[3; 16]),
            _ => noise,
        };
        let mut stream = TcpStream::connect(wire::socket_of(card)).unwrap();
        // The card may close before it has read everything.
        let _ = stream.write_all(&message);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer == wire::refusal(OURS), "the card answers an attacker: {answer:x?}");
    }
    say("done");
}

/// Knows the card's secret, and claims over TCP to be a card on the same host.
fn claim_this_host(card: &[u8]) {
    let mut stream = TcpStream::connect(wire::socket_of(card)).unwrap();
    stream.write_all(&wire::hello(OURS, &beside(card), card, &[1; 16])).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, wire::refusal(OURS));
    say("refused");
}

/// Starts a new peer, connects in both directions, and exchanges writes.
fn exchange(a: &mut End, buffer: &Buffer) {
    let mut peer = Peer::start(&BOTH_WIRES);
    peer.connect(&a.name());
    let to = a.connect(&peer.name);
    let (done, remote) = (a.local() + 1, a.remote());
    buffer.word(0).store(42, Ordering::Relaxed);
    a.post(to, write(peer.memory, buffer.sge(0, 8)));
    a.wait_done(done);
    assert_eq!(a.next_status().1, CompStatus::Ok);
    assert_eq!(peer.ask("word 0"), "42");
    let command = format!("write {} {} 64 7", buffer.at as u64, buffer.region.rkey);
    assert_eq!(peer.ask(&command), "1 0");
    assert_eq!((a.remote(), a.errors()), (remote + 1, 0));
    peer.finish();
}

/// Runs `body` with a card's endpoint and memory, and returns what the card logged.
fn with_card(test: &str, body: impl FnOnce(&mut End, &Buffer)) -> Option<String> {
    run(test, &BOTH_WIRES, || {
        let rig = Rig::open();
        let mut a = End::open(&rig);
        let buffer = rig.buffer(64);
        body(&mut a, &buffer);
    })
}

/// What this process writes to standard error, captured so that a test can wait for a line of the card's. It is passed
/// on at the end.
struct Log {
    file: File,
    stderr: OwnedFd,
}

impl Log {
    fn take() -> Self {
        let file = memfd_create(c"log", MFdFlags::MFD_CLOEXEC).unwrap().into();
        let stderr = unistd::dup(std::io::stderr()).unwrap();
        unistd::dup2_stderr(&file).unwrap();
        Self { file, stderr }
    }

    fn text(&self) -> String {
        let mut bytes = vec![0; self.file.metadata().unwrap().len() as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn contains(&self, part: &str) -> bool {
        self.text().contains(part)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        unistd::dup2_stderr(&self.stderr).unwrap();
        eprint!("{}", self.text());
    }
}

/// Whether a process can be started as another user, which needs root.
fn have_second_user(test: &str) -> bool {
    let have = unistd::geteuid().is_root()
        && Command::new("setpriv").args(["--reuid=65534", "true"]).status().is_ok_and(|status| status.success());
    if !have {
        ferrogin_test_support::skip(
            &format!("{test} as another user"),
            "needs root and setpriv (apt-get install util-linux)",
        );
    }
    have
}

#[test]
fn second_user_is_refused_even_with_the_secret() {
    let test = "second_user_is_refused_even_with_the_secret";
    if !have_second_user(test) {
        return;
    }
    let errors = with_card(test, |a, buffer| {
        let mut attacker = Attacker::start(&format!("calls {}", hex(&a.name())), true);
        assert_eq!(attacker.says(), "refused");
        exchange(a, buffer);
        attacker.finish();
    });
    if let Some(errors) = errors {
        assert!(errors.contains("belongs to user 65534"), "{errors}");
    }
}

/// Lets an attacker of this user or another one send `rounds` of forged packets, twice: nothing but the log shows it.
fn attacker_changes_nothing(test: &str, as_nobody: bool, rounds: u32) {
    let errors = with_card(test, |a, buffer| {
        exchange(a, buffer);
        buffer.fill(1);
        let mut without_secret = a.name();
        without_secret[8..16].fill(0);
        let (card, key) = (hex(&without_secret), buffer.region.rkey);
        let does = format!("attacks {card} {} {key} {rounds}", buffer.at as u64);
        // The first run warms up what is kept.
        let mut grown = 0;
        for _ in 0..2 {
            let before = resident_bytes();
            let mut attacker = Attacker::start(&does, as_nobody);
            assert_eq!(attacker.says(), "done");
            attacker.finish();
            grown = resident_bytes().saturating_sub(before);
        }
        assert!(buffer.matches(1), "an attacker wrote");
        assert_eq!((a.errors(), a.remote()), (0, 1));
        assert!(grown < 4 << 20, "{grown} bytes more");
        exchange(a, buffer);
    });
    if let Some(errors) = errors {
        assert!(errors.contains("did not prove that it knows the secret"), "{errors}");
        assert!(errors.lines().count() < 60, "{errors}");
    }
}

#[test]
fn attacker_on_tcp_changes_nothing() {
    attacker_changes_nothing("attacker_on_tcp_changes_nothing", false, 500);
}

#[test]
#[ignore = "make check"]
fn attacker_of_another_user_on_tcp_changes_nothing() {
    let test = "attacker_of_another_user_on_tcp_changes_nothing";
    if have_second_user(test) {
        attacker_changes_nothing(test, true, 3000);
    }
}

#[test]
fn hello_over_tcp_that_claims_this_host_is_refused() {
    let _ = with_card("hello_over_tcp_that_claims_this_host_is_refused", |a, buffer| {
        let log = Log::take();
        let mut attacker = Attacker::start(&format!("claims {}", hex(&a.name())), false);
        assert_eq!(attacker.says(), "refused");
        wait_until("refusal", || log.contains("a card of this host connects by shared memory"));
        exchange(a, buffer);
        attacker.finish();
    });
}

/// Gives the card's process few descriptors, and lets new peers connect while all of them are wanted.
fn is_held(test: &str, does: &str, as_nobody: bool) {
    if as_nobody && !have_second_user(test) {
        return;
    }
    let _ = with_card(test, |a, buffer| {
        assert!(limit_descriptors(FEW));
        exchange(a, buffer);
        let mut attacker = Attacker::start(&format!("{does} {}", hex(&a.name())), as_nobody);
        assert_eq!(attacker.says(), SILENT.to_string());
        for _ in 0..3 {
            exchange(a, buffer);
        }
        let open = || std::fs::read_dir("/proc/self/fd").map_or(FEW as usize, Iterator::count);
        wait_until("free descriptors", || open() < FEW as usize - 150);
        attacker.finish();
    });
}

#[test]
fn peers_connect_despite_silent_sockets() {
    is_held("peers_connect_despite_silent_sockets", "holds-sockets", false);
}

#[test]
#[ignore = "make check"]
fn peers_connect_despite_silent_sockets_of_another_user() {
    is_held("peers_connect_despite_silent_sockets_of_another_user", "holds-sockets", true);
}

#[test]
fn peers_connect_despite_silent_tcp_connections() {
    is_held("peers_connect_despite_silent_tcp_connections", "holds-tcp", false);
}

#[test]
fn peer_connects_once_there_are_descriptors_again() {
    let _ = with_card("peer_connects_once_there_are_descriptors_again", |a, buffer| {
        let log = Log::take();
        let mut peer = Peer::start(&BOTH_WIRES);
        peer.connect(&a.name());
        a.connect(&peer.name);
        assert!(limit_descriptors(FEW));
        let held: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        peer.tell(&format!("write {} {} 64 7", buffer.at as u64, buffer.region.rkey));
        wait_until("reason", || log.contains("accepts no connections for now") && log.contains("ulimit -n"));
        assert_eq!(a.remote(), 0);
        drop(held);
        assert_eq!(peer.answer(), "1 0");
        assert_eq!(a.remote(), 1);
        peer.finish();
    });
}
