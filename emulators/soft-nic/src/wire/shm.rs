//! The wire within one host: two rings in a memory file, agreed on over an abstract Unix socket.
//!
//! The side that has requests connects and creates the memory. After the [`handshake`] it sends the memory's descriptor with
//! its proof; requests travel in the first ring, answers in the second. A card that also asks in the other direction
//! connects by itself, so simultaneous connects need no arbitration. Nothing is on the file system, and the kernel closes
//! the socket of a process that dies, so nothing is left behind and the other side knows.
//!
//! The kernel names the user at the other end, and either side leaves before it reads a byte of another user. No other
//! user reaches the socket or the memory then, so packets in the rings carry no seals.
#![allow(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};

use zerocopy::{FromBytes, IntoBytes};

use super::handshake::{self, Disagreement, HELLO_LEN, Initiator, Response, Seal, Session, WELCOME_LEN};
use super::ring::{CONTROL_LEN, Consumer, Corrupt, Producer, RING_LEN};
use crate::address::Gid;
use crate::memory::{self, Mapping};
use crate::random;

const FILE_LEN: usize = 2 * (CONTROL_LEN + RING_LEN);

/// Why a connection could not be made or kept.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    #[error("no card listens there")]
    Absent,
    #[error("the other card is gone")]
    Gone,
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    #[error("the process at the other end belongs to user {0}, and this card accepts its own user and root alone")]
    Foreign(u32),
    #[error(transparent)]
    Corrupt(#[from] Corrupt),
    #[error("{0}: {1}{hint}", hint = cure(.1))]
    System(&'static str, io::Error),
}

impl ShmError {
    /// The process or the system has no descriptor or no memory for one more connection.
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::System(_, error) if error.raw_os_error().is_some_and(is_exhaustion))
    }
}

/// True for the errors of a process or system without free descriptors or memory.
pub fn is_exhaustion(errno: i32) -> bool {
    matches!(errno, libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EFBIG)
}

/// What to do about a failed system call.
fn cure(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the process's limit of open files (ulimit -n)",
        Some(libc::ENFILE) => "; raise the system's limit of open files (sysctl fs.file-max)",
        Some(libc::ENOBUFS | libc::ENOMEM) => {
            "; raise the process's limit of memory (ulimit -v), or free memory of this machine"
        }
        Some(libc::EFBIG) => "; raise the process's limit of file sizes (ulimit -f), which bounds shared memory",
        _ => "",
    }
}

fn system(call: &'static str) -> impl Fn(Errno) -> ShmError {
    move |errno| ShmError::System(call, errno.into())
}

fn address_of(gid: &Gid, call: &'static str) -> Result<UnixAddr, ShmError> {
    UnixAddr::new_abstract(handshake::abstract_name(gid).as_bytes()).map_err(system(call))
}

fn new_socket() -> Result<OwnedFd, ShmError> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(system("socket"))
}

fn sending(errno: Errno) -> ShmError {
    if matches!(errno, Errno::EPIPE | Errno::ECONNRESET) { ShmError::Gone } else { system("send")(errno) }
}

/// The socket on which a card is found.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// # Errors
    /// The system's, for `bind` and the calls around it; no memory file of this process may be as long as a connection's.
    pub fn bind(gid: &Gid) -> Result<Self, ShmError> {
        memory::check_file_size(FILE_LEN).map_err(|e| ShmError::System("memfd_create", e))?;
        let socket = new_socket()?;
        socket::bind(socket.as_raw_fd(), &address_of(gid, "bind")?).map_err(system("bind"))?;
        socket::listen(&socket, Backlog::MAXCONN).map_err(system("listen"))?;
        Ok(Self { socket })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next connection; `None` when there is none now.
    ///
    /// # Errors
    /// [`ShmError::Foreign`]: the connection was of another user, and is closed. The system's, for `accept4`.
    pub fn accept(&self) -> Result<Option<Accepting>, ShmError> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        loop {
            let socket = match socket::accept4(self.socket.as_raw_fd(), flags) {
                // SAFETY: accept4 just returned this descriptor, and nothing else owns it.
                Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
                Err(Errno::EINTR | Errno::ECONNABORTED) => continue,
                Err(Errno::EAGAIN) => return Ok(None),
                Err(errno) => return Err(system("accept4")(errno)),
            };
            check_user(&socket)?;
            return Ok(Some(Accepting { socket: Some(socket), initiator: None }));
        }
    }
}

/// Refuses a process of another user, unless the user is root, who may read this process's memory anyway.
fn check_user(socket: &OwnedFd) -> Result<(), ShmError> {
    let peer = socket::getsockopt(socket, sockopt::PeerCredentials).map_err(system("SO_PEERCRED"))?;
    let trusted = peer.uid() == nix::unistd::geteuid().as_raw() || peer.uid() == 0;
    if trusted { Ok(()) } else { Err(ShmError::Foreign(peer.uid())) }
}

/// A connection whose other end is not proven.
#[derive(Debug)]
pub struct Accepting {
    /// Taken by the [`RingPair`] that follows.
    socket: Option<OwnedFd>,
    /// The card that sent a good hello, and the session that its proof belongs to.
    initiator: Option<(Gid, Session)>,
}

impl Accepting {
    /// The socket; `None` when it belongs to a [`RingPair`].
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }

    /// Nothing has arrived that only a card knows.
    pub fn is_silent(&self) -> bool {
        self.initiator.is_none()
    }

    /// Reads what has arrived. Returns the peer's GID and the connection once the peer is proven.
    pub fn proceed(&mut self, own: &Gid) -> Result<Option<(Gid, RingPair)>, ShmError> {
        loop {
            let Some(socket) = &self.socket else { return Ok(None) };
            let mut bytes = [0; HELLO_LEN + 1];
            let Some((len, fds)) = receive(socket, &mut bytes)? else { return Ok(None) };
            let Some((peer, session)) = &mut self.initiator else {
                let nonce = random::secret().map_err(|e| ShmError::System("getrandom", e))?;
                match handshake::respond(&bytes[..len], own, nonce) {
                    Ok(Response { peer, welcome, session }) => {
                        answer(socket, welcome.as_bytes());
                        self.initiator = Some((peer, session));
                    }
                    Err(disagreement) => {
                        answer(socket, handshake::refusal(&bytes[..len]).as_bytes());
                        return Err(disagreement.into());
                    }
                }
                continue;
            };
            let seal = Seal::read_from_bytes(&bytes[..len]).map_err(|_| Disagreement::Protocol)?;
            session.open(&seal, &[]).map_err(|_| Disagreement::Unproven)?;
            let file = fds.first().filter(|fd| memory::is_sealed_memfd(fd.as_fd(), FILE_LEN));
            let file = file.ok_or(Disagreement::Protocol)?;
            let map = Mapping::shared(file.as_fd(), 0, FILE_LEN).map_err(|e| ShmError::System("mmap", e))?;
            let peer = *peer;
            return Ok(self.socket.take().map(|socket| (peer, RingPair::new(socket, map, None))));
        }
    }
}

/// The next message and the descriptors that came with it; `None` when there is no message now.
fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, ShmError> {
    let mut control = cmsg_space!([RawFd; 4]);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = match socket::recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
        Ok(message) => message,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(Errno::ECONNRESET) => return Err(ShmError::Gone),
        Err(errno) => return Err(system("recvmsg")(errno)),
    };
    let truncated = message.flags.contains(MsgFlags::MSG_CTRUNC);
    let mut fds = Vec::new();
    for part in message.cmsgs().map_err(system("recvmsg"))? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel just installed these descriptors for this call alone.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    // The kernel leaves out the descriptors for which the process has no room.
    if truncated && fds.is_empty() {
        return Err(system("recvmsg")(Errno::EMFILE));
    }
    if message.bytes == 0 { Err(ShmError::Gone) } else { Ok(Some((message.bytes, fds))) }
}

fn answer(socket: &OwnedFd, message: &[u8]) {
    // If the answer cannot be sent, the peer sees the connection close.
    let _ = socket::send(socket.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL);
}

/// What a card that connects keeps until it is welcome.
#[derive(Debug)]
struct Pending {
    initiator: Initiator,
    /// The memory of both rings.
    file: OwnedFd,
}

/// A connection to one card: a ring of packets in each direction, and the socket that set it up.
#[derive(Debug)]
pub struct RingPair {
    // The ends hold addresses in `map`; they are private and go with it.
    pub tx: Producer,
    pub rx: Consumer,
    socket: OwnedFd,
    _map: Mapping,
    pending: Option<Box<Pending>>,
}

impl RingPair {
    fn new(socket: OwnedFd, map: Mapping, pending: Option<Box<Pending>>) -> Self {
        let base = map.as_ptr();
        let control = |i: usize| base.wrapping_add(i * CONTROL_LEN);
        let data = |i: usize| base.wrapping_add(2 * CONTROL_LEN + i * RING_LEN);
        let (out, back) = if pending.is_some() { (0, 1) } else { (1, 0) };
        // SAFETY: both areas lie in `map`, which this value keeps; the other process has the opposite ends.
        let tx = unsafe { Producer::new(control(out), data(out)) };
        // SAFETY: both areas lie in `map`, which this value keeps; the other process has the opposite ends.
        let rx = unsafe { Consumer::new(control(back), data(back)) };
        Self { tx, rx, socket, _map: map, pending }
    }

    /// Connects to `peer`; packets may be pushed when [`RingPair::is_open`].
    ///
    /// # Errors
    /// [`ShmError::Absent`] when no such card is alive; `Ok(None)` when its queue of connections is full: try later.
    pub fn connect(own: &Gid, peer: &Gid) -> Result<Option<Self>, ShmError> {
        let socket = new_socket()?;
        match socket::connect(socket.as_raw_fd(), &address_of(peer, "connect")?) {
            Ok(()) => {}
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(Errno::ECONNREFUSED | Errno::ENOENT) => return Err(ShmError::Absent),
            Err(errno) => return Err(system("connect")(errno)),
        }
        check_user(&socket)?;
        let file = memory::sealed_memfd("softefa wire", FILE_LEN).map_err(|e| ShmError::System("memfd_create", e))?;
        let map = Mapping::shared(file.as_fd(), 0, FILE_LEN).map_err(|e| ShmError::System("mmap", e))?;
        let nonce = random::secret().map_err(|e| ShmError::System("getrandom", e))?;
        let initiator = Initiator::new(*own, *peer, nonce);
        let hello = initiator.hello();
        socket::send(socket.as_raw_fd(), hello.as_bytes(), MsgFlags::MSG_NOSIGNAL).map_err(sending)?;
        Ok(Some(Self::new(socket, map, Some(Box::new(Pending { initiator, file })))))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Both rings: their control blocks, then their data.
    #[cfg(feature = "fuzzing")]
    pub fn memory(&self) -> (*mut u8, usize) {
        (self._map.as_ptr(), self._map.len())
    }

    /// Both cards are proven to each other.
    pub fn is_open(&self) -> bool {
        self.pending.is_none()
    }

    /// Reads the socket: the answer to the hello, wake-ups, the end of the connection.
    ///
    /// # Errors
    /// The connection is over, for the reason given.
    pub fn proceed(&mut self) -> Result<(), ShmError> {
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
            if let Some(Pending { initiator, file }) = self.pending.as_deref() {
                let mut session = initiator.welcomed(&bytes[..len])?;
                let proof = session.seal(&[]);
                let fds = [file.as_raw_fd()];
                let control = [ControlMessage::ScmRights(&fds)];
                let parts = [IoSlice::new(proof.as_bytes())];
                socket::sendmsg::<()>(self.socket.as_raw_fd(), &parts, &control, MsgFlags::MSG_NOSIGNAL, None)
                    .map_err(sending)?;
                self.pending = None;
            }
        }
    }

    /// Wakes the reader of what was pushed, if it sleeps.
    pub fn flush(&mut self) {
        if self.tx.must_wake() {
            // A full socket holds enough wake-ups; `proceed` finds a dead one.
            let _ = socket::send(self.socket.as_raw_fd(), &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use ferrogin_test_support::wait::wait_for;

    use super::super::packet::{Header, Kind};
    use super::*;

    fn gid() -> Gid {
        Gid { ip: Ipv4Addr::LOCALHOST, port: 0, secret: random::secret().unwrap() }
    }

    fn pair() -> (RingPair, RingPair) {
        let (a, b) = (gid(), gid());
        let listener = Listener::bind(&b).unwrap();
        let mut link = RingPair::connect(&a, &b).unwrap().unwrap();
        let mut accepting = wait_for("connection", || listener.accept().unwrap());
        assert!(accepting.is_silent() && accepting.proceed(&b).unwrap().is_none() && !accepting.is_silent());
        assert!(!link.is_open());
        wait_for("answer", || {
            link.proceed().unwrap();
            link.is_open().then_some(())
        });
        let (from, other) = wait_for("proof", || accepting.proceed(&b).unwrap());
        assert_eq!(from, a);
        (link, other)
    }

    /// A process of this user connects to the card.
    fn connected(card: &Gid) -> OwnedFd {
        let socket = new_socket().unwrap();
        socket::connect(socket.as_raw_fd(), &address_of(card, "connect").unwrap()).unwrap();
        socket
    }

    fn sent(socket: &OwnedFd, message: &[u8]) {
        socket::send(socket.as_raw_fd(), message, MsgFlags::empty()).unwrap();
    }

    fn received(socket: &OwnedFd) -> Vec<u8> {
        let mut bytes = [0; 128];
        let len = socket::recv(socket.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap();
        bytes[..len].to_vec()
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
            assert!(to.rx.look());
            let (seen, at) = to.rx.peek().unwrap().unwrap();
            assert_eq!(seen, header);
            // SAFETY: the payload lies in the ring until `pop`.
            assert_eq!(unsafe { std::slice::from_raw_parts(at, 8) }, payload);
            to.rx.pop(seen.len);
        }
        // SAFETY: no payload.
        assert!(unsafe { b.tx.push(&Header::new(Kind::Ack, 7), std::ptr::null()) }.unwrap());
        assert!(a.rx.look());
        assert_eq!(a.rx.peek().unwrap().unwrap().0, Header::new(Kind::Ack, 7));
    }

    #[test]
    fn closed_peer_is_noticed() {
        let (mut a, b) = pair();
        assert!(a.proceed().is_ok());
        drop(b);
        assert!(matches!(wait_for("end of the connection", || a.proceed().err()), ShmError::Gone));
    }

    #[test]
    fn connect_to_missing_card_fails() {
        assert!(matches!(RingPair::connect(&gid(), &gid()), Err(ShmError::Absent)));
    }

    #[test]
    fn hello_of_another_version_is_refused_by_name() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let socket = connected(&b);
        let initiator = Initiator::new(gid(), b, random::secret().unwrap());
        let mut hello = initiator.hello();
        hello.version = 9;
        sent(&socket, hello.as_bytes());
        let mut accepting = wait_for("connection", || listener.accept().unwrap());
        let error = wait_for("refusal", || accepting.proceed(&b).err());
        assert!(error.to_string().contains("version 9"), "{error}");
        assert_eq!(initiator.welcomed(&received(&socket)).err(), Some(Disagreement::Refused));
    }

    #[test]
    fn malformed_hello_is_refused() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let unproven = Initiator::new(gid(), gid(), random::secret().unwrap()).hello();
        for (hello, reason) in [
            (b"GET / HTTP/1.1".to_vec(), Disagreement::Protocol),
            (unproven.as_bytes().to_vec(), Disagreement::Unproven),
            (unproven.as_bytes()[..40].to_vec(), Disagreement::Protocol),
        ] {
            sent(&connected(&b), &hello);
            let mut accepting = wait_for("connection", || listener.accept().unwrap());
            let error = wait_for("refusal", || accepting.proceed(&b).err());
            assert!(matches!(error, ShmError::Disagreement(seen) if seen == reason), "{error}");
        }
    }

    #[test]
    fn repeated_hello_without_proof_is_refused() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let initiator = Initiator::new(gid(), b, random::secret().unwrap());
        let mut session = None;
        // The second connection repeats everything that the first sent.
        for repeated in [false, true] {
            let socket = connected(&b);
            sent(&socket, initiator.hello().as_bytes());
            let mut accepting = wait_for("connection", || listener.accept().unwrap());
            assert!(accepting.proceed(&b).unwrap().is_none());
            let welcome = received(&socket);
            let proof = *session.get_or_insert_with(|| initiator.welcomed(&welcome).unwrap().seal(&[]));
            sent(&socket, proof.as_bytes());
            let error = wait_for("refusal", || accepting.proceed(&b).err());
            let expected = if repeated { Disagreement::Unproven } else { Disagreement::Protocol };
            assert!(matches!(error, ShmError::Disagreement(seen) if seen == expected), "{error}: no memory came");
        }
    }

    #[test]
    fn exhaustion_names_its_cure() {
        let error = system("accept4")(Errno::EMFILE);
        assert!(error.is_exhaustion() && error.to_string().contains("ulimit -n"), "{error}");
        for (errno, cure) in [(Errno::ENFILE, "fs.file-max"), (Errno::ENOMEM, "ulimit -v"), (Errno::EFBIG, "ulimit -f")]
        {
            let error = system("memfd_create")(errno);
            assert!(error.is_exhaustion() && error.to_string().contains(cure), "{error}");
        }
        assert!(!system("accept4")(Errno::EPERM).is_exhaustion());
    }
}
