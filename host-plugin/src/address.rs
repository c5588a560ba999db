//! EFA endpoint addresses, as `fi_getname` returns them and `fi_av_insert` takes them (libfabric's `efa_ep_addr`).

use crate::error::Error;
use ferrogin_libfabric::Endpoint as QueuePair;
use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, native_endian};

/// An endpoint's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointAddress {
    /// The card. An address handle names a card, so one handle serves all endpoints of the card.
    pub gid: [u8; 16],
    /// The queue pair.
    pub qpn: u16,
    /// The key that senders must present.
    pub qkey: u32,
}

/// An [`EndpointAddress`] as bytes, in host byte order.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawAddress {
    gid: [u8; 16],
    qpn: native_endian::U16,
    pad: [u8; 2],
    qkey: native_endian::U32,
    /// libfabric's pointer to the next address in a list; null in a single address.
    next: [u8; 8],
}

ferrogin_ffi::assert_layout!(RawAddress, size 32, align 1, { gid @ 0, qpn @ 16, pad @ 18, qkey @ 20, next @ 24 });

impl EndpointAddress {
    /// Size of an address in bytes.
    pub const LEN: usize = size_of::<RawAddress>();

    /// Returns the address of an open queue pair, which errors call `endpoint`.
    ///
    /// # Errors
    /// The libfabric call fails, or the address is not an EFA address.
    pub fn of(qp: &QueuePair, endpoint: &dyn fmt::Display) -> Result<Self, Error> {
        let name = qp.name().map_err(Error::fabric(format!("querying the address of endpoint {endpoint}")))?;
        Self::parse(&name).ok_or_else(|| {
            Error::Usage(format!(
                "endpoint {endpoint} has an address of {} bytes, but EFA addresses have {}: check that the libfabric \
                 provider is efa or softefa",
                name.len(),
                Self::LEN
            ))
        })
    }

    /// Parses an address; returns `None` if `bytes` has the wrong length.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let raw = RawAddress::read_from_bytes(bytes).ok()?;
        Some(Self { gid: raw.gid, qpn: raw.qpn.get(), qkey: raw.qkey.get() })
    }

    /// Returns the bytes for `fi_av_insert`.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        zerocopy::transmute!(RawAddress {
            gid: self.gid,
            qpn: self.qpn.into(),
            pad: [0; 2],
            qkey: self.qkey.into(),
            next: [0; 8],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip_and_other_lengths_are_refused() {
        let address = EndpointAddress { gid: [0xa5; 16], qpn: 0x0201, qkey: 0x0807_0605 };
        let bytes = address.to_bytes();
        assert_eq!((bytes[16..18].to_vec(), bytes[18..20].to_vec()), (0x0201u16.to_ne_bytes().to_vec(), vec![0; 2]));
        assert_eq!(bytes[20..24], 0x0807_0605u32.to_ne_bytes());
        assert_eq!(EndpointAddress::parse(&bytes), Some(address));
        assert_eq!((EndpointAddress::parse(&bytes[1..]), EndpointAddress::parse(&[0; 33])), (None, None));
    }
}
