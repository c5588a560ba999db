//! Connections between cards: streams of frames. The card that has requests connects, and answers use the same
//! connection. Two cards with requests in both directions have two connections, so simultaneous connects need no
//! arbitration.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use mlx5::device::DeviceError;
use zerocopy::big_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::frame::{Frame, HEADER, Header, Kind, VERSION};

/// A card's address: 16 bytes that take the place of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// IPv4 address.
    pub ip: [u8; 4],
    /// TCP port.
    pub port: u16,
    /// A random number. The card refuses connections from cards that send any other.
    pub nonce: u64,
}

/// An [`Address`] as bytes.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawAddress {
    ip: [u8; 4],
    port: U16,
    reserved: [u8; 2],
    nonce: U64,
}
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<RawAddress>() == 16 && offset_of!(RawAddress, port) == 4 && offset_of!(RawAddress, nonce) == 8);
};

impl Address {
    /// Returns the address as bytes, to send to another process.
    pub fn to_bytes(self) -> [u8; 16] {
        zerocopy::transmute!(RawAddress {
            ip: self.ip,
            port: self.port.into(),
            reserved: [0; 2],
            nonce: self.nonce.into(),
        })
    }

    /// Makes an address from bytes. Any bytes are valid.
    pub fn from_bytes(bytes: &[u8; 16]) -> Address {
        let raw: RawAddress = zerocopy::transmute!(*bytes);
        Address { ip: raw.ip, port: raw.port.get(), nonce: raw.nonce.get() }
    }

    fn socket(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::from(self.ip), self.port)
    }
}

/// The time limit for connecting.
const CONNECT: Duration = Duration::from_secs(5);
/// The most bytes to read from a socket at once.
const READ: usize = 256 << 10;

#[derive(Debug)]
enum Stream {
    Socket(TcpStream),
    /// The card's connection to itself. The engine moves the bytes.
    Memory,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Stream,
    out: Vec<u8>,
    sent: usize,
    /// Bytes `taken..filled` have arrived but aren't parsed yet. The rest is free.
    read: Vec<u8>,
    taken: usize,
    filled: usize,
    /// The peer has sent the nonce. A connection opened by this card needs no proof.
    pub authenticated: bool,
}

impl Connection {
    fn new(stream: Stream, authenticated: bool) -> Self {
        Self { stream, out: Vec::new(), sent: 0, read: Vec::new(), taken: 0, filled: 0, authenticated }
    }

    pub(super) fn memory() -> Self {
        Self::new(Stream::Memory, true)
    }

    pub(super) fn accepted(stream: TcpStream) -> io::Result<Self> {
        prepare(&stream)?;
        Ok(Self::new(Stream::Socket(stream), false))
    }

    pub(super) fn connect(to: &Address) -> Result<Self, DeviceError> {
        let stream = TcpStream::connect_timeout(&to.socket(), CONNECT)
            .and_then(|stream| prepare(&stream).map(|()| stream))
            .map_err(|error| DeviceError::Peer { why: format!("no card responds at {}: {error}", to.socket()) })?;
        let mut connection = Self::new(Stream::Socket(stream), true);
        let hello = Header { rkey: VERSION.into(), operand: to.nonce.into(), ..Header::new(Kind::Hello, 0, 0, 0) };
        connection.push(&hello);
        Ok(connection)
    }

    /// Returns the socket, to wait for it.
    pub(super) fn socket(&self) -> Option<&TcpStream> {
        match &self.stream {
            Stream::Socket(stream) => Some(stream),
            Stream::Memory => None,
        }
    }

    /// Returns the number of bytes that the socket hasn't taken yet.
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Queues a header. Its payload, if any, must follow through [`Connection::payload`].
    pub(super) fn push(&mut self, header: &Header) {
        self.out.extend_from_slice(header.as_bytes());
    }

    /// Queues `len` bytes of payload, for the caller to fill in.
    pub(super) fn payload(&mut self, len: usize) -> &mut [u8] {
        let at = self.out.len();
        self.out.resize(at + len, 0);
        &mut self.out[at..]
    }

    /// Sends as much as the socket takes. Returns true if anything was sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let Stream::Socket(stream) = &mut self.stream else { return Ok(false) };
        let mut moved = false;
        while self.sent < self.out.len() {
            match stream.write(&self.out[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => {
                    self.sent += len;
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(moved),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(moved)
    }

    /// Makes room for `bytes` arriving bytes.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        if self.taken == self.filled {
            (self.taken, self.filled) = (0, 0);
        } else if self.read.len() - self.filled < bytes {
            self.read.copy_within(self.taken..self.filled, 0);
            (self.taken, self.filled) = (0, self.filled - self.taken);
        }
        if self.read.len() < self.filled + bytes {
            self.read.resize(self.filled + bytes, 0);
        }
        &mut self.read[self.filled..]
    }

    /// Reads from the socket. Returns true if anything arrived.
    pub(super) fn fill(&mut self) -> io::Result<bool> {
        if matches!(self.stream, Stream::Memory) {
            return Ok(false);
        }
        self.room(READ);
        let Stream::Socket(stream) = &mut self.stream else { return Ok(false) };
        loop {
            match stream.read(&mut self.read[self.filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => {
                    self.filled += len;
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes the queued bytes, for the other end of the card's connection to itself.
    pub(super) fn take_out(&mut self) -> Vec<u8> {
        self.sent = 0;
        std::mem::take(&mut self.out)
    }

    /// Appends arriving bytes: the counterpart of [`Connection::take_out`].
    pub(super) fn give(&mut self, bytes: &[u8]) {
        self.room(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    /// Returns the next complete frame, if there is one.
    ///
    /// # Errors
    /// The header of a malformed frame.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Header> {
        let bytes = &self.read[self.taken..self.filled];
        let Ok((header, rest)) = Header::read_from_prefix(bytes) else { return Ok(None) };
        let kind = header.check().ok_or(header)?;
        let Some(payload) = rest.get(..header.len.get() as usize) else { return Ok(None) };
        let payload = payload.to_vec();
        self.taken += HEADER + payload.len();
        Ok(Some(Frame { kind, header, payload }))
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_round_trips() {
        let address = Address { ip: [10, 0, 0, 7], port: 4711, nonce: 0x0123_4567_89ab_cdef };
        let golden = [10, 0, 0, 7, 0x12, 0x67, 0, 0, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef];
        assert_eq!(address.to_bytes(), golden);
        assert_eq!(Address::from_bytes(&golden), address);
    }

    #[test]
    fn frame_is_returned_when_it_is_complete() {
        let mut connection = Connection::memory();
        let header = Header { total: 3.into(), len: 3.into(), ..Header::new(Kind::Send, 1, 2, 3) };
        connection.push(&header);
        connection.payload(3).copy_from_slice(b"abc");
        let bytes = connection.take_out();
        for cut in 0..bytes.len() {
            connection.give(&bytes[..cut]);
            assert!(connection.next().unwrap().is_none());
            connection.give(&bytes[cut..]);
            let frame = connection.next().unwrap().unwrap();
            assert_eq!((frame.header, &frame.payload[..]), (header, &b"abc"[..]));
            assert!(connection.next().unwrap().is_none());
        }
    }
}
