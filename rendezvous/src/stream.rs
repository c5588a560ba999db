//! A stream of frames between two ranks, over TCP or a Unix socket. No call blocks; [`wait`] waits for several streams at once.

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

/// A socket that does not block.
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

    /// Refuses the process of another user at the other end.
    pub fn unix(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let (other, own) = (getsockopt(&socket, PeerCredentials)?.uid(), geteuid().as_raw());
        if other != own {
            let text = format!("this socket belongs to a process of user {other}, and this process runs as user {own}");
            return Err(io::Error::new(ErrorKind::PermissionDenied, text));
        }
        Ok(Self::Unix(socket))
    }

    /// Reads at most the rest of `len` bytes of `into`; true once all are there.
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
    /// The peer said that it closes the stream.
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

/// Bytes of one read.
const CHUNK: usize = 32 << 10;

/// A stream whose ends have proved that they know a secret.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    /// Received bytes, of which the first `parsed` are done.
    input: Vec<u8>,
    parsed: usize,
    /// Bytes to send, of which the first `written` are done.
    output: Vec<u8>,
    written: usize,
    /// Why nothing can be sent any more.
    broken: Option<io::Error>,
    /// The peer's frames have ended. Those before may still be in `input`.
    ended: Option<End>,
    heard: Instant,
}

impl Stream {
    pub(crate) fn new(socket: Socket) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        Self { socket, input, parsed: 0, output, written: 0, broken: None, ended: None, heard: Instant::now() }
    }

    /// Two streams that lead to each other, within this process.
    ///
    /// # Errors
    /// The system has no sockets left for this process.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::new(Socket::unix(one)?), Self::new(Socket::unix(other)?)))
    }

    /// The socket, for a protocol with frames of its own; `None` of a Unix socket. For a stream that has not been used.
    pub fn into_tcp(self) -> Option<TcpStream> {
        match self.socket {
            Socket::Tcp(socket) => Some(socket),
            Socket::Unix(_) => None,
        }
    }

    /// Adds a frame with `body` to the bytes that [`Stream::flush`] sends.
    pub fn queue(&mut self, frame: Frame, body: &[u8]) {
        self.output.extend_from_slice(&Frame { len: body.len() as u32, ..frame }.emit());
        self.output.extend_from_slice(body);
    }

    /// Sends a frame with `body`. What the socket does not take now, later calls of [`Stream::flush`] send.
    pub fn send(&mut self, frame: Frame, body: &[u8]) {
        self.queue(frame, body);
        self.flush();
    }

    /// Sends waiting bytes; true when none are left.
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

    /// Reads what has arrived. `now` counts as the time at which the peer was heard.
    pub fn fill(&mut self, now: Instant) {
        self.input.drain(..std::mem::take(&mut self.parsed));
        let mut chunk = [0; CHUNK];
        while self.ended.is_none() {
            match self.socket.read(&mut chunk) {
                Ok(0) => self.ended = Some(End::Closed("its connection was closed".to_owned())),
                Ok(n) => {
                    self.input.extend_from_slice(&chunk[..n]);
                    self.heard = now;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.ended = self.broken.as_ref().map(|error| End::Closed(error.to_string()));
                    return;
                }
                Err(error) => self.ended = Some(End::Closed(error.to_string())),
            }
        }
    }

    /// The next frame that has arrived as a whole, with its body.
    ///
    /// # Errors
    /// The peer sent bytes that are no frame.
    pub fn frame(&mut self) -> Result<Option<(Frame, Vec<u8>)>, InvalidFrame> {
        let rest = &self.input[self.parsed..];
        let Some((head, rest)) = rest.split_at_checked(Frame::HEAD) else { return Ok(None) };
        let head = Frame::parse(head).ok_or(InvalidFrame)?;
        let Some(body) = rest.get(..head.len as usize) else { return Ok(None) };
        let body = body.to_vec();
        self.parsed += Frame::HEAD + body.len();
        Ok(Some((head, body)))
    }

    /// Notes that the peer said that it closes the stream.
    pub fn set_left(&mut self) {
        self.ended = Some(End::Left);
    }

    /// Why no more frames arrive, if so.
    pub fn ended(&self) -> Option<&End> {
        self.ended.as_ref()
    }

    /// When the peer was last heard.
    pub fn heard(&self) -> Instant {
        self.heard
    }

    /// What [`wait`] waits for: bytes from the peer, and room for bytes to it.
    pub fn interest(&self) -> PollFd<'_> {
        let read = if self.ended.is_none() { PollFlags::POLLIN } else { PollFlags::empty() };
        let write = if self.output.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        self.socket.interest(read | write)
    }

    /// True if [`wait`] should wait for this stream.
    pub fn is_open(&self) -> bool {
        self.ended.is_none() || !self.output.is_empty()
    }
}

/// The peer sent bytes that are no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidFrame;

/// Waits until one of `fds` is ready, or until `deadline`.
///
/// # Errors
/// The system has no memory for the call.
pub fn wait(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<()> {
    // Not before the deadline.
    let left = deadline.saturating_duration_since(Instant::now()).as_nanos().div_ceil(1_000_000);
    let left = PollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX));
    match poll(fds, left) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
