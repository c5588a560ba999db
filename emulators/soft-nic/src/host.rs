//! This host's identity, and its address for other hosts.

use std::net::Ipv4Addr;
use std::os::linux::fs::MetadataExt;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Returns the boot and the network namespace, hashed to 32 bits. Abstract sockets connect processes with the same
/// number.
pub fn host_id() -> u32 {
    let mut hash = Fnv::default();
    // Without a boot id, the host name and the address identify the host.
    match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(id) => hash.add(id.trim().as_bytes()),
        Err(_) => {
            hash.add(nix::unistd::gethostname().unwrap_or_default().as_encoded_bytes());
            hash.add(&default_address().octets());
        }
    }
    if let Ok(meta) = std::fs::metadata("/proc/self/ns/net") {
        hash.add(&meta.st_dev().to_le_bytes());
        hash.add(&meta.st_ino().to_le_bytes());
    }
    (hash.0 ^ (hash.0 >> 32)) as u32
}

/// Returns a card's GUID, which identifies the host and the card but reveals nothing of the card's GID.
pub fn card_guid(card: u32) -> u64 {
    u64::from(host_id()) << 32 | u64::from(card)
}

/// FNV-1a. Every build must compute the same number, which the standard library's hasher does not guarantee.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// Returns the first address of an interface that is up and not loopback, or 127.0.0.1. A link-local address, which
/// only reaches the hosts of one link, comes last.
pub fn default_address() -> Ipv4Addr {
    let Ok(interfaces) = getifaddrs() else { return Ipv4Addr::LOCALHOST };
    interfaces
        .filter(|i| i.flags.contains(InterfaceFlags::IFF_UP) && !i.flags.contains(InterfaceFlags::IFF_LOOPBACK))
        .filter_map(|i| i.address?.as_sockaddr_in().map(|a| a.ip()))
        .min_by_key(Ipv4Addr::is_link_local)
        .unwrap_or(Ipv4Addr::LOCALHOST)
}

#[cfg(test)]
mod tests {
    #[test]
    fn host_id_is_stable() {
        assert_eq!(super::host_id(), super::host_id());
    }
}
