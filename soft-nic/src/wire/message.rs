//! The wire across hosts: messages of another libfabric provider.
#![allow(unsafe_code)]

use std::net::Ipv4Addr;
use std::time::Duration;

use ferrogin_datagram::{Config, Event, MessageEndpoint, Peer, SendError};
use ferrogin_libfabric::{Error, Libfabric};

use super::packet::{ACKNOWLEDGEMENT_LEN, Acknowledgement, AcknowledgementBytes, HEADER_LEN, Header};
use crate::address::Gid;
use crate::memory;

/// Most payload in one message.
pub(crate) const MAX_PAYLOAD: usize = 64 * 1024;
/// Most acknowledgements in one message, behind its payload or alone.
pub(crate) const MAX_ACKS: usize = 32;
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
        /// Behind the payload, one after the other.
        acks: &'a [AcknowledgementBytes],
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
            max_payload: MAX_PAYLOAD + MAX_ACKS * ACKNOWLEDGEMENT_LEN,
            tx_depth: DEPTH,
            rx_depth: DEPTH,
            ..Config::default()
        };
        let endpoint = MessageEndpoint::open(&library, &config)?;
        let port = port_of(endpoint.address()).ok_or_else(|| WireError::Name(endpoint.address().to_vec()))?;
        Ok((Self { endpoint }, port))
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

    /// Sends a packet and, behind it, acknowledgements of other requests.
    ///
    /// Registered memory is copied: a message may stay under way when its request is long over, and the application may
    /// then have given the memory back.
    ///
    /// # Errors
    /// [`SendError`].
    ///
    /// # Safety
    /// [`Payload::Memory`] is readable for `header.len` bytes during the call.
    pub(crate) unsafe fn send(
        &mut self,
        to: Peer,
        header: &Header,
        payload: Payload<'_>,
        acks: &[Acknowledgement],
    ) -> Result<(), SendError> {
        let len = match payload {
            Payload::Nothing => 0,
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Memory(_) => header.len as usize,
        };
        if len > MAX_PAYLOAD {
            return Err(SendError::TooLong);
        }
        let total = len + acks.len() * ACKNOWLEDGEMENT_LEN;
        self.endpoint.send_with(to, &header.to_bytes(), total, |room| {
            let (data, rest) = room.split_at_mut(len);
            match payload {
                Payload::Nothing => {}
                Payload::Bytes(bytes) => data.copy_from_slice(bytes),
                // SAFETY: readable by this function's contract; `data` holds as many bytes and is nobody else's.
                Payload::Memory(at) => unsafe { memory::copy(data.as_mut_ptr(), at, len) },
            }
            for (room, ack) in rest.chunks_exact_mut(ACKNOWLEDGEMENT_LEN).zip(acks) {
                room.copy_from_slice(&ack.to_bytes());
            }
        })
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
                tell(take_apart(header, payload).map_or(Arrival::Nonsense { from }, |(header, payload, acks)| {
                    Arrival::Packet { from, header, payload, acks }
                }));
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

/// A packet's header, payload and what acknowledgements ride behind it; `None` when no card sends such.
pub(crate) fn take_apart<'a>(header: &[u8], bytes: &'a [u8]) -> Option<(Header, &'a [u8], &'a [AcknowledgementBytes])> {
    let header = Header::from_bytes(<&[u8; HEADER_LEN]>::try_from(header).ok()?);
    let (payload, rest) = bytes.split_at_checked(header.len as usize)?;
    let (acks, torn) = rest.as_chunks::<ACKNOWLEDGEMENT_LEN>();
    (header.is_consistent() && torn.is_empty() && acks.len() <= MAX_ACKS).then_some((header, payload, acks))
}

#[cfg(test)]
mod tests {
    use super::super::packet::Kind;
    use super::*;

    #[test]
    fn acknowledgements_ride_behind_the_payload() {
        let header = Header { total: 3, len: 3, ..Header::new(Kind::Write, 5) };
        let ack = Acknowledgement { token: 7, status: 2 };
        let bytes = [b"abc".as_slice(), &ack.to_bytes(), &ack.to_bytes()].concat();
        let (seen, payload, acks) = take_apart(&header.to_bytes(), &bytes).unwrap();
        assert_eq!((seen, payload, acks.len()), (header, b"abc".as_slice(), 2));
        assert_eq!(Acknowledgement::from_bytes(&acks[1]), ack);
        assert!(take_apart(&header.to_bytes(), &bytes[..3]).is_some_and(|(_, _, acks)| acks.is_empty()));
        assert!(take_apart(&header.to_bytes(), &bytes[..2]).is_none(), "shorter than it says");
        assert!(take_apart(&header.to_bytes(), &bytes[..34]).is_none(), "half an acknowledgement");
        assert!(take_apart(&header.to_bytes()[1..], &bytes).is_none());
        let many = [[0; ACKNOWLEDGEMENT_LEN]; MAX_ACKS + 1].concat();
        let header = Header::new(Kind::Read, 5);
        assert!(take_apart(&header.to_bytes(), &many).is_none(), "more than anybody gathers");
    }

    #[test]
    fn names_hold_address_and_port() {
        let name = socket_name(Ipv4Addr::new(10, 0, 0, 7), 4791);
        assert_eq!(name[..8], [2, 0, 0x12, 0xb7, 10, 0, 0, 7]);
        assert_eq!(port_of(&name), Some(4791));
        assert_eq!(port_of(&name[..15]), None);
        assert_eq!(port_of(&[0; 16]), None);
    }
}
