//! Endpoint names made of socket addresses: `sockaddr_in` or `sockaddr_in6`, one after another.

use std::net::{IpAddr, SocketAddr};

use nix::libc::{AF_INET, AF_INET6};

/// Sizes of `sockaddr_in` and `sockaddr_in6` in bytes.
const LENGTHS: (usize, usize) = (16, 28);

/// Returns the socket addresses in a name; empty if it contains anything else.
pub(crate) fn parse(mut name: &[u8]) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    while let Some((address, rest)) = split(name) {
        addresses.push(address);
        name = rest;
    }
    if name.is_empty() { addresses } else { Vec::new() }
}

fn split(name: &[u8]) -> Option<(SocketAddr, &[u8])> {
    let family = i32::from(u16::from_ne_bytes(*name.first_chunk()?));
    let len = if family == AF_INET6 { LENGTHS.1 } else { LENGTHS.0 };
    let (address, rest) = name.split_at_checked(len)?;
    let port = u16::from_be_bytes(*address[2..].first_chunk()?);
    let ip: IpAddr = match family {
        AF_INET => (*address[4..].first_chunk::<4>()?).into(),
        AF_INET6 => (*address[8..].first_chunk::<16>()?).into(),
        _ => return None,
    };
    Some((SocketAddr::new(ip, port), rest))
}

/// Builds a name of at most `max` bytes, skipping addresses that don't fit.
pub(crate) fn emit(addresses: &[SocketAddr], max: usize) -> Vec<u8> {
    let mut name = Vec::new();
    for address in addresses {
        let mut bytes = [0; LENGTHS.1];
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        let (family, len) = match address.ip() {
            IpAddr::V4(ip) => {
                bytes[4..8].copy_from_slice(&ip.octets());
                (AF_INET, LENGTHS.0)
            }
            IpAddr::V6(ip) => {
                bytes[8..24].copy_from_slice(&ip.octets());
                (AF_INET6, LENGTHS.1)
            }
        };
        bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        if name.len() + len <= max {
            name.extend_from_slice(&bytes[..len]);
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_socket_addresses() {
        let v4 = [&[2, 0, 0x1f, 0x90, 10, 0, 0, 1][..], &[0; 8]].concat();
        let v6 = [&[10, 0, 0, 80][..], &[0; 19], &[1, 0, 0, 0, 0]].concat();
        let addresses: Vec<SocketAddr> = ["10.0.0.1:8080", "[::1]:80"].map(|text| text.parse().unwrap()).to_vec();
        let both = [&v4[..], &v6].concat();
        assert_eq!((parse(&both), emit(&addresses, 44)), (addresses.clone(), both.clone()));
        assert_eq!(emit(&addresses, 43), v4);
        for bytes in [&both[..43], &both[1..], b"fi_shm://12:0\0"] {
            assert_eq!(parse(bytes), []);
        }
    }
}
