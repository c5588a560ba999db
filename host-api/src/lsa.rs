//! The LSA team: the ranks of one node, which load from and store to each other's windows (NCCL's term: load/store
//! accessible).
//!
//! A node is a host, or a part of it that FERROGIN_NODE names. Its ranks connect by Unix sockets in open, and pass the
//! descriptors of their windows' memory at each registration.
#![allow(unsafe_code)]

use crate::error::Error;
use ferrogin_rendezvous::stream::check_user;
use nccl_gin_ferrogin::device::DeviceKind;
use nix::errno::Errno;
use nix::sys::socket::{self, ControlMessage, ControlMessageOwned, MsgFlags};
use parking_lot::Mutex;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::fs::MetadataExt;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// The setting that divides a host.
pub const NODE: &str = "FERROGIN_NODE";
/// Bytes of a node's name.
pub const NAME_MAX: usize = 191;
const FIX: &str =
    "if the ranks of one host can't open Unix sockets to each other, give each rank its own FERROGIN_NODE";

/// This rank's node, and where its other ranks connect.
pub struct Entrance {
    /// The node's name, the same on its ranks; empty if this rank has a node of its own.
    pub node: String,
    /// The name of the abstract socket.
    pub socket: String,
    listener: Option<UnixListener>,
}

impl Entrance {
    /// Names the node of ranks on devices of one kind, and listens for its other ranks.
    ///
    /// # Errors
    /// FERROGIN_NODE is too long.
    pub fn open(device: DeviceKind) -> Result<Self, Error> {
        let part = std::env::var(NODE).unwrap_or_default();
        let inode = |name: &str| std::fs::metadata(format!("/proc/self/ns/{name}")).map(|meta| meta.st_ino());
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        // Without these, or without abstract sockets, ranks can't tell whether they share a host, and go without.
        let (Ok(boot), Ok(network), Ok(users)) = (boot, inode("net"), inode("user")) else { return Ok(Self::alone()) };
        // Only with the same namespaces and user do the sockets connect, and only on the same kind of device can ranks
        // map memory.
        let node = format!("{}/{network}/{users}/{}/{}/{part}", boot.trim(), nix::unistd::geteuid(), device.name());
        if node.len() > NAME_MAX {
            let most = NAME_MAX - (node.len() - part.len());
            return Err(Error::Argument(format!(
                "FERROGIN_NODE has {} bytes: pass a name of at most {most}",
                part.len()
            )));
        }
        let listener = (|| {
            let socket = format!("ferrogin-{:016x}", u128::from_le_bytes(ferrogin_rendezvous::random()?) as u64);
            Ok::<_, io::Error>((UnixListener::bind_addr(&SocketAddr::from_abstract_name(&socket)?)?, socket))
        })();
        let Ok((listener, socket)) = listener else { return Ok(Self::alone()) };
        Ok(Self { node, socket, listener: Some(listener) })
    }

    /// Returns the entrance of a rank that is its own node.
    pub fn alone() -> Self {
        Self { node: String::new(), socket: String::new(), listener: None }
    }

    /// Connects the ranks of this node. `all` has each rank's node and socket, by rank.
    ///
    /// # Errors
    /// A rank of this node doesn't connect within `timeout`.
    pub fn connect(self, rank: usize, all: &[(String, String)], timeout: Duration) -> Result<Team, Error> {
        let deadline = Instant::now() + timeout;
        let same = |other: usize| other == rank || (!self.node.is_empty() && all[other].0 == self.node);
        let ranks: Vec<usize> = (0..all.len()).filter(|other| same(*other)).collect();
        let mut links: Vec<Option<UnixStream>> = ranks.iter().map(|_| None).collect();
        let failed = |other: usize, source: io::Error| {
            Error::Usage(format!("rank {rank} could not connect to rank {other} of this host: {source}; {FIX}"))
        };
        for (link, other) in links.iter_mut().zip(&ranks).filter(|(_, other)| **other < rank) {
            let connect = || {
                let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(&all[*other].1)?)?;
                check_user(&stream)?;
                stream.set_read_timeout(Some(timeout))?;
                stream.write_all(&(rank as u64).to_le_bytes())?;
                Ok(stream)
            };
            *link = Some(connect().map_err(|source| failed(*other, source))?);
        }
        while let Some(missing) = (0..ranks.len()).find(|i| ranks[*i] > rank && links[*i].is_none()) {
            let Some(listener) = &self.listener else { break };
            let (stream, other) = accept(listener, deadline).map_err(|source| failed(ranks[missing], source))?;
            stream.set_read_timeout(Some(timeout)).map_err(|source| failed(ranks[missing], source))?;
            // Anything else is another process of this user.
            if let Some(at) = ranks.iter().position(|known| *known as u64 == other && *known > rank) {
                links[at].get_or_insert(stream);
            }
        }
        Ok(Team { ranks, links: Mutex::new(links) })
    }
}

/// Accepts the next connection of this user's processes, and returns it with the rank that it begins with.
fn accept(listener: &UnixListener, deadline: Instant) -> io::Result<(UnixStream, u64)> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::fd::AsFd;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], left) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(errno) => return Err(errno.into()),
        }
        let (mut stream, _) = listener.accept()?;
        let mut rank = [0; 8];
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        if check_user(&stream).is_ok() && stream.read_exact(&mut rank).is_ok() {
            return Ok((stream, u64::from_le_bytes(rank)));
        }
    }
}

/// The ranks of this rank's node, connected.
pub struct Team {
    /// In ascending order.
    pub ranks: Vec<usize>,
    /// By position in `ranks`; `None` for this rank. Locked during an exchange, which threads make one after another.
    links: Mutex<Vec<Option<UnixStream>>>,
}

/// A window's memory as a rank passes it on.
pub struct Shared {
    /// The memory, from [`share`](nccl_gin_ferrogin::device::DeviceBuffer::share).
    pub fd: OwnedFd,
    /// Bytes of the allocation.
    pub size: usize,
}

impl Team {
    /// Passes this rank's memory to the others, and returns theirs and its own, by position. `None` is memory that
    /// can't be shared.
    ///
    /// # Errors
    /// A rank ended, or didn't answer within FERROGIN_TIMEOUT.
    pub fn exchange(&self, own: Option<Shared>) -> Result<Vec<Option<Shared>>, Error> {
        let failed = |at: usize, source: io::Error| {
            Error::Usage(format!(
                "rank {} of this host did not pass its window's memory on: {source}; look for its error, or a rank that is stopped",
                self.ranks[at]
            ))
        };
        let links = self.links.lock();
        for (at, link) in links.iter().enumerate() {
            if let Some(link) = link {
                send(link, own.as_ref()).map_err(|source| failed(at, source))?;
            }
        }
        let mut own = Some(own);
        let each = links.iter().enumerate().map(|(at, link)| match link {
            Some(link) => receive(link).map_err(|source| failed(at, source)),
            None => Ok(own.take().flatten()),
        });
        each.collect()
    }
}

fn send(link: &UnixStream, memory: Option<&Shared>) -> io::Result<()> {
    let size = memory.map_or(0, |memory| memory.size as u64).to_le_bytes();
    let fds = memory.map(|memory| [memory.fd.as_raw_fd()]);
    let control = fds.as_ref().map(|fds| ControlMessage::ScmRights(fds));
    // Eight bytes in an empty socket are sent whole.
    socket::sendmsg::<()>(link.as_raw_fd(), &[IoSlice::new(&size)], control.as_slice(), MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

fn receive(link: &UnixStream) -> io::Result<Option<Shared>> {
    let mut size = [0; 8];
    let mut control = nix::cmsg_space!([RawFd; 1]);
    let mut parts = [IoSliceMut::new(&mut size)];
    let message = loop {
        match socket::recvmsg::<()>(link.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    let mut fd = None;
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: the kernel just opened this descriptor for this call alone.
            fd = raw.first().map(|raw| unsafe { OwnedFd::from_raw_fd(*raw) });
        }
    }
    if message.bytes != size.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let size = u64::from_le_bytes(size) as usize;
    match fd {
        Some(fd) => Ok(Some(Shared { fd, size })),
        None if size == 0 => Ok(None),
        // The kernel leaves out a descriptor that the process has no room for.
        None => Err(Errno::EMFILE.into()),
    }
}
