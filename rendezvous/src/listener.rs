//! A listener, and the proof of those that connect to it.

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

/// Connections without a good hello that a listener keeps, the newest ones.
const SILENT_MAX: usize = 256;
/// The byte that follows the confirm. Until it arrives, the listener may have dropped the connection.
pub(crate) const ACCEPTED: [u8; 1] = [1];
/// The time that a connection has for its proof.
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

/// A connection whose proof is not complete.
#[derive(Debug)]
struct Unproven {
    socket: Socket,
    input: Vec<u8>,
    /// After the hello.
    responder: Option<Responder>,
    deadline: Instant,
}

impl Unproven {
    /// Nothing has arrived that only those know which know the secret.
    fn is_silent(&self) -> bool {
        self.responder.is_none()
    }

    /// Reads what has arrived; `Some` when the proof is complete.
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

/// A listener. Only those that know its secret get a stream; no other connection delays them.
#[derive(Debug)]
pub struct Listener {
    sockets: Vec<Listening>,
    domain: Domain,
    secret: Secret,
    /// The oldest first.
    unproven: VecDeque<Unproven>,
    /// Has the sockets and those of `unproven`.
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

    /// Listens on a port of each of `addresses`, and returns the ports too.
    ///
    /// # Errors
    /// The address that is unusable, and why.
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
            // Ranks may connect before this process accepts, behind many others. The system has a limit of its own.
            listen(&socket, Backlog::MAXALLOWABLE).map_err(|error| failed(error.into()))?;
            bound.push(socket.local_addr().map_err(failed)?);
            sockets.push(Listening::Tcp(socket));
        }
        let first = addresses.first().copied().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
        Ok((Self::new(sockets, domain, secret).map_err(|error| (first, error))?, bound))
    }

    /// Listens on the abstract Unix socket `name`, to which only processes of this user can connect.
    ///
    /// # Errors
    /// Another process listens there.
    pub fn bind_unix(name: &str, domain: Domain, secret: Secret) -> io::Result<Self> {
        let socket = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?)?;
        socket.set_nonblocking(true)?;
        Self::new(vec![Listening::Unix(socket)], domain, secret)
    }

    /// Accepts what has connected, and returns the next stream with a complete proof, and what its peer says that it is.
    ///
    /// # Errors
    /// This process can accept no connection, for example because it has no descriptor left.
    pub fn poll(&mut self, now: Instant) -> io::Result<Option<(Stream, Claim)>> {
        for at in 0..self.sockets.len() {
            // At most as many as are kept, so that those that keep connecting do not keep this process here.
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
                    // This process has no descriptor left, for example: the oldest connection makes room.
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
        // Only now: those that have sent a hello already have had their turn.
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

    /// What [`wait`](crate::stream::wait) waits for.
    pub fn interest(&self) -> PollFd<'_> {
        PollFd::new(self.as_fd(), PollFlags::POLLIN)
    }

    /// Connections with a welcome.
    #[cfg(test)]
    pub fn welcomed(&self) -> usize {
        self.unproven.iter().filter(|peer| !peer.is_silent()).count()
    }

    /// Connections without a proof.
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

/// The socket addresses for rank 0 to listen at `host:port`. A host's own name may resolve to a loopback address that no other host
/// reaches, so every name but `localhost` stands for all addresses of this host.
pub(crate) fn own_addresses(address: &str) -> io::Result<Vec<Vec<SocketAddr>>> {
    use std::net::{Ipv4Addr, Ipv6Addr, ToSocketAddrs};
    let resolved: Vec<_> = address.to_socket_addrs()?.collect();
    let is_name = address.parse::<SocketAddr>().is_err() && !address.starts_with("localhost:");
    match resolved.first() {
        Some(first) if is_name => {
            let any = |ip| vec![SocketAddr::new(ip, first.port())];
            // The first takes IPv4 connections too, if this host has IPv6.
            Ok(vec![any(IpAddr::V6(Ipv6Addr::UNSPECIFIED)), any(IpAddr::V4(Ipv4Addr::UNSPECIFIED))])
        }
        _ => Ok(vec![resolved]),
    }
}
