//! The sending half of a connection: frames in order, and requested messages after them.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, sendmsg};

use super::frame::{EAGER_MAX, Header, Kind};
use crate::Payload;
use crate::proto::transport::{Event, SendResult};

/// Messages up to this length are copied, which costs less than sending them from where they are.
const COPIED_MAX: usize = 4 << 10;
/// The most bytes of copied frames in one piece.
const PIECE: usize = 64 << 10;
/// Copied bytes that may wait for a peer. A channel has fewer; a peer that makes this end answer but doesn't read loses its connection.
const COPIED_WAITING_MAX: usize = 4 << 20;
/// Pieces per system call.
const PIECES: usize = 32;

enum Piece {
    Copied(Vec<u8>),
    /// A message in its own memory, and the token of its send.
    Lent(Payload, u64),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Lent(payload, _) => payload.as_slice(),
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
    /// Long messages that haven't been requested, with their tags and tokens.
    offered: Vec<(u64, Payload, u64)>,
    /// Requested ones. Each goes out once all pieces before it have been sent, so that control messages don't wait behind all of them.
    requested: VecDeque<(u64, Payload, u64)>,
}

impl Output {
    /// True if nothing is waiting for room.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.requested.is_empty()
    }

    /// True if the peer takes nothing while it makes this end send more and more.
    pub fn is_too_long(&self) -> bool {
        self.copied > COPIED_WAITING_MAX
    }

    pub fn send(&mut self, tag: u64, body: Payload, token: u64) -> SendResult {
        let len = body.len();
        if len > EAGER_MAX {
            self.header(Kind::Offer, tag, len);
            self.offered.push((tag, body, token));
            return SendResult::Posted;
        }
        self.header(Kind::Message, tag, len);
        if len <= COPIED_MAX {
            self.copy(body.as_slice());
            return SendResult::Done(body);
        }
        self.pieces.push_back(Piece::Lent(body, token));
        SendResult::Posted
    }

    pub fn header(&mut self, kind: Kind, tag: u64, len: usize) {
        self.copy(&Header::new(kind, tag, len).emit());
    }

    fn copy(&mut self, bytes: &[u8]) {
        self.copied += bytes.len();
        match self.pieces.back_mut() {
            Some(Piece::Copied(last)) if last.len() + bytes.len() <= PIECE => last.extend_from_slice(bytes),
            _ => self.pieces.push_back(Piece::Copied(bytes.to_vec())),
        }
    }

    /// Called when the peer has a receive for an offered message. A request that matches none is the peer's loss.
    pub fn request(&mut self, tag: u64) {
        if let Some(at) = self.offered.iter().position(|(offered, ..)| *offered == tag) {
            self.requested.push_back(self.offered.remove(at));
        }
    }

    /// Drops the long messages that the peer hasn't begun to receive.
    pub fn drop_long(&mut self) {
        self.offered.clear();
        self.requested.clear();
    }

    /// Writes what the socket takes; true if nothing is left.
    ///
    /// # Errors
    /// If the connection is over.
    pub fn write(&mut self, socket: &TcpStream, events: &mut Vec<Event>) -> io::Result<bool> {
        loop {
            if self.pieces.is_empty() {
                let Some((tag, body, token)) = self.requested.pop_front() else { return Ok(true) };
                self.header(Kind::Requested, tag, body.len());
                self.pieces.push_back(Piece::Lent(body, token));
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
                    self.taken(taken, events);
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
    fn taken(&mut self, bytes: usize, events: &mut Vec<Event>) {
        self.sent += bytes;
        while let Some(first) = self.pieces.front()
            && self.sent >= first.bytes().len()
        {
            self.sent -= first.bytes().len();
            match self.pieces.pop_front() {
                Some(Piece::Copied(piece)) => self.copied -= piece.len(),
                Some(Piece::Lent(body, token)) => events.push(Event::Sent { token, body, result: Ok(()) }),
                None => {}
            }
        }
    }
}
