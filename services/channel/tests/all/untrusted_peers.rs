//! A listener facing processes that don't have its address: thousands of silent ones, and ones that forge messages.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::{LIMIT, exchange, patient};
use ferrogin_channel::{Address, Channel, Listener, Reactor};
use ferrogin_rendezvous::Secret;
use ferrogin_rendezvous::proof::{Domain, Initiator};
use ferrogin_test_support::child::run;
use ferrogin_test_support::peer::{Peer, hex, unhex};
use ferrogin_test_support::{Random, repetitions, resident_bytes, soak, untrusted};

/// Descriptors that the listener's process may have: fewer than there are silent connections; in a soak run also more.
const DESCRIPTORS: [u64; 2] = [512, 20_000];
/// The domain of a connection's proofs.
const DOMAIN: Domain = *b"channel\x07";

/// Returns the header of a frame.
fn header(kind: u64, len: u64) -> Vec<u8> {
    [kind, len].map(u64::to_le_bytes).concat()
}

fn echo(channel: Channel) {
    channel.clone().read(move |result| {
        if let Ok(bytes) = result {
            channel.write(bytes, |_| ());
            echo(channel);
        }
    });
}

/// What the other process runs.
#[test]
fn untrusted_process() {
    untrusted::hold();
    let Some(task) = untrusted::task() else { return };
    if let ["forge", listener, rounds] = task.split(' ').collect::<Vec<_>>()[..] {
        forge(listener, rounds.parse().unwrap());
    }
}

/// Connects a new endpoint, and sends a message from each end.
fn open(listener: &Listener) -> (Reactor, Channel, Channel) {
    let (accepted, reactor) = (listener.accept(), Reactor::open(&patient()).unwrap());
    let near = reactor.connect(listener.address()).wait_for(LIMIT).unwrap();
    let far = accepted.wait_for(LIMIT).unwrap();
    exchange(&near, &far, 100);
    exchange(&far, &near, 300_000);
    (reactor, near, far)
}

/// Not a test: a listener with few descriptors, whose channels echo. The clients have their own process, which never
/// runs out of them.
#[test]
fn echo_server() {
    let Ok(descriptors) = std::env::var("FERROGIN_TEST_DESCRIPTORS") else { return };
    assert!(untrusted::limit_descriptors(descriptors.parse().unwrap()), "{descriptors} descriptors are not allowed");
    let reactor = Reactor::open(&patient()).unwrap();
    let listener = reactor.listen().unwrap();
    println!("ADDRESS {}", hex(&listener.address().to_bytes()));
    listener.accept_all(|channel| {
        echo(channel);
        true
    });
    // Wait until the test kills this process.
    let _ = std::io::stdin().read(&mut [0]);
}

/// There are fewer descriptors than silent connections: without a limit on those, no other peer could connect.
#[test]
fn channels_open_despite_silent_connections() {
    let test = "channels_open_despite_silent_connections";
    let as_nobody = untrusted::have_second_user(test);
    let descriptors = &DESCRIPTORS[..if soak() { 2 } else { 1 }];
    for descriptors in descriptors {
        let environment = [("FERROGIN_TEST_DESCRIPTORS", descriptors.to_string())];
        let mut server = Peer::start("untrusted_peers::echo_server", &environment);
        let address = Address::parse(&unhex(&server.wait_for("ADDRESS "))).unwrap();
        let connect = || {
            let reactor = Reactor::open(&patient()).unwrap();
            let channel = reactor.connect(&address).wait_for(LIMIT).unwrap();
            (reactor, channel)
        };
        let (_reactor, early) = connect();
        let place = [address.endpoint().parse().unwrap()];
        let _silent = untrusted::start_silent("untrusted_process", &place, untrusted::silent(), as_nobody);
        for _ in 0..5 {
            let (_reactor, late) = connect();
            exchange(&late, &late, 300_000);
            exchange(&early, &early, 1000);
        }
    }
}

/// A process that knows ports but no secret changes nothing.
#[test]
fn forged_messages_change_nothing() {
    let test = "forged_messages_change_nothing";
    let as_nobody = untrusted::have_second_user(test);
    run(test, &[], || {
        let reactor = Reactor::open(&patient()).unwrap();
        let listener = reactor.listen().unwrap();
        let (_client, near, far) = open(&listener);
        let rounds = repetitions("FERROGIN_CHANNEL_FORGED", 3000, 100_000);
        let task = format!("forge {} {rounds}", listener.address().endpoint());
        let accepted = listener.accept();
        // The first campaign fills what the allocator keeps.
        let mut grown = 0;
        for _ in 0..2 {
            let before = resident_bytes();
            let mut forger = untrusted::start("untrusted_process", &task, as_nobody);
            forger.wait_for("untrusted process forged");
            exchange(&near, &far, 100);
            exchange(&far, &near, 1 << 20);
            grown = resident_bytes().saturating_sub(before);
        }
        assert!(grown < 4 << 20, "{grown} bytes more");
        assert!(accepted.wait_for(Duration::from_millis(1)).is_err(), "an untrusted process has a channel");
        drop(open(&listener));
        exchange(&near, &far, 100);
    });
}

/// Connects to `listener` and sends hellos without its secret, frames without a proof, and random bytes.
fn forge(listener: &str, rounds: usize) {
    let mut random = Random::new(16);
    for round in 0..rounds {
        let secret = Secret::new(u128::from(random.next_u64()).to_le_bytes());
        let nonce = u128::from(random.next_u64()).to_le_bytes();
        let hello = Initiator::new(DOMAIN, secret.bytes(), [0; 16], nonce).hello();
        let mut bytes = match round % 4 {
            0 => hello.to_vec(),
            1 => [&hello[..], &header(1, 48), &[7; 48]].concat(),
            2 => header(2, 8).repeat(10),
            _ => {
                let len = random.index(4000);
                random.bytes(len)
            }
        };
        match round % 5 {
            0 => bytes.truncate(random.index(bytes.len() + 1)),
            1 => bytes.iter_mut().for_each(|byte| *byte ^= if random.one_in(20) { 0x41 } else { 0 }),
            _ => {}
        }
        // The listener may close the connection in the meantime.
        let _ = TcpStream::connect(listener).unwrap().write_all(&bytes);
    }
    println!("untrusted process forged {rounds} messages");
}
