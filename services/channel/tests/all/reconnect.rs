//! Clients one after the other at one address: each connects, and gets no message of an earlier one.

use std::io::Write;
use std::sync::Arc;

use crate::common::{LIMIT, libraries, patient, with_card};
use ferrogin_channel::{Address, Channel, Config, Reactor};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::peer::{self, Peer as Process, hex, unhex};
use ferrogin_test_support::{Random, own_host, own_port};

/// Clients at one address.
const LIVES: u64 = 4;
/// Messages each way that are written and not all read when a client dies.
const UNREAD: u64 = 100;

/// The provider to test besides the software card. shm names its endpoints by process; rxm, and sometimes tcp with its own tags, let
/// messages of dead peers block later ones.
const TCP: &str = "tcp";

fn config(way: &str, source: &str) -> Config {
    let source = (way == TCP).then(|| source.to_owned());
    // No death is detected by silence: the next client must replace a dead one.
    Config { provider: way.to_owned(), source, ..patient() }
}

fn body(life: u64, from_client: bool, number: u64) -> Vec<u8> {
    let mut random = Random::new(life * 1_000_003 + number * 2 + u64::from(from_client));
    let len = match random.next_u64() % 16 {
        0 => 0,
        1 => 200_000,
        _ => random.index(3000),
    };
    [[life, u64::from(from_client), number].map(u64::to_le_bytes).concat(), random.bytes(len)].concat()
}

fn write(channel: &Channel, life: u64, from_client: bool, count: u64) {
    for number in 0..count {
        channel.write(body(life, from_client, number), |_| ());
    }
}

fn read(channel: &Channel, life: u64, from_client: bool, count: u64) {
    for number in 0..count {
        let message = channel.receive().wait_for(LIMIT).unwrap();
        assert!(message == body(life, from_client, number), "message {number} of life {life}");
    }
}

/// A client ends with a close, or is killed during its traffic.
fn ends_cleanly(life: u64) -> bool {
    life % 2 == 1
}

/// Not a test: what the clients run.
#[test]
fn child() {
    let var = |name: &str| std::env::var(name).ok();
    let (Some(library), Some(address)) = (peer::library(), var("FERROGIN_TEST_ADDRESS")) else { return };
    let life: u64 = var("FERROGIN_TEST_LIFE").and_then(|text| text.parse().ok()).unwrap();
    let config = config(&var("FERROGIN_TEST_PROVIDER").unwrap(), &var("FERROGIN_TEST_SOURCE").unwrap());
    let lib = Libfabric::load(Some(&library)).unwrap();
    let reactor = Reactor::open(&lib, &config).unwrap();
    let channel = reactor.connect(&Address::parse(&unhex(&address)).unwrap()).wait().unwrap();
    channel.send(life.to_le_bytes().to_vec()).wait_for(LIMIT).unwrap();
    read(&channel, life, false, UNREAD / 2);
    write(&channel, life, true, UNREAD);
    // The server has read some messages.
    read(&channel, life, false, UNREAD);
    println!("MIDDLE");
    std::io::stdout().flush().unwrap();
    let mut go_on = String::new();
    std::io::stdin().read_line(&mut go_on).unwrap();
    channel.close(LIMIT).wait().unwrap();
    assert!(reactor.shutdown(LIMIT));
}

/// Starts client number `life`.
fn start_client(lib: &Libfabric, way: &str, source: &(String, u16), address: &Address, life: u64) -> Process {
    let (host, port) = source;
    let mut environment = vec![
        ("FERROGIN_TEST_PROVIDER", way.to_owned()),
        ("FERROGIN_TEST_ADDRESS", hex(&address.to_bytes())),
        ("FERROGIN_TEST_SOURCE", host.clone()),
        ("FERROGIN_TEST_LIFE", life.to_string()),
    ];
    // The same port for each client: tcp, and net of 1.17, take it from a range.
    for name in ["FI_TCP_PORT_LOW_RANGE", "FI_TCP_PORT_HIGH_RANGE", "FI_NET_PORT_LOW_RANGE", "FI_NET_PORT_HIGH_RANGE"] {
        environment.push((name, port.to_string()));
    }
    Process::start_on("reconnect::child", lib.path(), &environment)
}

/// Clients over one provider, one after the other. `same_name`: the address gives them the same endpoint name.
fn lives(lib: &Arc<Libfabric>, way: &str, same_name: bool) {
    let place = (own_host().to_string(), own_port());
    let reactor = Reactor::open(lib, &config(way, "127.0.0.1")).unwrap();
    let listener = reactor.listen().unwrap();
    let mut before: Option<(Channel, u64)> = None;
    for life in 0..LIVES {
        let mut client = start_client(lib, way, &place, listener.address(), life);
        let channel = listener.accept().wait_for(LIMIT).unwrap();
        if let Some((before, life)) = before.take() {
            assert_eq!(same_name, before.peer() == channel.peer(), "{} and {}", before.peer(), channel.peer());
            // Operations with the dead client end, unless the next client has another name.
            if same_name && !ends_cleanly(life) {
                let error = before.receive().wait_for(LIMIT).unwrap_err();
                assert!(error.to_string().contains(before.peer()), "{error}");
            }
        }
        let hello = channel.receive().wait_for(LIMIT).unwrap();
        assert_eq!(hello, life.to_le_bytes());
        write(&channel, life, false, UNREAD / 2);
        read(&channel, life, true, UNREAD / 2);
        write(&channel, life, false, UNREAD);
        client.wait_for("MIDDLE");
        if ends_cleanly(life) {
            client.write_line("");
            for number in UNREAD / 2..UNREAD {
                assert!(channel.receive().wait_for(LIMIT).unwrap() == body(life, true, number));
            }
            assert!(client.succeeds());
        } else {
            // This message is never read.
            write(&channel, life, false, UNREAD);
            client.signal(libc::SIGKILL);
            assert!(!client.succeeds());
        }
        before = Some((channel, life));
    }
    println!("libfabric {} over {way}: {LIVES} clients at {}", lib.version(), before.unwrap().0.peer());
}

#[test]
fn next_client_at_same_address_connects() {
    for lib in &libraries("next_client_at_same_address_connects") {
        lives(lib, TCP, true);
    }
}

/// Every card has its own endpoint name, also at the same address.
#[test]
fn next_client_over_the_software_card_connects() {
    let test = "next_client_over_the_software_card_connects";
    with_card(test, || libraries(test).iter().for_each(|lib| lives(lib, "softefa", false)));
}
