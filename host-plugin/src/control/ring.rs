//! The ring of sockets, and the allgather that runs round it.

use super::frame::{Frame, Hello, Status};
use super::handle::{Handle, Listener, VERSION, host_id};
use super::{ControlError, Step};
use ferrogin_ffi::nccl::HANDLE_MAXSIZE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// Largest block of an allgather: far above any that set-up makes.
const BLOCK_MAX: u32 = 256 << 20;
/// Connections that may be open and have not said hello yet; beyond, the oldest goes.
const CANDIDATES: usize = 32;
/// Longest try of one address before the next one.
const DIAL: Duration = Duration::from_secs(5);
/// Rounds through all addresses of a peer that refuses before it counts as gone.
const DIAL_ROUNDS: usize = 3;

/// One rank's place in the ring.
#[derive(Debug)]
pub struct Ring {
    rank: usize,
    nranks: usize,
    timeout: Duration,
    /// None when this rank is alone.
    links: Option<Links>,
    /// Allgathers so far.
    sequence: u32,
    /// Set by the first failure that leaves the ranks apart: its cause.
    dead: Option<usize>,
}

#[derive(Debug)]
struct Links {
    /// We send here.
    next: TcpStream,
    /// We receive here.
    prev: TcpStream,
    /// A frame to `next` was begun and not finished.
    torn: bool,
}

/// The same before both are there.
struct Joining {
    next: TcpStream,
    prev: Option<TcpStream>,
    /// The welcome of the next rank.
    answer: Fill<{ Frame::LEN }>,
    /// What it says after that: nothing, or that it gives up.
    more: Fill<{ Frame::LEN }>,
}

impl Ring {
    /// Joins the ring as `rank`. `handles` has one entry for each rank, `listener` is this rank's own.
    ///
    /// # Errors
    /// A peer that cannot be reached or does not come within `timeout`; handles that are not ours. The listener is
    /// closed then, so that whoever waits for it learns of the failure.
    pub fn connect(
        listener: &Listener,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
        timeout: Duration,
    ) -> Result<Self, ControlError> {
        let mut socket = listener.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match socket.as_ref() {
            Some(socket) => Self::rendezvous(socket, &listener.handle, handles, rank, timeout),
            None => Err(ControlError::WrongOrder { rank }),
        };
        if result.is_err() {
            *socket = None;
        }
        result
    }

    fn rendezvous(
        socket: &TcpListener,
        own: &Handle,
        handles: &[[u8; HANDLE_MAXSIZE]],
        rank: usize,
        timeout: Duration,
    ) -> Result<Self, ControlError> {
        let nranks = handles.len();
        let parse =
            |rank: usize| Handle::parse(&handles[rank]).ok_or(ControlError::BadHandle { rank, version: VERSION });
        if parse(rank)? != *own {
            return Err(ControlError::WrongOrder { rank });
        }
        let mut ring = Self { rank, nranks, timeout, links: None, sequence: 0, dead: None };
        if nranks == 1 {
            return Ok(ring);
        }
        let deadline = Deadline::after(timeout);
        let next_handle = parse(ring.next())?;
        let mut next = dial(&next_handle, ring.next(), &deadline)?;
        let gone = |rank: usize| ControlError::PeerGone { rank, step: Step::Connect };
        let hello =
            Hello { nonce: next_handle.nonce, from: rank as u32, to: ring.next() as u32, nranks: nranks as u32 };
        // A fresh socket buffers far more than this.
        next.write_all(&hello.emit()).map_err(|_| gone(ring.next()))?;

        let expected = Hello { nonce: own.nonce, from: ring.prev() as u32, to: rank as u32, nranks: nranks as u32 };
        let mut links = Joining { next, prev: None, answer: Fill::default(), more: Fill::default() };
        let door = Door { socket, expected, candidates: Vec::new() };
        match ring.join(&mut links, door, &deadline) {
            Ok(()) => {}
            Err(error) => {
                let origin = error.culprit().unwrap_or(rank) as u32;
                let frame = Frame { status: Status::Abort, step: Step::Connect as u16, sequence: 0, origin, len: 0 };
                // Who cannot be told sees the socket close.
                for stream in [Some(&mut links.next), links.prev.as_mut()].into_iter().flatten() {
                    let _ = stream.write(&frame.emit());
                }
                return Err(error);
            }
        }
        let Joining { next, prev, .. } = links;
        ring.links = prev.map(|prev| Links { next, prev, torn: false });
        Ok(ring)
    }

    /// Waits for the rank before and for the welcome of the next one.
    fn join(&self, links: &mut Joining, mut door: Door<'_>, deadline: &Deadline) -> Result<(), ControlError> {
        let step = Step::Connect;
        let (next, prev, seconds) = (self.next(), self.prev(), self.timeout.as_secs());
        while links.prev.is_none() || !links.answer.full() {
            // The next rank is watched even after its welcome: it may give up while we wait for the one before.
            let mut fds = vec![links.next.as_fd()];
            if links.prev.is_none() {
                fds.push(door.socket.as_fd());
                fds.extend(door.candidates.iter().map(|candidate| candidate.stream.as_fd()));
            }
            if !wait_readable(&fds, deadline)? {
                let rank = if links.prev.is_none() { prev } else { next };
                return Err(ControlError::Timeout { rank, step, seconds });
            }
            let fill = if links.answer.full() { &mut links.more } else { &mut links.answer };
            let closed = fill.read(&mut links.next).is_err();
            if links.answer.full() {
                match Frame::parse(&links.answer.bytes) {
                    Some(Frame { status: Status::Welcome, .. }) => {}
                    other => return Err(blame(other, next, step)),
                }
            }
            if links.more.full() {
                return Err(blame(Frame::parse(&links.more.bytes), next, step));
            }
            if closed {
                return Err(ControlError::PeerGone { rank: next, step });
            }
            if links.prev.is_none()
                && let Some(stream) = door.open()?
            {
                let origin = self.rank as u32;
                let welcome = Frame { status: Status::Welcome, step: step as u16, sequence: 0, origin, len: 0 };
                let stream = links.prev.insert(stream);
                stream.write_all(&welcome.emit()).map_err(|_| ControlError::PeerGone { rank: prev, step })?;
            }
        }
        Ok(())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in the ring.
    pub fn nranks(&self) -> usize {
        self.nranks
    }

    fn next(&self) -> usize {
        (self.rank + 1) % self.nranks
    }

    fn prev(&self) -> usize {
        (self.rank + self.nranks - 1) % self.nranks
    }

    /// Every rank brings a block of any size and gets those of all, by rank. `None` says that this rank could not do
    /// its part: then every rank gets [`ControlError::PeerFailed`] and the ring stays usable.
    ///
    /// # Errors
    /// A rank that failed, vanished or made another call. After all but the first, the ring is dead.
    pub fn allgather(&mut self, step: Step, block: Option<&[u8]>) -> Result<Vec<Vec<u8>>, ControlError> {
        if let Some(culprit) = self.dead {
            return Err(ControlError::Dead { culprit });
        }
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        match self.circulate(step, sequence, block) {
            Ok(blocks) => {
                let mut failed = blocks.iter().enumerate().filter(|(_, block)| block.is_none()).map(|(rank, _)| rank);
                match failed.next() {
                    None => Ok(blocks.into_iter().flatten().collect()),
                    Some(rank) => Err(ControlError::PeerFailed { rank, step }),
                }
            }
            Err(error) => {
                self.abort(step, sequence, error.culprit().unwrap_or(self.rank));
                Err(error)
            }
        }
    }

    /// Tells both neighbours, as far as they listen, and ends the ring.
    fn abort(&mut self, step: Step, sequence: u32, culprit: usize) {
        self.dead = Some(culprit);
        let Some(mut links) = self.links.take() else { return };
        let frame = Frame { status: Status::Abort, step: step as u16, sequence, origin: culprit as u32, len: 0 };
        // Who cannot be told sees the socket close.
        let _ = links.prev.write(&frame.emit());
        if !links.torn {
            let _ = links.next.write(&frame.emit());
        }
    }

    fn circulate(
        &mut self,
        step: Step,
        sequence: u32,
        own: Option<&[u8]>,
    ) -> Result<Vec<Option<Vec<u8>>>, ControlError> {
        let n = self.nranks;
        let mut blocks: Vec<Option<Vec<u8>>> = vec![None; n];
        blocks[self.rank] = own.map(<[u8]>::to_vec);
        let deadline = Deadline::after(self.timeout);
        for round in 0..n - 1 {
            let out = (self.rank + n - round) % n;
            let incoming = (self.rank + n - round - 1) % n;
            blocks[incoming] = self.shift(step, sequence, (out, blocks[out].as_deref()), incoming, &deadline)?;
        }
        Ok(blocks)
    }

    /// Sends the block of rank `out` to the next rank while receiving the one of rank `incoming`.
    fn shift(
        &mut self,
        step: Step,
        sequence: u32,
        (out, block): (usize, Option<&[u8]>),
        incoming: usize,
        deadline: &Deadline,
    ) -> Result<Option<Vec<u8>>, ControlError> {
        let (next, prev, seconds) = (self.next(), self.prev(), self.timeout.as_secs());
        let Some(links) = self.links.as_mut() else { return Err(ControlError::Dead { culprit: self.rank }) };
        let status = if block.is_some() { Status::Block } else { Status::Failed };
        let body = block.unwrap_or_default();
        let len = u32::try_from(body.len()).ok().filter(|len| *len <= BLOCK_MAX);
        let len = len.ok_or(ControlError::Garbled { rank: out, step })?;
        let head = Frame { status, step: step as u16, sequence, origin: out as u32, len };
        // One buffer, so that a small frame leaves whole or not at all.
        let bytes = [&head.emit(), body].concat();
        let (mut sent, total) = (0, bytes.len());
        let mut back = Fill::<{ Frame::LEN }>::default();
        let mut arriving = Arriving::default();
        while sent < total || !arriving.done() {
            let mut fds = Vec::with_capacity(2);
            if sent < total {
                fds.push(PollFd::new(links.next.as_fd(), PollFlags::POLLOUT | PollFlags::POLLIN));
            }
            if !arriving.done() {
                fds.push(PollFd::new(links.prev.as_fd(), PollFlags::POLLIN));
            }
            if !wait(&mut fds, deadline)? {
                // Blocks go round by way of all: the one that is missing names the rank that is.
                let rank = if arriving.done() { next } else { incoming };
                return Err(ControlError::Timeout { rank, step, seconds });
            }
            if sent < total {
                // The next rank sends nothing but an abort.
                let closed = back.read(&mut links.next).is_err();
                if back.full() {
                    return Err(blame(Frame::parse(&back.bytes), next, step));
                }
                if closed {
                    return Err(ControlError::PeerGone { rank: next, step });
                }
                match links.next.write(&bytes[sent..]) {
                    Ok(count) => {
                        sent += count;
                        links.torn = sent < total;
                    }
                    Err(error) if would_block(&error) => {}
                    Err(_) => {
                        // It may have said why since we looked.
                        let _ = back.read(&mut links.next);
                        let last = back.full().then(|| blame(Frame::parse(&back.bytes), next, step));
                        return Err(last.unwrap_or(ControlError::PeerGone { rank: next, step }));
                    }
                }
            }
            if !arriving.done() {
                arriving.read(&mut links.prev).map_err(|_| ControlError::PeerGone { rank: prev, step })?;
                if let Some(head) = arriving.head(prev, step)? {
                    if head.step != step as u16 || head.sequence != sequence {
                        let theirs = head.step_name();
                        return Err(ControlError::OutOfStep { rank: prev, step, theirs });
                    }
                    if head.origin as usize != incoming {
                        return Err(ControlError::Garbled { rank: prev, step });
                    }
                }
            }
        }
        Ok(arriving.finish())
    }
}

/// What a neighbour's unexpected frame means.
fn blame(frame: Option<Frame>, rank: usize, step: Step) -> ControlError {
    match frame {
        Some(Frame { status: Status::Abort, origin, .. }) => {
            ControlError::Aborted { reporter: rank, culprit: origin as usize, step }
        }
        _ => ControlError::Garbled { rank, step },
    }
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// A frame on its way in.
#[derive(Debug, Default)]
struct Arriving {
    head: Fill<{ Frame::LEN }>,
    frame: Option<Frame>,
    body: Vec<u8>,
}

impl Arriving {
    fn missing(&self) -> usize {
        self.frame.map_or(0, |frame| frame.len as usize - self.body.len())
    }

    fn done(&self) -> bool {
        self.frame.is_some() && self.missing() == 0
    }

    /// Reads what is there; an error is the end of the connection.
    fn read(&mut self, stream: &mut TcpStream) -> io::Result<()> {
        if !self.head.full() {
            return self.head.read(stream);
        }
        let mut chunk = [0; 65536];
        let want = self.missing().min(chunk.len());
        match stream.read(&mut chunk[..want]) {
            Ok(0) if want > 0 => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.body.extend_from_slice(&chunk[..count]);
                Ok(())
            }
            Err(error) if would_block(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The head, once, when it has just become whole.
    fn head(&mut self, rank: usize, step: Step) -> Result<Option<Frame>, ControlError> {
        if !self.head.full() || self.frame.is_some() {
            return Ok(None);
        }
        match Frame::parse(&self.head.bytes) {
            Some(frame) if frame.status == Status::Block && frame.len <= BLOCK_MAX => self.frame = Some(frame),
            Some(frame) if frame.status == Status::Failed && frame.len == 0 => self.frame = Some(frame),
            other => return Err(blame(other, rank, step)),
        }
        Ok(self.frame)
    }

    fn finish(self) -> Option<Vec<u8>> {
        self.frame.filter(|frame| frame.status == Status::Block).map(|_| self.body)
    }
}

/// A fixed number of bytes that come in pieces.
#[derive(Debug)]
struct Fill<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Default for Fill<N> {
    fn default() -> Self {
        Self { bytes: [0; N], filled: 0 }
    }
}

impl<const N: usize> Fill<N> {
    fn full(&self) -> bool {
        self.filled == N
    }

    /// Reads what is there; an error is the end of the connection.
    fn read(&mut self, stream: &mut TcpStream) -> io::Result<()> {
        if self.full() {
            return Ok(());
        }
        match stream.read(&mut self.bytes[self.filled..]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.filled += count;
                Ok(())
            }
            Err(error) if would_block(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

struct Candidate {
    stream: TcpStream,
    hello: Fill<{ Hello::LEN }>,
}

/// Lets in who knows the secret and is the rank before us; everyone else is turned away, however slowly they talk.
struct Door<'a> {
    socket: &'a TcpListener,
    expected: Hello,
    candidates: Vec<Candidate>,
}

impl Door<'_> {
    fn open(&mut self) -> Result<Option<TcpStream>, ControlError> {
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => {
                    if prepare(&stream).is_ok() {
                        if self.candidates.len() == CANDIDATES {
                            self.candidates.remove(0);
                        }
                        self.candidates.push(Candidate { stream, hello: Fill::default() });
                    }
                }
                Err(error) if would_block(&error) => break,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(source) => return Err(ControlError::Socket { call: "accept", source }),
            }
        }
        let mut found = None;
        let expected = self.expected;
        let mut waiting = Vec::new();
        for mut candidate in self.candidates.drain(..) {
            match candidate.hello.read(&mut candidate.stream) {
                Ok(()) if !candidate.hello.full() => waiting.push(candidate),
                Ok(()) if found.is_none() && Hello::parse(&candidate.hello.bytes) == Some(expected) => {
                    found = Some(candidate.stream);
                }
                _ => crate::trace!("connect: turned away a stranger"),
            }
        }
        self.candidates = waiting;
        Ok(found)
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Calls a peer at each of its addresses.
fn dial(handle: &Handle, rank: usize, deadline: &Deadline) -> Result<TcpStream, ControlError> {
    let targets = handle.targets(host_id());
    let mut last = io::Error::new(ErrorKind::AddrNotAvailable, "the handle names no address");
    let mut round = 0;
    loop {
        let mut refused = true;
        for target in &targets {
            let left = deadline.left().min(DIAL);
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(target, left).and_then(|stream| prepare(&stream).map(|()| stream)) {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    refused &= error.kind() != ErrorKind::TimedOut;
                    last = error;
                }
            }
        }
        round += 1;
        if deadline.left().is_zero() || (refused && round >= DIAL_ROUNDS) {
            let addresses: Vec<_> = targets.iter().map(ToString::to_string).collect();
            return Err(ControlError::Unreachable { rank, addresses: addresses.join(", "), source: last });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[derive(Debug)]
struct Deadline(Instant);

impl Deadline {
    fn after(timeout: Duration) -> Self {
        Self(Instant::now() + timeout)
    }

    fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }
}

fn wait_readable(fds: &[BorrowedFd<'_>], deadline: &Deadline) -> Result<bool, ControlError> {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    wait(&mut fds, deadline)
}

/// Waits until one of `fds` is ready; false at the deadline.
fn wait(fds: &mut [PollFd<'_>], deadline: &Deadline) -> Result<bool, ControlError> {
    loop {
        let left = deadline.left();
        if left.is_zero() {
            return Ok(false);
        }
        let millis = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
        match poll(fds, PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX)) {
            Ok(0) | Err(nix::Error::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(ControlError::Socket { call: "poll", source: errno.into() }),
        }
    }
}
