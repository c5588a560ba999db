//! The first words between two cards: who speaks, to whom, in which version.

use crate::address::{Gid, WIRE_VERSION};

const MAGIC: [u8; 7] = *b"softefa";
/// Bytes of a hello.
pub(crate) const HELLO_LEN: usize = 40;
/// Bytes of the answer.
pub(crate) const WELCOME_LEN: usize = 8;

/// What the side that has requests says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub version: u8,
    pub from: [u8; 16],
    pub to: [u8; 16],
}

/// Why two cards do not work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Disagreement {
    #[error("the other card speaks wire version {0}, this one {WIRE_VERSION}: use the same release on both sides")]
    Version(u8),
    #[error("the other side does not speak this protocol")]
    Protocol,
    #[error("the other side is not the card that was meant, or would not have this one")]
    Refused,
}

impl Hello {
    pub(crate) fn new(from: &Gid, to: &Gid) -> Self {
        Self { version: WIRE_VERSION, from: from.to_bytes(), to: to.to_bytes() }
    }

    pub(crate) fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..7].copy_from_slice(&MAGIC);
        bytes[7] = self.version;
        bytes[8..24].copy_from_slice(&self.from);
        bytes[24..40].copy_from_slice(&self.to);
        bytes
    }

    /// Who says hello to the card `own`.
    pub(crate) fn check(bytes: &[u8], own: &Gid) -> Result<Gid, Disagreement> {
        let bytes: &[u8; HELLO_LEN] = bytes.try_into().map_err(|_| Disagreement::Protocol)?;
        if bytes[..7] != MAGIC {
            return Err(Disagreement::Protocol);
        }
        if bytes[7] != WIRE_VERSION {
            return Err(Disagreement::Version(bytes[7]));
        }
        let (mut from, mut to) = ([0; 16], [0; 16]);
        from.copy_from_slice(&bytes[8..24]);
        to.copy_from_slice(&bytes[24..40]);
        if to != own.to_bytes() {
            return Err(Disagreement::Refused);
        }
        Gid::from_bytes(from).map_err(|_| Disagreement::Protocol)
    }
}

/// The answer to a hello.
pub(crate) fn welcome(verdict: Result<(), Disagreement>) -> [u8; WELCOME_LEN] {
    let mut bytes = [0; WELCOME_LEN];
    bytes[..6].copy_from_slice(&MAGIC[..6]);
    bytes[6] = WIRE_VERSION;
    bytes[7] = u8::from(verdict.is_err());
    bytes
}

/// What the answer says.
pub(crate) fn check_welcome(bytes: &[u8]) -> Result<(), Disagreement> {
    let bytes: &[u8; WELCOME_LEN] = bytes.try_into().map_err(|_| Disagreement::Protocol)?;
    if bytes[..6] != MAGIC[..6] {
        return Err(Disagreement::Protocol);
    }
    match (bytes[6], bytes[7]) {
        (WIRE_VERSION, 0) => Ok(()),
        (WIRE_VERSION, _) => Err(Disagreement::Refused),
        (version, _) => Err(Disagreement::Version(version)),
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
    fn the_one_who_is_meant_learns_who_speaks() {
        let bytes = Hello::new(&gid(1), &gid(2)).to_bytes();
        assert_eq!(Hello::check(&bytes, &gid(2)), Ok(gid(1)));
        assert_eq!(Hello::check(&bytes, &gid(3)), Err(Disagreement::Refused));
        assert_eq!(Hello::check(&bytes[1..], &gid(2)), Err(Disagreement::Protocol));
        let mut other = bytes;
        other[7] = 9;
        assert_eq!(Hello::check(&other, &gid(2)), Err(Disagreement::Version(9)));
        other[0] = 0;
        assert_eq!(Hello::check(&other, &gid(2)), Err(Disagreement::Protocol));
    }

    #[test]
    fn answers() {
        assert_eq!(check_welcome(&welcome(Ok(()))), Ok(()));
        assert_eq!(check_welcome(&welcome(Err(Disagreement::Protocol))), Err(Disagreement::Refused));
        let mut other = welcome(Ok(()));
        other[6] = 7;
        assert_eq!(check_welcome(&other), Err(Disagreement::Version(7)));
        assert_eq!(check_welcome(b"hello"), Err(Disagreement::Protocol));
    }
}
