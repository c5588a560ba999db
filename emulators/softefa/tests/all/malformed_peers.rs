//! A card whose peer, in another process, has another version or sends malformed packets: over both wires, with either side
//! connecting.
#![allow(unsafe_code)]

use std::io::{IoSliceMut, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};

use efa_dp_direct::wire::CompStatus;
use ferrogin_datagram::{Config, Event, MessageEndpoint};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::peer::{hex, unhex};
use nix::sys::socket::{self, AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr};
use softefa_rig::child::run;
use softefa_rig::peer::Peer;
use softefa_rig::wire::{self, DATA, HELLO, OTHER, OURS, READ, Session, WELCOME, WRITE, header};
use softefa_rig::*;

const MALFORMED_PEER: &str = "SOFTEFA_TEST_MALFORMED_PEER";
/// The secret of the card that the malformed peer plays.
const SECRET: u64 = 0x0bad_cafe_0000_0000;

/// A nonce that no other handshake of this run has.
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
    assert!(have_libfabric("malformed_peer"));
    let (sender, commands) = channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    match how.split_once(' ').unwrap() {
        ("shm", what) => over_shared_memory(what, &commands),
        (_, what) => over_messages(what, &commands),
    }
}

fn over_messages(what: &str, commands: &Receiver<String>) {
    let config = Config { max_header: 48, max_payload: (64 << 10) + 536, ..Config::default() };
    let mut endpoint = MessageEndpoint::open(&Libfabric::already_loaded().unwrap(), &config).unwrap();
    let port = u16::from_be_bytes(endpoint.address()[2..4].try_into().unwrap());
    let own = wire::address(port, SECRET | u64::from(std::process::id()));
    print_line(&format!("{} 0 0", hex(&own)));
    let mut reads = 0;
    let mut session: Option<Session> = None;
    loop {
        match commands.try_recv().as_deref() {
            Ok("exit") => return,
            Ok(card) => {
                let (card, nonce) = (unhex(card), nonce());
                let peer = endpoint.add_peer(&wire::endpoint_of(&card)).unwrap();
                let bad = if what == "malformed" { vec![7; 72] } else { wire::hello(OTHER, &own, &card, &nonce) };
                endpoint.send(peer, &header(HELLO, bad.len()), &bad).unwrap();
                // The answer to a good hello shows that the card has refused the bad one.
                let good = wire::hello(OURS, &own, &card, &nonce);
                endpoint.send(peer, &header(HELLO, good.len()), &good).unwrap();
            }
            Err(_) => {}
        }
        let mut hello = None;
        let mut asked = Vec::new();
        let polled = endpoint.poll(|_, event| {
            if let Event::Message { from, header, payload } = event {
                match header[0] {
                    HELLO => hello = Some((from, payload.to_vec())),
                    WELCOME => print_line(&hex(payload)),
                    WRITE | READ => asked.push((from, header[0], header[40..48].to_vec())),
                    _ => {}
                }
            }
        });
        polled.unwrap();
        for (card, kind, token) in asked {
            let session = session.as_mut().unwrap();
            if what == "corrupt" {
                let nonsense = [0xee; 48];
                endpoint.send(card, &nonsense, &session.seal(&[&nonsense])).unwrap();
                continue;
            }
            for mut lie in answers(kind, &mut reads) {
                lie[40..48].copy_from_slice(&token);
                let payload = &[9; 64][..usize::from(lie[32])];
                let rest = session.sealed(&lie, payload);
                endpoint.send(card, &lie, &rest).unwrap();
            }
        }
        if let Some((card, hello)) = hello {
            let (answer, agreed) = wire::welcome(&own, &hello, &nonce());
            let good = matches!(what, "corrupt" | "inconsistent");
            let answer = if good { answer } else { wire::welcome_of_another_version(&hello) };
            endpoint.send(card, &header(WELCOME, answer.len()), &answer).unwrap();
            session = Some(agreed);
        }
        std::thread::yield_now();
    }
}

/// The inconsistent answers to a write, and to its first and second read: data, or an acknowledgement.
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
        // What is connected stays so until the end of the process.
        let mut kept: Vec<(Option<OwnedFd>, Option<std::fs::File>)> = Vec::new();
        while let Ok(fd) = socket::accept(listener.as_raw_fd()) {
            // SAFETY: accept just made this descriptor, and no other value owns it.
            let card = unsafe { OwnedFd::from_raw_fd(fd) };
            let mut hello = [0; 73];
            let len = socket::recv(card.as_raw_fd(), &mut hello, MsgFlags::empty()).unwrap();
            assert_eq!(len, 72, "a hello");
            let (answer, _) = wire::welcome(&own, &hello[..len], &nonce());
            let answer = if corrupt { answer } else { wire::welcome_of_another_version(&hello) };
            socket::send(card.as_raw_fd(), &answer, MsgFlags::empty()).unwrap();
            if corrupt {
                let file = take_file(&card);
                // The tail of the ring of answers is no multiple of a record.
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
        let mut answer = [0; 64];
        let len = socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
        print_line(&hex(&answer[..len]));
    }
}

/// The rings that arrive with a card's proof.
fn take_file(card: &OwnedFd) -> std::fs::File {
    let (mut bytes, mut control) = ([0; 64], nix::cmsg_space!([RawFd; 1]));
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let message = socket::recvmsg::<()>(card.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty()).unwrap();
    let file = message.cmsgs().unwrap().find_map(|part| match part {
        // SAFETY: the kernel just installed this descriptor for this call alone.
        ControlMessageOwned::ScmRights(fds) => Some(unsafe { std::fs::File::from_raw_fd(fds[0]) }),
        _ => None,
    });
    assert_eq!(message.bytes, 24, "a proof");
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
        // Over datagrams the bad hello gets no answer: the answer is to a good hello behind it.
        assert_eq!(
            answer[..8],
            [b"softef".as_slice(), &[OURS, u8::from(wire == "shm")]].concat(),
            "its version, and no"
        );
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

const VERSION_LINE: &str = "the other card speaks wire version 4, this one 3: use the same release on both sides";

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
