//! A card whose peer, in another process, has another version or sends malformed packets: over both wires, with either
//! side connecting.
#![allow(unsafe_code)]

use std::io::{IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};

use efa_dp_direct::wire::CompStatus;
use ferrogin_test_support::peer::{hex, unhex};
use nix::sys::socket::{self, AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr};
use softefa_rig::child::run;
use softefa_rig::peer::Peer;
use softefa_rig::wire::{self, CONFIRM_LEN, DATA, HELLO_LEN, OTHER, OURS, READ, WELCOME_LEN, WRITE, header};
use softefa_rig::*;

const MALFORMED_PEER: &str = "SOFTEFA_TEST_MALFORMED_PEER";
/// The secret of the card that the malformed peer pretends to be.
const SECRET: u64 = 0x0bad_cafe_0000_0000;

/// Returns a nonce that is unique in this run.
fn nonce() -> [u8; 16] {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    [number.to_le_bytes(), u64::from(std::process::id()).to_le_bytes()].concat().try_into().unwrap()
}

fn print_line(line: &str) {
    println!("@{line}");
    std::io::stdout().flush().unwrap();
}

/// The second process: a malformed peer, which starts when it gets a card's address, and behaves as its variable says.
#[test]
fn malformed_peer() {
    let Ok(how) = std::env::var(MALFORMED_PEER) else { return };
    let (sender, commands) = channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    match how.split_once(' ').unwrap() {
        ("shm", what) => over_shared_memory(what, &commands),
        (_, what) => over_tcp(what, &commands),
    }
}

fn over_tcp(what: &str, commands: &Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = wire::address(listener.local_addr().unwrap().port(), SECRET | u64::from(std::process::id()));
    print_line(&format!("{} 0 0", hex(&own)));
    let behaves = what.to_owned();
    std::thread::spawn(move || {
        for card in listener.incoming() {
            answer_stream(card.unwrap(), &behaves, &own);
        }
    });
    for line in commands {
        if line == "exit" {
            return;
        }
        let card = unhex(&line);
        let bad = if what == "malformed" { vec![7; HELLO_LEN] } else { wire::hello(OTHER, &own, &card, &nonce()) };
        let mut stream = TcpStream::connect(wire::socket_of(&card)).unwrap();
        stream.write_all(&bad).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        print_line(&hex(&answer));
    }
}

/// Answers the card that opened a stream, until the stream ends.
fn answer_stream(mut card: TcpStream, what: &str, own: &[u8]) {
    let mut hello = [0; HELLO_LEN];
    card.read_exact(&mut hello).unwrap();
    if !matches!(what, "corrupt" | "inconsistent") {
        card.write_all(&wire::refusal(OTHER)).unwrap();
        return;
    }
    card.write_all(&wire::welcome(own, &hello, &nonce())).unwrap();
    card.read_exact(&mut [0; CONFIRM_LEN]).unwrap();
    let (mut reads, mut asked) = (0, [0; 48]);
    while card.read_exact(&mut asked).is_ok() {
        card.read_exact(&mut [0; 64][..usize::from(asked[32])]).unwrap();
        if what == "corrupt" {
            card.write_all(&[0xee; 48]).unwrap();
            continue;
        }
        for mut lie in answers(asked[0], &mut reads) {
            lie[40..48].copy_from_slice(&asked[40..48]);
            card.write_all(&[&lie[..], &[9; 64][..usize::from(lie[32])]].concat()).unwrap();
        }
    }
}

/// Returns the inconsistent answers to a write, and to the first and second read: data, or an acknowledgement.
fn answers(kind: u8, reads: &mut u32) -> Vec<[u8; 48]> {
    *reads += u32::from(kind == READ);
    match (kind, *reads) {
        (WRITE, _) => vec![header(DATA, 8), header(wire::ACK, 0)],
        (_, 1) => vec![header(DATA, 4)],
        _ => vec![header(wire::ACK, 0)],
    }
}

fn over_shared_memory(what: &str, commands: &Receiver<String>) {
    let new = || socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let name = |card: &[u8]| UnixAddr::new_abstract(wire::abstract_name(card).as_bytes()).unwrap();
    let own = wire::address(0, SECRET | u64::from(std::process::id()));
    let listener = new();
    socket::bind(listener.as_raw_fd(), &name(&own)).unwrap();
    socket::listen(&listener, Backlog::new(4).unwrap()).unwrap();
    print_line(&format!("{} 0 0", hex(&own)));
    let corrupt = what == "corrupt";
    std::thread::spawn(move || {
        // Connections stay open until the process ends.
        let mut kept: Vec<(Option<OwnedFd>, Option<std::fs::File>)> = Vec::new();
        while let Ok(fd) = socket::accept(listener.as_raw_fd()) {
            // SAFETY: accept just made this descriptor, and no other value owns it.
            let card = unsafe { OwnedFd::from_raw_fd(fd) };
            let mut hello = [0; HELLO_LEN + 1];
            let len = socket::recv(card.as_raw_fd(), &mut hello, MsgFlags::empty()).unwrap();
            assert_eq!(len, HELLO_LEN, "a hello");
            let answer = if corrupt { wire::welcome(&own, &hello[..len], &nonce()) } else { wire::refusal(OTHER) };
            socket::send(card.as_raw_fd(), &answer, MsgFlags::empty()).unwrap();
            if corrupt {
                let file = take_file(&card);
                // The tail of the answer ring is not a multiple of the record alignment.
                file.write_all_at(&63u64.to_le_bytes(), 4096).unwrap();
                kept.push((None, Some(file)));
            }
            kept.push((Some(card), None));
        }
    });
    for line in commands {
        if line == "exit" {
            return;
        }
        let card = unhex(&line);
        let socket = new();
        socket::connect(socket.as_raw_fd(), &name(&card)).unwrap();
        let first = if what == "malformed" { vec![7; 40] } else { wire::hello(OTHER, &own, &card, &nonce()) };
        socket::send(socket.as_raw_fd(), &first, MsgFlags::empty()).unwrap();
        let mut answer = [0; WELCOME_LEN + 1];
        let len = socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
        print_line(&hex(&answer[..len]));
    }
}

/// Takes the rings that arrive with a card's confirm.
fn take_file(card: &OwnedFd) -> std::fs::File {
    let (mut bytes, mut control) = ([0; 64], nix::cmsg_space!([RawFd; 1]));
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let message = socket::recvmsg::<()>(card.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty()).unwrap();
    let file = message.cmsgs().unwrap().find_map(|part| match part {
        // SAFETY: the kernel just installed this descriptor for this call alone.
        ControlMessageOwned::ScmRights(fds) => Some(unsafe { std::fs::File::from_raw_fd(fds[0]) }),
        _ => None,
    });
    assert_eq!(message.bytes, CONFIRM_LEN, "a confirm");
    file.unwrap()
}

fn start(wire: &str, what: &str) -> Peer {
    let how = format!("{wire} {what}");
    Peer::start_test("malformed_peer", &[(MALFORMED_PEER, &how)])
}

/// Sends a malformed peer a request. `status` is the completion's, and `line` a part of the log.
fn request_fails(test: &str, wire: &'static str, what: &'static str, status: CompStatus, line: &str) {
    let errors = run(test, &[("SOFTEFA_WIRE", wire)], || {
        let rig = Rig::open();
        let mut a = End::open(&rig);
        let buffer = rig.buffer(64);
        let peer = start(wire, what);
        let to = a.connect(&peer.name);
        a.post(to, write(buffer.remote(0), buffer.sge(0, 8)));
        assert_eq!(a.next_status().1, status);
        a.wait_done(1);
        a.post(to, write(buffer.remote(0), buffer.sge(0, 8)));
        assert_eq!(a.next_status().1, status, "from then on");
        a.wait_done(2);
        assert_eq!((a.local(), a.errors()), (0, 2));
        peer.finish();
    });
    if let Some(errors) = errors {
        assert!(errors.contains(line), "{errors}");
    }
}

/// Connects a malformed peer to a card, which refuses the hello with `line` in its log.
fn hello_is_refused(test: &str, wire: &'static str, what: &'static str, line: &str) {
    let errors = run(test, &[("SOFTEFA_WIRE", wire)], || {
        let rig = Rig::open();
        let (mut a, b) = (End::open(&rig), End::open(&rig));
        let buffer = rig.buffer(64);
        let mut peer = start(wire, what);
        let answer = unhex(&peer.ask(&hex(&a.name())));
        assert_eq!(answer, wire::refusal(OURS), "its version, and no");
        // The card still serves others.
        let to = a.connect(&b.name());
        a.post(to, write(buffer.remote(0), buffer.sge(8, 8)));
        assert_eq!(a.next_status().1, CompStatus::Ok);
        peer.finish();
    });
    if let Some(errors) = errors {
        assert!(errors.contains(line), "{errors}");
    }
}

const VERSION_LINE: &str =
    "the other side speaks version 5 of this protocol, this one version 4: use the same release on both sides";

#[test]
fn request_to_another_version_fails_over_shared_memory() {
    let test = "request_to_another_version_fails_over_shared_memory";
    request_fails(test, "shm", "version", CompStatus::RemoteFeatureMismatch, VERSION_LINE);
}

#[test]
fn request_to_another_version_fails_over_tcp() {
    let test = "request_to_another_version_fails_over_tcp";
    request_fails(test, "tcp", "version", CompStatus::RemoteFeatureMismatch, VERSION_LINE);
}

#[test]
fn hello_of_another_version_is_refused_over_shared_memory() {
    hello_is_refused("hello_of_another_version_is_refused_over_shared_memory", "shm", "version", VERSION_LINE);
}

#[test]
fn hello_of_another_version_is_refused_over_tcp() {
    hello_is_refused("hello_of_another_version_is_refused_over_tcp", "tcp", "version", VERSION_LINE);
}

#[test]
fn malformed_hello_is_refused_over_shared_memory() {
    let line = "refused a connection: the other side does not speak this protocol";
    hello_is_refused("malformed_hello_is_refused_over_shared_memory", "shm", "malformed", line);
}

#[test]
fn malformed_hello_is_refused_over_tcp() {
    let line = "refused a connection: the other side does not speak this protocol";
    hello_is_refused("malformed_hello_is_refused_over_tcp", "tcp", "malformed", line);
}

#[test]
fn corrupt_ring_fails_requests() {
    request_fails(
        "corrupt_ring_fails_requests",
        "shm",
        "corrupt",
        CompStatus::LocalUnresponsiveRemote,
        "it sent a corrupt packet; ",
    );
}

#[test]
fn corrupt_stream_fails_requests() {
    request_fails(
        "corrupt_stream_fails_requests",
        "tcp",
        "corrupt",
        CompStatus::LocalUnresponsiveRemote,
        "it sent a corrupt packet; ",
    );
}

/// Data with another length than requested, a read that ends without data, and data for a write.
#[test]
fn answers_that_do_not_fit_request_are_refused() {
    let errors = run("answers_that_do_not_fit_request_are_refused", &[("SOFTEFA_WIRE", "tcp")], || {
        let rig = Rig::open();
        let mut a = End::open(&rig);
        let buffer = rig.buffer(64);
        let peer = start("tcp", "inconsistent");
        let to = a.connect(&peer.name);
        for n in 1..=2 {
            a.post(to, read(buffer.remote(0), buffer.sge(0, 8)));
            assert_eq!(a.next_status().1, CompStatus::RemoteBadStatus, "read {n}");
            a.wait_done(n);
        }
        a.post(to, write(buffer.remote(0), buffer.sge(8, 8)));
        assert_eq!(a.next_status().1, CompStatus::Ok, "further answers are ignored");
        a.wait_done(3);
        assert_eq!((a.local(), a.errors()), (1, 2));
        let words = [0, 1].map(|n| buffer.word(n).load(std::sync::atomic::Ordering::Relaxed));
        assert_eq!(words, [0, 0], "nothing of it is placed");
        peer.finish();
    });
    if let Some(errors) = errors {
        let line = "refused by the other side: the peer answered with an unexpected status; request ";
        assert_eq!(errors.lines().filter(|l| l.contains(line)).count(), 2, "{errors}");
    }
}
