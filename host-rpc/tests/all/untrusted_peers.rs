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
    let what = format!("libfabric {}: a client and 160 calls", lib.version());
    let undisturbed = untrusted::is_undisturbed(&what, "untrusted_process", &place, as_nobody, || {
        let second = reactor();
        let late = connect(&second);
        thread::scope(|scope| {
            scope.spawn(|| hammer(&early, 4, 20));
            hammer(&late, 4, 20);
        });
    });
    assert!(undisturbed, "silent connections slow down calls");
    assert!(running.shutdown(LIMIT));
}

#[test]
fn silent_connections_do_not_delay_calls() {
    let test = "silent_connections_do_not_delay_calls";
    let (libraries, as_nobody) = (libraries(test), untrusted::have_second_user(test));
    let report = run(test, &[], || {
        assert!(untrusted::limit_descriptors(DESCRIPTORS));
        libraries.iter().for_each(|lib| calls_run(lib, as_nobody));
    });
    if let Some(report) = report {
        println!("{report}");
    }
}
