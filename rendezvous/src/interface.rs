//! The network interface of the control plane's sockets.

use super::error::ControlError;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::net::IpAddr;

/// The address of the first interface that is up and that `filter` allows, IPv4 before IPv6. Without a filter and without
/// another interface it is the loopback address, which serves ranks of one host.
pub(super) fn source_address(filter: &str) -> Result<IpAddr, ControlError> {
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
        // Other hosts cannot use a link-local address, which is valid on one interface only.
        let usable = address.as_sockaddr_in6().map(|v6| v6.ip()).filter(|ip| !ip.is_unicast_link_local());
        v6 = v6.or(usable);
    }
    match v6 {
        Some(address) => Ok(IpAddr::V6(address)),
        None if filter.is_empty() => Ok(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)),
        None => Err(ControlError::NoInterface { filter: filter.to_owned() }),
    }
}

/// NCCL_SOCKET_IFNAME is a comma list of name prefixes; a leading `=` makes them whole names, a leading `^` excludes them. An
/// empty filter allows all interfaces but loopback and container bridges.
fn allowed(filter: &str, name: &str) -> bool {
    if filter.is_empty() {
        return name != "lo" && !name.starts_with("docker") && !name.starts_with("virbr");
    }
    let (exclude, rest) = match filter.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, filter),
    };
    let (whole, rest) = match rest.strip_prefix('=') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let named = rest.split(',').filter(|entry| !entry.is_empty()).any(|entry| {
        // NCCL's lists may have port numbers after a colon.
        let entry = entry.split(':').next().unwrap_or(entry);
        if whole { name == entry } else { name.starts_with(entry) }
    });
    named != exclude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_filter_follows_nccl() {
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
