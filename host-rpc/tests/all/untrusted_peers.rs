//! A server beside silent connections of another process.

use std::sync::Arc;
use std::thread;

use crate::calls::{LIMIT, hammer, server};
use crate::common::libfabric::libraries;
use crate::common::patient_config;
use ferrogin_channel::Reactor;
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::child::run;
use ferrogin_test_support::untrusted;
use host_rpc::{Client, Settings};

/// Descriptors that the server's process may have: fewer than silent connections.
const DESCRIPTORS: u64 = 512;

/// What the other process runs.
#[test]
fn untrusted_process() {
    untrusted::hold();
}

fn calls_run(lib: &Arc<Libfabric>, as_nobody: bool) {
    let reactor = || Reactor::open(lib, &patient_config()).unwrap();
    let running = server(Settings::default());
    let (there, first) = (reactor(), reactor());
    let address = running.listen(there.listen().unwrap());
    let connect = |reactor: &Reactor| Client::new(reactor.connect(&address).wait().unwrap(), Settings::default());
    let early = connect(&first);
    let place = [address.endpoint().parse().unwrap()];
    let _silent = untrusted::start_silent("untrusted_process", &place, untrusted::silent(), as_nobody);
    for _ in 0..3 {
        let second = reactor();
        let late = connect(&second);
        thread::scope(|scope| {
            scope.spawn(|| hammer(&early, 4, 20));
            hammer(&late, 4, 20);
        });
    }
    assert!(running.shutdown(LIMIT));
}

/// Far fewer descriptors than silent connections: without a limit for those, no further client could connect.
#[test]
fn clients_connect_and_call_beside_silent_connections() {
    let test = "clients_connect_and_call_beside_silent_connections";
    let (libraries, as_nobody) = (libraries(test), untrusted::have_second_user(test));
    run(test, &[], || {
        assert!(untrusted::limit_descriptors(DESCRIPTORS));
        libraries.iter().for_each(|lib| calls_run(lib, as_nobody));
    });
}
