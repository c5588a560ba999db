//! The sending half of a connection: control messages, and messages after them.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, sendmsg};

use super::frame::{Header, Kind};
use crate::Payload;

/// Messages up to this length are copied, which costs less than sending them from where they are.
const COPIED_MAX: usize = 4 << 10;
/// Longer messages go out one after the other, so that control messages don't wait behind all of them.
const QUEUED_MAX: usize = 64 << 10;
/// The most bytes of copied frames in one piece.
const PIECE: usize = 64 << 10;
/// Copied bytes that may wait for a peer. A channel has fewer; a peer that makes this end answer but doesn't read loses
/// its connection.
const COPIED_WAITING_MAX: usize = 4 << 20;
/// Pieces per system call.
const PIECES: usize = 32;

/// A message in its own memory.
pub(super) struct Lent {
    pub id: u32,
    pub body: Payload,
}

enum Piece {
    Copied(Vec<u8>),
    Lent(Lent),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Lent(lent) => lent.body.as_slice(),
        }
    }
}

/// What is waiting for room in the socket.
#[derive(Default)]
pub(super) struct Output {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have been sent.
    sent: usize,
    /// Bytes in copied pieces.
    copied: usize,
    /// Messages that go out once all pieces have been sent, from the first long one on.
    messages: VecDeque<Lent>,
    /// Bytes of messages that haven't been sent.
    bytes: usize,
}

impl Output {
    /// Returns whether the peer takes nothing while it makes this end send more and more.
    pub fn is_too_long(&self) -> bool {
        self.copied > COPIED_WAITING_MAX
    }

    /// Returns the bytes of messages that are in their own memory and haven't been sent.
    pub fn message_bytes(&self) -> usize {
        self.bytes
    }

    pub fn control(&mut self, bytes: &[u8]) {
        self.copy(&Header::new(Kind::Control, bytes.len()).emit());
        self.copy(bytes);
    }

    /// Queues the next message. Returns the body if it was copied.
    pub fn message(&mut self, id: u32, body: Payload) -> Option<Payload> {
        let is_queued = !self.messages.is_empty() || body.len() > QUEUED_MAX;
        self.bytes += body.len();
        let lent = Lent { id, body };
        if is_queued {
            self.messages.push_back(lent);
            return None;
        }
        self.push(lent).map(|copied| copied.body)
    }

    /// Makes a message the next piece. Returns it if it was copied.
    fn push(&mut self, lent: Lent) -> Option<Lent> {
        let bytes = lent.body.as_slice();
        self.copy(&Header::new(Kind::Message, bytes.len()).emit());
        if bytes.len() <= COPIED_MAX {
            self.copy(bytes);
            self.bytes -= bytes.len();
            return Some(lent);
        }
        self.pieces.push_back(Piece::Lent(lent));
        None
    }

    fn copy(&mut self, bytes: &[u8]) {
        self.copied += bytes.len();
        match self.pieces.back_mut() {
            Some(Piece::Copied(last)) if last.len() + bytes.len() <= PIECE => last.extend_from_slice(bytes),
            _ => self.pieces.push_back(Piece::Copied(bytes.to_vec())),
        }
    }

    /// Drops the messages that haven't begun to be sent.
    pub fn drop_queued(&mut self) {
        self.bytes -= self.messages.drain(..).map(|lent| lent.body.len()).sum::<usize>();
    }

    /// Makes queued messages the next pieces, up to the first long one; calls `sent` with those that are copied.
    fn next_pieces(&mut self, sent: &mut impl FnMut(u32, Payload)) {
        while let Some(lent) = self.messages.pop_front() {
            let is_long = lent.body.len() > QUEUED_MAX;
            if let Some(Lent { id, body }) = self.push(lent) {
                sent(id, body);
            }
            if is_long {
                return;
            }
        }
    }

    /// Writes what the socket takes, and calls `sent` with the messages that it took; true if nothing is left.
    ///
    /// # Errors
    /// If the connection is over.
    pub fn write(&mut self, socket: &TcpStream, mut sent: impl FnMut(u32, Payload)) -> io::Result<bool> {
        loop {
            if self.pieces.is_empty() {
                self.next_pieces(&mut sent);
            }
            if self.pieces.is_empty() {
                return Ok(true);
            }
            let mut slices = [IoSlice::new(&[]); PIECES];
            let (mut count, mut total) = (0, 0);
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                let bytes = if count == 0 { &piece.bytes()[self.sent..] } else { piece.bytes() };
                *slice = IoSlice::new(bytes);
                (count, total) = (count + 1, total + bytes.len());
            }
            match sendmsg::<()>(socket.as_raw_fd(), &slices[..count], &[], MsgFlags::MSG_NOSIGNAL, None) {
                Ok(taken) => {
                    self.taken(taken, &mut sent);
                    if taken < total {
                        return Ok(false);
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Accounts for bytes that the socket took.
    fn taken(&mut self, bytes: usize, sent: &mut impl FnMut(u32, Payload)) {
        self.sent += bytes;
        while let Some(first) = self.pieces.front()
            && self.sent >= first.bytes().len()
        {
            self.sent -= first.bytes().len();
            match self.pieces.pop_front() {
                Some(Piece::Copied(piece)) => self.copied -= piece.len(),
                Some(Piece::Lent(lent)) => {
                    self.bytes -= lent.body.len();
                    sent(lent.id, lent.body);
                }
                None => {}
            }
        }
    }
}
