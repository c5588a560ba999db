//! A listener beside processes that do not have its address: silent ones by the thousand, and ones that forge messages.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{LIMIT, exchange, libraries, patient};
use crate::malformed_peers::raw::{Datagrams, EAGER, INLINE, Raw, Tagged, header};
use crate::malformed_peers::{Control, VERSION, echo};
use ferrogin_channel::{Address, Channel, Listener, Reactor};
use ferrogin_libfabric::{Libfabric, bindings};
use ferrogin_test_support::child::run;
use ferrogin_test_support::peer::{self, Peer, hex, unhex};
use ferrogin_test_support::{Random, repetitions, resident_bytes, soak, untrusted};

/// Descriptors that the listener's process may have: fewer than silent connections; in a soak run also more.
const DESCRIPTORS: [u64; 2] = [512, 20_000];
/// Offsets in an address: the secret, the endpoint's name.
const SECRET: usize = 16;
const NAME: usize = 24;

/// What the other process runs.
#[test]
fn untrusted_process() {
    untrusted::hold();
    let Some(task) = untrusted::task() else { return };
    if let ["forge", lib, listener, client, rounds] = task.split(' ').collect::<Vec<_>>()[..] {
        forge(lib, &unhex(listener), &unhex(client), rounds.parse().unwrap());
    }
}

/// A new endpoint connects, and both ends send a message.
fn open(lib: &Arc<Libfabric>, listener: &Listener) -> (Reactor, Channel, Channel) {
    let (accepted, reactor) = (listener.accept(), Reactor::open(lib, &patient()).unwrap());
    let near = reactor.connect(listener.address()).wait_for(LIMIT).unwrap();
    let far = accepted.wait_for(LIMIT).unwrap();
    exchange(&near, &far, 100);
    exchange(&far, &near, 300_000);
    (reactor, near, far)
}

/// Not a test: a listener with few descriptors, whose channels echo. The clients have a process of their own, which never lacks one.
#[test]
fn echo_server() {
    let (Ok(descriptors), Some(library)) = (std::env::var("FERROGIN_TEST_DESCRIPTORS"), peer::library()) else {
        return;
    };
    assert!(untrusted::limit_descriptors(descriptors.parse().unwrap()), "{descriptors} descriptors are not allowed");
    let reactor = Reactor::open(&Libfabric::load(Some(&library)).unwrap(), &patient()).unwrap();
    let listener = reactor.listen().unwrap();
    println!("ADDRESS {}", hex(&listener.address().to_bytes()));
    listener.accept_all(|channel| {
        echo(channel);
        true
    });
    // Until the test kills this process.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Fewer descriptors than silent connections: without a limit for those, no further peer could connect.
#[test]
fn channels_open_beside_silent_connections() {
    let test = "channels_open_beside_silent_connections";
    let as_nobody = untrusted::have_second_user(test);
    let descriptors = &DESCRIPTORS[..if soak() { 2 } else { 1 }];
    for (lib, descriptors) in libraries(test).iter().flat_map(|lib| descriptors.iter().map(move |count| (lib, count))) {
        let environment = [("FERROGIN_TEST_DESCRIPTORS", descriptors.to_string())];
        let mut server = Peer::start_on("untrusted_peers::echo_server", lib.path(), &environment);
        let address = Address::parse(&unhex(&server.wait_for("ADDRESS "))).unwrap();
        let connect = || {
            let reactor = Reactor::open(lib, &patient()).unwrap();
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

/// A process that knows names and ports but no secret changes nothing.
#[test]
fn forged_messages_change_nothing() {
    let test = "forged_messages_change_nothing";
    let (libraries, as_nobody) = (libraries(test), untrusted::have_second_user(test));
    run(test, &[], || {
        for lib in &libraries {
            let reactor = Reactor::open(lib, &patient()).unwrap();
            let listener = reactor.listen().unwrap();
            let (client, near, far) = open(lib, &listener);
            let client = client.listen().unwrap().address().to_bytes();
            let mut address = listener.address().to_bytes();
            address[SECRET..NAME].fill(0);
            let rounds = repetitions("FERROGIN_CHANNEL_FORGED", 3000, 100_000);
            let task = format!("forge {} {} {} {rounds}", lib.path().display(), hex(&address), hex(&client[NAME..]));
            let accepted = listener.accept();
            // The first campaign warms up what the provider keeps.
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
            drop(open(lib, &listener));
            exchange(&near, &far, 100);
        }
    });
}

/// Sends forged messages to `listener`: in the name of its peer `client`, of the listener, of invented endpoints; and bytes without form.
fn forge(lib: &str, listener: &[u8], client: &[u8], rounds: usize) {
    let lib = Libfabric::load(Some(Path::new(lib))).unwrap();
    let mut raw = Tagged::open_with(&lib, "tcp", bindings::FI_MSG);
    let name = &listener[NAME..];
    raw.set_peer(name);
    let mut random = Random::new(16);
    for round in 0..rounds {
        let mut invented = name.to_vec();
        invented[2..8].copy_from_slice(&random.next_u64().to_le_bytes()[..6]);
        let from = [client, name, &invented][round % 3];
        let mut message = datagram(from, &mut random);
        match round % 5 {
            0 => message.truncate(random.index(message.len())),
            1 => message.iter_mut().for_each(|byte| *byte ^= if random.one_in(20) { 0x41 } else { 0 }),
            _ => {}
        }
        raw.send_message(&message);
    }
    while raw.in_flight > 0 {
        raw.progress();
    }
    // Bytes that no provider sends.
    let address = Address::parse(listener).unwrap().endpoint();
    for len in 0..100 {
        let noise: Vec<u8> = (0..len * 40).map(|_| random.next_u64() as u8).collect();
        let _ = TcpStream::connect(&*address).unwrap().write_all(&noise);
    }
    println!("untrusted process forged {rounds} messages");
}

/// A datagram of the endpoint `from` with one or two records.
fn datagram(from: &[u8], random: &mut Random) -> Vec<u8> {
    let mut records = Vec::new();
    for _ in 0..1 + random.below(2) {
        let kind = 1 + random.below(5) as u8;
        // A hello, another control message, a length, a payload.
        let id = u64::from(random.below(12));
        let tag = random.of(&[1 << 34 | 1, 1 << 34 | id, 1 << 32 | id, 1 << 33 | id]);
        let (name, secret) = (from.to_vec(), random.next_u64());
        let (version, matching) = (VERSION, Datagrams::MATCHING);
        let control = Control { version, matching, kind: tag as u8, secret, name, ..Control::default() }.emit();
        let is_eager = kind == EAGER;
        let total = if is_eager { control.len() as u64 } else { u64::from(random.below(1 << 20)) };
        let mut header = header(kind, tag, total);
        header[1] = INLINE;
        records.extend(header);
        records.extend(is_eager.then_some(control).into_iter().flatten());
    }
    // Data, or a control message between the endpoints: a ping, a close, its confirmation.
    let (kind, flags) = [(1, 0), (2, random.below(8) as u8)][usize::from(random.one_in(4))];
    let header_len = (records.len() as u16).to_le_bytes();
    let mut prefix = [&b"FGM2"[..], &[kind, flags, from.len() as u8, 0], &header_len, &[0; 22]].concat();
    prefix[16..24].copy_from_slice(&random.next_u64().to_le_bytes());
    [&prefix, from, &records].concat()
}
