//! The network interfaces that NCCL's variables allow.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::io;
use std::net::IpAddr;

/// No interface is usable.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// The system failed to list its interfaces.
    #[error("getifaddrs failed: {0}")]
    System(io::Error),
    /// NCCL_SOCKET_FAMILY has an invalid value.
    #[error("NCCL_SOCKET_FAMILY={0} is not valid: set it to AF_INET or AF_INET6, or unset it")]
    Family(String),
    /// No interface that the variables allow is up.
    #[error(
        "no network interface of this host that is up{} has an address{}; see `ip address`",
        allowed_by(filter, family),
        if *link_local { " other than IPv6 link-local ones (fe80::), which other hosts cannot use" } else { "" },
    )]
    NoneAllowed {
        /// NCCL_SOCKET_IFNAME, or empty.
        filter: String,
        /// NCCL_SOCKET_FAMILY, or empty.
        family: String,
        /// An allowed interface has an IPv6 link-local address.
        link_local: bool,
    },
}

/// Returns the part of a message about the variables that limit the choice.
fn allowed_by(filter: &str, family: &str) -> String {
    let set = [("NCCL_SOCKET_IFNAME", filter), ("NCCL_SOCKET_FAMILY", family)]
        .into_iter()
        .filter(|(_, value)| !value.is_empty());
    let set: Vec<_> = set.map(|(name, value)| format!("{name}={value}")).collect();
    if set.is_empty() { String::new() } else { format!(" and that {} allows", set.join(" with ")) }
}

/// Returns the addresses that NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY allow, IPv4 before IPv6. Without
/// NCCL_SOCKET_IFNAME, returns only the first interface's address; IPv4 link-local addresses, container bridges and the
/// loopback interface come last.
///
/// # Errors
/// There are none.
pub fn addresses() -> Result<Vec<IpAddr>, InterfaceError> {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let (filter, family) = (variable("NCCL_SOCKET_IFNAME"), variable("NCCL_SOCKET_FAMILY"));
    let interfaces = getifaddrs().map_err(|errno| InterfaceError::System(errno.into()))?;
    let up = interfaces.filter(|interface| interface.flags.contains(InterfaceFlags::IFF_UP));
    let found = up.filter_map(|interface| {
        let address = interface.address.as_ref()?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let v6 = address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()));
        Some((interface.interface_name, v4.or(v6)?))
    });
    choose(found.collect(), &filter, &family)
}

fn choose(mut found: Vec<(String, IpAddr)>, filter: &str, family: &str) -> Result<Vec<IpAddr>, InterfaceError> {
    match family {
        "" => {}
        "AF_INET" => found.retain(|(_, address)| address.is_ipv4()),
        "AF_INET6" => found.retain(|(_, address)| address.is_ipv6()),
        _ => return Err(InterfaceError::Family(family.to_owned())),
    }
    found.retain(|(name, _)| allowed(filter, name));
    // Other hosts can't use an IPv6 link-local address, which is only valid on one interface.
    let all = found.len();
    found.retain(|(_, address)| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    if found.is_empty() {
        let (filter, family) = (filter.to_owned(), family.to_owned());
        return Err(InterfaceError::NoneAllowed { filter, family, link_local: all > 0 });
    }
    // An IPv4 one only reaches the hosts on its link, and isn't unique beyond.
    let link_local = |address: &IpAddr| matches!(address, IpAddr::V4(v4) if v4.is_link_local());
    if filter.is_empty() {
        // A bridge or the loopback interface reaches no other host at all.
        found.sort_by_key(|(name, address)| (rank(name).max(1), link_local(address), rank(name), address.is_ipv6()));
        found.truncate(1);
    } else {
        found.sort_by_key(|(_, address)| (link_local(address), address.is_ipv6()));
    }
    Ok(found.into_iter().map(|(_, address)| address).collect())
}

/// Returns an interface's place in NCCL's order: InfiniBand first, and last those that don't lead to other hosts.
fn rank(name: &str) -> usize {
    let last = ["docker", "lo", "virbr"].iter().position(|prefix| name.starts_with(prefix));
    last.map_or(usize::from(!name.starts_with("ib")), |at| at + 2)
}

/// Returns whether NCCL_SOCKET_IFNAME, a comma-separated list of name prefixes, allows an interface. A leading `=`
/// makes them whole names, a leading `^` excludes them. An empty filter allows all interfaces.
fn allowed(filter: &str, name: &str) -> bool {
    if filter.is_empty() {
        return true;
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
            ("", "lo", true),
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

    #[test]
    fn addresses_are_those_that_nccl_would_take() {
        let found = || {
            [
                ("lo", "127.0.0.1"),
                ("docker0", "172.17.0.1"),
                ("eth1", "fd00::1"),
                ("eth0", "10.0.0.1"),
                ("eth1", "10.1.0.1"),
            ]
            .map(|(name, address)| (name.to_owned(), address.parse().unwrap()))
            .to_vec()
        };
        let chosen = |found, filter, family| {
            let chosen = choose(found, filter, family).map_err(|error| error.to_string())?;
            Ok::<_, String>(chosen.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" "))
        };
        for (filter, family, expected) in [
            ("", "", "10.0.0.1"),
            ("", "AF_INET6", "fd00::1"),
            ("=eth1", "", "10.1.0.1 fd00::1"),
            ("eth", "AF_INET", "10.0.0.1 10.1.0.1"),
            ("^eth", "", "127.0.0.1 172.17.0.1"),
        ] {
            assert_eq!(chosen(found(), filter, family).as_deref(), Ok(expected), "{filter} {family}");
        }
        assert_eq!(chosen(found()[..2].to_vec(), "", "").as_deref(), Ok("172.17.0.1"));
        assert_eq!(chosen(found()[..1].to_vec(), "", "").as_deref(), Ok("127.0.0.1"));
        let error = chosen(found(), "eth0", "AF_INET6").unwrap_err();
        assert!(
            error.contains("and that NCCL_SOCKET_IFNAME=eth0 with NCCL_SOCKET_FAMILY=AF_INET6 allows has an address;"),
            "{error}"
        );
        let error = chosen(Vec::new(), "", "").unwrap_err();
        assert_eq!(error, "no network interface of this host that is up has an address; see `ip address`");
        assert!(chosen(found(), "", "inet").unwrap_err().contains("NCCL_SOCKET_FAMILY=inet is not valid"));
    }

    #[test]
    fn link_local_addresses_come_last_or_are_refused_by_name() {
        let found = |all: &[(&str, &str)]| -> Vec<(String, IpAddr)> {
            all.iter().map(|(name, address)| (name.to_string(), address.parse().unwrap())).collect()
        };
        let first = |all, filter, family| choose(found(all), filter, family).map(|chosen| chosen[0].to_string());
        let both = [("lo", "127.0.0.1"), ("eth0", "169.254.3.1"), ("eth0", "fe80::1"), ("eth1", "10.1.0.1")];
        assert_eq!(first(&both, "", "").unwrap(), "10.1.0.1");
        assert_eq!(first(&both, "eth", "").unwrap(), "10.1.0.1");
        let bridge = [("eth0", "169.254.3.1"), ("docker0", "172.17.0.1")];
        assert_eq!(first(&bridge, "", "").unwrap(), "169.254.3.1");
        assert_eq!(first(&both[..3], "", "").unwrap(), "169.254.3.1");
        for (filter, family, allowed_by) in [
            ("", "AF_INET6", " and that NCCL_SOCKET_FAMILY=AF_INET6 allows"),
            ("=eth0", "AF_INET6", " and that NCCL_SOCKET_IFNAME==eth0 with NCCL_SOCKET_FAMILY=AF_INET6 allows"),
        ] {
            let error = first(&both, filter, family).unwrap_err().to_string();
            let text = format!(
                "that is up{allowed_by} has an address other than IPv6 link-local ones (fe80::), which other hosts"
            );
            assert!(error.contains(&text), "{error}");
        }
    }
}
