//! The message layer over tcp: between threads, between processes, beside silent connections.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use ferrogin_datagram::{Config, Event, LostReason, MessageEndpoint, Peer, SendError, Unadmitted};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::libraries;
use ferrogin_test_support::peer::{self, Peer as Process, hex, unhex};
use ferrogin_test_support::untrusted::limit_descriptors;
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until, wait_until};
use ferrogin_test_support::{Random, child, own_host, own_port, skip};

/// For live peers: a busy machine does not reach this limit.
fn config() -> Config {
    Config {
        tx_depth: 32,
        rx_depth: 32,
        ping_after: Duration::from_millis(200),
        lost_after: HANG_LIMIT,
        ..Config::default()
    }
}

/// The size of message `number` of a sender: all magnitudes, the largest and 0 among them.
fn size_of_message(seed: u64, number: u64) -> usize {
    let random = Random::new(seed ^ (number << 20)).next_u64();
    match number % 16 {
        0 => 0,
        1 => 64 << 10,
        _ => (random as usize) % (1usize << (1 + random.rotate_left(32) % 16)),
    }
}

fn payload_of_message(seed: u64, number: u64) -> Vec<u8> {
    Random::new(seed.wrapping_mul(31) + number).bytes(size_of_message(seed, number))
}

fn header_of_message(seed: u64, number: u64) -> Vec<u8> {
    let mut header = seed.to_le_bytes().to_vec();
    header.extend_from_slice(&number.to_le_bytes());
    header.resize(16 + (number % 49) as usize, number as u8);
    header
}

/// Sends `count` messages to the peer, every other one borrowed, and receives `count` messages of it, until every borrowed payload is
/// released. Without a peer it takes the first sender. True when the peer has closed already.
fn exchange(endpoint: &mut MessageEndpoint, mut peer: Option<Peer>, local: u64, remote: u64, count: u64) -> bool {
    let mut seen = HashSet::new();
    let mut payloads: Vec<Option<Vec<u8>>> = (0..count).map(|_| None).collect();
    let (mut sent, mut returned, mut borrowed, mut closed) = (0, 0, 0, false);
    poll_until("end of the exchange", || {
        while let Some(to) = peer
            && sent < count
        {
            let (header, payload) = (header_of_message(local, sent), payload_of_message(local, sent));
            let result = if sent % 2 == 0 {
                endpoint.send(to, &header, &payload)
            } else {
                let payload = &*payloads[sent as usize].insert(payload);
                // SAFETY: `payloads` keeps the payload until its Sent event.
                unsafe { endpoint.send_borrowed(to, &header, payload.as_ptr(), payload.len(), sent) }
            };
            match result {
                Ok(()) => {
                    borrowed += sent % 2;
                    sent += 1;
                }
                Err(SendError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
        endpoint
            .poll(|_, event| match event {
                Event::Message { from, header, payload } => {
                    assert_eq!(*peer.get_or_insert(from), from);
                    let number = u64::from_le_bytes(header[8..16].try_into().unwrap());
                    assert_eq!(header, header_of_message(remote, number));
                    assert!(payload == payload_of_message(remote, number), "payload of message {number}");
                    assert!(seen.insert(number), "message {number} came twice");
                }
                Event::Sent { token, .. } => {
                    assert!(payloads[token as usize].take().is_some(), "payload {token} returned twice");
                    returned += 1;
                }
                // The peer has got everything, but here something may still be on its way up.
                Event::Lost { reason: LostReason::Closed, .. } => closed = true,
                other => panic!("{other:?}"),
            })
            .unwrap();
        sent == count && returned == borrowed && seen.len() as u64 == count
    });
    assert_eq!(seen, (0..count).collect());
    closed
}

/// Closes after an exchange.
fn say_closing(endpoint: &mut MessageEndpoint) {
    assert!(endpoint.shutdown(HANG_LIMIT, |_, event| panic!("{event:?}")).unwrap());
}

/// Waits for the close of the peer, and closes too.
fn hear_closing(endpoint: &mut MessageEndpoint, mut closed: bool) {
    poll_until("close of the peer", || {
        if !closed {
            endpoint
                .poll(|_, event| match event {
                    Event::Lost { reason: LostReason::Closed, .. } => closed = true,
                    other => panic!("{other:?}"),
                })
                .unwrap();
        }
        closed
    });
    say_closing(endpoint);
}

#[test]
fn two_threads_exchange_every_byte() {
    for lib in libraries("two_threads_exchange_every_byte") {
        let mut a = MessageEndpoint::open(&lib, &config()).unwrap();
        let mut b = MessageEndpoint::open(&lib, &config()).unwrap();
        println!("provider {}", a.provider());
        let address = a.address().to_vec();
        let thread = std::thread::spawn(move || {
            let peer = b.add_peer(&address).unwrap();
            exchange(&mut b, Some(peer), 2, 1, 2000);
            say_closing(&mut b);
        });
        // The first message makes `b` known here.
        let closed = exchange(&mut a, None, 1, 2, 2000);
        hear_closing(&mut a, closed);
        thread.join().unwrap();
    }
}

#[test]
fn endpoint_sends_to_itself() {
    for lib in libraries("endpoint_sends_to_itself") {
        let mut a = MessageEndpoint::open(&lib, &config()).unwrap();
        let address = a.address().to_vec();
        let me = a.add_peer(&address).unwrap();
        exchange(&mut a, Some(me), 5, 5, 200);
    }
}

/// Polls both endpoints until `done` has seen what it waits for; it gets messages of unadmitted endpoints to `a`, and events of `b`.
fn poll_both(
    (a, b): (&mut MessageEndpoint, &mut MessageEndpoint),
    mut on_unadmitted: impl FnMut(Unadmitted<'_>),
    mut done: impl FnMut(Option<Event<'_>>) -> bool,
) {
    poll_until("expected events", || {
        let mut over = false;
        a.poll_admitting(|_, event| over |= done(Some(event)), |_, message| on_unadmitted(message)).unwrap();
        b.poll(|_, event| panic!("{event:?}")).unwrap();
        over || done(None)
    });
}

#[test]
fn only_admitted_endpoints_become_peers() {
    for lib in libraries("only_admitted_endpoints_become_peers") {
        let mut a = MessageEndpoint::open(&lib, &Config { admission: true, ..config() }).unwrap();
        let mut b = MessageEndpoint::open(&lib, &config()).unwrap();
        let to_a = b.add_peer(a.address()).unwrap();
        // A peer by its address alone is not admitted either.
        let to_b = a.add_peer(b.address()).unwrap();
        for number in 0..3 {
            b.send(to_a, &[number], b"first").unwrap();
        }
        let (seen, address) = (std::cell::RefCell::new(Vec::new()), b.address().to_vec());
        let on_unadmitted = |message: Unadmitted<'_>| {
            assert_eq!((message.address, message.payload), (&address[..], &b"first"[..]));
            seen.borrow_mut().push((message.header.to_vec(), message.number));
        };
        poll_both((&mut a, &mut b), on_unadmitted, |event| {
            assert!(event.is_none(), "{event:?}");
            seen.borrow().len() == 3
        });
        let number = seen.borrow()[0].1;
        let wrong = a.admit(&address, number ^ 1).unwrap();
        assert_eq!(wrong, to_b, "the peer that was added");
        b.send(to_a, &[3], b"first").unwrap();
        poll_both((&mut a, &mut b), on_unadmitted, |event| {
            assert!(event.is_none(), "another endpoint was admitted: {event:?}");
            seen.borrow().len() == 4
        });
        // A live peer of another number is replaced only by an admission.
        let right = a.admit(&address, number).unwrap();
        assert_ne!(right, wrong);
        b.send(to_a, &[4], b"second").unwrap();
        let mut arrived = false;
        poll_both(
            (&mut a, &mut b),
            |message| panic!("{message:?}"),
            |event| {
                match event {
                    Some(Event::Message { from, header, payload }) => {
                        assert_eq!((from, header, payload), (right, &[4][..], &b"second"[..]));
                        arrived = true;
                    }
                    Some(Event::Lost { peer, reason }) => assert_eq!((peer, reason), (wrong, LostReason::Replaced)),
                    Some(other) => panic!("{other:?}"),
                    None => {}
                }
                arrived
            },
        );
    }
}

/// Waits until the silent connections are old enough to be closed.
#[test]
#[ignore = "make check"]
fn silent_connections_do_not_use_up_descriptors() {
    let test = "silent_connections_do_not_use_up_descriptors";
    let libraries = libraries(test);
    child::run(test, &[], || {
        if limit_descriptors(SILENT as u64 + 1000) {
            libraries.iter().for_each(serve_beside_silent_connections);
        } else {
            skip(test, format!("this process may not have {} descriptors", SILENT + 1000));
        }
    });
}

const SILENT: usize = 3000;

fn serve_beside_silent_connections(lib: &Arc<Libfabric>) {
    let (_process, address) = start_peer(lib, "echo with few descriptors");
    let port = u16::from_be_bytes(address[2..4].try_into().unwrap());
    let connect = |_| TcpStream::connect(("127.0.0.1", port)).unwrap();
    let silent: Vec<_> = (0..SILENT).map(connect).collect();
    // A peer that connects now is served, and goes on.
    let mut endpoint = MessageEndpoint::open(lib, &config()).unwrap();
    let peer = endpoint.add_peer(&address).unwrap();
    let mut answers = 0;
    poll_until("answers", || {
        if endpoint.free_slots() == 32 {
            endpoint.send(peer, b"header", b"payload").unwrap();
        }
        endpoint.poll(|_, event| answers += u32::from(matches!(event, Event::Message { .. }))).unwrap();
        answers >= 100
    });
    let is_open = |mut stream: &TcpStream| {
        stream.set_nonblocking(true).unwrap();
        stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    wait_until("end of the silent connections", || !silent.iter().any(is_open));
}

#[test]
fn limits_are_enforced() {
    for lib in libraries("limits_are_enforced") {
        let mut a = MessageEndpoint::open(&lib, &config()).unwrap();
        let b = MessageEndpoint::open(&lib, &config()).unwrap();
        let peer = a.add_peer(b.address()).unwrap();
        assert_eq!(a.add_peer(b.address()).unwrap(), peer);
        assert_eq!(a.peer_address(peer), b.address());
        assert_eq!(a.send(peer, &[0; 65], &[]), Err(SendError::TooLong));
        assert_eq!(a.send(peer, &[], &vec![0; (64 << 10) + 1]), Err(SendError::TooLong));
        // `b` never polls, and `a` neither: at most every slot is taken.
        for free in (0..32).rev() {
            a.send(peer, &[1; 64], &[2; 100]).unwrap();
            assert_eq!(a.free_slots(), free);
        }
        assert_eq!(a.send(peer, &[], &[]), Err(SendError::Full));
        a.forget(peer);
        assert!(!a.is_alive(peer));
        assert_eq!(a.send(peer, &[], &[]), Err(SendError::Gone));
        assert_ne!(a.add_peer(b.address()).unwrap(), peer);
        assert!(a.add_peer(&[1, 2, 3]).is_err());

        let (host, port) = (own_host(), own_port());
        let wanted = Config { source: Some(format!("{host}:{port}")), ..config() };
        assert_eq!(MessageEndpoint::open(&lib, &wanted).unwrap().address()[2..4], port.to_be_bytes());

        let wrong = Config { provider: "nonesuch".to_owned(), ..config() };
        let error = MessageEndpoint::open(&lib, &wrong).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("nonesuch") && error.contains("tcp"), "{error}");
        for wrong in [
            Config { max_header: 1 << 16, ..config() },
            Config { tx_depth: 0, ..config() },
            Config { rx_depth: 0, ..config() },
            Config { max_payload: 5 << 30, ..config() },
        ] {
            assert!(MessageEndpoint::open(&lib, &wrong).is_err(), "{wrong:?}");
        }
    }
}

/// Starts a child process with one of the roles below; gives its address too.
fn start_peer(lib: &Arc<Libfabric>, role: &str) -> (Process, Vec<u8>) {
    let mut process = Process::start_on("child", lib.path(), &[("FERROGIN_TEST_ROLE", role.to_owned())]);
    let address = unhex(&process.wait_for("ADDRESS "));
    (process, address)
}

/// Not a test: what the children run.
#[test]
fn child() {
    let (Ok(role), Some(library)) = (std::env::var("FERROGIN_TEST_ROLE"), peer::library()) else { return };
    let lib = Libfabric::load(Some(&library)).unwrap();
    if role == "echo with few descriptors" {
        assert!(limit_descriptors(512));
    }
    let mut endpoint = MessageEndpoint::open(&lib, &config()).unwrap();
    println!("ADDRESS {}", hex(endpoint.address()));
    match role.as_str() {
        "exchange" => {
            exchange(&mut endpoint, None, 4, 3, 2000);
            say_closing(&mut endpoint);
        }
        // Until the test kills this process.
        "echo with few descriptors" => poll_until("end of the test", || {
            endpoint
                .poll(|outbox, event| {
                    if let Event::Message { from, header, payload } = event {
                        let _ = outbox.send(from, header, payload);
                    }
                })
                .unwrap();
            false
        }),
        other => panic!("{other}"),
    }
}

#[test]
fn two_processes_exchange_every_byte() {
    for lib in libraries("two_processes_exchange_every_byte") {
        let (mut process, address) = start_peer(&lib, "exchange");
        let mut endpoint = MessageEndpoint::open(&lib, &config()).unwrap();
        let peer = endpoint.add_peer(&address).unwrap();
        let closed = exchange(&mut endpoint, Some(peer), 3, 4, 2000);
        hear_closing(&mut endpoint, closed);
        assert!(process.succeeds());
    }
}
