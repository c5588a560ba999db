//! The wire to other hosts: one TCP stream between two cards, which carries packets once both are proven to each other.
//!
//! Nothing here blocks or waits: the engine calls again when the socket has an event. Both directions' requests and
//! answers travel on the same stream, in order.
#![allow(unsafe_code)]

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ferrogin_rendezvous::proof::{CONFIRM_LEN, HELLO_LEN, Initiator, Responder, WELCOME_LEN};
use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, sockopt};

use super::error::{WireError, system};
use super::handshake::{self, Response};
use super::packet::{Corrupt, HEADER_LEN, Header};
use crate::address::Gid;
use crate::memory;

/// Maximum payload of a packet in bytes.
pub const MAX_PAYLOAD: usize = 64 * 1024;
/// Size of the input in bytes: several packets, so that one read takes what several writes sent.
const INPUT_LEN: usize = 4 * (HEADER_LEN + MAX_PAYLOAD);
/// A packet with at least this much payload is sent straight from memory; shorter ones are collected.
const LONG: usize = 2048;
/// No packet is taken while this many bytes wait for room in the socket.
const FULL: usize = 64 * 1024;

/// A card's port.
#[derive(Debug)]
pub struct Listener(TcpListener);

fn new_socket(ip: Ipv4Addr, only_for_connect: bool) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    socket::setsockopt(&socket, sockopt::IpBindAddressNoPort, &only_for_connect)?;
    socket::bind(socket.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(ip, 0)))?;
    Ok(socket)
}

impl Listener {
    /// Reserves a port on `ip`, on which nothing listens before [`Listener::listen`].
    ///
    /// # Errors
    /// The address is not this host's, or no port is left.
    pub fn bind(ip: Ipv4Addr) -> io::Result<Self> {
        Ok(Self(new_socket(ip, false)?.into()))
    }

    /// Returns the port's number.
    ///
    /// # Errors
    /// The system's.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.0.local_addr()?.port())
    }

    /// Lets other cards connect from now on.
    ///
    /// # Errors
    /// The system's.
    pub fn listen(&self) -> io::Result<()> {
        Ok(socket::listen(&self.0, Backlog::MAXCONN)?)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Accepts the next connection; `None` if there is none now.
    ///
    /// # Errors
    /// The system's, for `accept4`.
    pub fn accept(&self) -> Result<Option<Stream>, WireError> {
        loop {
            match self.0.accept() {
                Ok((socket, from)) => {
                    let prepared = socket.set_nonblocking(true).and_then(|()| socket.set_nodelay(true));
                    prepared.map_err(system("accept4"))?;
                    return Ok(Some(Stream::new(socket, Stage::Called(from.ip()))));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(system("accept4")(error)),
            }
        }
    }
}

/// Bytes that have arrived.
#[derive(Debug)]
pub struct Input {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Input {
    fn new(len: usize) -> Self {
        Self { bytes: vec![0; len], start: 0, end: 0 }
    }

    /// Creates an input that holds `bytes`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn with(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), start: 0, end: bytes.len() }
    }

    /// Makes room for packets in place of a handshake. The system provides only the memory that is used.
    fn grow(&mut self) {
        let mut grown = Self::new(INPUT_LEN);
        let rest = &self.bytes[self.start..self.end];
        grown.end = rest.len();
        grown.bytes[..rest.len()].copy_from_slice(rest);
        *self = grown;
    }

    /// Returns the room for more bytes. There is some unless whole packets are waiting.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 && self.bytes.len() - self.end < HEADER_LEN + MAX_PAYLOAD {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// Takes the first `N` bytes, if they have arrived.
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let taken = *self.bytes[self.start..self.end].first_chunk()?;
        self.pop(N);
        Some(taken)
    }

    /// Returns the oldest packet, if all of it has arrived: its header, and where its payload stays until
    /// [`Input::pop`].
    ///
    /// # Errors
    /// No card sends such a packet.
    pub fn peek(&self) -> Result<Option<(Header, *const u8)>, Corrupt> {
        let Some((head, rest)) = self.bytes[self.start..self.end].split_first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let header = Header::from_bytes(*head);
        let len = header.len as usize;
        if len > MAX_PAYLOAD || !header.is_consistent() {
            return Err(Corrupt);
        }
        Ok((rest.len() >= len).then_some((header, rest.as_ptr())))
    }

    /// Frees the room of the oldest `len` bytes.
    pub fn pop(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }
}

/// How far the handshake has come.
enum Stage {
    /// This card connects; its hello is sent as soon as the stream takes it.
    Calling(Initiator),
    /// The other side connected, from this address. No valid hello has arrived yet.
    Called(IpAddr),
    /// This card sent the welcome.
    Answered(Responder, Gid),
    Open,
}

/// What came of the bytes that arrived.
pub enum Progress {
    Nothing,
    /// A card calls from this address: [`Stream::send`] the welcome, or close.
    Hello {
        peer: Gid,
        from: IpAddr,
        welcome: [u8; WELCOME_LEN],
    },
    /// Both cards are proven to each other; this is the other one if it connected.
    Proven(Option<Gid>),
}

/// A connection to one card.
pub struct Stream {
    socket: TcpStream,
    stage: Stage,
    input: Input,
    /// What waits for room in the socket, from `sent` on.
    output: Vec<u8>,
    sent: usize,
}

impl Stream {
    fn new(socket: TcpStream, stage: Stage) -> Self {
        Self { socket, stage, input: Input::new(HELLO_LEN.max(WELCOME_LEN)), output: Vec::new(), sent: 0 }
    }

    /// Calls `peer`; packets may be pushed after [`Progress::Proven`].
    ///
    /// # Errors
    /// The system's, [`WireError::NoAddress`], or [`WireError::Absent`] if no card listens there, which a later call
    /// may report instead.
    pub fn connect(own: &Gid, peer: &Gid) -> Result<Self, WireError> {
        let (Some(from), Some(to)) = (own.ip(), peer.address) else { return Err(WireError::NoAddress) };
        let socket = new_socket(from, true).map_err(system("socket"))?;
        match socket::connect(socket.as_raw_fd(), &SockaddrIn::from(to)) {
            Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => {}
            Err(errno) => return Err(broken(errno.into())),
        }
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true).map_err(system("TCP_NODELAY"))?;
        let initiator = handshake::initiate(own, peer).map_err(system("getrandom"))?;
        let hello = initiator.hello();
        let mut stream = Self::new(socket, Stage::Calling(initiator));
        stream.send(&hello)?;
        Ok(stream)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether both cards are proven to each other.
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    /// Whether this card connected and the other has not answered.
    pub fn is_calling(&self) -> bool {
        matches!(self.stage, Stage::Calling(_))
    }

    /// Whether the other side connected and nothing has arrived that only a card knows.
    pub fn is_silent(&self) -> bool {
        matches!(self.stage, Stage::Called(_))
    }

    /// Returns the card that was sent a welcome and has not proven itself yet.
    pub fn unproven(&self) -> Option<Gid> {
        if let Stage::Answered(_, peer) = &self.stage { Some(*peer) } else { None }
    }

    /// Reads what has arrived, as far as there is room.
    ///
    /// # Errors
    /// The connection is over, for the reason given. What arrived before can still be read.
    pub fn proceed(&mut self, own: &Gid) -> Result<Progress, WireError> {
        loop {
            let room = self.input.room();
            let len = room.len();
            // Without room, the read would look like the end of the connection.
            if len == 0 {
                break;
            }
            match self.socket.read(room) {
                Ok(0) => return Err(WireError::Gone),
                Ok(read) => {
                    self.input.end += read;
                    if read < len || !self.is_open() {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(broken(error)),
            }
        }
        self.shake_hands(own)
    }

    fn shake_hands(&mut self, own: &Gid) -> Result<Progress, WireError> {
        let peer = match &self.stage {
            Stage::Open => return Ok(Progress::Nothing),
            Stage::Called(from) => {
                let Some(hello) = self.input.take::<HELLO_LEN>() else { return Ok(Progress::Nothing) };
                let from = *from;
                let response = handshake::respond(own, &hello);
                let Response { peer, responder, welcome } = response.inspect_err(|_| self.refuse())?;
                self.stage = Stage::Answered(responder, peer);
                return Ok(Progress::Hello { peer, from, welcome });
            }
            Stage::Calling(initiator) => {
                let Some(welcome) = self.input.take::<WELCOME_LEN>() else { return Ok(Progress::Nothing) };
                let confirm = initiator.welcomed(&welcome)?;
                self.send(&confirm)?;
                None
            }
            Stage::Answered(responder, peer) => {
                let Some(confirm) = self.input.take::<CONFIRM_LEN>() else { return Ok(Progress::Nothing) };
                responder.confirmed(&confirm)?;
                Some(*peer)
            }
        };
        self.stage = Stage::Open;
        self.input.grow();
        Ok(Progress::Proven(peer))
    }

    /// Tells the other side that it is refused.
    pub fn refuse(&mut self) {
        // If that cannot be sent, it sees the connection close.
        let _ = self.send(&handshake::refusal());
    }

    /// Sends a message of the handshake.
    ///
    /// # Errors
    /// Those of [`Stream::flush`].
    pub fn send(&mut self, message: &[u8]) -> Result<(), WireError> {
        self.output.extend_from_slice(message);
        self.flush().map(drop)
    }

    /// Whether a whole packet or a corrupt one has arrived.
    pub fn packets_arrived(&self) -> bool {
        self.is_open() && !matches!(self.input.peek(), Ok(None))
    }

    /// [`Input::peek`]
    ///
    /// # Errors
    /// Those of [`Input::peek`].
    pub fn peek(&self) -> Result<Option<(Header, *const u8)>, Corrupt> {
        self.input.peek()
    }

    /// Frees the room of the oldest packet, whose payload had `len` bytes.
    pub fn pop(&mut self, len: u32) {
        self.input.pop(HEADER_LEN + len as usize);
    }

    /// Whether bytes wait for room in the socket.
    pub fn has_output(&self) -> bool {
        self.sent < self.output.len()
    }

    /// Sends a packet, but a short one only with the next [`Stream::flush`]. Returns false if there is no room now.
    ///
    /// # Errors
    /// Those of [`Stream::flush`].
    ///
    /// # Safety
    /// `header.len` bytes at `payload` are readable. Others may write them at the same time.
    pub unsafe fn push(&mut self, header: &Header, payload: *const u8) -> Result<bool, WireError> {
        let len = header.len as usize;
        if self.output.len() - self.sent >= FULL {
            self.flush()?;
            if self.has_output() {
                return Ok(false);
            }
        }
        let header = header.to_bytes();
        let mut written = 0;
        if len >= LONG {
            let waiting = self.output.len() - self.sent;
            // SAFETY: this function's caller keeps `len` bytes at `payload` readable.
            let all = unsafe { self.write_with(&header, payload, len) }?;
            self.sent += all.min(waiting);
            if self.has_output() {
                return Ok(false);
            }
            self.forget_sent();
            written = all - waiting;
        }
        self.output.extend_from_slice(&header[written.min(HEADER_LEN)..]);
        let from = written.saturating_sub(HEADER_LEN);
        let at = self.output.len();
        self.output.resize(at + (len - from), 0);
        // SAFETY: this function's caller keeps `len` bytes at `payload` readable; `from` of them are sent, and the
        // output has room for the others.
        unsafe { memory::copy(self.output[at..].as_mut_ptr(), payload.wrapping_add(from), len - from) };
        Ok(true)
    }

    /// Writes the output and a packet in one call. Returns how many bytes the socket took.
    ///
    /// # Safety
    /// `len` bytes at `payload` are readable.
    unsafe fn write_with(&self, header: &[u8; HEADER_LEN], payload: *const u8, len: usize) -> Result<usize, WireError> {
        let output = &self.output[self.sent..];
        let part = |at: *const u8, len| libc::iovec { iov_base: at.cast_mut().cast(), iov_len: len };
        let mut parts = [part(output.as_ptr(), output.len()), part(header.as_ptr(), HEADER_LEN), part(payload, len)];
        // SAFETY: integers and pointers, for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len() as _);
        // SAFETY: the parts are readable, the last one by this function's contract, and the kernel only reads them.
        let taken = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        usize::try_from(taken).or_else(|_| blocked(io::Error::last_os_error()))
    }

    /// Hands the socket what waits for room. Returns true if it took some.
    ///
    /// # Errors
    /// The connection cannot be made. [`Stream::proceed`] reports the end of a connection, after everything that
    /// arrived before it.
    pub fn flush(&mut self) -> Result<bool, WireError> {
        let before = self.sent;
        while self.has_output() {
            match self.socket.write(&self.output[self.sent..]) {
                Ok(taken) => self.sent += taken,
                Err(error) if self.is_calling() && error.kind() != ErrorKind::WouldBlock => return Err(broken(error)),
                Err(error) => {
                    blocked(error)?;
                    break;
                }
            }
        }
        let moved = self.sent > before;
        self.forget_sent();
        Ok(moved)
    }

    /// Ends this card's side of the stream and discards what still arrives. Returns true once the other card has ended
    /// its side: a socket that is closed with unread bytes resets the stream, and what the other card hasn't received
    /// by then is lost.
    pub fn end(&mut self) -> bool {
        let _ = self.socket.shutdown(Shutdown::Write);
        match self.socket.read(&mut [0; 16 << 10]) {
            Ok(read) => read == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    fn forget_sent(&mut self) {
        if !self.has_output() {
            self.output.clear();
            self.sent = 0;
        }
    }
}

/// Handles a failed write, which took nothing. The reader finds the end of the connection, after what arrived before
/// it.
fn blocked(error: io::Error) -> Result<usize, WireError> {
    use ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, WouldBlock};
    match error.kind() {
        WouldBlock | Interrupted | BrokenPipe | ConnectionReset => Ok(0),
        _ => Err(system("send")(error)),
    }
}

/// Returns the error of a connection that could not be made or is over.
fn broken(error: io::Error) -> WireError {
    match error.kind() {
        ErrorKind::ConnectionRefused => WireError::Absent,
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::NotConnected => WireError::Gone,
        _ => system("connection")(error),
    }
}

#[cfg(test)]
mod tests;
