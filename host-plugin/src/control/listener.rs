//! The endpoint of a rank between `listen` and `connect`, and the handle that leads peers to it.

use super::error::ControlError;
use super::interface::source_address;
use super::ring::{BLOCK_MAX, Ring};
use super::time_limits::{PING_AFTER, answer_limit, connect_limit};
use ferrogin_channel::{self as channel, Config, Reactor};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_libfabric::Libfabric;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Version of the handle and of the protocol that it leads to.
pub(super) const VERSION: u16 = 3;
const _: () = assert!(channel::ADDRESS_MAX <= HANDLE_MAXSIZE);

/// The endpoint's configuration. A socket provider (`tcp`) uses the first address that NCCL_SOCKET_IFNAME allows; any other provider chooses
/// its own.
fn config(provider: &str, timeout: Duration) -> Result<Config, ControlError> {
    let source = if provider.contains("tcp") {
        let filter = std::env::var("NCCL_SOCKET_IFNAME").unwrap_or_default();
        Some(source_address(&filter)?.to_string())
    } else {
        None
    };
    Ok(Config {
        provider: provider.to_owned(),
        source,
        // A block, a hello or welcome, and an abort may be under way at once.
        depth: 4,
        max_message: BLOCK_MAX + 64,
        ping_after: PING_AFTER,
        lost_after: answer_limit(timeout),
        connect_within: connect_limit(timeout),
        ..Config::default()
    })
}

/// A rank's endpoint while it waits for `connect`.
pub(super) struct Endpoint {
    // The first field: the listener refuses peers before the reactor ends.
    pub listener: channel::Listener,
    pub reactor: Reactor,
}

/// A listening endpoint. A ring does not need it after `connect`.
pub struct Listener {
    /// `None` after `connect` took it, or failed: peers that still wait for this rank are refused.
    pub(super) endpoint: Mutex<Option<Endpoint>>,
    /// A ring that failed in `connect`, whose abort frames are still under way.
    failed_ring: Mutex<Option<Ring>>,
    handle: [u8; HANDLE_MAXSIZE],
}

impl Listener {
    /// Listens with an endpoint of `provider`.
    ///
    /// # Errors
    /// There is no such provider, or no such interface.
    pub fn open(lib: &Arc<Libfabric>, provider: &str, timeout: Duration) -> Result<Self, ControlError> {
        let failed = |source: io::Error| ControlError::Endpoint { provider: provider.to_owned(), source };
        let reactor =
            Reactor::open(lib, &config(provider, timeout)?).map_err(|error| failed(io::Error::other(error)))?;
        let listener = reactor.listen().map_err(|error| failed(io::Error::other(error)))?;
        let mut handle = [0; HANDLE_MAXSIZE];
        let bytes = listener.address().to_bytes();
        handle[..bytes.len()].copy_from_slice(&bytes);
        Ok(Self { endpoint: Mutex::new(Some(Endpoint { listener, reactor })), failed_ring: Mutex::new(None), handle })
    }

    /// Tries whether [`Listener::open`] opens an endpoint, at less cost.
    ///
    /// # Errors
    /// Those of [`Listener::open`].
    pub fn check(lib: &Arc<Libfabric>, provider: &str, timeout: Duration) -> Result<(), ControlError> {
        Reactor::check(lib, &config(provider, timeout)?)
            .map_err(|error| ControlError::Endpoint { provider: provider.to_owned(), source: io::Error::other(error) })
    }

    /// The handle for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.handle
    }

    /// Keeps a failed ring until this listener ends, so that `connect` need not wait for the ring's abort frames.
    pub fn keep_failed(&self, ring: Ring) {
        *self.failed_ring.lock().unwrap_or_else(PoisonError::into_inner) = Some(ring);
    }

    /// Stops listening: peers that wait for this rank are refused.
    pub fn close(&self) {
        *self.endpoint.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::super::neighbors::handle_address;
    use super::*;

    #[test]
    fn handles_contain_addresses() {
        let lib = Libfabric::load(None).expect("a libfabric");
        let listener = Listener::open(&lib, "tcp", Duration::from_secs(60)).expect("a listener");
        assert!(handle_address(&listener.handle()).is_some());
        assert!(handle_address(&[0xa5; HANDLE_MAXSIZE]).is_none());
        assert!(handle_address(&[0; HANDLE_MAXSIZE]).is_none());
    }

    #[test]
    fn silent_peers_are_given_up_before_deadline() {
        let seconds = Duration::from_secs;
        let limits = |timeout| (answer_limit(seconds(timeout)), connect_limit(seconds(timeout)));
        assert_eq!(limits(60), (seconds(15), seconds(30)));
        assert_eq!(limits(300), (seconds(75), seconds(150)));
        assert_eq!(limits(1), (seconds(2), seconds(2)));
    }
}
