//! Closes silent connections to an endpoint of a provider over TCP.
//!
//! A provider keeps every TCP connection that it accepts until the other end closes it, so a program that reaches the port could use up
//! the descriptors of the process. A peer sends a message as soon as it is connected, and answers pings from then on. The limit therefore ends
//! connections with fewer bytes than the shortest message, if they are old or too many, and connections that are quiet for longer than any live
//! peer. It only shuts the socket down: the provider sees the end of the connection and closes its descriptor itself.
//!
//! The listening socket is the provider's too. To close it would confuse the provider, so a filter that drops every packet to it takes
//! the place of the close.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::dir::Dir;
use nix::fcntl::OFlag;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{SockaddrStorage, getpeername, getsockname, getsockopt, sockopt};
use nix::sys::stat::Mode;

use crate::address::socket_address;

/// A connection on which fewer bytes arrived is silent. The first message of a peer is longer, with what the provider sends first.
const LEAST: u64 = 128;
/// A silent connection that is older is closed.
const LIMIT_AGE: Duration = Duration::from_secs(10);
/// Of more connections without a byte than this part of the process's descriptors, the oldest of the address with the most are closed at
/// once. Providers send the first bytes as soon as they are connected.
const PART: u64 = 4;
/// The same number at least and at most. All endpoints of the process share it.
const COUNTS: (u64, u64) = (64, 4096);
/// Time between two looks at the number of open descriptors: usually, and while that number rises above the limit, when the provider may accept
/// a connection in each poll.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const LOOK_OFTEN: Duration = Duration::from_micros(20);
/// Time between two searches without need.
const SEARCH_EVERY: Duration = Duration::from_secs(5);
/// An endpoint that was not polled for longer did not answer its peers either.
const PAUSE: Duration = Duration::from_secs(1);

/// Endpoints of this process that have a limit.
static ENDPOINTS: AtomicU64 = AtomicU64::new(0);

/// The limit of one endpoint. Its owner calls [`ConnectionLimit::enforce`] whenever it polls the endpoint.
pub struct ConnectionLimit {
    address: IpAddr,
    port: u16,
    /// A connection that is quiet for longer is closed, whatever arrived on it before.
    longest_pause: Duration,
    /// The process has no descriptor left.
    no_descriptor: bool,
    /// The descriptors of the process. It is open from the start: when it is needed there may be no descriptor left.
    open: Dir,
    /// A descriptor that is one of the process's others while the search looks at it, so that its number cannot change its meaning.
    spare: OwnedFd,
    looked: Instant,
    searched: Instant,
    /// The endpoint has been polled without a pause since.
    polled_since: Instant,
    /// The process had this many descriptors at the last look: more than the limit of silent connections, and more than before.
    count: u64,
    count_rises: bool,
    /// The next search comes early when the process has this many descriptors.
    search_at: u64,
}

/// A silent connection to the port.
struct Connection {
    fd: RawFd,
    quiet_for: Duration,
    received: u64,
    source: Option<IpAddr>,
}

impl ConnectionLimit {
    /// The limit of the endpoint at `address`, whose peers answer within `answer_limit`. None where the endpoint has no port, or the system gives
    /// no descriptors to look with.
    pub fn of(address: &[u8], answer_limit: Duration) -> Option<Self> {
        let open = Dir::open("/proc/self/fd", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).ok()?;
        let spare = nix::unistd::dup(&open).ok()?;
        let now = Instant::now();
        let address = socket_address(address)?;
        ENDPOINTS.fetch_add(1, Ordering::Relaxed);
        Some(Self {
            address: address.ip(),
            port: address.port(),
            longest_pause: LIMIT_AGE.max(answer_limit.saturating_mul(2)),
            no_descriptor: false,
            open,
            spare,
            looked: now,
            searched: now,
            polled_since: now,
            count: 0,
            count_rises: false,
            search_at: u64::MAX,
        })
    }

    /// The process has no descriptor left: the provider cannot accept, and the port stays readable meanwhile.
    pub fn has_no_descriptor(&self) -> bool {
        self.no_descriptor
    }

    /// Searches for silent connections and ends them, if it is time. To be called whenever the endpoint is polled.
    pub fn enforce(&mut self, now: Instant) {
        if now.duration_since(self.looked) < if self.count_rises { LOOK_OFTEN } else { LOOK_EVERY } {
            return;
        }
        if now.duration_since(self.looked) > PAUSE {
            self.polled_since = now;
        }
        self.looked = now;
        let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or_default();
        let limit = (descriptors / PART).clamp(COUNTS.0, COUNTS.1);
        let share = limit / ENDPOINTS.load(Ordering::Relaxed).max(1);
        // The lowest free number: about how many descriptors are open.
        let lowest = nix::unistd::dup(&self.spare);
        if !std::mem::replace(&mut self.no_descriptor, lowest.is_err()) && lowest.is_err() {
            log::warn!(
                "port {}: no peer can connect while this process has too many open files: raise `ulimit -n`",
                self.port
            );
        }
        let count = lowest.map_or(descriptors, |fd| fd.as_raw_fd() as u64);
        self.count_rises = count > std::mem::replace(&mut self.count, count) && count >= limit;
        // Other endpoints may have closed connections meanwhile.
        self.search_at = self.search_at.min(count + share / 4 + 1);
        if count < self.search_at.max(limit) && now.duration_since(self.searched) < SEARCH_EVERY {
            return;
        }
        self.searched = now;
        let silent = self.silent();
        let overdue = self.overdue(silent, share, now.duration_since(self.polled_since));
        let closed = overdue.into_iter().filter(|fd| self.shut(*fd)).count() as u64;
        if closed > 0 {
            log::warn!("closed {closed} connections to port {} on which no peer sent anything", self.port);
        }
        // A process with many descriptors of its own is not searched again until it has more.
        self.search_at = count.saturating_sub(closed) + share / 4 + 1;
        self.release_spare();
    }

    /// Nothing stays open by the spare descriptor.
    fn release_spare(&mut self) {
        let _ = nix::unistd::dup3(&self.open, &mut self.spare, OFlag::O_CLOEXEC);
    }

    /// The descriptors of the process, but not the limit's own.
    fn others(&mut self) -> Vec<RawFd> {
        let name = |entry: nix::Result<nix::dir::Entry>| entry.ok()?.file_name().to_str().ok()?.parse::<RawFd>().ok();
        let own = [self.open.as_raw_fd(), self.spare.as_raw_fd()];
        self.open.iter().filter_map(name).filter(|fd| !own.contains(fd)).collect()
    }

    /// The silent connections to the port.
    fn silent(&mut self) -> Vec<Connection> {
        self.others().into_iter().filter_map(|fd| self.look_at(fd)).collect()
    }

    /// Of the silent connections to an endpoint that has been polled for `polled_for`: those without a byte beyond `share`, and those that are
    /// quiet for longer than a peer.
    fn overdue(&self, silent: Vec<Connection>, share: u64, polled_for: Duration) -> Vec<RawFd> {
        let empty = silent.iter().filter(|connection| connection.received == 0).count() as u64;
        let mut too_many = empty.saturating_sub(share);
        let is_overdue = |connection: &Connection| {
            let surplus = connection.received == 0 && too_many > 0;
            too_many -= u64::from(surplus);
            let limit = if connection.received < LEAST { LIMIT_AGE } else { self.longest_pause };
            surplus || connection.quiet_for.min(polled_for) >= limit
        };
        oldest_of_largest_source_first(silent).into_iter().filter(is_overdue).map(|connection| connection.fd).collect()
    }

    /// Ends the connections without a peer's message, and gives their number.
    pub fn end_silent(&mut self) -> usize {
        let silent = self.silent().into_iter();
        let ended = silent.filter(|connection| connection.received < LEAST && self.shut(connection.fd)).count();
        self.release_spare();
        ended
    }

    /// Drops every later packet to the listening socket: programs that connect get no answer. True if that is possible.
    pub fn close_port(&mut self) -> bool {
        let closed = self.take_listening_socket() && drop_packets(&self.spare);
        self.release_spare();
        closed
    }

    /// Makes the spare descriptor one with the endpoint's listening socket; false if there is none.
    fn take_listening_socket(&mut self) -> bool {
        // Another endpoint may have the same port of another address.
        let own = (self.address, self.port);
        let is_own = |(ip, port): (IpAddr, u16)| (ip, port) == own || ip.is_unspecified() && port == own.1;
        self.others().into_iter().any(|fd| {
            self.take(fd).is_some()
                && getsockopt(&self.spare, sockopt::AcceptConn).unwrap_or(false)
                && self.local_address().is_some_and(is_own)
        })
    }

    /// The local address and port of the spare descriptor, if it is an IP socket.
    fn local_address(&self) -> Option<(IpAddr, u16)> {
        getsockname::<SockaddrStorage>(self.spare.as_raw_fd()).ok().and_then(|name| ip_and_port(&name))
    }

    /// The silent connection to the port that has this descriptor; None for every other descriptor.
    fn look_at(&mut self, fd: RawFd) -> Option<Connection> {
        self.take(fd)?;
        self.local_address().filter(|(_, port)| *port == self.port)?;
        let info = TcpInfo::of(&self.spare)?;
        let (received, quiet_for) = (info.bytes_received(), info.quiet_for());
        let silent = received < LEAST || quiet_for >= self.longest_pause;
        let peer = getpeername::<SockaddrStorage>(self.spare.as_raw_fd()).ok();
        let source = peer.and_then(|peer| ip_and_port(&peer)).map(|(ip, _)| ip);
        (info.is_established() && silent).then_some(Connection { fd, quiet_for, received, source })
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

impl Drop for ConnectionLimit {
    fn drop(&mut self) {
        ENDPOINTS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sorts connections: the ones first that must go first. So an address with few connections keeps them beside one with many.
fn oldest_of_largest_source_first(mut connections: Vec<Connection>) -> Vec<Connection> {
    connections.sort_by_key(|connection| connection.quiet_for);
    let mut of_source = HashMap::new();
    let number = |connection: Connection| {
        let count = of_source.entry(connection.source).and_modify(|count| *count += 1).or_insert(1);
        (*count, connection)
    };
    let mut numbered: Vec<(usize, Connection)> = connections.into_iter().map(number).collect();
    numbered.sort_by_key(|(number, connection)| std::cmp::Reverse((*number, connection.quiet_for)));
    numbered.into_iter().map(|(_, connection)| connection).collect()
}

/// Makes the kernel drop every packet to a listening socket.
fn drop_packets(socket: &OwnedFd) -> bool {
    // "Return 0": accept no byte of the packet.
    let mut drop_all = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &raw mut drop_all };
    let (len, at) = (size_of_val(&program) as libc::socklen_t, (&raw const program).cast());
    // SAFETY: the kernel reads `len` bytes of `program` and the one instruction that it points to, which both live during the call.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, at, len) == 0 }
}

/// The address and port of an IP socket.
fn ip_and_port(name: &SockaddrStorage) -> Option<(IpAddr, u16)> {
    let v4 = name.as_sockaddr_in().map(|name| (name.ip().into(), name.port()));
    v4.or_else(|| name.as_sockaddr_in6().map(|name| (name.ip().into(), name.port())))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use ferrogin_test_support::untrusted::limit_descriptors;
    use ferrogin_test_support::{child, wait::wait_until};

    /// A listening socket, and the limit of an endpoint that had it.
    fn listen() -> (TcpListener, ConnectionLimit) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut address = [0; 16];
        address[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        address[2..4].copy_from_slice(&port.to_be_bytes());
        address[4..8].copy_from_slice(&[127, 0, 0, 1]);
        (listener, ConnectionLimit::of(&address, Duration::from_secs(1)).unwrap())
    }

    /// Both ends of a connection on which the peer has sent a message.
    fn connect(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.write_all(&[7; 2 * LEAST as usize]).unwrap();
        let (mut here, _) = listener.accept().unwrap();
        here.read_exact(&mut [0; 2 * LEAST as usize]).unwrap();
        (peer, here)
    }

    /// Searches, with a limit for quiet connections.
    fn search(limit: &mut ConnectionLimit, longest_pause: Duration) {
        let now = Instant::now() + SEARCH_EVERY;
        limit.longest_pause = longest_pause;
        (limit.looked, limit.searched, limit.polled_since) = (now - LOOK_EVERY, now - SEARCH_EVERY, now - LIMIT_AGE);
        limit.enforce(now);
    }

    /// Whether the other end has closed the connection of this one, from which it sent nothing.
    fn is_closed(mut peer: &TcpStream) -> bool {
        peer.set_nonblocking(true).unwrap();
        matches!(peer.read(&mut [0]), Ok(0))
    }

    #[test]
    fn connection_is_closed_after_the_longest_pause() {
        let (listener, mut limit) = listen();
        let (peer, _here) = connect(&listener);
        search(&mut limit, Duration::from_secs(3600));
        assert!(!is_closed(&peer));
        search(&mut limit, Duration::ZERO);
        assert!(is_closed(&peer));
    }

    #[test]
    fn kernel_counts_bytes_and_time_of_silence() {
        let (listener, mut limit) = listen();
        let (mut peer, mut here) = connect(&listener);
        limit.longest_pause = Duration::ZERO;
        let fd = here.as_raw_fd();
        let mut look = || limit.look_at(fd).unwrap();
        assert_eq!((look().received, look().source), (2 * LEAST, Some([127, 0, 0, 1].into())));
        let quiet = Duration::from_millis(20);
        wait_until("a quiet connection", || look().quiet_for >= quiet);
        let mut sent = 2 * LEAST;
        wait_until("a connection with a new byte", || {
            peer.write_all(&[1]).unwrap();
            here.read_exact(&mut [0]).unwrap();
            sent += 1;
            look().quiet_for < quiet
        });
        assert_eq!(look().received, sent);
    }

    #[test]
    fn overdue_connections_are_quiet_for_longer_than_peers() {
        let (_listener, mut limit) = listen();
        limit.longest_pause = 3 * LIMIT_AGE;
        let tick = Duration::from_millis(1);
        let connection = |fd, received, quiet_for| Connection { fd, quiet_for, received, source: None };
        let all = || {
            vec![
                connection(1, 0, LIMIT_AGE - tick),
                connection(2, 0, LIMIT_AGE),
                connection(3, LEAST - 1, LIMIT_AGE),
                connection(4, LEAST, limit.longest_pause - tick),
                connection(5, LEAST, limit.longest_pause),
            ]
        };
        let overdue = |share, polled_for| {
            let mut overdue = limit.overdue(all(), share, polled_for);
            overdue.sort_unstable();
            overdue
        };
        assert_eq!(overdue(2, 3 * LIMIT_AGE), [2, 3, 5]);
        assert_eq!(overdue(2, LIMIT_AGE), [2, 3]);
        assert!(overdue(2, LIMIT_AGE - tick).is_empty());
        // The surplus goes at once, the oldest first.
        assert_eq!(overdue(1, Duration::ZERO), [2]);
        assert_eq!(overdue(0, Duration::ZERO), [1, 2]);
    }

    #[test]
    fn surplus_of_silent_connections_is_closed_at_the_next_look() {
        child::run("surplus_of_silent_connections_is_closed_at_the_next_look", &[], || {
            let descriptors = 512;
            assert!(limit_descriptors(descriptors));
            let (listener, mut limit) = listen();
            let talking = connect(&listener);
            let now = limit.looked + LOOK_EVERY;
            limit.enforce(now);
            let silent: Vec<_> = (0..200)
                .map(|_| (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap()))
                .collect();
            limit.enforce(now + LOOK_EVERY);
            let closed = silent.iter().filter(|(peer, _)| is_closed(peer)).count() as u64;
            assert_eq!(closed, silent.len() as u64 - descriptors / PART);
            assert!(!is_closed(&talking.0));
        });
    }

    #[test]
    fn closed_port_ignores_connects_and_keeps_connections() {
        let (listener, mut limit) = listen();
        let (mut peer, mut here) = connect(&listener);
        assert!(limit.close_port());
        let late = TcpStream::connect_timeout(&listener.local_addr().unwrap(), Duration::from_millis(300));
        assert_eq!(late.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
        peer.write_all(&[1]).unwrap();
        here.write_all(&[2]).unwrap();
        assert_eq!((peer.read(&mut [0]).unwrap(), here.read(&mut [0]).unwrap()), (1, 1));
        let (other, _limit) = listen();
        connect(&other);
    }

    #[test]
    fn source_with_most_connections_loses_them_first() {
        let connection = |source: u8, seconds| Connection {
            fd: i32::from(source),
            quiet_for: Duration::from_secs(seconds),
            received: 0,
            source: Some([10, 0, 0, source].into()),
        };
        let all = vec![connection(1, 9), connection(2, 3), connection(2, 5), connection(2, 4), connection(3, 8)];
        let order = oldest_of_largest_source_first(all);
        let order: Vec<_> = order.iter().map(|c| (c.fd, c.quiet_for.as_secs())).collect();
        assert_eq!(order, [(2, 5), (2, 4), (1, 9), (3, 8), (2, 3)]);
    }
}
