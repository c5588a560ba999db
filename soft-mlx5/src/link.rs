//! Connections between cards: streams of frames. The side that has requests connects; answers come back on the same
//! connection, so two cards that talk both ways have two, and simultaneous connects need no arbitration.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use mlx5::device::DeviceError;
use zerocopy::{FromBytes, IntoBytes};

use super::frame::{Frame, HEADER, Header, Kind, VERSION};

/// Where a card is found, in 16 bytes: they stand where a GID would.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// IPv4 address.
    pub ip: [u8; 4],
    /// TCP port.
    pub port: u16,
    /// Chosen at random: a card refuses who does not know it.
    pub nonce: u64,
}

impl Address {
    /// As bytes that another process can be given.
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&self.ip);
        bytes[4..6].copy_from_slice(&self.port.to_be_bytes());
        bytes[8..].copy_from_slice(&self.nonce.to_be_bytes());
        bytes
    }

    /// The same back; any bytes are some address.
    pub fn from_bytes(bytes: &[u8; 16]) -> Address {
        let [a, b, c, d, p, q, _, _, nonce @ ..] = *bytes;
        Address { ip: [a, b, c, d], port: u16::from_be_bytes([p, q]), nonce: u64::from_be_bytes(nonce) }
    }

    fn socket(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::from(self.ip), self.port)
    }
}

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// Bytes asked of a socket at once.
const READ: usize = 256 << 10;

#[derive(Debug)]
enum Path {
    Socket(TcpStream),
    /// Within one card: bytes are handed over by the engine.
    Memory,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Link {
    path: Path,
    out: Vec<u8>,
    sent: usize,
    /// What came and was not taken is at `taken..filled`; the rest is room, kept so that no look at the socket clears it anew.
    read: Vec<u8>,
    taken: usize,
    filled: usize,
    /// The other side has shown that it knows the nonce. A link that connected needs no proof.
    pub known: bool,
}

impl Link {
    fn new(path: Path, known: bool) -> Self {
        Self { path, out: Vec::new(), sent: 0, read: Vec::new(), taken: 0, filled: 0, known }
    }

    pub(super) fn memory() -> Self {
        Self::new(Path::Memory, true)
    }

    pub(super) fn accepted(stream: TcpStream) -> io::Result<Self> {
        prepare(&stream)?;
        Ok(Self::new(Path::Socket(stream), false))
    }

    pub(super) fn connect(to: &Address) -> Result<Self, DeviceError> {
        let stream = TcpStream::connect_timeout(&to.socket(), CONNECT)
            .and_then(|stream| prepare(&stream).map(|()| stream))
            .map_err(|error| DeviceError::Peer { why: format!("no card answers at {}: {error}", to.socket()) })?;
        let mut link = Self::new(Path::Socket(stream), true);
        let hello = Header { rkey: VERSION.into(), operand: to.nonce.into(), ..Header::new(Kind::Hello, 0, 0, 0) };
        link.push(&hello);
        Ok(link)
    }

    /// The socket, for waiting.
    pub(super) fn socket(&self) -> Option<&TcpStream> {
        match &self.path {
            Path::Socket(stream) => Some(stream),
            Path::Memory => None,
        }
    }

    /// Bytes that the other side has not taken.
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Queues a header; its payload, if any, is to follow by [`Link::payload`].
    pub(super) fn push(&mut self, header: &Header) {
        self.out.extend_from_slice(header.as_bytes());
    }

    /// Room for `len` bytes of payload.
    pub(super) fn payload(&mut self, len: usize) -> &mut [u8] {
        let at = self.out.len();
        self.out.resize(at + len, 0);
        &mut self.out[at..]
    }

    /// Sends what it can; true if something went.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        let Path::Socket(stream) = &mut self.path else { return Ok(false) };
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

    /// Room for `bytes` more of what comes.
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

    /// Takes what came; true if something did.
    pub(super) fn fill(&mut self) -> io::Result<bool> {
        if matches!(self.path, Path::Memory) {
            return Ok(false);
        }
        self.room(READ);
        let Path::Socket(stream) = &mut self.path else { return Ok(false) };
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

    /// What is queued, for the other end of a link within one card.
    pub(super) fn take_out(&mut self) -> Vec<u8> {
        self.sent = 0;
        std::mem::take(&mut self.out)
    }

    /// The other half of [`Link::take_out`].
    pub(super) fn give(&mut self, bytes: &[u8]) {
        self.room(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    /// The next whole frame; an error when the bytes are no frame.
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
    fn addresses_survive_as_bytes() {
        let address = Address { ip: [10, 0, 0, 7], port: 4711, nonce: 0x0123_4567_89ab_cdef };
        assert_eq!(Address::from_bytes(&address.to_bytes()), address);
    }

    #[test]
    fn frames_come_whole_or_not_at_all() {
        let mut link = Link::memory();
        let header = Header { total: 3.into(), len: 3.into(), ..Header::new(Kind::Send, 1, 2, 3) };
        link.push(&header);
        link.payload(3).copy_from_slice(b"abc");
        let bytes = link.take_out();
        for cut in 0..bytes.len() {
            link.give(&bytes[..cut]);
            assert!(link.next().unwrap().is_none());
            link.give(&bytes[cut..]);
            let frame = link.next().unwrap().unwrap();
            assert_eq!((frame.header, &frame.payload[..]), (header, &b"abc"[..]));
            assert!(link.next().unwrap().is_none());
        }
    }
}
