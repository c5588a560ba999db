//! The wire within one host: two rings in a memory file, set up over an abstract Unix socket.
//!
//! The side with requests connects and creates the memory. After the [`handshake`] it sends the memory's descriptor
//! with its proof. Requests travel in the first ring, answers in the second. A card with requests in the other
//! direction opens a connection of its own, so simultaneous connects need no arbitration. Nothing is on the file
//! system, and the kernel closes a dead process's socket, so nothing is left behind and the other side notices.
//!
//! The kernel names the user at the other end, and either side hangs up on another user before it reads a byte. So no
//! other user gets at the socket or the memory.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use ferrogin_rendezvous::proof::{HELLO_LEN, Initiator, ProofError, Responder, WELCOME_LEN};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};

use super::error::{WireError, system};
use super::handshake::{self, Response};
use super::ring::{CONTROL_LEN, Consumer, Producer, RING_LEN};
use crate::address::Gid;
use crate::memory::{self, Mapping};

const FILE_LEN: usize = 2 * (CONTROL_LEN + RING_LEN);

fn address_of(gid: &Gid, call: &'static str) -> Result<UnixAddr, WireError> {
    UnixAddr::new_abstract(handshake::abstract_name(gid).as_bytes()).map_err(system(call))
}

fn new_socket() -> Result<OwnedFd, WireError> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(system("socket"))
}

fn sending(errno: Errno) -> WireError {
    if matches!(errno, Errno::EPIPE | Errno::ECONNRESET) { WireError::Gone } else { system("send")(errno) }
}

/// The socket where other cards find a card.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// # Errors
    /// The system's, for `bind` and the calls around it; `EFBIG` if this process's file size limit is below a
    /// connection's memory file.
    pub fn bind(gid: &Gid) -> Result<Self, WireError> {
        memory::check_file_size(FILE_LEN).map_err(|e| WireError::System("memfd_create", e))?;
        let socket = new_socket()?;
        socket::bind(socket.as_raw_fd(), &address_of(gid, "bind")?).map_err(system("bind"))?;
        socket::listen(&socket, Backlog::MAXCONN).map_err(system("listen"))?;
        Ok(Self { socket })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Accepts the next connection; `None` if there is none now.
    ///
    /// # Errors
    /// [`WireError::Foreign`] if the connection came from another user; it is closed. The system's, for `accept4`.
    pub fn accept(&self) -> Result<Option<Accepting>, WireError> {
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

/// Refuses another user's process, unless the user is root, who can read this process's memory anyway.
fn check_user(socket: &OwnedFd) -> Result<(), WireError> {
    let peer = socket::getsockopt(socket, sockopt::PeerCredentials).map_err(system("SO_PEERCRED"))?;
    let trusted = peer.uid() == nix::unistd::geteuid().as_raw() || peer.uid() == 0;
    if trusted { Ok(()) } else { Err(WireError::Foreign(peer.uid())) }
}

/// A connection whose other end is not proven.
#[derive(Debug)]
pub struct Accepting {
    /// Taken by the [`RingPair`] that follows.
    socket: Option<OwnedFd>,
    /// The card that sent a valid hello, and what its confirm is checked against.
    initiator: Option<(Gid, Responder)>,
}

impl Accepting {
    /// Returns the socket; `None` once it belongs to a [`RingPair`].
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(OwnedFd::as_fd)
    }

    /// Whether nothing has arrived that only a card knows.
    pub fn is_silent(&self) -> bool {
        self.initiator.is_none()
    }

    /// Reads what has arrived. Returns the peer's GID and the connection once the peer is proven.
    pub fn proceed(&mut self, own: &Gid) -> Result<Option<(Gid, RingPair)>, WireError> {
        loop {
            let Some(socket) = &self.socket else { return Ok(None) };
            let mut bytes = [0; HELLO_LEN + 1];
            let Some((len, fds)) = receive(socket, &mut bytes)? else { return Ok(None) };
            let Some((peer, responder)) = &self.initiator else {
                let hello = bytes[..len].try_into().map_err(|_| ProofError::Protocol);
                match hello.and_then(|hello| handshake::respond(own, hello)) {
                    Ok(Response { peer, responder, welcome }) => {
                        answer(socket, &welcome);
                        self.initiator = Some((peer, responder));
                    }
                    Err(error) => {
                        answer(socket, &handshake::refusal());
                        return Err(error.into());
                    }
                }
                continue;
            };
            let confirm = bytes[..len].try_into().map_err(|_| ProofError::Protocol)?;
            responder.confirmed(confirm)?;
            let file = fds.first().filter(|fd| memory::is_sealed_memfd(fd.as_fd(), FILE_LEN));
            let file = file.ok_or(ProofError::Protocol)?;
            let map = Mapping::shared(file.as_fd(), 0, FILE_LEN).map_err(|e| WireError::System("mmap", e))?;
            let peer = *peer;
            return Ok(self.socket.take().map(|socket| (peer, RingPair::new(socket, map, None))));
        }
    }
}

/// Receives the next message and the descriptors that came with it; `None` if there is no message now.
fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, WireError> {
    let mut control = cmsg_space!([RawFd; 4]);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = match socket::recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags) {
        Ok(message) => message,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(Errno::ECONNRESET) => return Err(WireError::Gone),
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
    if message.bytes == 0 { Err(WireError::Gone) } else { Ok(Some((message.bytes, fds))) }
}

fn answer(socket: &OwnedFd, message: &[u8]) {
    // If the answer cannot be sent, the peer sees the connection close.
    let _ = socket::send(socket.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL);
}

/// What a connecting card keeps until it is welcomed.
#[derive(Debug)]
struct Pending {
    initiator: Initiator,
    /// The memory of both rings.
    file: OwnedFd,
}

/// A connection to one card: a ring of packets in each direction, and the socket that set it up.
#[derive(Debug)]
pub struct RingPair {
    // The ends hold addresses in `map`, which lives as long as they do.
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

    /// Connects to `peer`; packets may be pushed once [`RingPair::is_open`].
    ///
    /// # Errors
    /// [`WireError::Absent`] if no such card is alive. `Ok(None)` means that its backlog is full: try again later.
    pub fn connect(own: &Gid, peer: &Gid) -> Result<Option<Self>, WireError> {
        let socket = new_socket()?;
        match socket::connect(socket.as_raw_fd(), &address_of(peer, "connect")?) {
            Ok(()) => {}
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(Errno::ECONNREFUSED | Errno::ENOENT) => return Err(WireError::Absent),
            Err(errno) => return Err(system("connect")(errno)),
        }
        check_user(&socket)?;
        let file = memory::sealed_memfd("softefa wire", FILE_LEN).map_err(|e| WireError::System("memfd_create", e))?;
        let map = Mapping::shared(file.as_fd(), 0, FILE_LEN).map_err(|e| WireError::System("mmap", e))?;
        let initiator = handshake::initiate(own, peer).map_err(system("getrandom"))?;
        socket::send(socket.as_raw_fd(), &initiator.hello(), MsgFlags::MSG_NOSIGNAL).map_err(sending)?;
        Ok(Some(Self::new(socket, map, Some(Box::new(Pending { initiator, file })))))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns both rings: their control blocks, then their data.
    #[cfg(feature = "fuzzing")]
    pub fn memory(&self) -> (*mut u8, usize) {
        (self._map.as_ptr(), self._map.len())
    }

    /// Whether both cards are proven to each other.
    pub fn is_open(&self) -> bool {
        self.pending.is_none()
    }

    /// Reads the socket: the answer to the hello, wake-ups, the end of the connection.
    ///
    /// # Errors
    /// The connection is over, for the reason given.
    pub fn proceed(&mut self) -> Result<(), WireError> {
        let mut bytes = [0; WELCOME_LEN + 1];
        loop {
            let len = match socket::recv(self.socket.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Err(WireError::Gone),
                Ok(len) => len,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(Errno::ECONNRESET | Errno::EPIPE) => return Err(WireError::Gone),
                Err(errno) => return Err(system("recv")(errno)),
            };
            if let Some(Pending { initiator, file }) = self.pending.as_deref() {
                let welcome = bytes[..len].try_into().map_err(|_| ProofError::Protocol)?;
                let confirm = initiator.welcomed(welcome)?;
                let fds = [file.as_raw_fd()];
                let control = [ControlMessage::ScmRights(&fds)];
                let parts = [IoSlice::new(&confirm)];
                socket::sendmsg::<()>(self.socket.as_raw_fd(), &parts, &control, MsgFlags::MSG_NOSIGNAL, None)
                    .map_err(sending)?;
                self.pending = None;
            }
        }
    }

    /// Wakes the reader if packets were pushed while it sleeps.
    pub fn flush(&mut self) {
        if self.tx.must_wake() {
            // A full socket holds enough wake-ups; `proceed` notices a dead one.
            let _ = socket::send(self.socket.as_raw_fd(), &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrogin_test_support::wait::wait_for;

    use super::super::packet::{Header, Kind};
    use super::*;

    fn gid() -> Gid {
        Gid { address: None, secret: crate::random::secret().unwrap() }
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

    /// Connects to the card as a process of this user.
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
            assert!(to.rx.packets_arrived());
            let (seen, at) = to.rx.peek().unwrap().unwrap();
            assert_eq!(seen, header);
            // SAFETY: the payload lies in the ring until `pop`.
            assert_eq!(unsafe { std::slice::from_raw_parts(at, 8) }, payload);
            to.rx.pop(seen.len);
        }
        // SAFETY: no payload.
        assert!(unsafe { b.tx.push(&Header::new(Kind::Ack, 7), std::ptr::null()) }.unwrap());
        assert!(a.rx.packets_arrived());
        assert_eq!(a.rx.peek().unwrap().unwrap().0, Header::new(Kind::Ack, 7));
    }

    #[test]
    fn closed_peer_is_noticed() {
        let (mut a, b) = pair();
        assert!(a.proceed().is_ok());
        drop(b);
        assert!(matches!(wait_for("end of the connection", || a.proceed().err()), WireError::Gone));
    }

    #[test]
    fn connect_to_missing_card_fails() {
        assert!(matches!(RingPair::connect(&gid(), &gid()), Err(WireError::Absent)));
    }

    #[test]
    fn hello_of_another_version_is_refused_by_name() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let socket = connected(&b);
        let mut hello = handshake::initiate(&gid(), &b).unwrap().hello();
        hello[7] = 9;
        sent(&socket, &hello);
        let mut accepting = wait_for("connection", || listener.accept().unwrap());
        let error = wait_for("refusal", || accepting.proceed(&b).err());
        assert!(error.to_string().contains("version 9"), "{error}");
        assert_eq!(received(&socket), handshake::refusal());
    }

    #[test]
    fn malformed_hello_is_refused() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let unproven = handshake::initiate(&gid(), &gid()).unwrap().hello();
        for (hello, reason) in [
            (b"GET / HTTP/1.1".to_vec(), ProofError::Protocol),
            (unproven.to_vec(), ProofError::Unproven),
            (unproven[..40].to_vec(), ProofError::Protocol),
        ] {
            sent(&connected(&b), &hello);
            let mut accepting = wait_for("connection", || listener.accept().unwrap());
            let error = wait_for("refusal", || accepting.proceed(&b).err());
            assert!(matches!(error, WireError::Proof(seen) if seen == reason), "{error}");
        }
    }

    #[test]
    fn repeated_hello_without_proof_is_refused() {
        let b = gid();
        let listener = Listener::bind(&b).unwrap();
        let initiator = handshake::initiate(&gid(), &b).unwrap();
        let mut confirm = None;
        // The second connection replays everything that the first sent.
        for repeated in [false, true] {
            let socket = connected(&b);
            sent(&socket, &initiator.hello());
            let mut accepting = wait_for("connection", || listener.accept().unwrap());
            assert!(accepting.proceed(&b).unwrap().is_none());
            let welcome = received(&socket);
            let welcome = welcome.as_slice().try_into().unwrap();
            sent(&socket, confirm.get_or_insert_with(|| initiator.welcomed(welcome).unwrap()));
            let error = wait_for("refusal", || accepting.proceed(&b).err());
            let expected = if repeated { ProofError::Unproven } else { ProofError::Protocol };
            assert!(matches!(error, WireError::Proof(seen) if seen == expected), "{error}: no memory came");
        }
    }
}
