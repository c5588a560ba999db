//! The listening socket and the 128 bytes that lead other ranks to it.

use super::ControlError;
use super::frame::NONCE;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};
use std::sync::{Mutex, PoisonError};

/// Version of the handle and of the protocol behind it.
pub(super) const VERSION: u16 = 1;
const MAGIC: [u8; 8] = *b"ferrogin";
/// Addresses that a handle has room for.
const ADDRESSES: usize = 16;

/// What a handle says. On the wire: magic 8, version 2, port 2, addresses 2, zero 2, host 8, nonce 16, addresses 4 each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Handle {
    /// Which host, or part of a host with its own network.
    pub host: u64,
    /// TCP port.
    pub port: u16,
    /// The secret.
    pub nonce: [u8; NONCE],
    /// Where the host can be reached, best first.
    pub addresses: Vec<Ipv4Addr>,
}

impl Handle {
    /// As NCCL carries it.
    pub fn emit(&self) -> [u8; HANDLE_MAXSIZE] {
        let mut out = [0; HANDLE_MAXSIZE];
        let count = self.addresses.len().min(ADDRESSES);
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10..12].copy_from_slice(&self.port.to_le_bytes());
        out[12..14].copy_from_slice(&(count as u16).to_le_bytes());
        out[16..24].copy_from_slice(&self.host.to_le_bytes());
        out[24..40].copy_from_slice(&self.nonce);
        for (place, address) in out[40..].chunks_exact_mut(4).zip(&self.addresses[..count]) {
            place.copy_from_slice(&address.octets());
        }
        out
    }

    /// From NCCL's bytes; `None` if this version did not make them.
    pub fn parse(bytes: &[u8; HANDLE_MAXSIZE]) -> Option<Self> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let count = usize::from(u16_at(12));
        if bytes[..8] != MAGIC || u16_at(8) != VERSION || count > ADDRESSES {
            return None;
        }
        let mut host = [0; 8];
        host.copy_from_slice(&bytes[16..24]);
        let mut nonce = [0; NONCE];
        nonce.copy_from_slice(&bytes[24..40]);
        let addresses =
            bytes[40..].chunks_exact(4).take(count).map(|a| Ipv4Addr::new(a[0], a[1], a[2], a[3])).collect();
        Some(Self { host: u64::from_le_bytes(host), port: u16_at(10), nonce, addresses })
    }

    /// Where to call, best first: within one host, the loopback.
    pub fn targets(&self, own_host: u64) -> Vec<SocketAddr> {
        let local = (self.host == own_host).then_some(Ipv4Addr::LOCALHOST);
        let to = |address| SocketAddr::V4(SocketAddrV4::new(address, self.port));
        match local {
            Some(address) => vec![to(address)],
            None => self.addresses.iter().copied().map(to).collect(),
        }
    }
}

/// A listening socket. Nothing of it is needed once `connect` has returned.
#[derive(Debug)]
pub struct Listener {
    /// None once a `connect` failed: who waits in its queue learns it so.
    pub(super) socket: Mutex<Option<TcpListener>>,
    pub(super) handle: Handle,
}

impl Listener {
    /// Listens on all IPv4 interfaces, on a port that the system picks.
    ///
    /// # Errors
    /// No socket, no interface, no randomness.
    pub fn open() -> Result<Self, ControlError> {
        let failed = |call| move |source| ControlError::Socket { call, source };
        let filter = std::env::var("NCCL_SOCKET_IFNAME").unwrap_or_default();
        let addresses = addresses(&filter)?;
        let socket = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed("bind"))?;
        socket.set_nonblocking(true).map_err(failed("set_nonblocking"))?;
        let port = socket.local_addr().map_err(failed("getsockname"))?.port();
        let mut nonce = [0; NONCE];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut file| file.read_exact(&mut nonce))
            .map_err(failed("read of /dev/urandom"))?;
        let handle = Handle { host: host_id(), port, nonce, addresses };
        Ok(Self { socket: Mutex::new(Some(socket)), handle })
    }

    /// The bytes for the other ranks.
    pub fn handle(&self) -> [u8; HANDLE_MAXSIZE] {
        self.handle.emit()
    }

    /// Stops listening: who is waiting for this rank is refused.
    pub fn close(&self) {
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// A number that is the same for all processes that share a loopback interface, and for no others: of the boot and the
/// network namespace.
pub(super) fn host_id() -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(&std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default());
    if let Ok(namespace) = std::fs::read_link("/proc/self/ns/net") {
        hasher.write(namespace.as_os_str().as_encoded_bytes());
    }
    hasher.write(&std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default());
    hasher.finish()
}

/// IPv4 addresses of the interfaces that are up and that `filter` allows. Falls back to the loopback, which serves one
/// host, when nothing is set and there is no other.
fn addresses(filter: &str) -> Result<Vec<Ipv4Addr>, ControlError> {
    let interfaces = getifaddrs().map_err(|errno| ControlError::Socket { call: "getifaddrs", source: errno.into() })?;
    let mut found = Vec::new();
    for interface in interfaces {
        let Some(address) = interface.address.as_ref().and_then(|address| address.as_sockaddr_in()) else { continue };
        if interface.flags.contains(InterfaceFlags::IFF_UP) && allowed(filter, &interface.interface_name) {
            found.push(address.ip());
        }
    }
    if found.is_empty() {
        if !filter.is_empty() {
            return Err(ControlError::NoInterface { filter: filter.to_owned() });
        }
        found.push(Ipv4Addr::LOCALHOST);
    }
    found.truncate(ADDRESSES);
    Ok(found)
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
    fn handles_survive_nccl() {
        let handle = Handle {
            host: 0x0102_0304_0506_0708,
            port: 65535,
            nonce: std::array::from_fn(|i| i as u8 + 1),
            addresses: vec![Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(192, 168, 255, 254)],
        };
        assert_eq!(Handle::parse(&handle.emit()), Some(handle.clone()));
        assert_eq!(handle.targets(1).len(), 2);
        assert_eq!(handle.targets(handle.host), vec![SocketAddr::from(([127, 0, 0, 1], 65535))]);
        let many = Handle { addresses: vec![Ipv4Addr::LOCALHOST; 40], ..handle };
        assert_eq!(Handle::parse(&many.emit()).unwrap().addresses.len(), ADDRESSES);
    }

    #[test]
    fn foreign_handles_are_refused() {
        assert_eq!(Handle::parse(&[0xa5; HANDLE_MAXSIZE]), None);
        assert_eq!(Handle::parse(&[0; HANDLE_MAXSIZE]), None);
        let mut bytes = Handle { host: 1, port: 2, nonce: [3; NONCE], addresses: vec![] }.emit();
        bytes[8] = 99;
        assert_eq!(Handle::parse(&bytes), None);
        bytes[8] = VERSION as u8;
        bytes[12] = 200;
        assert_eq!(Handle::parse(&bytes), None);
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
