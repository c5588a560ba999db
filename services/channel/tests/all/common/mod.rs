//! What the tests share.

pub mod traffic;

pub use ferrogin_test_support::libraries;
pub use ferrogin_test_support::wait::HANG_LIMIT as LIMIT;
use std::sync::Arc;

use ferrogin_channel::{Channel, Config, Reactor};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::{child, dist};

/// For live ends: no delay of the machine reaches the limits.
pub fn patient() -> Config {
    Config { lost_after: LIMIT, connect_within: LIMIT, ..Config::default() }
}

/// Two reactors, and a channel between them.
pub fn pair(lib: &Arc<Libfabric>, config: &Config) -> (Reactor, Reactor, Channel, Channel) {
    let (here, there) = (Reactor::open(lib, config).unwrap(), Reactor::open(lib, config).unwrap());
    let listener = here.listen().unwrap();
    let (a, b) = (listener.accept(), there.connect(listener.address()));
    let (a, b) = (a.wait_for(LIMIT).unwrap(), b.wait_for(LIMIT).unwrap());
    (here, there, a, b)
}

/// Sends a message of `len` bytes, and receives it.
pub fn exchange(from: &Channel, to: &Channel, len: usize) {
    let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
    let sent = from.send(bytes.clone());
    assert!(to.receive().wait_for(LIMIT).unwrap() == bytes, "{len}");
    sent.wait_for(LIMIT).unwrap();
}

/// Runs the body of `test` in a process that has the software card: libfabric takes its providers from the environment.
pub fn with_card(test: &str, body: impl FnOnce()) {
    if let Some(dist) = dist(test, &["libsoftefa-fi.so"]) {
        child::run(test, &[("FI_PROVIDER_PATH", dist.to_str().unwrap())], body);
    }
}
