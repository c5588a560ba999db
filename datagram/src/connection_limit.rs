//! Closes silent connections to this endpoint.
//!
//! A provider keeps every TCP connection that it accepts until the other end closes it, so a program that reaches the port could use up
//! the descriptors of the process. A peer sends a message as soon as it is connected. The limit therefore ends connections with
//! fewer bytes than the shortest message, if they are old or too many. It only shuts the socket down: the provider sees the end of
//! the connection and closes its descriptor itself.

use std::net::{SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::fcntl::OFlag;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{SockaddrIn, SockaddrIn6, SockaddrStorage, getsockname};
use nix::sys::stat::Mode;

/// A connection on which fewer bytes arrived is silent. The first message of a peer is longer, with what the provider sends first.
const LEAST: u64 = 128;
/// A silent connection that is older is closed.
const LIMIT_AGE: Duration = Duration::from_secs(10);
/// Of more connections without a byte than this part of the process's descriptors, the oldest are closed at once. Providers send the
/// first bytes as soon as they are connected.
const PART: u64 = 4;
/// The same number at least and at most.
const COUNTS: (u64, u64) = (64, 4096);
/// Time between two looks at the number of open descriptors, in which a provider may accept a few hundred connections, and
/// between two searches without need.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const SEARCH_EVERY: Duration = Duration::from_secs(5);
/// An endpoint that was not polled for longer did not answer its peers either.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) struct ConnectionLimit {
    port: u16,
    /// The descriptors of the process. It is open from the start: when it is needed there may be no descriptor left.
    open: Dir,
    /// A descriptor that is one of the process's others while the search looks at it, so that its number cannot change its meaning.
    spare: OwnedFd,
    looked: Instant,
    searched: Instant,
    /// The endpoint has been polled without a pause since.
    polled_since: Instant,
    /// The next search comes early when the process has this many descriptors.
    crowded: u64,
}

/// A silent connection to the port.
struct Connection {
    fd: RawFd,
    age: Duration,
    received: u64,
}

impl ConnectionLimit {
    /// None where the endpoint has no port, or the system gives no descriptors to look with.
    pub(super) fn of(address: &[u8]) -> Option<Self> {
        let open = Dir::open("/proc/self/fd", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
        let spare = nix::unistd::dup(&open).ok()?;
        let now = Instant::now();
        Some(Self { port: port_of(address)?, open, spare, looked: now, searched: now, polled_since: now, crowded: 0 })
    }

    /// Searches for silent connections and ends them, if it is time.
    pub(super) fn enforce(&mut self, now: Instant) {
        if now.duration_since(self.looked) < LOOK_EVERY {
            return;
        }
        if now.duration_since(self.looked) > PAUSE {
            self.polled_since = now;
        }
        self.looked = now;
        let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or_default();
        let limit = (descriptors / PART).clamp(COUNTS.0, COUNTS.1);
        // The lowest free number: about how many descriptors are open.
        let count = nix::unistd::dup(&self.spare).map_or(descriptors, |fd| fd.as_raw_fd() as u64);
        if count < self.crowded.max(limit) && now.duration_since(self.searched) < SEARCH_EVERY {
            return;
        }
        self.searched = now;
        let mut silent = self.silent();
        silent.sort_by_key(|connection| std::cmp::Reverse(connection.age));
        let empty = silent.iter().filter(|connection| connection.received == 0).count() as u64;
        let (mut too_many, mut closed) = (empty.saturating_sub(limit), 0);
        let steady = now.duration_since(self.polled_since) >= LIMIT_AGE;
        for connection in silent {
            let surplus = connection.received == 0 && too_many > 0;
            if surplus || steady && connection.age >= LIMIT_AGE {
                too_many -= u64::from(surplus);
                closed += u64::from(self.shut(connection.fd));
            }
        }
        if closed > 0 {
            log::warn!("closed {closed} connections to port {} on which nothing was said", self.port);
        }
        // A process with many descriptors of its own is not searched again until it has more.
        self.crowded = count.saturating_sub(closed) + limit / 4;
        // Nothing else stays open by the spare descriptor.
        let _ = nix::unistd::dup3(&self.open, &mut self.spare, OFlag::O_CLOEXEC);
    }

    /// The silent connections to the port.
    fn silent(&mut self) -> Vec<Connection> {
        let name = |entry: nix::Result<nix::dir::Entry>| entry.ok()?.file_name().to_str().ok()?.parse::<RawFd>().ok();
        let numbers: Vec<RawFd> = self.open.iter().filter_map(name).collect();
        let own = [self.open.as_raw_fd(), self.spare.as_raw_fd()];
        let others = numbers.into_iter().filter(|fd| !own.contains(fd));
        others.filter_map(|fd| self.look_at(fd)).collect()
    }

    /// The silent connection to the port that has this descriptor; None for every other descriptor.
    fn look_at(&mut self, fd: RawFd) -> Option<Connection> {
        self.take(fd)?;
        let name: SockaddrStorage = getsockname(self.spare.as_raw_fd()).ok()?;
        let v4 = name.as_sockaddr_in().copied().map(|name: SockaddrIn| SocketAddrV4::from(name).port());
        let v6 = name.as_sockaddr_in6().copied().map(|name: SockaddrIn6| SocketAddrV6::from(name).port());
        if v4.or(v6)? != self.port {
            return None;
        }
        let info = TcpInfo::of(&self.spare)?;
        let received = info.bytes_received();
        (info.is_established() && received < LEAST).then(|| Connection { fd, age: info.quiet_for(), received })
    }

    /// Ends a connection that is still silent.
    fn shut(&mut self, fd: RawFd) -> bool {
        self.look_at(fd).is_some()
            && nix::sys::socket::shutdown(self.spare.as_raw_fd(), nix::sys::socket::Shutdown::Both).is_ok()
    }

    /// Makes the spare descriptor one with `fd`.
    fn take(&mut self, fd: RawFd) -> Option<()> {
        // SAFETY: the borrowed number is only given to dup3, which fails if nothing is open there.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        nix::unistd::dup3(fd, &mut self.spare, OFlag::O_CLOEXEC).ok()
    }
}

/// The port of `sockaddr_in` or `sockaddr_in6`.
fn port_of(address: &[u8]) -> Option<u16> {
    let (family, port) = (address.first_chunk::<2>()?, address.get(2..4)?);
    let is_ip = matches!(i32::from(u16::from_ne_bytes(*family)), libc::AF_INET | libc::AF_INET6);
    (is_ip && matches!(address.len(), 16 | 28)).then(|| u16::from_be_bytes([port[0], port[1]]))
}

/// `struct tcp_info` of linux/tcp.h as far as the bytes received, which the C library's lacks.
struct TcpInfo([u8; 136]);

impl TcpInfo {
    fn of(socket: &OwnedFd) -> Option<Self> {
        let mut bytes = [0; 136];
        let mut len = bytes.len() as libc::socklen_t;
        let at = bytes.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `len` bytes to `bytes`, and sets `len` to their number.
        let code = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, at, &raw mut len) };
        (code == 0 && len as usize == bytes.len()).then_some(Self(bytes))
    }

    /// `tcpi_state` is TCP_ESTABLISHED.
    fn is_established(&self) -> bool {
        self.0[0] == 1
    }

    /// `tcpi_last_data_recv`: since the last byte, or since the connection was made.
    fn quiet_for(&self) -> Duration {
        let at: [u8; 4] = std::array::from_fn(|i| self.0[52 + i]);
        Duration::from_millis(u32::from_ne_bytes(at).into())
    }

    /// `tcpi_bytes_received`.
    fn bytes_received(&self) -> u64 {
        u64::from_ne_bytes(std::array::from_fn(|i| self.0[128 + i]))
    }
}
