//! The 32-byte EFA address, and the contents of a software card's 16-byte GID.
//!
//! The address has the layout of libfabric's `efa_ep_addr`: GID, QPN, padding, QKey, and eight bytes that are zero on
//! the wire.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, big_endian, native_endian};

use crate::wire::assert_layout;

/// Version of everything two cards must agree on: the GID, the hello and the packets.
pub const WIRE_VERSION: u8 = 4;
/// First byte of a GID that other hosts can reach.
const MAGIC: u8 = 0x5e;
/// First half of the GID of a card that only its own host can reach: fe80::/64 (link local), as on EFA cards.
const LINK_LOCAL: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];
/// Length of an address in bytes.
pub const ADDRESS_LEN: usize = 32;

/// A card's name, and the permission to reach it: a card accepts connections only from cards that know its GID.
///
/// A GID reveals nothing about its host but the address: cards on one host find each other under a name derived from
/// the GID.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// Address and port for cards on other hosts; `None` for a card that only its own host reaches.
    pub address: Option<SocketAddrV4>,
    /// Random bytes that no later card shares. Logs never show them.
    pub secret: [u8; 8],
}

/// The bytes of a [`Gid`] with an address. Without one, they are [`LINK_LOCAL`] and the secret.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawGid {
    magic: u8,
    version: u8,
    ip: [u8; 4],
    port: big_endian::U16,
    secret: [u8; 8],
}
assert_layout!(RawGid, 16, { magic @ 0, version @ 1, ip @ 2, port @ 6, secret @ 8 });

/// Why 16 or 32 bytes do not name a software card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The first bytes are not those of a software card.
    #[error(
        "is not the address of a software EFA card: it begins with {0:#04x}, and theirs with {MAGIC:#04x} or fe80::/64"
    )]
    Foreign(u8),
    /// The peer speaks another wire version.
    #[error("has wire version {0}, but this card speaks version {WIRE_VERSION}: use the same release on both sides")]
    Version(u8),
    /// The queue pair number is 0.
    #[error("names queue pair 0, which no card has")]
    NoQueuePair,
}

/// Hashes only the secret, because every request looks up a card.
impl Hash for Gid {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from_ne_bytes(self.secret));
    }
}

impl Gid {
    /// Returns the GID's 16 bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        let Some(address) = self.address else { return zerocopy::transmute!([LINK_LOCAL, self.secret]) };
        zerocopy::transmute!(RawGid {
            magic: MAGIC,
            version: WIRE_VERSION,
            ip: address.ip().octets(),
            port: address.port().into(),
            secret: self.secret,
        })
    }

    /// Returns the address for cards on other hosts, without the port.
    pub fn ip(&self) -> Option<Ipv4Addr> {
        self.address.map(|address| *address.ip())
    }

    /// Formats the GID as an IPv6 address, like a real card's. The text reveals the secret.
    pub fn text(self) -> String {
        Ipv6Addr::from(self.to_bytes()).to_string()
    }

    /// Returns 32 bits of a hash, which identify the card in logs and traces without revealing the secret.
    pub fn short(&self) -> u32 {
        let hash = blake3::derive_key("softefa wire 4: card in a log", &self.to_bytes());
        u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]])
    }

    /// Reads the 16 bytes of a GID.
    ///
    /// # Errors
    /// The bytes do not name a software card of this wire version.
    pub fn from_bytes(bytes: [u8; 16]) -> Result<Self, AddressError> {
        let [prefix, secret]: [[u8; 8]; 2] = zerocopy::transmute!(bytes);
        if prefix == LINK_LOCAL {
            return Ok(Self { address: None, secret });
        }
        let raw: RawGid = zerocopy::transmute!(bytes);
        if raw.magic != MAGIC {
            return Err(AddressError::Foreign(raw.magic));
        }
        if raw.version != WIRE_VERSION {
            return Err(AddressError::Version(raw.version));
        }
        Ok(Self { address: Some(SocketAddrV4::new(raw.ip.into(), raw.port.get())), secret: raw.secret })
    }
}

/// For logs: 32 bits of a hash in place of the secret, and the address if there is one.
impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(f, "{:08x}@{address}", self.short()),
            None => write!(f, "{:08x}", self.short()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// Prefix of an EFA address in libfabric's text form.
const PREFIX: &str = "fi_addr_efa://";

/// An endpoint's address, as `fi_getname` returns it and `fi_av_insert` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// The card.
    pub gid: Gid,
    /// The queue pair, never 0.
    pub qpn: u16,
    /// The key that senders to the queue pair must present.
    pub qkey: u32,
}

/// An [`Address`] as bytes: libfabric's `efa_ep_addr`, with numbers in host byte order.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawAddress {
    gid: [u8; 16],
    qpn: native_endian::U16,
    pad: [u8; 2],
    qkey: native_endian::U32,
    reserved: [u8; 8],
}
assert_layout!(RawAddress, 32, { gid @ 0, qpn @ 16, pad @ 18, qkey @ 20, reserved @ 24 });

impl Address {
    /// Returns the 32 bytes that `fi_getname` reports.
    pub fn to_bytes(self) -> [u8; ADDRESS_LEN] {
        zerocopy::transmute!(RawAddress {
            gid: self.gid.to_bytes(),
            qpn: self.qpn.into(),
            pad: [0; 2],
            qkey: self.qkey.into(),
            reserved: [0; 8],
        })
    }

    /// Formats the address as `fi_av_straddr` does.
    pub fn text(self) -> String {
        format!("{PREFIX}[{}]:{}:{}", self.gid.text(), self.qpn, self.qkey)
    }

    /// Parses what [`text`](Self::text) returns.
    pub fn from_text(text: &str) -> Option<Self> {
        let (gid, rest) = text.strip_prefix(PREFIX)?.strip_prefix('[')?.split_once("]:")?;
        let (qpn, qkey) = rest.split_once(':')?;
        let gid = Gid::from_bytes(gid.parse::<Ipv6Addr>().ok()?.octets()).ok()?;
        let address = Self { gid, qpn: qpn.parse().ok()?, qkey: qkey.parse().ok()? };
        (address.qpn != 0).then_some(address)
    }

    /// Reads the 32 bytes that `fi_av_insert` takes.
    ///
    /// # Errors
    /// The bytes do not name a queue pair of a software card of this wire version.
    pub fn from_bytes(bytes: &[u8; ADDRESS_LEN]) -> Result<Self, AddressError> {
        let raw: RawAddress = zerocopy::transmute!(*bytes);
        let gid = Gid::from_bytes(raw.gid)?;
        if raw.qpn == 0 {
            return Err(AddressError::NoQueuePair);
        }
        Ok(Self { gid, qpn: raw.qpn.get(), qkey: raw.qkey.get() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> Address {
        let gid = Gid { address: Some("10.0.0.9:4791".parse().unwrap()), secret: *b"8 bytes." };
        Address { gid, qpn: 0x1234, qkey: 0x89ab_cdef }
    }

    #[test]
    fn address_round_trips() {
        assert_eq!(Address::from_bytes(&address().to_bytes()), Ok(address()));
    }

    #[test]
    fn gid_for_its_own_host_is_link_local() {
        let gid = Gid { address: None, ..address().gid };
        assert_eq!(gid.to_bytes(), *b"\xfe\x80\0\0\0\0\0\08 bytes.");
        assert_eq!(Gid::from_bytes(gid.to_bytes()), Ok(gid));
        assert_eq!(gid.to_string(), format!("{:08x}", gid.short()));
    }

    #[test]
    fn secret_is_not_logged() {
        let Address { gid, .. } = address();
        for text in [gid.to_string(), format!("{gid:?}"), format!("{:?}", address())] {
            assert!(text.contains("@10.0.0.9:4791"), "{text}");
            for secret in ["8 bytes", "3820", "56, 32", "8203"] {
                assert!(!text.contains(secret), "{text}");
            }
        }
    }

    #[test]
    fn address_text_round_trips() {
        assert_eq!(Address::from_text(&address().text()), Some(address()));
        for text in
            ["", "fi_addr_efa://[fec0::1]:1:2", "fi_addr_efa://[5e02::1]:1:2", "fi_addr_efa://[5e04::1]:1", "127.0.0.1"]
        {
            assert_eq!(Address::from_text(text), None, "{text}");
        }
    }

    #[test]
    fn address_is_emitted_as_golden_bytes() {
        let bytes = address().to_bytes();
        assert_eq!(bytes[..16], *b"\x5e\x04\x0a\x00\x00\x09\x12\xb78 bytes.");
        assert_eq!(bytes[16..24], [0x34, 0x12, 0, 0, 0xef, 0xcd, 0xab, 0x89]);
        assert_eq!(bytes[24..], [0; 8]);
    }

    #[test]
    fn malformed_address_is_refused() {
        let good = address().to_bytes();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Address::from_bytes(&bytes)
        };
        assert_eq!(with(0, 0xfe), Err(AddressError::Foreign(0xfe)));
        assert_eq!(with(1, 2), Err(AddressError::Version(2)));
        let text = AddressError::Version(2).to_string();
        assert!(text.contains("version 2") && text.contains("version 4"), "{text}");
        let mut no_qp = good;
        no_qp[16..18].fill(0);
        assert_eq!(Address::from_bytes(&no_qp), Err(AddressError::NoQueuePair));
    }
}
