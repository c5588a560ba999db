//! The wire within one host: two rings in a memory file, agreed on over an abstract Unix socket.
//!
//! The side that has requests connects, creates the memory and sends it with its hello; requests travel in the first
//! ring, answers in the second. A card that also asks in the other direction connects by itself, so simultaneous
//! connects need no arbitration. Nothing is on the file system, and the kernel closes the socket of a process that
//! dies, so nothing is left behind and the other side knows.
#![allow(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};

use zerocopy::IntoBytes;

use super::hello::{Disagreement, HELLO_LEN, Hello, WELCOME_LEN, Welcome};
use super::ring::{CONTROL_LEN, Consumer, Corrupt, Producer, RING_LEN};
use crate::address::Gid;
use crate::memory::{self, Mapping};

const FILE_LEN: usize = 2 * (CONTROL_LEN + RING_LEN);
/// Why a connection could not be made or kept.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShmError {
    #[error("no card listens there")]
    Absent,
    #[error("the other card is gone")]
    Gone,
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    #[error("the other process belongs to another user")]
    Foreign,
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

fn system(call: &'static str) -> impl Fn(Errno) -> ShmError {
    move |errno| ShmError::System(call, errno.into())
}

fn name_of(gid: &Gid) -> String {
    format!("softefa/{:08x}/{:08x}", gid.host, gid.nonce)
}

fn new_socket() -> Result<OwnedFd, ShmError> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(system("socket"))
}

/// The socket on which a card is found.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// # Errors
    /// `EADDRINUSE` when another card of this host has the same nonce.
    pub(crate) fn bind(gid: &Gid) -> Result<Self, ShmError> {
        let socket = new_socket()?;
        let address = UnixAddr::new_abstract(name_of(gid).as_bytes()).map_err(system("bind"))?;
        socket::bind(socket.as_raw_fd(), &address).map_err(system("bind"))?;
        socket::listen(&socket, Backlog::MAXCONN).map_err(system("listen"))?;
        Ok(Self { socket })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next card that connects; `None` when there is none now.
    pub(crate) fn accept(&self) -> Option<Accepting> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        loop {
            match socket::accept4(self.socket.as_raw_fd(), flags) {
                // SAFETY: accept4 just returned this descriptor, and nothing else owns it.
                Ok(fd) => return Some(Accepting { socket: Some(unsafe { OwnedFd::from_raw_fd(fd) }) }),
                Err(Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(_) => return None,
            }
        }
    }
}

fn same_user(socket: &OwnedFd) -> bool {
    socket::getsockopt(socket, sockopt::PeerCredentials).is_ok_and(|c| c.uid() == nix::unistd::geteuid().as_raw())
}

/// A connection whose hello has not arrived.
#[derive(Debug)]
pub(crate) struct Accepting {
    /// Taken by the [`RingPair`] that follows.
    socket: Option<OwnedFd>,
}

impl Accepting {
    /// The socket; `None` when it belongs to a [`RingPair`].
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }

    /// Reads the hello, if it has arrived, and returns the peer's GID and the connection.
    pub(crate) fn proceed(&mut self, own: &Gid) -> Result<Option<(Gid, RingPair)>, ShmError> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let mut bytes = [0; HELLO_LEN + 1];
        let mut control = cmsg_space!([RawFd; 4]);
        let (len, fds) = {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
            let message = match socket::recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
                Ok(message) => message,
                Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
                Err(errno) => return Err(system("recvmsg")(errno)),
            };
            let mut fds = Vec::new();
            for part in message.cmsgs().map_err(system("recvmsg"))? {
                if let ControlMessageOwned::ScmRights(raw) = part {
                    // SAFETY: the kernel just installed these descriptors for this call alone.
                    fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                }
            }
            (message.bytes, fds)
        };
        if len == 0 {
            return Err(ShmError::Gone);
        }
        if !same_user(socket) {
            return Err(ShmError::Foreign);
        }
        let file = fds.first().filter(|fd| memory::is_sealed_memfd(fd.as_fd(), FILE_LEN));
        let verdict = Hello::check(&bytes[..len], own).and_then(|from| Ok((from, file.ok_or(Disagreement::Protocol)?)));
        let (from, file) = match verdict {
            Ok(found) => found,
            Err(disagreement) => {
                answer(socket, Err(disagreement));
                return Err(disagreement.into());
            }
        };
        let map = Mapping::shared(file.as_fd(), 0, FILE_LEN).map_err(|e| ShmError::System("mmap", e))?;
        answer(socket, Ok(()));
        let link = self.socket.take().map(|socket| (from, RingPair::new(socket, map, Side::Accepted)));
        Ok(link)
    }
}

fn answer(socket: &OwnedFd, verdict: Result<(), Disagreement>) {
    // If the answer cannot be sent, the peer sees the connection close.
    let _ = socket::send(socket.as_raw_fd(), Welcome::new(verdict).as_bytes(), MsgFlags::MSG_NOSIGNAL);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Connected,
    Accepted,
}

/// A connection to one card: a ring of packets in each direction, and the socket that set it up.
#[derive(Debug)]
pub(crate) struct RingPair {
    // The ends hold addresses in `map`; they are private and go with it.
    pub tx: Producer,
    pub rx: Consumer,
    socket: OwnedFd,
    _map: Mapping,
    welcomed: bool,
}

impl RingPair {
    fn new(socket: OwnedFd, map: Mapping, side: Side) -> Self {
        let base = map.as_ptr();
        let control = |i: usize| base.wrapping_add(i * CONTROL_LEN);
        let data = |i: usize| base.wrapping_add(2 * CONTROL_LEN + i * RING_LEN);
        let (out, back) = if side == Side::Connected { (0, 1) } else { (1, 0) };
        // SAFETY: both areas lie in `map`, which this value keeps; the other process has the opposite ends.
        let tx = unsafe { Producer::new(control(out), data(out)) };
        // SAFETY: both areas lie in `map`, which this value keeps; the other process has the opposite ends.
        let rx = unsafe { Consumer::new(control(back), data(back)) };
        Self { tx, rx, socket, _map: map, welcomed: side == Side::Accepted }
    }

    /// Connects to `peer`; packets may be pushed when [`RingPair::is_open`].
    ///
    /// # Errors
    /// [`ShmError::Absent`] when no such card is alive; `Ok(None)` when its queue of connections is full: try later.
    pub(crate) fn connect(own: &Gid, peer: &Gid) -> Result<Option<Self>, ShmError> {
        let socket = new_socket()?;
        let address = UnixAddr::new_abstract(name_of(peer).as_bytes()).map_err(system("connect"))?;
        match socket::connect(socket.as_raw_fd(), &address) {
            Ok(()) => {}
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(Errno::ECONNREFUSED | Errno::ENOENT) => return Err(ShmError::Absent),
            Err(errno) => return Err(system("connect")(errno)),
        }
        if !same_user(&socket) {
            return Err(ShmError::Foreign);
        }
        let file = memory::sealed_memfd("softefa wire", FILE_LEN).map_err(|e| ShmError::System("memfd_create", e))?;
        let map = Mapping::shared(file.as_fd(), 0, FILE_LEN).map_err(|e| ShmError::System("mmap", e))?;
        let hello = Hello::new(own, peer);
        let fds = [file.as_raw_fd()];
        let control = [ControlMessage::ScmRights(&fds)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        socket::sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(hello.as_bytes())], &control, flags, None)
            .map_err(|errno| if errno == Errno::EPIPE { ShmError::Gone } else { system("sendmsg")(errno) })?;
        Ok(Some(Self::new(socket, map, Side::Connected)))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Both rings: their control blocks, then their data.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn memory(&self) -> (*mut u8, usize) {
        (self._map.as_ptr(), self._map.len())
    }

    /// Whether both cards agreed.
    pub(crate) fn is_open(&self) -> bool {
        self.welcomed
    }

    /// Reads the socket: the answer to the hello, wake-ups, the end of the connection.
    ///
    /// # Errors
    /// The connection is over, for the reason given.
    pub(crate) fn proceed(&mut self) -> Result<(), ShmError> {
        let mut bytes = [0; WELCOME_LEN + 1];
        loop {
            let len = match socket::recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Err(ShmError::Gone),
                Ok(len) => len,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(Errno::ECONNRESET | Errno::EPIPE) => return Err(ShmError::Gone),
                Err(errno) => return Err(system("recv")(errno)),
            };
            if self.welcomed {
                continue;
            }
            Welcome::check(&bytes[..len])?;
            self.welcomed = true;
        }
    }

    /// Wakes the reader of what was pushed, if it sleeps.
    pub(crate) fn flush(&mut self) {
        if self.tx.must_wake() {
            // A full socket holds enough wake-ups; `proceed` finds a dead one.
            let _ = socket::send(self.socket.as_raw_fd(), &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::{Duration, Instant};

    use super::super::packet::{Header, Kind};
    use super::*;
    use crate::random::Random;

    fn gid() -> Gid {
        Gid { host: 0x7e57, ip: Ipv4Addr::LOCALHOST, port: 0, nonce: Random::from_system().next_u32() }
    }

    fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = step() {
                return value;
            }
            assert!(start.elapsed() < Duration::from_secs(120), "no progress");
            std::thread::yield_now();
        }
    }

    fn pair() -> (RingPair, RingPair) {
        let (a, b) = (gid(), gid());
        let listener = Listener::bind(&b).unwrap();
        let mut link = RingPair::connect(&a, &b).unwrap().unwrap();
        let mut accepting = until(|| listener.accept());
        let (from, other) = until(|| accepting.proceed(&b).unwrap());
        assert_eq!(from, a);
        until(|| {
            link.proceed().unwrap();
            link.is_open().then_some(())
        });
        (link, other)
    }

    #[test]
    fn packets_cross_both_ways() {
        let (mut a, mut b) = pair();
        let payload = *b"payload!";
        let header = Header { total: 8, len: 8, ..Header::new(Kind::Write, 7) };
        {
            let (from, to) = (&mut a, &mut b);
            // SAFETY: `payload` holds 8 bytes.
            assert!(unsafe { from.tx.push(&header, payload.as_ptr()) }.unwrap());
            let (seen, at) = to.rx.peek().unwrap().unwrap();
            assert_eq!(seen, header);
            // SAFETY: the payload lies in the ring until `pop`.
            assert_eq!(unsafe { std::slice::from_raw_parts(at, 8) }, payload);
            to.rx.pop(seen.len);
        }
        // SAFETY: no payload.
        assert!(unsafe { b.tx.push(&Header::new(Kind::Ack, 7), std::ptr::null()) }.unwrap());
        assert_eq!(a.rx.peek().unwrap().unwrap().0, Header::new(Kind::Ack, 7));
    }

    #[test]
    fn closed_peer_is_noticed() {
        let (mut a, b) = pair();
        assert!(a.proceed().is_ok());
        drop(b);
        assert!(matches!(until(|| a.proceed().err()), ShmError::Gone));
    }

    #[test]
    fn connect_to_missing_card_fails() {
        assert!(matches!(RingPair::connect(&gid(), &gid()), Err(ShmError::Absent)));
    }

    #[test]
    fn hello_of_another_version_is_refused_by_name() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let socket = new_socket().unwrap();
        socket::connect(socket.as_raw_fd(), &UnixAddr::new_abstract(name_of(&b).as_bytes()).unwrap()).unwrap();
        let mut hello = Hello::new(&gid(), &b);
        hello.version = 9;
        socket::send(socket.as_raw_fd(), hello.as_bytes(), MsgFlags::empty()).unwrap();
        let mut accepting = until(|| listener.accept());
        let error = until(|| accepting.proceed(&b).err());
        assert!(error.to_string().contains("version 9"), "{error}");
        let mut answer = [0; 16];
        assert_eq!(socket::recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()), Ok(WELCOME_LEN));
        assert_eq!(Welcome::check(&answer[..WELCOME_LEN]), Err(Disagreement::Refused));
    }

    #[test]
    fn malformed_hello_and_missing_file_are_refused() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        for hello in [b"GET / HTTP/1.1".to_vec(), Hello::new(&gid(), &b).as_bytes().to_vec()] {
            let socket = new_socket().unwrap();
            socket::connect(socket.as_raw_fd(), &UnixAddr::new_abstract(name_of(&b).as_bytes()).unwrap()).unwrap();
            socket::send(socket.as_raw_fd(), &hello, MsgFlags::empty()).unwrap();
            let mut accepting = until(|| listener.accept());
            assert!(matches!(until(|| accepting.proceed(&b).err()), ShmError::Disagreement(Disagreement::Protocol)));
        }
    }
}
