//! Helpers shared by the tests.

pub mod traffic;

pub use ferrogin_test_support::libraries;
pub use ferrogin_test_support::wait::HANG_LIMIT as LIMIT;
use std::fmt;
use std::sync::Arc;

use ferrogin_channel::{Channel, Config, Reactor};
use ferrogin_libfabric::{Libfabric, Version};
use ferrogin_test_support::{child, dist};

/// For live ends: no delay of the machine reaches the limits.
pub fn patient() -> Config {
    Config { lost_after: LIMIT, connect_within: LIMIT, ..Config::default() }
}

/// A provider that channels run over.
pub struct Way {
    libfabric: Option<Arc<Libfabric>>,
    pub provider: String,
}

impl Way {
    pub fn tcp() -> Self {
        Self { libfabric: None, provider: "tcp".to_owned() }
    }

    pub fn over(lib: &Arc<Libfabric>, provider: &str) -> Self {
        Self { libfabric: Some(Arc::clone(lib)), provider: provider.to_owned() }
    }

    /// For live peers.
    pub fn config(&self) -> Config {
        let source = self.provider.contains("tcp").then(|| "127.0.0.1".to_owned());
        Config { libfabric: self.libfabric.clone(), provider: self.provider.clone(), source, ..patient() }
    }

    /// Returns the environment for a child process with the other end.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let lib = self.libfabric.iter().map(|lib| ("FERROGIN_LIBFABRIC", lib.path().display().to_string()));
        lib.chain([(PROVIDER, self.provider.clone())]).collect()
    }
}

const PROVIDER: &str = "FERROGIN_TEST_PROVIDER";

/// In a child process: its parent's way, with the libfabric that FERROGIN_LIBFABRIC names.
pub fn way_of_child() -> Way {
    Way { libfabric: None, provider: std::env::var(PROVIDER).unwrap() }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.provider)?;
        self.libfabric.as_ref().map_or(Ok(()), |lib| write!(f, " of libfabric {}", lib.version()))
    }
}

/// tcp, and providers of each libfabric from 2.0 on: in 1.17, shm hangs on unexpected tagged messages, and other
/// providers crash when peers die. Or the provider in FERROGIN_CHANNEL_PROVIDER.
pub fn ways(test: &str) -> Vec<Way> {
    let over = |lib: &Arc<Libfabric>, providers: &[&str]| -> Vec<Way> {
        providers.iter().map(|provider| Way::over(lib, provider)).collect()
    };
    match std::env::var("FERROGIN_CHANNEL_PROVIDER").as_deref() {
        Ok("tcp") => vec![Way::tcp()],
        Ok(only) => libraries(test).iter().flat_map(|lib| over(lib, &[only])).collect(),
        Err(_) => {
            let able = libraries(test).into_iter().filter(|lib| lib.version() >= Version::new(2, 0));
            [Way::tcp()].into_iter().chain(able.flat_map(|lib| over(&lib, &["tcp;ofi_rxm", "shm"]))).collect()
        }
    }
}

/// Two reactors, and a channel between them.
pub fn pair(config: &Config) -> (Reactor, Reactor, Channel, Channel) {
    let (here, there) = (Reactor::open(config).unwrap(), Reactor::open(config).unwrap());
    let listener = here.listen().unwrap();
    let (a, b) = (listener.accept(), there.connect(listener.address()));
    let (a, b) = (a.wait_for(LIMIT).unwrap(), b.wait_for(LIMIT).unwrap());
    (here, there, a, b)
}

/// Sends a message of `len` bytes and receives it.
pub fn exchange(from: &Channel, to: &Channel, len: usize) {
    let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
    let sent = from.send(bytes.clone());
    assert!(to.receive().wait_for(LIMIT).unwrap() == bytes, "{len}");
    sent.wait_for(LIMIT).unwrap();
}

/// Runs the body of `test` in a process that has the software card: libfabric finds its providers through the
/// environment.
pub fn with_card(test: &str, body: impl FnOnce()) {
    if let Some(dist) = dist(test, &["libsoftefa-fi.so"]) {
        child::run(test, &[("FI_PROVIDER_PATH", dist.to_str().unwrap())], body);
    }
}
