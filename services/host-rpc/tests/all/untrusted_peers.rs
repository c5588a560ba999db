//! A server facing silent connections from another process.

use std::io::Read;
use std::thread;

use crate::calls::{hammer, server};
use crate::common::patient_config;
use ferrogin_channel::{Address, Reactor};
use ferrogin_test_support::peer::{Peer, hex, unhex};
use ferrogin_test_support::untrusted;
use host_rpc::{Client, Settings};

/// Descriptors that the server's process may have: fewer than there are silent connections.
const DESCRIPTORS: u64 = 512;

/// What the other process runs.
#[test]
fn untrusted_process() {
    untrusted::hold();
}

/// Not a test: a server with few descriptors. The clients have their own process, which never runs out of them.
#[test]
fn server_with_few_descriptors() {
    if std::env::var_os("FERROGIN_TEST_SERVER").is_none() {
        return;
    }
    assert!(untrusted::limit_descriptors(DESCRIPTORS));
    let reactor = Reactor::open(&patient_config()).unwrap();
    let running = server(Settings::default());
    let address = running.listen(reactor.listen().unwrap());
    println!("ADDRESS {}", hex(&address.to_bytes()));
    // Wait until the test kills this process.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Without a limit on silent connections, no other client could connect.
#[test]
fn clients_connect_and_call_despite_silent_connections() {
    let test = "clients_connect_and_call_despite_silent_connections";
    let as_nobody = untrusted::have_second_user(test);
    let environment = [("FERROGIN_TEST_SERVER", "1".to_owned())];
    let mut server = Peer::start("server_with_few_descriptors", &environment);
    let address = Address::parse(&unhex(&server.wait_for("ADDRESS "))).unwrap();
    let connect = || {
        let reactor = Reactor::open(&patient_config()).unwrap();
        let client = Client::new(reactor.connect(&address).wait().unwrap(), Settings::default());
        (reactor, client)
    };
    let (_reactor, early) = connect();
    let place = [address.endpoint().parse().unwrap()];
    let _silent = untrusted::start_silent("untrusted_process", &place, untrusted::silent(), as_nobody);
    for _ in 0..3 {
        let (_reactor, late) = connect();
        thread::scope(|scope| {
            scope.spawn(|| hammer(&early, 4, 20));
            hammer(&late, 4, 20);
        });
    }
}
