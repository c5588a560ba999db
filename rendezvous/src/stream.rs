//! A stream of frames between two ranks, over TCP or a Unix socket. No call blocks; [`wait`] waits for several streams
//! at once.

use crate::frame::Frame;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Checks that the other end's process belongs to this user.
///
/// # Errors
/// It belongs to another one.
pub fn check_user(socket: &UnixStream) -> io::Result<()> {
    let (other, own) = (getsockopt(socket, PeerCredentials)?.uid(), geteuid().as_raw());
    if other == own { Ok(()) } else { Err(io::Error::new(ErrorKind::PermissionDenied, other_user(other, own))) }
}

/// Returns the message for a socket whose other end is another user's process.
pub(crate) fn other_user(other: u32, own: u32) -> String {
    format!("this socket belongs to a process of user {other}, and this process runs as user {own}")
}

/// A non-blocking socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub fn tcp(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Self::Tcp(socket))
    }

    /// Wraps a Unix socket. Refuses one whose other end is another user's process.
    pub fn unix(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        check_user(&socket)?;
        Ok(Self::Unix(socket))
    }

    /// Reads into `into` until it has `len` bytes; true once it does.
    pub fn read_up_to(&mut self, into: &mut Vec<u8>, len: usize) -> io::Result<bool> {
        while into.len() < len {
            let have = into.len();
            into.resize(len, 0);
            let got = self.read(&mut into[have..]);
            into.truncate(have + got.as_ref().copied().unwrap_or(0));
            match got {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    pub fn interest(&self, flags: PollFlags) -> PollFd<'_> {
        PollFd::new(self.as_fd(), flags)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Unix(socket) => socket.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.read(bytes),
            Self::Unix(socket) => socket.read(bytes),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(socket) => socket.write(bytes),
            Self::Unix(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why a peer's frames ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The peer said that it was closing the stream.
    Left,
    /// The system's reason.
    Closed(String),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("it left"),
            Self::Closed(reason) => f.write_str(reason),
        }
    }
}

/// Bytes per read.
const CHUNK: usize = 32 << 10;

/// A stream whose ends have proved that they know a secret.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    /// Received bytes; the first `parsed` are done.
    input: Vec<u8>,
    parsed: usize,
    /// Bytes to send; the first `written` are done.
    output: Vec<u8>,
    written: usize,
    /// Why nothing more can be sent.
    broken: Option<io::Error>,
    /// Why the peer's frames have ended. Earlier ones may still be in `input`.
    ended: Option<End>,
    /// When the connection was found closed.
    closed_at: Option<Instant>,
    heard: Instant,
}

impl Stream {
    pub(crate) fn new(socket: Socket) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        let (broken, ended, closed_at) = (None, None, None);
        Self { socket, input, parsed: 0, output, written: 0, broken, ended, closed_at, heard: Instant::now() }
    }

    /// Creates two streams connected to each other, within this process.
    ///
    /// # Errors
    /// This process can't open any more sockets.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::new(Socket::unix(one)?), Self::new(Socket::unix(other)?)))
    }

    /// Returns an unused stream's socket, for a protocol with its own frames; `None` for a Unix socket.
    pub fn into_tcp(self) -> Option<TcpStream> {
        match self.socket {
            Socket::Tcp(socket) => Some(socket),
            Socket::Unix(_) => None,
        }
    }

    /// Queues a frame with `body` for [`Stream::flush`] to send.
    pub fn queue(&mut self, frame: Frame, body: &[u8]) {
        self.output.extend_from_slice(&Frame { len: body.len() as u32, ..frame }.emit());
        self.output.extend_from_slice(body);
    }

    /// Sends a frame with `body`. Later calls of [`Stream::flush`] send what the socket doesn't take now.
    pub fn send(&mut self, frame: Frame, body: &[u8]) {
        self.queue(frame, body);
        self.flush();
    }

    /// Sends queued bytes; true once none are left.
    pub fn flush(&mut self) -> bool {
        while self.written < self.output.len() {
            match self.socket.write(&self.output[self.written..]) {
                Ok(n) => self.written += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.broken = Some(error);
                    break;
                }
            }
        }
        self.output.clear();
        self.written = 0;
        true
    }

    /// Reads what has arrived. If anything has, the peer was heard at `now`.
    pub fn fill(&mut self, now: Instant) {
        self.input.drain(..std::mem::take(&mut self.parsed));
        let mut chunk = [0; CHUNK];
        while self.ended.is_none() {
            let why = match self.socket.read(&mut chunk) {
                Ok(0) => "its connection was closed".to_owned(),
                Ok(n) => {
                    self.input.extend_from_slice(&chunk[..n]);
                    self.heard = now;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => match &self.broken {
                    Some(error) => error.to_string(),
                    None => return,
                },
                Err(error) => error.to_string(),
            };
            (self.ended, self.closed_at) = (Some(End::Closed(why)), Some(now));
        }
    }

    /// Returns the next complete frame, with its body.
    ///
    /// # Errors
    /// The peer sent bytes that aren't a frame.
    pub fn frame(&mut self) -> Result<Option<(Frame, Vec<u8>)>, InvalidFrame> {
        let rest = &self.input[self.parsed..];
        let Some((head, rest)) = rest.split_at_checked(Frame::HEAD) else { return Ok(None) };
        let head = Frame::parse(head).ok_or(InvalidFrame)?;
        let Some(body) = rest.get(..head.len as usize) else { return Ok(None) };
        let body = body.to_vec();
        self.parsed += Frame::HEAD + body.len();
        Ok(Some((head, body)))
    }

    /// Records that the peer said it was closing the stream.
    pub fn set_left(&mut self) {
        self.ended = Some(End::Left);
    }

    /// Returns why no more frames will arrive, if so.
    pub fn ended(&self) -> Option<&End> {
        self.ended.as_ref()
    }

    /// Returns when the connection was found closed, unless the peer said that it was closing it.
    pub fn closed_at(&self) -> Option<Instant> {
        self.closed_at.filter(|_| self.ended != Some(End::Left))
    }

    /// Returns when the peer was last heard.
    pub fn heard(&self) -> Instant {
        self.heard
    }

    /// Returns what [`wait`] waits for: bytes from the peer, and room for bytes to it.
    pub fn interest(&self) -> PollFd<'_> {
        let read = if self.ended.is_none() { PollFlags::POLLIN } else { PollFlags::empty() };
        let write = if self.output.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        self.socket.interest(read | write)
    }

    /// Returns the number of queued bytes.
    #[cfg(test)]
    pub fn unsent(&self) -> usize {
        self.output.len() - self.written
    }

    /// Returns true if [`wait`] should wait for this stream.
    pub fn is_open(&self) -> bool {
        self.ended.is_none() || !self.output.is_empty()
    }
}

/// The peer sent bytes that aren't a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidFrame;

/// Waits until one of `fds` is ready, or until `deadline`.
///
/// # Errors
/// The system is out of memory.
pub fn wait(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<()> {
    // Rounded up, so as not to return before the deadline.
    let left = deadline.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
    let left = PollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX));
    match poll(fds, left) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
