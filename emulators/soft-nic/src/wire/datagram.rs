//! The wire to other hosts: reliable datagrams over another libfabric provider.
//!
//! A datagram names its sender itself, and anyone who reaches the port can send one. So only a handshake makes an endpoint a
//! peer, and every datagram after it ends with a [`Seal`] of the session.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use ferrogin_datagram::{Config, Event, MessageEndpoint, Peer, SendError, Unadmitted};
use ferrogin_libfabric::{Error, Libfabric};

use zerocopy::{FromBytes, IntoBytes};

use super::handshake::{BadSeal, SEAL_LEN, Seal, Session};
use super::packet::{ACKNOWLEDGEMENT_LEN, Acknowledgement, HEADER_LEN, Header};
use crate::address::Gid;
use crate::memory;

/// Payload bytes of one datagram at most.
pub const MAX_PAYLOAD: usize = 64 * 1024;
/// Acknowledgements in one datagram at most, behind its payload or alone.
pub const MAX_ACKS: usize = 32;
/// The seal covers payloads up to this many bytes; of a longer one it covers the header and the acknowledgements alone.
const SEALED_PAYLOAD: usize = 64;
/// Datagrams in flight, and buffers for those that arrive.
const DEPTH: usize = 128;

/// The payload of a packet.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// As many bytes as the header says, in memory that the application may write meanwhile.
    Memory(*const u8),
}

/// An event of the wire.
pub enum Arrival<'a> {
    /// A datagram of an endpoint that is a peer, or of someone who knows the numbers of one.
    Packet {
        from: Peer,
        header: &'a [u8],
        /// Payload, acknowledgements and seal.
        rest: &'a [u8],
    },
    /// A datagram of any other endpoint.
    Unadmitted(Unadmitted<'a>),
    Lost {
        peer: Peer,
        why: String,
    },
}

/// The wire's endpoint of one card.
pub struct Wire {
    endpoint: MessageEndpoint,
}

/// Error of opening the wire.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error(transparent)]
    Libfabric(#[from] Error),
    #[error("the endpoint's name is not the IPv4 address and port that it was to have: {0:02x?}")]
    Name(Vec<u8>),
}

impl WireError {
    /// libfabric's code, which is the system's for failures of the system.
    pub fn os_code(&self) -> Option<i32> {
        match self {
            Self::Libfabric(error) => error.code(),
            Self::Name(_) => None,
        }
    }
}

/// The endpoint's address of a card.
pub fn address_of(gid: &Gid) -> [u8; 16] {
    socket_name(gid.ip, gid.port)
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
    /// Opens an endpoint of `provider` on `address`. The provider chooses the port if that has none; the port is returned.
    ///
    /// # Errors
    /// The provider is missing or refuses.
    pub fn open(provider: &str, address: SocketAddrV4) -> Result<(Self, u16), WireError> {
        let library = Libfabric::already_loaded().or_else(|_| Libfabric::load(None))?;
        let source = if address.port() == 0 { address.ip().to_string() } else { address.to_string() };
        let config = Config {
            provider: provider.to_owned(),
            source: Some(source),
            max_header: HEADER_LEN,
            max_payload: MAX_PAYLOAD + MAX_ACKS * ACKNOWLEDGEMENT_LEN + SEAL_LEN,
            admission: true,
            tx_depth: DEPTH,
            rx_depth: DEPTH,
            ..Config::default()
        };
        let endpoint = MessageEndpoint::open(&library, &config)?;
        let port = port_of(endpoint.address()).filter(|port| [0, *port].contains(&address.port()));
        let port = port.ok_or_else(|| WireError::Name(endpoint.address().to_vec()))?;
        Ok((Self { endpoint }, port))
    }

    /// The peer that a card's GID names.
    ///
    /// # Errors
    /// The provider refuses the address.
    pub fn peer(&mut self, gid: &Gid) -> Result<Peer, Error> {
        self.endpoint.add_peer(&address_of(gid))
    }

    /// Makes an endpoint a peer that has proven to be the card of `gid`.
    ///
    /// # Errors
    /// The provider refuses the address.
    pub fn admit(&mut self, gid: &Gid, number: u64) -> Result<Peer, Error> {
        self.endpoint.admit(&address_of(gid), number)
    }

    pub fn forget(&mut self, peer: Peer) {
        self.endpoint.forget(peer);
    }

    /// Sends a packet and, behind it, acknowledgements of other requests.
    ///
    /// Registered memory is copied: a datagram may still be in flight when its request has completed and the application
    /// has freed the memory.
    ///
    /// # Errors
    /// [`SendError`].
    ///
    /// # Safety
    /// [`Payload::Memory`] is readable for `header.len` bytes during the call.
    pub unsafe fn send(
        &mut self,
        to: Peer,
        header: &Header,
        payload: Payload<'_>,
        acks: &[Acknowledgement],
        session: &mut Session,
    ) -> Result<(), SendError> {
        let len = match payload {
            Payload::Nothing => 0,
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Memory(_) => header.len as usize,
        };
        if len > MAX_PAYLOAD {
            return Err(SendError::TooLong);
        }
        let header = header.to_bytes();
        let total = len + acks.len() * ACKNOWLEDGEMENT_LEN;
        self.endpoint.send_with(to, &header, total + SEAL_LEN, |room| {
            let (body, end) = room.split_at_mut(total);
            let (data, rest) = body.split_at_mut(len);
            match payload {
                Payload::Nothing => {}
                Payload::Bytes(bytes) => data.copy_from_slice(bytes),
                // SAFETY: the initiator keeps `len` bytes at `at` readable; `data` is a buffer of as many bytes that only this call uses.
                Payload::Memory(at) => unsafe { memory::copy(data.as_mut_ptr(), at, len) },
            }
            rest.copy_from_slice(acks.as_bytes());
            end.copy_from_slice(session.seal(&[&header, sealed_part(len, body)]).as_bytes());
        })
    }

    /// Sends a packet of the handshake; false when the wire has no room now.
    pub fn send_control(&mut self, to: Peer, header: &Header, bytes: &[u8]) -> bool {
        !matches!(self.endpoint.send(to, &header.to_bytes(), bytes), Err(SendError::Full))
    }

    /// Gives each event to `handle`. True when there was one.
    ///
    /// # Errors
    /// The endpoint failed as a whole.
    pub fn poll(&mut self, mut handle: impl FnMut(Arrival<'_>)) -> Result<bool, Error> {
        let handle = RefCell::new(&mut handle);
        let on_event = |event: Event<'_>| match event {
            Event::Message { from, header, payload: rest } => {
                handle.borrow_mut()(Arrival::Packet { from, header, rest })
            }
            Event::Sent { .. } | Event::SendFailed { .. } => {}
            Event::Lost { peer, reason } => handle.borrow_mut()(Arrival::Lost { peer, why: reason.to_string() }),
        };
        let events = self.endpoint.poll_admitting(
            |_, event| on_event(event),
            |_, message| handle.borrow_mut()(Arrival::Unadmitted(message)),
        )?;
        Ok(events > 0)
    }

    /// Sends what is in flight, then tells the peers that this endpoint closes.
    pub fn shutdown(&mut self, limit: Duration) {
        // A failure now changes nothing: the card is closing.
        let _ = self.endpoint.shutdown(limit, |_, _| {});
    }
}

/// What a seal covers of payload and acknowledgements, where the payload has `len` bytes.
fn sealed_part(len: usize, body: &[u8]) -> &[u8] {
    let from = if len > SEALED_PAYLOAD { len } else { 0 };
    body.get(from..).unwrap_or_default()
}

/// Opens the datagram of a peer with the peer's session: payload and acknowledgements, which [`parse`] takes.
///
/// # Errors
/// The datagram is not one of the session, or came before.
pub fn open<'a>(header: &[u8], rest: &'a [u8], session: &mut Session) -> Result<&'a [u8], BadSeal> {
    let len = Header::read(header).ok_or(BadSeal::Forged)?.len as usize;
    let (body, seal) = Seal::read_from_suffix(rest).map_err(|_| BadSeal::Forged)?;
    session.open(&seal, &[header, sealed_part(len, body)])?;
    Ok(body)
}

/// Header, payload and acknowledgements of a packet; `None` for bytes that no card sends.
pub fn parse<'a>(header: &[u8], bytes: &'a [u8]) -> Option<(Header, &'a [u8], &'a [Acknowledgement])> {
    let header = Header::read(header)?;
    let (payload, rest) = bytes.split_at_checked(header.len as usize)?;
    let acks = <[Acknowledgement]>::ref_from_bytes(rest).ok()?;
    (header.is_consistent() && acks.len() <= MAX_ACKS).then_some((header, payload, acks))
}

#[cfg(test)]
mod tests {
    use super::super::packet::Kind;
    use super::*;

    #[test]
    fn packet_is_parsed_into_payload_and_acknowledgements() {
        let header = Header { total: 3, len: 3, ..Header::new(Kind::Write, 5) };
        let ack = Acknowledgement::new(7, 2);
        let bytes = [b"abc".as_slice(), ack.as_bytes(), ack.as_bytes()].concat();
        let (seen, payload, acks) = parse(&header.to_bytes(), &bytes).unwrap();
        assert_eq!((seen, payload, acks.len()), (header, b"abc".as_slice(), 2));
        assert_eq!(acks[1], ack);
        assert!(parse(&header.to_bytes(), &bytes[..3]).is_some_and(|(_, _, acks)| acks.is_empty()));
        assert!(parse(&header.to_bytes(), &bytes[..2]).is_none(), "shorter than its header says");
        assert!(parse(&header.to_bytes(), &bytes[..34]).is_none(), "half an acknowledgement");
        assert!(parse(&header.to_bytes()[1..], &bytes).is_none());
        let many = [[0; ACKNOWLEDGEMENT_LEN]; MAX_ACKS + 1].concat();
        let header = Header::new(Kind::Read, 5);
        assert!(parse(&header.to_bytes(), &many).is_none(), "more acknowledgements than a card sends");
    }

    #[test]
    fn socket_address_round_trips() {
        let name = socket_name(Ipv4Addr::new(10, 0, 0, 7), 4791);
        assert_eq!(name[..8], [2, 0, 0x12, 0xb7, 10, 0, 0, 7]);
        assert_eq!(port_of(&name), Some(4791));
        assert_eq!(port_of(&name[..15]), None);
        assert_eq!(port_of(&[0; 16]), None);
    }
}
