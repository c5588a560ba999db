//! The receiving half of a connection: assembles frames, and keeps messages until a read asks for them.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use nix::libc;

use super::frame::{HEADER, Header, Kind};
use crate::proto::outgoing::UNREAD_WINDOW;
use crate::proto::wire::{CONTROL_MAX, Control};
use crate::{Violation, buffer_pool};

/// Bytes of messages that wait for reads: 256 of 64 KiB. A longer message comes once a read waits for it.
pub(super) const UNREAD_BYTES: usize = 16 << 20;
/// If more than this is missing, the rest of a message goes from the socket to its memory without a copy.
const DIRECT: usize = 16 << 10;
/// Reads per poll, limited so that no peer keeps this end from its other work.
const READS: usize = 16;

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum Ended {
    Closed,
    Failed(io::Error),
    /// The peer sent a frame that no channel sends.
    Malformed(&'static str),
    /// The peer violated the protocol of channels. The connection can still carry an abort.
    Violated(Violation),
}

/// What arrived.
pub(super) enum Arrived {
    /// A control message, with the endpoint name that follows it.
    Control(Control),
    /// The next message, which a read asked for.
    Message(Vec<u8>),
}

/// A frame that isn't complete yet.
struct Partial {
    kind: Kind,
    bytes: Vec<u8>,
    missing: usize,
}

impl Partial {
    /// Returns whether the rest goes straight from the socket to its place.
    fn is_direct(&self) -> bool {
        self.missing > DIRECT
    }
}

/// The receiving half.
pub(super) struct Input {
    /// Length of the longest message, in bytes.
    max_message: usize,
    /// The start of a header.
    header: Vec<u8>,
    partial: Option<Partial>,
    /// Id of the next message that arrives.
    next: u32,
    /// The memory of reads that wait for messages; and messages that wait for reads, and their bytes. One of the two is
    /// empty.
    reads: VecDeque<Vec<u8>>,
    unread: VecDeque<Vec<u8>>,
    unread_bytes: usize,
}

impl Input {
    pub fn new(max_message: usize) -> Self {
        Self {
            max_message,
            header: Vec::new(),
            partial: None,
            next: 0,
            reads: VecDeque::new(),
            unread: VecDeque::new(),
            unread_bytes: 0,
        }
    }

    /// Sets the id of the peer's first message.
    pub fn start_at(&mut self, id: u32) {
        self.next = id;
    }

    /// Returns the bytes of the message that is arriving.
    pub fn message_bytes(&self) -> usize {
        self.partial.as_ref().map_or(0, |partial| partial.bytes.len() + partial.missing)
    }

    /// Adds a read. Returns the next message if it has arrived.
    pub fn read_message(&mut self, buffer: Vec<u8>) -> Option<Vec<u8>> {
        let Some(message) = self.unread.pop_front() else {
            self.reads.push_back(buffer);
            return None;
        };
        self.unread_bytes -= message.len();
        Some(into_memory_of(buffer, message))
    }

    /// Returns whether messages wait for reads.
    #[cfg(test)]
    pub fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Reads what has arrived, using `scratch` for bytes whose destination isn't known yet.
    ///
    /// # Errors
    /// If the connection is over. What arrived before that is in `arrived`.
    pub fn read(
        &mut self,
        socket: &mut TcpStream,
        scratch: &mut [u8],
        arrived: &mut Vec<Arrived>,
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
                    self.proceed(&[], arrived)?;
                }
                _ => self.proceed(&scratch[..len], arrived)?,
            }
            if len < room {
                break;
            }
        }
        Ok(())
    }

    /// Processes bytes that have arrived.
    fn proceed(&mut self, mut bytes: &[u8], arrived: &mut Vec<Arrived>) -> Result<(), Ended> {
        loop {
            if let Some(partial) = &mut self.partial {
                let (part, rest) = bytes.split_at(partial.missing.min(bytes.len()));
                partial.bytes.extend_from_slice(part);
                partial.missing -= part.len();
                bytes = rest;
                if partial.missing > 0 {
                    return Ok(());
                }
                self.complete(arrived)?;
            }
            let (part, rest) = bytes.split_at((HEADER - self.header.len()).min(bytes.len()));
            self.header.extend_from_slice(part);
            bytes = rest;
            let Ok(header) = self.header[..].try_into() else { return Ok(()) };
            self.header.clear();
            let header = Header::parse(&header).ok_or(Ended::Malformed("it sent bytes that are not a frame"))?;
            self.begin(&header)?;
        }
    }

    /// Handles a header.
    fn begin(&mut self, header: &Header) -> Result<(), Ended> {
        let kind = header.kind;
        let (max, violation) = match kind {
            Kind::Control => (CONTROL_MAX, Violation::Control),
            Kind::Message => {
                let max = self.max_message;
                (max, Violation::TooLong { id: self.next, len: header.len, max })
            }
        };
        let len = usize::try_from(header.len).ok().filter(|len| *len <= max).ok_or(Ended::Violated(violation))?;
        let mut bytes = Vec::new();
        if kind == Kind::Message {
            self.next = self.next.wrapping_add(1);
            bytes = self.memory(len)?;
        }
        bytes.clear();
        bytes.reserve_exact(len);
        self.partial = Some(Partial { kind, bytes, missing: len });
        Ok(())
    }

    /// Returns memory for the next message: the read's that waits for it, if it has enough.
    fn memory(&mut self, len: usize) -> Result<Vec<u8>, Ended> {
        let memory = match self.reads.front_mut() {
            Some(buffer) => std::mem::take(buffer),
            None if self.unread.len() >= UNREAD_WINDOW as usize || self.unread_bytes + len > UNREAD_BYTES => {
                return Err(Ended::Malformed("it sent more messages than a channel has unread"));
            }
            None => Vec::new(),
        };
        Ok(if memory.capacity() < len { buffer_pool::take(len).unwrap_or(memory) } else { memory })
    }

    /// Handles a frame that has arrived completely.
    fn complete(&mut self, arrived: &mut Vec<Arrived>) -> Result<(), Ended> {
        let Some(Partial { kind, bytes, .. }) = self.partial.take() else { return Ok(()) };
        match kind {
            Kind::Control => {
                let (message, _) = Control::parse(&bytes).ok_or(Ended::Violated(Violation::Control))?;
                arrived.push(Arrived::Control(message));
            }
            Kind::Message => match self.reads.pop_front() {
                // The read may have come while the message was arriving.
                Some(buffer) => arrived.push(Arrived::Message(into_memory_of(buffer, bytes))),
                None => {
                    self.unread_bytes += bytes.len();
                    self.unread.push_back(bytes);
                }
            },
        }
        Ok(())
    }
}

/// Moves a message into `buffer` if it fits its capacity.
fn into_memory_of(mut buffer: Vec<u8>, message: Vec<u8>) -> Vec<u8> {
    if message.is_empty() || buffer.capacity() < message.len() {
        return message;
    }
    buffer.clear();
    buffer.extend_from_slice(&message);
    buffer
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
