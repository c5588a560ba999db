//! Connecting to a listener, with retries until the proof is complete.

use crate::claim::Claim;
use crate::listener::ACCEPTED;
use crate::owner::owner;
use crate::proof::{Domain, Initiator, WELCOME_LEN};
use crate::secret::{Secret, random};
use crate::stream::{Socket, Stream, other_user};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, UnixAddr, connect, getsockopt, socket, sockopt::SocketError,
};
use nix::unistd::geteuid;
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long an address has to accept. A listener whose queue is full only answers a later attempt.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(1);
/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Where a listener is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `host:port`.
    Tcp(SocketAddr),
    /// The name of an abstract Unix socket.
    Unix(String),
}

#[derive(Debug)]
enum Attempt {
    /// Until the next attempt.
    Pause(Instant),
    /// Connecting, until then at the latest.
    Connecting(Socket, Instant),
    /// The peer's listener has the hello and, if `confirmed`, the confirm.
    Proving { socket: Socket, initiator: Initiator, input: Vec<u8>, confirmed: bool },
}

/// A connection in the making.
pub struct Dial {
    addresses: Vec<Address>,
    domain: Domain,
    secret: Secret,
    claim: Claim,
    attempt: Attempt,
    /// Attempts so far.
    attempts: u32,
    /// Refusals in a row.
    refusals: usize,
    last_error: io::Error,
}

impl std::fmt::Debug for Dial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dial").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl Dial {
    /// Creates a connection to the first of `addresses` that accepts, on which to make `claim`.
    pub fn new(addresses: Vec<Address>, domain: Domain, secret: Secret, claim: Claim) -> Self {
        let attempt = Attempt::Pause(Instant::now());
        let last_error = io::Error::from(ErrorKind::TimedOut);
        Self { addresses, domain, secret, claim, attempt, attempts: 0, refusals: 0, last_error }
    }

    /// Makes progress; `Some` once both ends have proved that they know the secret.
    ///
    /// # Errors
    /// The peer doesn't know the secret, has another version, or is another user's process on a Unix socket; or this
    /// process is out of descriptors or memory.
    pub fn poll(&mut self, now: Instant) -> io::Result<Option<Stream>> {
        loop {
            match self.step(now) {
                Ok(Some(stream)) => return Ok(Some(stream)),
                Ok(None) => return Ok(None),
                Err(error) if is_final(&error) => return Err(error),
                Err(error) => {
                    let refused = error.kind() == ErrorKind::ConnectionRefused;
                    self.refusals = if refused { self.refusals + 1 } else { 0 };
                    self.last_error = error;
                    self.attempts += 1;
                    let round = self.attempts / self.addresses.len().max(1) as u32;
                    // The next address at once; after the last one, all of them again.
                    let pause = match self.attempts as usize % self.addresses.len().max(1) {
                        0 => Duration::from_millis(1 << round.min(10)).min(PAUSE_MAX),
                        _ => Duration::ZERO,
                    };
                    self.attempt = Attempt::Pause(now + pause);
                    if !pause.is_zero() {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Does what's possible now; `None` if there's something to wait for.
    fn step(&mut self, now: Instant) -> io::Result<Option<Stream>> {
        match &mut self.attempt {
            Attempt::Pause(until) if now < *until => Ok(None),
            Attempt::Pause(_) => {
                let at = self.attempts as usize % self.addresses.len().max(1);
                let Some(address) = self.addresses.get(at) else { return Err(ErrorKind::AddrNotAvailable.into()) };
                self.attempt = Attempt::Connecting(begin(address)?, now + ATTEMPT_LIMIT);
                self.step(now)
            }
            Attempt::Connecting(socket, until) => {
                if let Some(error) = getsockopt(socket, SocketError).ok().filter(|error| *error != 0) {
                    return Err(io::Error::from_raw_os_error(error));
                }
                if matches!(socket, Socket::Tcp(socket) if socket.peer_addr().is_err()) {
                    return if now < *until { Ok(None) } else { Err(ErrorKind::TimedOut.into()) };
                }
                let initiator = Initiator::new(self.domain, self.secret.bytes(), self.claim.emit(), random()?);
                // A new socket has room for it.
                socket.write_all(&initiator.hello())?;
                let Attempt::Connecting(socket, _) = std::mem::replace(&mut self.attempt, Attempt::Pause(now)) else {
                    return Ok(None);
                };
                self.attempt = Attempt::Proving { socket, initiator, input: Vec::new(), confirmed: false };
                self.step(now)
            }
            Attempt::Proving { socket, initiator, input, confirmed } => {
                if !*confirmed {
                    if !socket.read_up_to(input, WELCOME_LEN)? {
                        return Ok(None);
                    }
                    let welcome = std::mem::take(input).try_into().map_err(|_| ErrorKind::InvalidData)?;
                    let confirm = initiator
                        .welcomed(&welcome)
                        .map_err(|error| io::Error::new(ErrorKind::PermissionDenied, error))?;
                    socket.write_all(&confirm)?;
                    *confirmed = true;
                }
                if !socket.read_up_to(input, ACCEPTED.len())? {
                    return Ok(None);
                }
                match std::mem::replace(&mut self.attempt, Attempt::Pause(now)) {
                    Attempt::Proving { socket, .. } => Ok(Some(Stream::new(socket))),
                    _ => Ok(None),
                }
            }
        }
    }

    /// Returns true once a listener has accepted, while the proof is under way.
    pub fn is_accepted(&self) -> bool {
        matches!(self.attempt, Attempt::Proving { .. })
    }

    /// Returns true once this end has sent its last message of the proof.
    #[cfg(test)]
    pub fn is_confirmed(&self) -> bool {
        matches!(self.attempt, Attempt::Proving { confirmed: true, .. })
    }

    /// Returns true if no process listens at any of the addresses.
    pub fn is_refused(&self) -> bool {
        self.refusals >= self.addresses.len()
    }

    /// Returns why the last attempt failed.
    pub fn last_error(&self) -> io::Error {
        match (self.last_error.kind(), self.last_error.raw_os_error()) {
            (ErrorKind::AddrNotAvailable, _) => io::Error::other(
                "this host has no free port for a connection: raise net.ipv4.ip_local_port_range (sysctl)",
            ),
            // Only a Unix socket's connect fails with this error.
            (ErrorKind::WouldBlock, _) => io::Error::other(self.full_queue()),
            (_, Some(code)) => io::Error::from_raw_os_error(code),
            (kind, None) => io::Error::new(kind, self.last_error.to_string()),
        }
    }

    /// Returns the message for a Unix socket whose queue of connections is full.
    fn full_queue(&self) -> String {
        let own = geteuid().as_raw();
        let name = self.addresses.iter().find_map(|address| match address {
            Address::Unix(name) => Some(name),
            Address::Tcp(_) => None,
        });
        let who = match name.and_then(|name| owner(name)).filter(|user| *user != own) {
            Some(user) => other_user(user, own),
            None => "the process that listens there does not accept connections".to_owned(),
        };
        format!("{who}, and its queue of connections is full; choose another address")
    }

    /// Returns what [`wait`](crate::stream::wait) waits for, until [`Dial::wakes`].
    pub fn interest(&self) -> Option<PollFd<'_>> {
        match &self.attempt {
            Attempt::Pause(_) => None,
            Attempt::Connecting(socket, _) => Some(socket.interest(PollFlags::POLLOUT)),
            Attempt::Proving { socket, .. } => Some(socket.interest(PollFlags::POLLIN)),
        }
    }

    /// Returns when [`Dial::poll`] has something to do even without an event.
    pub fn wakes(&self) -> Option<Instant> {
        match &self.attempt {
            Attempt::Pause(until) | Attempt::Connecting(_, until) => Some(*until),
            Attempt::Proving { .. } => None,
        }
    }
}

/// Returns true if another attempt would fail the same way.
fn is_final(error: &io::Error) -> bool {
    let lacks = |code| matches!(Errno::from_raw(code), Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOBUFS);
    error.kind() == ErrorKind::PermissionDenied || error.raw_os_error().is_some_and(lacks)
}

/// Starts to connect. A Unix socket connects at once, or fails with EAGAIN if the listener's queue is full.
fn begin(address: &Address) -> io::Result<Socket> {
    let family = match address {
        Address::Unix(_) => AddressFamily::Unix,
        Address::Tcp(SocketAddr::V4(_)) => AddressFamily::Inet,
        Address::Tcp(SocketAddr::V6(_)) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(family, SockType::Stream, flags, None)?;
    match address {
        Address::Unix(name) => {
            connect(socket.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?)?;
            Socket::unix(UnixStream::from(socket))
        }
        Address::Tcp(address) => match connect(socket.as_raw_fd(), &SockaddrStorage::from(*address)) {
            Ok(()) | Err(Errno::EINPROGRESS) => Socket::tcp(TcpStream::from(socket)),
            Err(error) => Err(error.into()),
        },
    }
}
