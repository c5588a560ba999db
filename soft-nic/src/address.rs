//! The 32-byte EFA address and what the software card keeps in its 16-byte GID.
//!
//! Layout of the address: libfabric, `efa_ep_addr` (GID, QPN, padding, QKey, eight bytes that are zero on the wire).

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Version of everything that two cards must agree on: the GID, the hello, the packets.
pub const WIRE_VERSION: u8 = 2;
/// The first byte of a software card's GID; real ones begin with 0xfe (link local).
const MAGIC: u8 = 0x5e;
/// Bytes of an address.
pub const ADDRESS_LEN: usize = 32;

/// A card, as others name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid {
    /// Boot and network namespace; equal means that shared memory can be agreed on.
    pub host: u32,
    /// Where the message wire listens.
    pub ip: Ipv4Addr,
    /// 0 when there is no message wire.
    pub port: u16,
    /// Tells the cards of one host apart, and a card from its successor.
    pub nonce: u32,
}

/// Why 16 or 32 bytes do not name a software card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The first byte is not that of a software card.
    #[error("is not the address of a software EFA card (first byte {0:#04x}, must be {MAGIC:#04x})")]
    Foreign(u8),
    /// The peer speaks another wire version.
    #[error("is of wire version {0}, this card speaks version {WIRE_VERSION}: use the same release on both sides")]
    Version(u8),
    /// The queue pair number is 0.
    #[error("names queue pair 0, which no card has")]
    NoQueuePair,
}

impl Gid {
    /// The 16 bytes of the GID.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0] = MAGIC;
        bytes[1] = WIRE_VERSION;
        bytes[2..6].copy_from_slice(&self.host.to_be_bytes());
        bytes[6..10].copy_from_slice(&self.ip.octets());
        bytes[10..12].copy_from_slice(&self.port.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.nonce.to_be_bytes());
        bytes
    }

    /// As IPv6 addresses are written, like the GID of a real card.
    pub fn text(self) -> String {
        Ipv6Addr::from(self.to_bytes()).to_string()
    }

    /// Reads the 16 bytes of a GID.
    ///
    /// # Errors
    /// The bytes do not name a software card of this wire version.
    pub fn from_bytes(bytes: [u8; 16]) -> Result<Self, AddressError> {
        let [magic, version, h0, h1, h2, h3, i0, i1, i2, i3, p0, p1, n0, n1, n2, n3] = bytes;
        if magic != MAGIC {
            return Err(AddressError::Foreign(magic));
        }
        if version != WIRE_VERSION {
            return Err(AddressError::Version(version));
        }
        Ok(Self {
            host: u32::from_be_bytes([h0, h1, h2, h3]),
            ip: Ipv4Addr::new(i0, i1, i2, i3),
            port: u16::from_be_bytes([p0, p1]),
            nonce: u32::from_be_bytes([n0, n1, n2, n3]),
        })
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}:{:08x}@{}:{}", self.host, self.nonce, self.ip, self.port)
    }
}

/// How libfabric marks the text of an EFA address.
const PREFIX: &str = "fi_addr_efa://";

/// An endpoint, as `fi_getname` gives it and `fi_av_insert` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// The card.
    pub gid: Gid,
    /// The queue pair, never 0.
    pub qpn: u16,
    /// The key that the queue pair asks of senders.
    pub qkey: u32,
}

impl Address {
    /// The 32 bytes that `fi_getname` gives.
    pub fn to_bytes(self) -> [u8; ADDRESS_LEN] {
        let mut bytes = [0; ADDRESS_LEN];
        bytes[..16].copy_from_slice(&self.gid.to_bytes());
        bytes[16..18].copy_from_slice(&self.qpn.to_ne_bytes());
        bytes[20..24].copy_from_slice(&self.qkey.to_ne_bytes());
        bytes
    }

    /// As `fi_av_straddr` writes it.
    pub fn text(self) -> String {
        format!("{PREFIX}[{}]:{}:{}", self.gid.text(), self.qpn, self.qkey)
    }

    /// What [`text`](Self::text) wrote.
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
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[..16]);
        let qpn = u16::from_ne_bytes([bytes[16], bytes[17]]);
        let gid = Gid::from_bytes(gid)?;
        if qpn == 0 {
            return Err(AddressError::NoQueuePair);
        }
        Ok(Self { gid, qpn, qkey: u32::from_ne_bytes([bytes[20], bytes[21], bytes[22], bytes[23]]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> Address {
        let gid = Gid { host: 0x0102_0304, ip: Ipv4Addr::new(10, 0, 0, 9), port: 4791, nonce: 0xa1b2_c3d4 };
        Address { gid, qpn: 0x1234, qkey: 0x89ab_cdef }
    }

    #[test]
    fn round_trip() {
        assert_eq!(Address::from_bytes(&address().to_bytes()), Ok(address()));
    }

    #[test]
    fn text_can_be_read_back() {
        assert_eq!(Address::from_text(&address().text()), Some(address()));
        for text in ["", "fi_addr_efa://[fe80::1]:1:2", "fi_addr_efa://[5e02::1]:1", "127.0.0.1"] {
            assert_eq!(Address::from_text(text), None, "{text}");
        }
    }

    #[test]
    fn bytes_are_pinned() {
        let bytes = address().to_bytes();
        assert_eq!(bytes[..16], [0x5e, 2, 1, 2, 3, 4, 10, 0, 0, 9, 0x12, 0xb7, 0xa1, 0xb2, 0xc3, 0xd4]);
        assert_eq!(bytes[16..24], [0x34, 0x12, 0, 0, 0xef, 0xcd, 0xab, 0x89]);
        assert_eq!(bytes[24..], [0; 8]);
    }

    #[test]
    fn strangers_are_refused() {
        let good = address().to_bytes();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Address::from_bytes(&bytes)
        };
        assert_eq!(with(0, 0xfe), Err(AddressError::Foreign(0xfe)));
        assert_eq!(with(1, 1), Err(AddressError::Version(1)));
        let mut no_qp = good;
        no_qp[16..18].fill(0);
        assert_eq!(Address::from_bytes(&no_qp), Err(AddressError::NoQueuePair));
    }
}
