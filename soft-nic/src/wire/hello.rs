//! The handshake of two cards: a hello with the GIDs of both and the wire version, and its answer.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::{Gid, WIRE_VERSION};

const MAGIC: [u8; 7] = *b"softefa";
const WELCOME_MAGIC: [u8; 6] = *b"softef";
/// Bytes of a hello.
pub(crate) const HELLO_LEN: usize = size_of::<Hello>();
/// Bytes of the answer.
pub(crate) const WELCOME_LEN: usize = size_of::<Welcome>();

/// The first packet of the card that connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Hello {
    magic: [u8; 7],
    /// [`WIRE_VERSION`].
    pub version: u8,
    /// GID of the card that connects.
    from: [u8; 16],
    /// GID of the card that it connects to.
    to: [u8; 16],
}
assert_layout!(Hello, 40, { magic @ 0, version @ 7, from @ 8, to @ 24 });

/// The answer to a hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Welcome {
    magic: [u8; 6],
    /// [`WIRE_VERSION`].
    version: u8,
    /// 0 when the card accepts the connection.
    refused: u8,
}
assert_layout!(Welcome, 8, { magic @ 0, version @ 6, refused @ 7 });

/// Why two cards do not work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Disagreement {
    #[error("the other card speaks wire version {0}, this one {WIRE_VERSION}: use the same release on both sides")]
    Version(u8),
    #[error("the other side does not speak this protocol")]
    Protocol,
    #[error("the other card has another GID, or refused this card")]
    Refused,
}

impl Hello {
    pub(crate) fn new(from: &Gid, to: &Gid) -> Self {
        Self { magic: MAGIC, version: WIRE_VERSION, from: from.to_bytes(), to: to.to_bytes() }
    }

    /// The GID of the card that sent `bytes` as a hello to the card `own`.
    pub(crate) fn check(bytes: &[u8], own: &Gid) -> Result<Gid, Disagreement> {
        let hello = Self::read_from_bytes(bytes).map_err(|_| Disagreement::Protocol)?;
        if hello.magic != MAGIC {
            return Err(Disagreement::Protocol);
        }
        if hello.version != WIRE_VERSION {
            return Err(Disagreement::Version(hello.version));
        }
        if hello.to != own.to_bytes() {
            return Err(Disagreement::Refused);
        }
        Gid::from_bytes(hello.from).map_err(|_| Disagreement::Protocol)
    }
}

impl Welcome {
    /// The answer to a hello that was checked.
    pub(crate) fn new(verdict: Result<(), Disagreement>) -> Self {
        Self { magic: WELCOME_MAGIC, version: WIRE_VERSION, refused: verdict.is_err().into() }
    }

    /// Checks the answer to a hello.
    pub(crate) fn check(bytes: &[u8]) -> Result<(), Disagreement> {
        let welcome = Self::read_from_bytes(bytes).map_err(|_| Disagreement::Protocol)?;
        if welcome.magic != WELCOME_MAGIC {
            return Err(Disagreement::Protocol);
        }
        match (welcome.version, welcome.refused) {
            (WIRE_VERSION, 0) => Ok(()),
            (WIRE_VERSION, _) => Err(Disagreement::Refused),
            (version, _) => Err(Disagreement::Version(version)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn gid(nonce: u32) -> Gid {
        Gid { host: 1, ip: Ipv4Addr::LOCALHOST, port: 9, nonce }
    }

    #[test]
    fn hello_is_emitted_as_golden_bytes() {
        let gid = |nonce: u8| [0x5e, 2, 0, 0, 0, 1, 127, 0, 0, 1, 0, 9, 0, 0, 0, nonce];
        let golden = [b"softefa\x02".as_slice(), &gid(1), &gid(2)].concat();
        assert_eq!(Hello::new(&self::gid(1), &self::gid(2)).as_bytes(), golden);
    }

    #[test]
    fn hello_to_this_card_names_its_sender() {
        let hello = Hello::new(&gid(1), &gid(2));
        let bytes = hello.as_bytes();
        assert_eq!(Hello::check(bytes, &gid(2)), Ok(gid(1)));
        assert_eq!(Hello::check(bytes, &gid(3)), Err(Disagreement::Refused));
        assert_eq!(Hello::check(&bytes[1..], &gid(2)), Err(Disagreement::Protocol));
        let mut other = Hello { version: 9, ..hello };
        assert_eq!(Hello::check(other.as_bytes(), &gid(2)), Err(Disagreement::Version(9)));
        other.magic[0] = 0;
        assert_eq!(Hello::check(other.as_bytes(), &gid(2)), Err(Disagreement::Protocol));
    }

    #[test]
    fn welcome_is_emitted_as_golden_bytes_and_parsed() {
        assert_eq!(Welcome::new(Ok(())).as_bytes(), b"softef\x02\x00");
        assert_eq!(Welcome::check(b"softef\x02\x00"), Ok(()));
        let refusal = Welcome::new(Err(Disagreement::Protocol));
        assert_eq!(refusal.as_bytes(), b"softef\x02\x01");
        assert_eq!(Welcome::check(refusal.as_bytes()), Err(Disagreement::Refused));
        assert_eq!(Welcome::check(b"softef\x07\x00"), Err(Disagreement::Version(7)));
        assert_eq!(Welcome::check(b"hello"), Err(Disagreement::Protocol));
    }
}
