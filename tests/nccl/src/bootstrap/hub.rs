//! Ranks that are processes: every rank has one connection to rank 0.
//!
//! A message is a [`Header`] and its payload. Ranks send `Block`; rank 0 answers with `Blocks` (each rank's length
//! and bytes) once it has them all, or with `Abort` and a text when one is missing.

use super::Identity;
use crate::error::BootstrapError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MAGIC: u32 = u32::from_le_bytes(*b"fgbs");
/// Blocks are handles and small reports; a longer one is not ours.
const MAX_PAYLOAD: usize = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A rank presents itself: payload is rank and number of ranks, two u64.
    Hello,
    /// A rank's part of an allgather.
    Block,
    /// All parts: for each rank a u64 length and the bytes.
    Blocks,
    /// The job is over; the payload says why.
    Abort,
}

impl Kind {
    const ALL: [(Kind, u32); 4] = [(Kind::Hello, 1), (Kind::Block, 2), (Kind::Blocks, 3), (Kind::Abort, 4)];

    fn raw(self) -> u32 {
        Kind::ALL.into_iter().find(|(kind, _)| *kind == self).map_or(0, |(_, raw)| raw)
    }

    fn from_raw(raw: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|(_, value)| *value == raw).map(|(kind, _)| kind)
    }
}

/// 24 bytes, little endian: magic, kind, sequence number, payload length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    kind: Kind,
    sequence: u64,
    length: usize,
}

impl Header {
    const SIZE: usize = 24;

    fn emit(self) -> [u8; Header::SIZE] {
        let mut bytes = [0; Header::SIZE];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.kind.raw().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.length as u64).to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8; Header::SIZE]) -> Result<Header, String> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if u32_at(0) != MAGIC {
            return Err(format!("{:02x?} is no bootstrap message", &bytes[..4]));
        }
        let kind = Kind::from_raw(u32_at(4)).ok_or_else(|| format!("unknown message kind {}", u32_at(4)))?;
        let length = usize::try_from(read_u64(&bytes[16..]).unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
        if length > MAX_PAYLOAD {
            return Err(format!("a message of {length} bytes"));
        }
        Ok(Header { kind, sequence: read_u64(&bytes[8..]).unwrap_or(0), length })
    }
}

fn read_u64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?))
}

#[derive(Debug)]
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Stream::Unix(s) => s.set_nonblocking(true),
            Stream::Tcp(s) => s.set_nonblocking(true).and_then(|()| s.set_nodelay(true)),
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(s) => s.as_fd(),
            Stream::Tcp(s) => s.as_fd(),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.read(bytes),
            Stream::Tcp(s) => s.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(s) => s.write(bytes),
            Stream::Tcp(s) => s.write(bytes),
        }
    }
}

/// Why a connection gave no message.
#[derive(Debug)]
enum Broken {
    Timeout,
    Gone(String),
    Protocol(String),
}

impl Broken {
    fn from_io(error: &io::Error) -> Broken {
        Broken::Gone(error.to_string())
    }
}

fn wait(fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> Result<(), Broken> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Broken::Timeout);
        }
        let left = PollTimeout::try_from(left.min(Duration::from_secs(1))).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(fd, events)], left) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(Broken::Gone(error.to_string())),
        }
    }
}

/// One connection and the part of a message that has come on it.
#[derive(Debug)]
struct Peer {
    stream: Stream,
    partial: Vec<u8>,
}

impl Peer {
    fn new(stream: Stream) -> io::Result<Peer> {
        stream.set_nonblocking()?;
        Ok(Peer { stream, partial: Vec::new() })
    }

    fn send(&mut self, kind: Kind, sequence: u64, payload: &[u8], deadline: Instant) -> Result<(), Broken> {
        let mut bytes = Header { kind, sequence, length: payload.len() }.emit().to_vec();
        bytes.extend_from_slice(payload);
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    wait(self.stream.fd(), PollFlags::POLLOUT, deadline)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::from_io(&error)),
            }
        }
        Ok(())
    }

    /// Reads what is there; a whole message if it is complete. It never reads past one message.
    fn try_receive(&mut self) -> Result<Option<(Header, Vec<u8>)>, Broken> {
        loop {
            let header = match self.partial.first_chunk::<{ Header::SIZE }>() {
                Some(bytes) => Some(Header::parse(bytes).map_err(Broken::Protocol)?),
                None => None,
            };
            let want = Header::SIZE + header.map_or(0, |header| header.length);
            if let Some(header) = header
                && self.partial.len() == want
            {
                let payload = self.partial.split_off(Header::SIZE);
                self.partial.clear();
                return Ok(Some((header, payload)));
            }
            let have = self.partial.len();
            self.partial.resize(want, 0);
            let got = self.stream.read(&mut self.partial[have..]);
            self.partial.truncate(have + got.as_ref().copied().unwrap_or(0));
            match got {
                Ok(0) => return Err(Broken::Gone("its connection was closed".into())),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::from_io(&error)),
            }
        }
    }

    fn receive(&mut self, deadline: Instant) -> Result<(Header, Vec<u8>), Broken> {
        loop {
            if let Some(message) = self.try_receive()? {
                return Ok(message);
            }
            wait(self.stream.fd(), PollFlags::POLLIN, deadline)?;
        }
    }
}

/// A rank's connections: rank 0 has one to every other rank, the others one to rank 0.
#[derive(Debug)]
pub struct Sockets {
    rank: usize,
    nranks: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    sequence: u64,
    /// Rank 0: peers of rank 1, 2, …; another rank: rank 0.
    peers: Vec<Peer>,
    /// Set when an exchange failed: the job is over.
    failed: Option<BootstrapError>,
}

impl Sockets {
    /// Meets the other ranks at `identity.address`.
    pub fn meet(identity: &Identity, timeout: Duration) -> Result<Sockets, BootstrapError> {
        let deadline = Instant::now() + timeout;
        let &Identity { rank, nranks, .. } = identity;
        let peers = match rank {
            0 => accept_all(identity, deadline, timeout)?,
            _ => vec![connect(identity, deadline, timeout)?],
        };
        Ok(Sockets { rank, nranks, state: Mutex::new(State { sequence: 0, peers, failed: None }) })
    }

    /// See [`Bootstrap::allgather`](super::Bootstrap::allgather).
    pub fn allgather(&self, block: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        state.sequence += 1;
        let deadline = Instant::now() + timeout;
        let result = match self.rank {
            0 => self.gather(&mut state, block, deadline, timeout),
            _ => self.contribute(&mut state, block, deadline, timeout),
        };
        if let Err(error) = &result {
            state.failed = Some(error.clone());
        }
        result
    }

    fn gather(
        &self,
        state: &mut State,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let sequence = state.sequence;
        match self.gather_blocks(state, block, deadline, timeout) {
            Ok(blocks) => {
                let mut payload = Vec::new();
                for block in &blocks {
                    payload.extend_from_slice(&(block.len() as u64).to_le_bytes());
                    payload.extend_from_slice(block);
                }
                for (index, peer) in state.peers.iter_mut().enumerate() {
                    peer.send(Kind::Blocks, sequence, &payload, deadline)
                        .map_err(|broken| self.error(broken, index + 1, timeout))?;
                }
                Ok(blocks)
            }
            Err(error) => {
                // Best effort: who is gone cannot be told.
                let soon = Instant::now() + Duration::from_secs(1);
                for peer in &mut state.peers {
                    let _ = peer.send(Kind::Abort, sequence, error.to_string().as_bytes(), soon);
                }
                Err(error)
            }
        }
    }

    fn gather_blocks(
        &self,
        state: &mut State,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; self.nranks];
        blocks[0] = Some(block.to_vec());
        loop {
            for (index, peer) in
                state.peers.iter_mut().enumerate().filter(|(index, _)| blocks[index + 1].is_none()).collect::<Vec<_>>()
            {
                let rank = index + 1;
                match peer.try_receive().map_err(|broken| self.error(broken, rank, timeout))? {
                    None => {}
                    Some((Header { kind: Kind::Block, sequence, .. }, payload)) if sequence == state.sequence => {
                        blocks[rank] = Some(payload);
                    }
                    Some((header, _)) => {
                        let what = format!("rank {rank} sent {header:?} in step {}", state.sequence);
                        return Err(BootstrapError::Protocol { rank: 0, what });
                    }
                }
            }
            let missing: Vec<usize> = (1..self.nranks).filter(|&rank| blocks[rank].is_none()).collect();
            if missing.is_empty() {
                return Ok(blocks.into_iter().flatten().collect());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = missing.iter().map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ");
                return Err(BootstrapError::Timeout { rank: 0, step: "allgather", missing, waited: timeout });
            }
            let fds = missing.iter().map(|rank| PollFd::new(state.peers[rank - 1].stream.fd(), PollFlags::POLLIN));
            let left = PollTimeout::try_from(left.min(Duration::from_secs(1))).unwrap_or(PollTimeout::ZERO);
            match poll(&mut fds.collect::<Vec<_>>(), left) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(self.error(Broken::Gone(error.to_string()), missing[0], timeout)),
            }
        }
    }

    fn contribute(
        &self,
        state: &mut State,
        block: &[u8],
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let sequence = state.sequence;
        // Rank 0 has the same deadline and knows who is missing: give its verdict time to come.
        let patience = deadline + Duration::from_secs(2);
        let hub = &mut state.peers[0];
        let sent = hub.send(Kind::Block, sequence, block, deadline);
        let answer = match sent {
            // Rank 0 may have said why it closed the connection.
            Err(Broken::Gone(text)) => hub.receive(patience).map_err(|_| Broken::Gone(text)),
            Err(broken) => Err(broken),
            Ok(()) => hub.receive(patience),
        };
        let (header, payload) = answer.map_err(|broken| self.error(broken, 0, timeout))?;
        match header.kind {
            Kind::Blocks if header.sequence == sequence => split(&payload, self.nranks).ok_or_else(|| {
                BootstrapError::Protocol { rank: self.rank, what: "rank 0 sent blocks that do not add up".into() }
            }),
            Kind::Abort => {
                let gone = format!("rank 0 ended the job: {}", String::from_utf8_lossy(&payload));
                Err(BootstrapError::PeerGone { rank: self.rank, gone, step: "allgather" })
            }
            _ => Err(BootstrapError::Protocol { rank: self.rank, what: format!("rank 0 sent {header:?}") }),
        }
    }

    fn error(&self, broken: Broken, peer: usize, timeout: Duration) -> BootstrapError {
        explain(broken, self.rank, peer, "allgather", timeout)
    }
}

fn explain(broken: Broken, rank: usize, peer: usize, step: &'static str, waited: Duration) -> BootstrapError {
    match broken {
        Broken::Timeout => BootstrapError::Timeout { rank, step, missing: format!("rank {peer}"), waited },
        Broken::Gone(text) => BootstrapError::PeerGone { rank, gone: format!("rank {peer} is gone ({text})"), step },
        Broken::Protocol(what) => BootstrapError::Protocol { rank, what },
    }
}

fn split(mut payload: &[u8], nranks: usize) -> Option<Vec<Vec<u8>>> {
    let mut blocks = Vec::with_capacity(nranks);
    for _ in 0..nranks {
        let length = usize::try_from(read_u64(payload)?).ok()?;
        let end = length.checked_add(8)?;
        blocks.push(payload.get(8..end)?.to_vec());
        payload = &payload[end..];
    }
    payload.is_empty().then_some(blocks)
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

fn is_tcp(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

impl Listener {
    fn bind(address: &str) -> io::Result<Listener> {
        if is_tcp(address) {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            return Ok(Listener::Tcp(listener));
        }
        let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(address)?)?;
        listener.set_nonblocking(true)?;
        Ok(Listener::Unix(listener))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        }
    }
}

fn accept_all(identity: &Identity, deadline: Instant, timeout: Duration) -> Result<Vec<Peer>, BootstrapError> {
    let nranks = identity.nranks;
    let socket_error = |error: io::Error| BootstrapError::Socket {
        rank: 0,
        what: "listen on",
        address: identity.address.clone(),
        text: error.to_string(),
    };
    let listener = Listener::bind(&identity.address).map_err(socket_error)?;
    let mut peers: Vec<Option<Peer>> = (1..nranks).map(|_| None).collect();
    while peers.iter().any(Option::is_none) {
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => continue,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if wait(listener.fd(), PollFlags::POLLIN, deadline).is_err() {
                    let missing = (1..nranks).filter(|rank| peers[rank - 1].is_none());
                    let missing = missing.map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ");
                    return Err(BootstrapError::Timeout { rank: 0, step: "meeting", missing, waited: timeout });
                }
                continue;
            }
            Err(error) => return Err(socket_error(error)),
        };
        let mut peer = Peer::new(stream).map_err(socket_error)?;
        // Who says nothing, or not what a rank says, is a stranger: drop it and go on.
        let soon = deadline.min(Instant::now() + Duration::from_secs(5));
        let Ok((Header { kind: Kind::Hello, .. }, hello)) = peer.receive(soon) else { continue };
        let place = match (read_u64(&hello), hello.get(8..).and_then(read_u64)) {
            (Some(rank), Some(n)) if n == nranks as u64 && rank >= 1 && rank < n => rank as usize - 1,
            (rank, n) => {
                let what = format!("a rank says it is {rank:?} of {n:?}, this job has {nranks}");
                let _ = peer.send(Kind::Abort, 0, what.as_bytes(), soon);
                return Err(BootstrapError::Protocol { rank: 0, what });
            }
        };
        if peers[place].is_some() {
            let what = format!("two processes say they are rank {}", place + 1);
            let _ = peer.send(Kind::Abort, 0, what.as_bytes(), soon);
            return Err(BootstrapError::Protocol { rank: 0, what });
        }
        peers[place] = Some(peer);
    }
    Ok(peers.into_iter().flatten().collect())
}

fn connect(identity: &Identity, deadline: Instant, timeout: Duration) -> Result<Peer, BootstrapError> {
    let &Identity { rank, nranks, ref address } = identity;
    let socket_error = |text: String| BootstrapError::Socket {
        rank,
        what: "connect to",
        address: address.clone(),
        text: format!("{text} (waited {timeout:?} for rank 0)"),
    };
    let mut pause = Duration::from_millis(1);
    let stream = loop {
        let attempt = connect_once(address, deadline);
        match attempt {
            Ok(stream) => break stream,
            Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(socket_error(error.to_string())),
            Err(error) if Instant::now() + pause >= deadline => return Err(socket_error(error.to_string())),
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(100));
    };
    let mut peer = Peer::new(stream).map_err(|error| socket_error(error.to_string()))?;
    let mut hello = (rank as u64).to_le_bytes().to_vec();
    hello.extend_from_slice(&(nranks as u64).to_le_bytes());
    peer.send(Kind::Hello, 0, &hello, deadline).map_err(|broken| explain(broken, rank, 0, "meeting", timeout))?;
    Ok(peer)
}

fn connect_once(address: &str, deadline: Instant) -> io::Result<Stream> {
    if !is_tcp(address) {
        let name = UnixAddr::from_abstract_name(address)?;
        return UnixStream::connect_addr(&name).map(Stream::Unix);
    }
    let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for candidate in address.to_socket_addrs()? {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&candidate, left) {
            Ok(stream) => return Ok(Stream::Tcp(stream)),
            Err(error) => last = error,
        }
    }
    Err(last)
}
