//! The receiving half of a connection: assembles frames, and matches messages with receives.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use nix::libc;

use super::frame::{EAGER_MAX, HEADER, Header, Kind};
use super::output::Output;
use crate::proto::tags::Pattern;
use crate::proto::transport::{Addr, Event, Receive, ReceiveError};

/// How many of a peer's messages may wait for a receive: twice as many as a channel's unread messages with their lengths.
const UNMATCHED_MAX: usize = 1024;
/// If more than this is missing, the rest of a message goes from the socket to its memory without a copy.
const DIRECT: usize = 16 << 10;
/// Reads per poll, limited so that no peer keeps this end from its other work.
const READS: usize = 16;

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum Ended {
    Closed,
    Failed(io::Error),
    Malformed(&'static str),
}

/// A message waiting for a receive.
enum Unmatched {
    Whole(u64, Vec<u8>),
    Offer(u64, usize),
}

impl Unmatched {
    fn tag(&self) -> u64 {
        match self {
            Self::Whole(tag, _) | Self::Offer(tag, _) => *tag,
        }
    }
}

/// Where the bytes of a message go.
enum Sink {
    /// The receive with this token.
    Receive(u64),
    Unmatched,
    Nowhere,
}

/// A message that isn't complete yet.
struct Partial {
    tag: u64,
    sink: Sink,
    bytes: Vec<u8>,
    missing: usize,
}

impl Partial {
    /// True if the rest goes straight from the socket to its place.
    fn is_direct(&self) -> bool {
        matches!(self.sink, Sink::Receive(_)) && self.missing > DIRECT
    }
}

/// A receive whose message has been requested.
struct Requested {
    tag: u64,
    len: usize,
    token: u64,
    buffer: Vec<u8>,
}

/// What all connections of an endpoint share.
#[derive(Default)]
pub(super) struct Shared {
    /// Receives for messages from any peer.
    pub any_source: VecDeque<Receive>,
    pub events: Vec<Event>,
}

impl Shared {
    /// Cancels receives for messages from any peer.
    pub fn cancel(&mut self, which: &dyn Fn(u64) -> bool) {
        cancel(&mut self.any_source, which, &mut self.events);
    }

    fn received(&mut self, from: Addr, token: u64, bytes: Vec<u8>, tag: u64, result: Result<(), ReceiveError>) {
        self.events.push(Event::Received { token, bytes, tag, from: Some(from), result });
    }
}

/// The receiving half.
pub(super) struct Input {
    from: Addr,
    /// The start of a header.
    header: Vec<u8>,
    partial: Option<Partial>,
    posted: VecDeque<Receive>,
    requested: Vec<Requested>,
    unmatched: VecDeque<Unmatched>,
}

impl Input {
    pub fn new(from: Addr) -> Self {
        let (posted, unmatched) = (VecDeque::new(), VecDeque::new());
        Self { from, header: Vec::new(), partial: None, posted, requested: Vec::new(), unmatched }
    }

    /// Posts a receive, or matches it with a waiting message.
    pub fn receive(&mut self, receive: Receive, output: &mut Output, shared: &mut Shared) {
        if let Some(receive) = self.receive_waiting(receive, output, shared) {
            self.posted.push_back(receive);
        }
    }

    /// Matches a receive with a waiting message; gives it back if none matches.
    pub fn receive_waiting(&mut self, receive: Receive, output: &mut Output, shared: &mut Shared) -> Option<Receive> {
        let at = self.unmatched.iter().position(|message| receive.pattern.matches(message.tag()));
        match at.and_then(|at| self.unmatched.remove(at)) {
            None => Some(receive),
            Some(message) => {
                self.match_with(message, receive, output, shared);
                None
            }
        }
    }

    fn match_with(&mut self, message: Unmatched, receive: Receive, output: &mut Output, shared: &mut Shared) {
        let Receive { token, buffer, len: room, .. } = receive;
        match message {
            Unmatched::Whole(tag, bytes) if bytes.len() <= room => {
                let bytes = if buffer.capacity() < bytes.len() { bytes } else { copied(buffer, &bytes) };
                shared.received(self.from, token, bytes, tag, Ok(()));
            }
            Unmatched::Offer(tag, len) if len <= room => {
                output.header(Kind::Request, tag, len);
                self.requested.push(Requested { tag, len, token, buffer });
            }
            Unmatched::Whole(tag, _) | Unmatched::Offer(tag, _) => {
                shared.received(self.from, token, buffer, tag, Err(ReceiveError::Truncated));
            }
        }
    }

    /// Keeps a message for which no receive is posted.
    fn wait(&mut self, message: Unmatched) -> Result<(), Ended> {
        if self.unmatched.len() >= UNMATCHED_MAX {
            return Err(Ended::Malformed("it sent more messages than a channel has unread"));
        }
        self.unmatched.push_back(message);
        Ok(())
    }

    /// The tag of the first waiting message that matches.
    pub fn peek(&self, pattern: Pattern) -> Option<u64> {
        self.unmatched.iter().map(Unmatched::tag).find(|tag| pattern.matches(*tag))
    }

    /// Cancels receives, except those whose messages have been requested or are arriving.
    pub fn cancel(&mut self, which: &dyn Fn(u64) -> bool, shared: &mut Shared) {
        cancel(&mut self.posted, which, &mut shared.events);
    }

    /// Reads what has arrived, using `scratch` for bytes whose destination isn't known yet.
    ///
    /// # Errors
    /// If the connection is over. What arrived before that has been received.
    pub fn read(
        &mut self,
        socket: &mut TcpStream,
        scratch: &mut [u8],
        output: &mut Output,
        shared: &mut Shared,
    ) -> Result<(), Ended> {
        for _ in 0..READS {
            let is_direct = self.partial.as_ref().is_some_and(Partial::is_direct);
            let (room, read) = match &mut self.partial {
                Some(partial) if is_direct => (partial.missing, read_into(socket, &mut partial.bytes, partial.missing)),
                _ => (scratch.len(), socket.read(scratch)),
            };
            let len = match read {
                Ok(0) => return Err(Ended::Closed),
                Ok(len) => len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(Ended::Failed(error)),
            };
            match &mut self.partial {
                Some(partial) if is_direct => {
                    partial.missing -= len;
                    self.proceed(&[], output, shared)?;
                }
                _ => self.proceed(&scratch[..len], output, shared)?,
            }
            if len < room {
                break;
            }
        }
        Ok(())
    }

    /// Processes bytes that have arrived.
    fn proceed(&mut self, mut bytes: &[u8], output: &mut Output, shared: &mut Shared) -> Result<(), Ended> {
        loop {
            if let Some(partial) = &mut self.partial {
                let (part, rest) = bytes.split_at(partial.missing.min(bytes.len()));
                if !matches!(partial.sink, Sink::Nowhere) {
                    partial.bytes.extend_from_slice(part);
                }
                partial.missing -= part.len();
                bytes = rest;
                if partial.missing > 0 {
                    return Ok(());
                }
                self.complete(output, shared)?;
            }
            let (part, rest) = bytes.split_at((HEADER - self.header.len()).min(bytes.len()));
            self.header.extend_from_slice(part);
            bytes = rest;
            let Ok(header) = self.header[..].try_into() else { return Ok(()) };
            self.header.clear();
            let header = Header::parse(&header).ok_or(Ended::Malformed("it sent bytes that are not a frame"))?;
            self.begin(&header, output, shared)?;
        }
    }

    /// Takes the first receive that matches `tag`.
    fn take_posted(&mut self, tag: u64, shared: &mut Shared) -> Option<Receive> {
        [&mut self.posted, &mut shared.any_source].into_iter().find_map(|posted| {
            let at = posted.iter().position(|receive| receive.pattern.matches(tag))?;
            posted.remove(at)
        })
    }

    /// Handles a header.
    fn begin(&mut self, header: &Header, output: &mut Output, shared: &mut Shared) -> Result<(), Ended> {
        let (tag, len) = (header.tag, usize::try_from(header.len).unwrap_or(usize::MAX));
        let (sink, mut bytes) = match header.kind {
            Kind::Request => {
                output.request(tag);
                return Ok(());
            }
            Kind::Offer => {
                return match self.take_posted(tag, shared) {
                    None => self.wait(Unmatched::Offer(tag, len)),
                    Some(receive) => {
                        self.match_with(Unmatched::Offer(tag, len), receive, output, shared);
                        Ok(())
                    }
                };
            }
            Kind::Requested => {
                let at = self.requested.iter().position(|requested| (requested.tag, requested.len) == (tag, len));
                let at = at.ok_or(Ended::Malformed("it sent a long message that was not requested"))?;
                let Requested { token, buffer, .. } = self.requested.remove(at);
                (Sink::Receive(token), buffer)
            }
            Kind::Message if len > EAGER_MAX => {
                return Err(Ended::Malformed("it sent a long message that it had not offered"));
            }
            Kind::Message => match self.take_posted(tag, shared) {
                None => (Sink::Unmatched, Vec::new()),
                Some(receive) if len <= receive.len => (Sink::Receive(receive.token), receive.buffer),
                Some(receive) => {
                    shared.received(self.from, receive.token, receive.buffer, tag, Err(ReceiveError::Truncated));
                    (Sink::Nowhere, Vec::new())
                }
            },
        };
        if !matches!(sink, Sink::Nowhere) {
            bytes.clear();
            bytes.reserve_exact(len);
        }
        self.partial = Some(Partial { tag, sink, bytes, missing: len });
        Ok(())
    }

    /// Handles a message that has arrived completely.
    fn complete(&mut self, output: &mut Output, shared: &mut Shared) -> Result<(), Ended> {
        let Some(Partial { tag, sink, bytes, .. }) = self.partial.take() else { return Ok(()) };
        match sink {
            Sink::Receive(token) => shared.received(self.from, token, bytes, tag, Ok(())),
            // A receive may have been posted while the message was arriving.
            Sink::Unmatched => match self.take_posted(tag, shared) {
                Some(receive) => self.match_with(Unmatched::Whole(tag, bytes), receive, output, shared),
                None => self.wait(Unmatched::Whole(tag, bytes))?,
            },
            Sink::Nowhere => {}
        }
        Ok(())
    }
}

/// Reads and drops what has arrived on a connection that this end has left.
pub(super) fn skip(socket: &mut TcpStream, scratch: &mut [u8]) -> Result<(), Ended> {
    for _ in 0..READS {
        match socket.read(scratch) {
            Ok(0) => return Err(Ended::Closed),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Ended::Failed(error)),
        }
    }
    Ok(())
}

fn cancel(posted: &mut VecDeque<Receive>, which: &dyn Fn(u64) -> bool, events: &mut Vec<Event>) {
    let all = std::mem::take(posted).into_iter();
    let (cancelled, kept): (VecDeque<_>, VecDeque<_>) = all.partition(|receive| which(receive.token));
    *posted = kept;
    events.extend(cancelled.into_iter().map(|Receive { from, token, buffer, .. }| Event::Received {
        token,
        bytes: buffer,
        tag: 0,
        from,
        result: Err(ReceiveError::Cancelled),
    }));
}

fn copied(mut buffer: Vec<u8>, bytes: &[u8]) -> Vec<u8> {
    buffer.clear();
    buffer.extend_from_slice(bytes);
    buffer
}

/// Appends at most `len` bytes from the socket to `bytes`, which has room for them.
fn read_into(socket: &TcpStream, bytes: &mut Vec<u8>, len: usize) -> io::Result<usize> {
    let room = bytes.spare_capacity_mut();
    let len = len.min(room.len());
    // SAFETY: `len` bytes of the vector's spare capacity are writable.
    let read = unsafe { libc::recv(socket.as_raw_fd(), room.as_mut_ptr().cast(), len, 0) };
    let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the system has written this many bytes after the vector's last one, within its capacity.
    unsafe { bytes.set_len(bytes.len() + read) };
    Ok(read)
}
