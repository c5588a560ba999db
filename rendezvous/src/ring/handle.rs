//! A rank's NCCL handle: where it listens, and the secret that its listener asks for.

use crate::Secret;
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"fGIN";
/// Version of the handle, and of the protocol spoken at its addresses.
pub(super) const VERSION: u16 = 6;
/// Most addresses in a handle.
pub(super) const ADDRESSES_MAX: usize = 5;

/// A handle's bytes, unchecked.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHandle {
    magic: [u8; 4],
    version: U16,
    secret: [u8; 16],
    /// Unused ones have port 0.
    addresses: [RawAddress; ADDRESSES_MAX],
    zero: [u8; 16],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawAddress {
    /// An IPv6 address, or an IPv4 address mapped to one.
    ip: [u8; 16],
    port: U16,
}

ferrogin_ffi::assert_layout!(RawAddress, size 18, align 1, { ip @ 0, port @ 16 });
ferrogin_ffi::assert_layout!(RawHandle, size 128, align 1, {
    magic @ 0, version @ 4, secret @ 6, addresses @ 22, zero @ 112,
});

/// A valid handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Handle {
    pub secret: Secret,
    /// At least one.
    pub addresses: Vec<SocketAddr>,
}

impl Handle {
    /// Returns the bytes, with the first [`ADDRESSES_MAX`] addresses.
    pub fn emit(&self) -> [u8; HANDLE_MAXSIZE] {
        let mut addresses = [RawAddress { ip: [0; 16], port: U16::ZERO }; ADDRESSES_MAX];
        for (raw, address) in addresses.iter_mut().zip(&self.addresses) {
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            *raw = RawAddress { ip: ip.octets(), port: address.port().into() };
        }
        let (version, secret) = (VERSION.into(), *self.secret.bytes());
        zerocopy::transmute!(RawHandle { magic: MAGIC, version, secret, addresses, zero: [0; 16] })
    }

    /// Parses a handle; `None` if this version doesn't make such handles.
    pub fn parse(bytes: &[u8; HANDLE_MAXSIZE]) -> Option<Self> {
        let raw: &RawHandle = zerocopy::transmute_ref!(bytes);
        let used = raw.addresses.iter().take_while(|address| address.port != U16::ZERO);
        let addresses: Vec<_> =
            used.map(|raw| SocketAddr::new(Ipv6Addr::from(raw.ip).to_canonical(), raw.port.get())).collect();
        let valid = raw.magic == MAGIC && raw.version.get() == VERSION && !addresses.is_empty();
        valid.then_some(Self { secret: Secret::new(raw.secret), addresses })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_round_trip_and_invalid_ones_are_refused() {
        let addresses = ["10.0.0.7:4660", "[fd00::1]:80"].map(|text| text.parse().unwrap());
        let handle = Handle { secret: Secret::new([0xa5; 16]), addresses: addresses.to_vec() };
        let bytes = handle.emit();
        assert_eq!(bytes[..24], *b"fGIN\x06\0\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\xa5\0\0");
        assert_eq!(bytes[32..40], [0xff, 0xff, 10, 0, 0, 7, 0x34, 0x12]);
        assert_eq!(Handle::parse(&bytes), Some(handle));
        for (at, value) in [(0, 0), (4, 4)] {
            let mut invalid = bytes;
            invalid[at] = value;
            assert_eq!(Handle::parse(&invalid), None, "byte {at}");
        }
        assert_eq!(Handle::parse(&[0; HANDLE_MAXSIZE]), None);
        assert_eq!(Handle::parse(&[0xa5; HANDLE_MAXSIZE]), None);
    }
}
