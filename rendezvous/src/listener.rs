//! A listener, and the proof that it requires from those that connect.

use crate::claim::Claim;
use crate::proof::{CONFIRM_LEN, Domain, HELLO_LEN, Responder, refusal};
use crate::secret::{Secret, random};
use crate::stream::{Socket, Stream};
use nix::poll::{PollFd, PollFlags};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::socket::{Backlog, listen};
use std::collections::VecDeque;
use std::io::ErrorKind::{ConnectionAborted, Interrupted, PermissionDenied, WouldBlock};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::time::{Duration, Instant};

/// How many connections without a good hello a listener keeps; it drops the oldest ones.
const SILENT_MAX: usize = 256;
/// The byte that answers the confirm. Until it arrives, the listener may have dropped the connection.
pub(crate) const ACCEPTED: [u8; 1] = [1];
/// How long a connection has to complete its proof.
const PROOF_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug)]
enum Listening {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl AsFd for Listening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Unix(socket) => socket.as_fd(),
        }
    }
}

/// A connection whose proof is incomplete.
#[derive(Debug)]
struct Unproven {
    socket: Socket,
    input: Vec<u8>,
    /// Set after a good hello.
    responder: Option<Responder>,
    deadline: Instant,
}

impl Unproven {
    /// Returns true if nothing has arrived that requires knowing the secret.
    fn is_silent(&self) -> bool {
        self.responder.is_none()
    }

    /// Reads what has arrived; `Some` once the proof is complete.
    fn poll(&mut self, domain: Domain, secret: &Secret) -> io::Result<Option<Claim>> {
        let refused = || io::Error::from(PermissionDenied);
        if self.responder.is_none() {
            if !self.socket.read_up_to(&mut self.input, HELLO_LEN)? {
                return Ok(None);
            }
            let hello = std::mem::take(&mut self.input).try_into().map_err(|_| refused())?;
            let answer = Responder::respond(domain, secret.bytes(), &hello, random()?);
            // A new socket has room for it.
            self.socket.write_all(&answer.as_ref().map_or(refusal(domain), |(_, welcome)| *welcome))?;
            self.responder = Some(answer.map_err(|_| refused())?.0);
        }
        if !self.socket.read_up_to(&mut self.input, CONFIRM_LEN)? {
            return Ok(None);
        }
        let confirm = std::mem::take(&mut self.input).try_into().map_err(|_| refused())?;
        let responder = self.responder.take().ok_or_else(refused)?;
        responder.confirmed(&confirm).map_err(|_| refused())?;
        self.socket.write_all(&ACCEPTED)?;
        Ok(Some(Claim::parse(responder.identity())))
    }
}

/// A listener. Only peers that know its secret get a stream, and other connections don't delay them.
#[derive(Debug)]
pub struct Listener {
    sockets: Vec<Listening>,
    domain: Domain,
    secret: Secret,
    /// Oldest first.
    unproven: VecDeque<Unproven>,
    /// Watches `sockets`, and the sockets of `unproven`.
    ready: Epoll,
}

impl Listener {
    fn new(sockets: Vec<Listening>, domain: Domain, secret: Secret) -> io::Result<Self> {
        let ready = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for socket in &sockets {
            ready.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        Ok(Self { sockets, domain, secret, unproven: VecDeque::new(), ready })
    }

    /// Listens on each of `addresses`, and returns the addresses with their actual ports.
    ///
    /// # Errors
    /// The unusable address, and why it is unusable.
    pub fn bind(
        addresses: &[SocketAddr],
        domain: Domain,
        secret: Secret,
    ) -> Result<(Self, Vec<SocketAddr>), (SocketAddr, io::Error)> {
        let (mut sockets, mut bound) = (Vec::new(), Vec::new());
        for address in addresses {
            let failed = |error| (*address, error);
            let socket = TcpListener::bind(address).map_err(failed)?;
            socket.set_nonblocking(true).map_err(failed)?;
            // Ranks may connect before this process accepts, behind many others. The system has its own limit.
            listen(&socket, Backlog::MAXALLOWABLE).map_err(|error| failed(error.into()))?;
            bound.push(socket.local_addr().map_err(failed)?);
            sockets.push(Listening::Tcp(socket));
        }
        let first = addresses.first().copied().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
        Ok((Self::new(sockets, domain, secret).map_err(|error| (first, error))?, bound))
    }

    /// Listens on the abstract Unix socket `name`, and accepts only this user's processes.
    ///
    /// # Errors
    /// Another process listens there.
    pub fn bind_unix(name: &str, domain: Domain, secret: Secret) -> io::Result<Self> {
        let socket = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?)?;
        socket.set_nonblocking(true)?;
        Self::new(vec![Listening::Unix(socket)], domain, secret)
    }

    /// Accepts new connections. Returns the next stream with a complete proof, and what its peer claims to be.
    ///
    /// # Errors
    /// This process can't accept connections, for example because it's out of descriptors.
    pub fn poll(&mut self, now: Instant) -> io::Result<Option<(Stream, Claim)>> {
        for at in 0..self.sockets.len() {
            // No more than are kept, so that peers that keep connecting don't hold this process up.
            for _ in 0..SILENT_MAX {
                let accepted = match &self.sockets[at] {
                    Listening::Tcp(socket) => socket.accept().and_then(|(socket, _)| Socket::tcp(socket)),
                    Listening::Unix(socket) => socket.accept().and_then(|(socket, _)| Socket::unix(socket)),
                };
                match accepted {
                    Ok(socket) => {
                        let deadline = now + PROOF_LIMIT;
                        self.ready.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
                        self.unproven.push_back(Unproven { socket, input: Vec::new(), responder: None, deadline });
                    }
                    Err(error) if error.kind() == WouldBlock => break,
                    Err(error) if matches!(error.kind(), Interrupted | ConnectionAborted | PermissionDenied) => {}
                    // For example, out of descriptors: the oldest connection makes room.
                    Err(error) => {
                        let silent = self.unproven.iter().position(Unproven::is_silent);
                        let peer = self.unproven.remove(silent.unwrap_or(0)).ok_or(error)?;
                        let _ = self.ready.delete(&peer.socket);
                        break;
                    }
                }
            }
        }
        for _ in 0..self.unproven.len() {
            let Some(mut peer) = self.unproven.pop_front() else { break };
            let result = peer.poll(self.domain, &self.secret);
            if matches!(result, Ok(None)) && now < peer.deadline {
                self.unproven.push_back(peer);
                continue;
            }
            let _ = self.ready.delete(&peer.socket);
            if let Ok(Some(claim)) = result {
                return Ok(Some((Stream::new(peer.socket), claim)));
            }
        }
        // Only now, so that those that have already sent a hello have had their turn.
        let silent = self.unproven.iter().filter(|peer| peer.is_silent()).count();
        let mut excess = silent.saturating_sub(SILENT_MAX);
        self.unproven.retain(|peer| {
            let is_excess = excess > 0 && peer.is_silent();
            if is_excess {
                let _ = self.ready.delete(&peer.socket);
                excess -= 1;
            }
            !is_excess
        });
        Ok(None)
    }

    /// Returns what [`wait`](crate::stream::wait) waits for.
    pub fn interest(&self) -> PollFd<'_> {
        PollFd::new(self.as_fd(), PollFlags::POLLIN)
    }

    /// Returns how many connections got a welcome.
    #[cfg(test)]
    pub fn welcomed(&self) -> usize {
        self.unproven.iter().filter(|peer| !peer.is_silent()).count()
    }

    /// Returns how many connections lack a proof.
    #[cfg(test)]
    pub fn unproven(&self) -> usize {
        self.unproven.len()
    }
}

/// Readable while [`Listener::poll`] has something to do.
impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.0.as_fd()
    }
}

/// Returns the socket addresses on which rank 0 listens for `host:port`. A host's own name may resolve to a loopback
/// address that other hosts can't reach, so every name but `localhost` stands for all of this host's addresses.
pub(crate) fn own_addresses(address: &str) -> io::Result<Vec<Vec<SocketAddr>>> {
    use std::net::{Ipv4Addr, Ipv6Addr, ToSocketAddrs};
    let resolved: Vec<_> = address.to_socket_addrs()?.collect();
    let is_name = address.parse::<SocketAddr>().is_err() && !address.starts_with("localhost:");
    match resolved.first() {
        Some(first) if is_name => {
            let any = |ip| vec![SocketAddr::new(ip, first.port())];
            // If this host has IPv6, the first one also takes IPv4 connections.
            Ok(vec![any(IpAddr::V6(Ipv6Addr::UNSPECIFIED)), any(IpAddr::V4(Ipv4Addr::UNSPECIFIED))])
        }
        _ => Ok(vec![resolved]),
    }
}
