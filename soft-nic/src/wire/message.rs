//! The wire across hosts: messages of another libfabric provider.
#![allow(unsafe_code)]

use std::net::Ipv4Addr;
use std::time::Duration;

use ferrogin_fabric::msg::{Config, Event, MessageEndpoint, Peer, SendError};
use ferrogin_fabric::{Error, Libfabric};

use super::packet::{HEADER_LEN, Header};
use crate::address::Gid;
use crate::memory;

/// Most payload in one message.
pub(crate) const MAX_PAYLOAD: usize = 64 * 1024;
/// Messages under way, and buffers for those that arrive.
const DEPTH: usize = 128;

/// What a message carries.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Payload<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// As many bytes as the header says, in memory that others may write meanwhile.
    Memory(*const u8),
}

/// What arrived.
pub(crate) enum Arrival<'a> {
    Packet {
        from: Peer,
        header: Header,
        payload: &'a [u8],
    },
    /// Something that no card sends.
    Nonsense {
        from: Peer,
    },
    Lost {
        peer: Peer,
        why: String,
    },
}

/// One card's end of the wire.
pub(crate) struct Wire {
    endpoint: MessageEndpoint,
    /// Registered memory is copied here first: a message may stay under way when its request is long over, and the
    /// application may then have given the memory back.
    piece: Box<[u8]>,
}

/// Why there is no such wire.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error(transparent)]
    Fabric(#[from] Error),
    #[error("the endpoint's name is no IPv4 address and port: {0:02x?}")]
    Name(Vec<u8>),
}

/// `sockaddr_in`.
fn socket_name(ip: Ipv4Addr, port: u16) -> [u8; 16] {
    let mut name = [0; 16];
    name[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    name[2..4].copy_from_slice(&port.to_be_bytes());
    name[4..8].copy_from_slice(&ip.octets());
    name
}

fn port_of(name: &[u8]) -> Option<u16> {
    let name: &[u8; 16] = name.try_into().ok()?;
    let family = u16::from_ne_bytes([name[0], name[1]]);
    (family == libc::AF_INET as u16).then(|| u16::from_be_bytes([name[2], name[3]]))
}

impl Wire {
    /// Opens an endpoint of `provider` on `ip`; the port is its own choice.
    ///
    /// # Errors
    /// The provider is not there or cannot.
    pub(crate) fn open(provider: &str, ip: Ipv4Addr) -> Result<(Self, u16), WireError> {
        let library = Libfabric::already_loaded()?;
        let config = Config {
            provider: provider.to_owned(),
            source: Some(ip.to_string()),
            max_header: HEADER_LEN,
            max_payload: MAX_PAYLOAD,
            tx_depth: DEPTH,
            rx_depth: DEPTH,
            ..Config::default()
        };
        let endpoint = MessageEndpoint::open(&library, &config)?;
        let port = port_of(endpoint.address()).ok_or_else(|| WireError::Name(endpoint.address().to_vec()))?;
        Ok((Self { endpoint, piece: vec![0; MAX_PAYLOAD].into_boxed_slice() }, port))
    }

    /// The peer that a card's GID names.
    ///
    /// # Errors
    /// What the provider answers.
    pub(crate) fn peer(&mut self, gid: &Gid) -> Result<Peer, Error> {
        self.endpoint.add_peer(&socket_name(gid.ip, gid.port))
    }

    pub(crate) fn forget(&mut self, peer: Peer) {
        self.endpoint.forget(peer);
    }

    /// # Errors
    /// [`SendError`].
    ///
    /// # Safety
    /// [`Payload::Memory`] is readable for `header.len` bytes during the call.
    pub(crate) unsafe fn send(&mut self, to: Peer, header: &Header, payload: Payload<'_>) -> Result<(), SendError> {
        if self.endpoint.free_slots() == 0 {
            return Err(SendError::Full);
        }
        let payload = match payload {
            Payload::Nothing => &[][..],
            Payload::Bytes(bytes) => bytes,
            Payload::Memory(at) => {
                let piece = self.piece.get_mut(..header.len as usize).ok_or(SendError::TooLong)?;
                // SAFETY: readable by this function's contract; `piece` holds as many bytes and is nobody else's.
                unsafe { memory::copy(piece.as_mut_ptr(), at, piece.len()) };
                piece
            }
        };
        self.endpoint.send(to, &header.to_bytes(), payload)
    }

    /// Sends bytes of the card itself; false when there is no room now.
    pub(crate) fn say(&mut self, to: Peer, header: &Header, bytes: &[u8]) -> bool {
        !matches!(self.endpoint.send(to, &header.to_bytes(), bytes), Err(SendError::Full))
    }

    /// Tells what arrived. True when something did.
    ///
    /// # Errors
    /// The endpoint failed as a whole.
    pub(crate) fn poll(&mut self, mut tell: impl FnMut(Arrival<'_>)) -> Result<bool, Error> {
        let events = self.endpoint.poll(|_, event| match event {
            Event::Message { from, header, payload } => {
                let header = <&[u8; HEADER_LEN]>::try_from(header).ok().map(Header::from_bytes);
                tell(match header.filter(|h| h.is_consistent() && h.len as usize == payload.len()) {
                    Some(header) => Arrival::Packet { from, header, payload },
                    None => Arrival::Nonsense { from },
                });
            }
            Event::Sent { .. } | Event::SendFailed { .. } => {}
            Event::Lost { peer, reason } => tell(Arrival::Lost { peer, why: reason.to_string() }),
        })?;
        Ok(events > 0)
    }

    /// Lets what is under way go out and says goodbye.
    pub(crate) fn shutdown(&mut self, limit: Duration) {
        // A wire that fails now has nobody left to tell.
        let _ = self.endpoint.shutdown(limit, |_, _| {});
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hold_address_and_port() {
        let name = socket_name(Ipv4Addr::new(10, 0, 0, 7), 4791);
        assert_eq!(name[..8], [2, 0, 0x12, 0xb7, 10, 0, 0, 7]);
        assert_eq!(port_of(&name), Some(4791));
        assert_eq!(port_of(&name[..15]), None);
        assert_eq!(port_of(&[0; 16]), None);
    }
}
