//! What the tests share.

#[path = "../../../../libfabric/tests/all/common/mod.rs"]
mod libfabric;
pub mod traffic;

pub use libfabric::libraries;
use std::sync::Arc;
use std::time::Duration;

use ferrogin_channel::{Channel, ChannelError, Config, Reactor};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::{child, dist};

/// For everything that live peers do: a busy machine does not reach it.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The peer was given up because it did not answer, by the channel or by the datagrams below.
pub fn is_silence(error: &ChannelError) -> bool {
    error.to_string().contains("has not answered")
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
