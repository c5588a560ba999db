//! A card whose peer, in another process, has another version or sends malformed packets: over both wires, with either side
//! connecting.
#![allow(unsafe_code)]

use std::io::{IoSliceMut, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};

use crate::common::child::run;
use crate::common::peer::Peer;
use crate::common::*;
use efa_dp_direct::wire::CompStatus;
use ferrogin_datagram::{Config, Event, MessageEndpoint};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::peer::{hex, unhex};
use nix::sys::socket::{self, AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr};

/// The wire version of the cards of this build, and another.
const OURS: u8 = 2;
const OTHER: u8 = 3;
const NONCE: u32 = 0x0bad_cafe;
const MALFORMED_PEER: &str = "SOFTEFA_TEST_MALFORMED_PEER";

/// The address of a card that does not exist: a GID with this port and nonce, queue pair 1.
fn address(port: u16, nonce: u32) -> [u8; 32] {
    let mut bytes = [0; 32];
    (bytes[0], bytes[1]) = (0x5e, OURS);
    bytes[6..10].copy_from_slice(&[127, 0, 0, 1]);
    bytes[10..12].copy_from_slice(&port.to_be_bytes());
    bytes[12..16].copy_from_slice(&nonce.to_be_bytes());
    bytes[16..18].copy_from_slice(&1u16.to_ne_bytes());
    bytes
}

fn hello(version: u8, from: &[u8], to: &[u8]) -> Vec<u8> {
    [b"softefa".as_slice(), &[version], &from[..16], &to[..16]].concat()
}

fn welcome(version: u8) -> Vec<u8> {
    [b"softef".as_slice(), &[version, 0]].concat()
}

/// A packet's header: kind 6 is a hello, kind 7 its answer.
fn header(kind: u8, len: usize) -> [u8; 48] {
    let mut bytes = [0; 48];
    bytes[0] = kind;
    for at in [24, 32] {
        bytes[at..at + 4].copy_from_slice(&(len as u32).to_le_bytes());
    }
    bytes
}

fn print_line(line: &str) {
    println!("@{line}");
    std::io::stdout().flush().unwrap();
}

/// The second process: a malformed peer, which starts when it gets a card's address, and behaves as its variable says.
#[test]
fn malformed_peer() {
    let Ok(how) = std::env::var(MALFORMED_PEER) else { return };
    assert!(have_libfabric("malformed_peer"));
    let (sender, commands) = channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    match how.split_once(' ').unwrap() {
        ("shm", what) => over_shared_memory(what, &commands),
        (_, what) => over_messages(what, &commands),
    }
}

fn over_messages(what: &str, commands: &Receiver<String>) {
    let config = Config { max_header: 48, max_payload: (64 << 10) + 512, ..Config::default() };
    let mut endpoint = MessageEndpoint::open(&Libfabric::already_loaded().unwrap(), &config).unwrap();
    let port = u16::from_be_bytes(endpoint.address()[2..4].try_into().unwrap());
    let own = address(port, NONCE);
    print_line(&format!("{} 0 0", hex(&own)));
    let mut reads = 0;
    loop {
        match commands.try_recv().as_deref() {
            Ok("exit") => return,
            Ok(card) => {
                let card = unhex(card);
                let name = [&[2, 0], &card[10..12], &card[6..10], &[0; 8]].concat();
                let peer = endpoint.add_peer(&name).unwrap();
                let first = if what == "malformed" { vec![7; 40] } else { hello(OTHER, &own, &card) };
                endpoint.send(peer, &header(6, first.len()), &first).unwrap();
            }
            Err(_) => {}
        }
        let corrupt = what == "corrupt";
        let mut greeted = None;
        let mut asked = Vec::new();
        let polled = endpoint.poll(|_, event| {
            if let Event::Message { from, header, payload } = event {
                match header[0] {
                    6 => greeted = Some(from),
                    7 => print_line(&hex(payload)),
                    1 | 3 => asked.push((from, header[0], header[40..48].to_vec())),
                    _ => {}
                }
            }
        });
        polled.unwrap();
        for (card, kind, token) in asked {
            for mut lie in answers(kind, &mut reads) {
                lie[40..48].copy_from_slice(&token);
                let payload = &[9; 64][..usize::from(lie[32])];
                endpoint.send(card, &lie, payload).unwrap();
            }
        }
        if let Some(card) = greeted {
            let answer = welcome(if corrupt || what == "inconsistent" { OURS } else { OTHER });
            endpoint.send(card, &header(7, answer.len()), &answer).unwrap();
            if corrupt {
                endpoint.send(card, &[0xee; 48], b"nonsense").unwrap();
            }
        }
        std::thread::yield_now();
    }
}

/// The inconsistent answers to a write (kind 1), and to its first and second read: kind 4 is data, kind 2 an acknowledgement.
fn answers(kind: u8, reads: &mut u32) -> Vec<[u8; 48]> {
    *reads += u32::from(kind == 3);
    match (kind, *reads) {
        (1, _) => vec![header(4, 8), header(2, 0)],
        (_, 1) => vec![header(4, 4)],
        _ => vec![header(2, 0)],
    }
}

fn over_shared_memory(what: &str, commands: &Receiver<String>) {
    let new = || socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    let name = |host: &[u8], nonce: &[u8]| {
        UnixAddr::new_abstract(format!("softefa/{}/{}", hex(host), hex(nonce)).as_bytes()).unwrap()
    };
    let own = address(0, std::process::id() | 1 << 31);
    let listener = new();
    socket::bind(listener.as_raw_fd(), &name(&own[2..6], &own[12..16])).unwrap();
    socket::listen(&listener, Backlog::new(4).unwrap()).unwrap();
    print_line(&format!("{} 0 0", hex(&own)));
    let corrupt = what == "corrupt";
    std::thread::spawn(move || {
        // What is connected stays so until the end of the process.
        let mut kept = Vec::new();
        while let Ok(fd) = socket::accept(listener.as_raw_fd()) {
            // SAFETY: accept just made this descriptor and nobody else has it.
            let card = unsafe { OwnedFd::from_raw_fd(fd) };
            let file = take_file(&card);
            let answer = welcome(if corrupt { OURS } else { OTHER });
            socket::send(card.as_raw_fd(), &answer, MsgFlags::empty()).unwrap();
            if corrupt {
                // The tail of the ring of answers is no multiple of a record.
                file.write_all_at(&63u64.to_le_bytes(), 4096).unwrap();
            }
            kept.push((card, file));
        }
    });
    for line in commands {
        if line == "exit" {
            return;
        }
        let card = unhex(&line);
        let socket = new();
        socket::connect(socket.as_raw_fd(), &name(&card[2..6], &card[12..16])).unwrap();
        let first = if what == "malformed" { vec![7; 40] } else { hello(OTHER, &own, &card) };
        socket::send(socket.as_raw_fd(), &first, MsgFlags::empty()).unwrap();
        let mut answer = [0; 64];
        let len = socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
        print_line(&hex(&answer[..len]));
    }
}

/// The rings that arrive with a hello.
fn take_file(card: &OwnedFd) -> std::fs::File {
    let (mut bytes, mut control) = ([0; 64], nix::cmsg_space!([RawFd; 1]));
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let message = socket::recvmsg::<()>(card.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty()).unwrap();
    let file = message.cmsgs().unwrap().find_map(|part| match part {
        // SAFETY: the kernel just installed this descriptor for this call alone.
        ControlMessageOwned::ScmRights(fds) => Some(unsafe { std::fs::File::from_raw_fd(fds[0]) }),
        _ => None,
    });
    assert_eq!(message.bytes, 40, "a hello");
    file.unwrap()
}

fn start(wire: &str, what: &str) -> Peer {
    let how = format!("{wire} {what}");
    Peer::start_test("malformed_peer", &[(MALFORMED_PEER, &how)])
}

/// A card sends a request to a malformed peer. `status` is that of the completion, `line` a part of the log.
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
        a.close();
        buffer.close();
        rig.close();
    });
    if let Some(errors) = errors {
        assert!(errors.contains(line), "{errors}");
    }
}

/// A malformed peer connects to a card, which refuses the hello with `line` in its log.
fn hello_is_refused(test: &str, wire: &'static str, what: &'static str, line: &str) {
    let errors = run(test, &[("SOFTEFA_WIRE", wire)], || {
        let rig = Rig::open();
        let (mut a, b) = (End::open(&rig), End::open(&rig));
        let buffer = rig.buffer(64);
        let mut peer = start(wire, what);
        let answer = unhex(&peer.ask(&hex(&a.name())));
        assert_eq!(answer, [b"softef".as_slice(), &[OURS, 1]].concat(), "its version, and no");
        // It goes on with others.
        let to = a.connect(&b.name());
        a.post(to, write(buffer.remote(0), buffer.sge(8, 8)));
        assert_eq!(a.next_status().1, CompStatus::Ok);
        peer.finish();
        a.close();
        b.close();
        buffer.close();
        rig.close();
    });
    if let Some(errors) = errors {
        assert!(errors.contains(line), "{errors}");
    }
}

const VERSION_LINE: &str = "the other card speaks wire version 3, this one 2: use the same release on both sides";

#[test]
fn request_to_another_version_fails_over_shared_memory() {
    let test = "request_to_another_version_fails_over_shared_memory";
    request_fails(test, "shm", "version", CompStatus::RemoteFeatureMismatch, VERSION_LINE);
}

#[test]
fn request_to_another_version_fails_over_datagrams() {
    let test = "request_to_another_version_fails_over_datagrams";
    request_fails(test, "tcp", "version", CompStatus::RemoteFeatureMismatch, VERSION_LINE);
}

#[test]
fn hello_of_another_version_is_refused_over_shared_memory() {
    hello_is_refused("hello_of_another_version_is_refused_over_shared_memory", "shm", "version", VERSION_LINE);
}

#[test]
fn hello_of_another_version_is_refused_over_datagrams() {
    hello_is_refused("hello_of_another_version_is_refused_over_datagrams", "tcp", "version", VERSION_LINE);
}

#[test]
fn malformed_hello_is_refused_over_shared_memory() {
    let line = "refused a connection: the other side does not speak this protocol";
    hello_is_refused("malformed_hello_is_refused_over_shared_memory", "shm", "malformed", line);
}

#[test]
fn malformed_hello_is_refused_over_datagrams() {
    let line = "refused a connection: the other side does not speak this protocol";
    hello_is_refused("malformed_hello_is_refused_over_datagrams", "tcp", "malformed", line);
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
fn corrupt_datagram_fails_requests() {
    request_fails(
        "corrupt_datagram_fails_requests",
        "tcp",
        "corrupt",
        CompStatus::LocalUnresponsiveRemote,
        "it sent a corrupt packet; ",
    );
}

/// Data of another length than requested, a read that ends without data, and data for a write.
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
        a.close();
        buffer.close();
        rig.close();
    });
    if let Some(errors) = errors {
        let line = "refused by the other side: the peer answered with an unexpected status; request ";
        assert_eq!(errors.lines().filter(|l| l.contains(line)).count(), 2, "{errors}");
    }
}
