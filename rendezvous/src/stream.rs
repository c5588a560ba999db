//! Sockets between the ranks, which carry whole messages.

use super::message::{Header, Hello, MessageKind};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Stream::Unix(s) => s.set_nonblocking(true),
            Stream::Tcp(s) => s.set_nonblocking(true).and_then(|()| s.set_nodelay(true)),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }

    /// Refuses the process of another user at the other end of a Unix socket.
    fn check_user(self) -> io::Result<Stream> {
        if let Stream::Unix(stream) = &self {
            let (other, own) = (getsockopt(stream, PeerCredentials)?.uid(), geteuid().as_raw());
            if other != own {
                let text = format!("a process of user {other} has this socket, and this process is of user {own}");
                return Err(io::Error::new(ErrorKind::PermissionDenied, text));
            }
        }
        Ok(self)
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.read(bytes),
            Stream::Tcp(s) => s.read(bytes),
        }
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.write(bytes),
            Stream::Tcp(s) => s.write(bytes),
        }
    }
}

/// The reason why a connection has no message.
#[derive(Debug)]
pub(super) enum ConnectionError {
    Timeout,
    Closed(String),
    InvalidMessage(String),
}

impl ConnectionError {
    fn from_io(error: &io::Error) -> ConnectionError {
        ConnectionError::Closed(error.to_string())
    }
}

/// Waits until one of `fds` has one of `events`.
pub(super) fn wait<'a>(
    fds: impl IntoIterator<Item = BorrowedFd<'a>>,
    events: PollFlags,
    deadline: Instant,
) -> Result<(), ConnectionError> {
    let mut fds: Vec<_> = fds.into_iter().map(|fd| PollFd::new(fd, events)).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectionError::Timeout);
        }
        let left = PollTimeout::try_from(left.min(Duration::from_secs(1))).unwrap_or(PollTimeout::ZERO);
        match poll(&mut fds, left) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(ConnectionError::Closed(error.to_string())),
        }
    }
}

/// A connection, with the received part of the next message.
#[derive(Debug)]
pub(super) struct Peer {
    pub stream: Stream,
    partial: Vec<u8>,
}

impl Peer {
    pub fn new(stream: Stream) -> io::Result<Peer> {
        stream.set_nonblocking()?;
        Ok(Peer { stream, partial: Vec::new() })
    }

    pub fn send(
        &mut self,
        kind: MessageKind,
        sequence: u64,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<(), ConnectionError> {
        let bytes = Header { kind, sequence, length: payload.len() }.emit(payload);
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    wait([self.stream.fd()], PollFlags::POLLOUT, deadline)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ConnectionError::from_io(&error)),
            }
        }
        Ok(())
    }

    /// Reads the available bytes of one message, and returns the message if it is complete.
    pub fn try_receive(&mut self) -> Result<Option<(Header, Vec<u8>)>, ConnectionError> {
        if !self.fill(Header::SIZE)? {
            return Ok(None);
        }
        let header = Header::parse(&self.partial[..Header::SIZE]).map_err(ConnectionError::InvalidMessage)?;
        if !self.fill(Header::SIZE + header.length)? {
            return Ok(None);
        }
        let payload = self.partial.split_off(Header::SIZE);
        self.partial.clear();
        Ok(Some((header, payload)))
    }

    /// As [`Peer::try_receive`], for a hello. It reads no more bytes than a hello has, because anyone may have sent them.
    pub fn try_receive_hello(&mut self) -> Result<Option<Hello>, ConnectionError> {
        if !self.fill(Header::SIZE + size_of::<Hello>())? {
            return Ok(None);
        }
        let bytes = std::mem::take(&mut self.partial);
        let (header, hello) = bytes.split_at(Header::SIZE);
        match (Header::parse(header).map_err(ConnectionError::InvalidMessage)?, Hello::read_from_bytes(hello)) {
            (Header { kind: MessageKind::Hello, length, .. }, Ok(hello)) if length == size_of::<Hello>() => {
                Ok(Some(hello))
            }
            (header, _) => Err(ConnectionError::InvalidMessage(format!("{header:?} is no hello"))),
        }
    }

    /// Reads until `len` bytes of the message are there; false if the rest has not arrived.
    fn fill(&mut self, len: usize) -> Result<bool, ConnectionError> {
        while self.partial.len() < len {
            let have = self.partial.len();
            self.partial.resize(len, 0);
            let got = self.stream.read(&mut self.partial[have..]);
            self.partial.truncate(have + got.as_ref().copied().unwrap_or(0));
            match got {
                Ok(0) => return Err(ConnectionError::Closed("its connection was closed".into())),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ConnectionError::from_io(&error)),
            }
        }
        Ok(true)
    }

    pub fn receive(&mut self, deadline: Instant) -> Result<(Header, Vec<u8>), ConnectionError> {
        loop {
            if let Some(message) = self.try_receive()? {
                return Ok(message);
            }
            wait([self.stream.fd()], PollFlags::POLLIN, deadline)?;
        }
    }
}

pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

fn is_tcp(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

impl Listener {
    pub fn bind(address: &str) -> io::Result<Listener> {
        if is_tcp(address) {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            return Ok(Listener::Tcp(listener));
        }
        let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(address)?)?;
        listener.set_nonblocking(true)?;
        Ok(Listener::Unix(listener))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }

    /// Only processes of this user can connect.
    pub fn checks_user(&self) -> bool {
        matches!(self, Listener::Unix(_))
    }

    pub fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Unix(listener) => Stream::Unix(listener.accept()?.0).check_user(),
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        }
    }
}

/// One attempt to connect to rank 0.
pub(super) fn connect_once(address: &str, deadline: Instant) -> io::Result<Stream> {
    if !is_tcp(address) {
        let name = UnixAddr::from_abstract_name(address)?;
        return Stream::Unix(UnixStream::connect_addr(&name)?).check_user();
    }
    let mut last = io::Error::new(ErrorKind::NotFound, "the host name has no address");
    for candidate in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&candidate, left) {
            Ok(stream) => return Ok(Stream::Tcp(stream)),
            Err(error) => last = error,
        }
    }
    Err(last)
}
