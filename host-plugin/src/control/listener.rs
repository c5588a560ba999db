//! The endpoint of a rank, and the 128 bytes that lead other ranks to it.

use super::{ControlError, Ring};
use ferrogin_channel::{self as channel, Address, Config, Reactor};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use ferrogin_libfabric::Libfabric;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Version of the handle and of the protocol behind it.
pub(super) const VERSION: u16 = 2;
/// Largest block of an allgather: far above any that set-up makes.
pub(super) const BLOCK_MAX: usize = 256 << 20;
/// A neighbour that is quiet for so long is asked whether it lives.
const PING_AFTER: Duration = Duration::from_millis(500);
/// And given up when it has not answered for so long, or a quarter of FERROGIN_TIMEOUT if that is longer, and at the latest after
/// half of FERROGIN_TIMEOUT: its neighbours, which alone know that it is silent, tell the others before these run out of time and
/// take the wrong one for the cause. An endpoint that does not answer a connect at all gets as long: it was there before its handle was.
const LOST_AFTER: Duration = Duration::from_secs(10);
/// But not sooner, since a busy machine may let a process wait.
const LOST_AFTER_LEAST: Duration = Duration::from_secs(2);

const _: () = assert!(channel::ADDRESS_MAX <= HANDLE_MAXSIZE);

/// The listener's address in a handle; `None` if it is no address that this version made.
pub(super) fn address(handle: &[u8; HANDLE_MAXSIZE]) -> Option<Address> {
    Address::parse(handle).ok()
}

/// A rank's endpoint while it waits for `connect`.
pub(super) struct Endpoint {
    // First, so that nobody is let in any more when the reactor ends.
    pub listener: channel::Listener,
    pub reactor: Reactor,
}

/// A listening endpoint. Nothing of it is needed once `connect` has returned.
pub struct Listener {
    /// None once `connect` took it, or failed: who waits for this rank learns it so.
    pub(super) endpoint: Mutex<Option<Endpoint>>,
    /// A ring that failed in `connect`, whose last words are on their way.
    parted: Mutex<Option<Ring>>,
    handle: [u8; HANDLE_MAXSIZE],
}

impl Listener {
    /// Listens with an endpoint of the provider `provider`: a socket provider (`tcp`) at the first address that
    /// NCCL_SOCKET_IFNAME allows, any other where it likes.
    ///
    /// # Errors
    /// No such provider, no interface.
    pub fn open(lib: &Arc<Libfabric>, provider: &str, timeout: Duration) -> Result<Self, ControlError> {
        let source = if provider.contains("tcp") {
            let filter = std::env::var("NCCL_SOCKET_IFNAME").unwrap_or_default();
            Some(source(&filter)?.to_string())
        } else {
            None
        };
        let lost_after = LOST_AFTER.max(timeout / 4);
        let config = Config {
            provider: provider.to_owned(),
            source,
            // One block, a head, an abort.
            depth: 4,
            max_message: BLOCK_MAX + 64,
            ping_after: PING_AFTER,
            lost_after: (timeout / 2).max(LOST_AFTER_LEAST).min(lost_after),
            connect_within: timeout.min(lost_after),
            ..Config::default()
        };
        let failed = |source: io::Error| ControlError::Endpoint { provider: provider.to_owned(), source };
        let reactor = Reactor::open(lib, &config).map_err(|error| failed(io::Error::other(error)))?;
        let listener = reactor.listen().map_err(|error| failed(io::Error::other(error)))?;
        let mut handle = [0; HANDLE_MAXSIZE];
        let bytes = listener.address().to_bytes();
        handle[..bytes.len()].copy_from_slice(&bytes);
        Ok(Self { endpoint: Mutex::new(Some(Endpoint { listener, reactor })), parted: Mutex::new(None), handle })
    }

    /// The bytes for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.handle
    }

    /// Keeps a ring that has failed until this listener ends: nobody waits in `connect` for its farewell.
    pub fn park(&self, ring: Ring) {
        *self.parted.lock().unwrap_or_else(PoisonError::into_inner) = Some(ring);
    }

    /// Stops listening: who is waiting for this rank is refused.
    pub fn close(&self) {
        *self.endpoint.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The address to be reached by: of an interface that is up and that `filter` allows, IPv4 before IPv6. Falls back to the
/// loopback, which serves one host, when nothing is set and there is no other.
fn source(filter: &str) -> Result<IpAddr, ControlError> {
    let interfaces = getifaddrs().map_err(|errno| ControlError::Socket { call: "getifaddrs", source: errno.into() })?;
    let mut v6 = None;
    for interface in interfaces {
        if !interface.flags.contains(InterfaceFlags::IFF_UP) || !allowed(filter, &interface.interface_name) {
            continue;
        }
        let Some(address) = interface.address.as_ref() else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            return Ok(IpAddr::V4(v4.ip()));
        }
        // A link-local address means nothing without its interface.
        let usable = address.as_sockaddr_in6().map(|v6| v6.ip()).filter(|ip| !ip.is_unicast_link_local());
        v6 = v6.or(usable);
    }
    match v6 {
        Some(address) => Ok(IpAddr::V6(address)),
        None if filter.is_empty() => Ok(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)),
        None => Err(ControlError::NoInterface { filter: filter.to_owned() }),
    }
}

/// NCCL_SOCKET_IFNAME: a comma list of name prefixes, of whole names with a leading `=`, of what to avoid with a
/// leading `^`. Unset: everything but loopback and container bridges.
pub(super) fn allowed(filter: &str, name: &str) -> bool {
    if filter.is_empty() {
        return name != "lo" && !name.starts_with("docker") && !name.starts_with("virbr");
    }
    let (avoid, rest) = match filter.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, filter),
    };
    let (whole, rest) = match rest.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let named = rest.split(',').filter(|entry| !entry.is_empty()).any(|entry| {
        // NCCL lists may give port numbers after a colon.
        let entry = entry.split(':').next().unwrap_or(entry);
        if whole { name == entry } else { name.starts_with(entry) }
    });
    named != avoid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_addresses() {
        let lib = Libfabric::load(None).expect("a libfabric");
        let listener = Listener::open(&lib, "tcp", Duration::from_secs(1)).expect("a listener");
        assert!(address(&listener.handle()).is_some());
        assert!(address(&[0xa5; HANDLE_MAXSIZE]).is_none());
        assert!(address(&[0; HANDLE_MAXSIZE]).is_none());
    }

    #[test]
    fn interface_filters_are_nccls() {
        for (filter, name, expected) in [
            ("", "eth0", true),
            ("", "lo", false),
            ("", "docker0", false),
            ("eth", "eth0", true),
            ("eth", "ens5", false),
            ("eth,ens", "ens5", true),
            ("=eth0", "eth0", true),
            ("=eth0", "eth01", false),
            ("^eth", "eth0", false),
            ("^eth", "ens5", true),
            ("^=eth0", "eth01", true),
            ("^=eth0", "eth0", false),
            ("lo", "lo", true),
        ] {
            assert_eq!(allowed(filter, name), expected, "{filter} {name}");
        }
    }
}
