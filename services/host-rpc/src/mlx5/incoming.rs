//! The peer's messages, in order of arrival, and the callbacks waiting for them.

use std::collections::VecDeque;

use mlx5::wqe::{Remote, Sge};

use super::memory::ReadBuffer;
use crate::{ReceiveDone, TransportError};

/// The most bytes that one READ fetches.
const MAX_READ: u64 = 1 << 30;

enum Message {
    Eager(Vec<u8>),
    /// `requested` bytes are in posted READs; `complete` is set once the last READ has completed.
    Rendezvous {
        buffer: ReadBuffer,
        rkey: u32,
        requested: u64,
        complete: bool,
    },
}

/// A READ to post.
pub(super) struct Read {
    pub remote: Remote,
    pub into: Sge,
    /// For a message's last READ: the number of the message.
    pub completes: Option<u64>,
}

#[derive(Default)]
pub(super) struct Incoming {
    messages: VecDeque<Message>,
    /// The number of the first message.
    first: u64,
    /// The numbers of messages whose READs haven't all been posted.
    unread: VecDeque<u64>,
    receivers: VecDeque<ReceiveDone>,
}

impl Incoming {
    pub fn add_receiver(&mut self, done: ReceiveDone) {
        self.receivers.push_back(done);
    }

    pub fn push_eager(&mut self, bytes: Vec<u8>) {
        self.messages.push_back(Message::Eager(bytes));
    }

    /// Adds a message that the window `rkey` exposes.
    pub fn push_rendezvous(&mut self, buffer: ReadBuffer, rkey: u32) {
        self.unread.push_back(self.first + self.messages.len() as u64);
        self.messages.push_back(Message::Rendezvous { buffer, rkey, requested: 0, complete: false });
    }

    /// The next READ to post, if a message needs one.
    pub fn next_read(&mut self) -> Option<Read> {
        let number = *self.unread.front()?;
        let message = self.messages.get_mut((number - self.first) as usize);
        let Some(Message::Rendezvous { buffer, rkey, requested, .. }) = message else { return None };
        let (start, length) = (*requested, (buffer.mr.length - *requested).min(MAX_READ));
        *requested += length;
        let is_last = *requested == buffer.mr.length;
        if is_last {
            self.unread.pop_front();
        }
        Some(Read {
            remote: Remote { addr: start, rkey: *rkey },
            into: Sge { addr: buffer.mr.addr + start, length: length as u32, lkey: buffer.mr.lkey },
            completes: is_last.then_some(number),
        })
    }

    /// Called when a message's last READ has completed. Returns the key of its window.
    pub fn complete(&mut self, number: u64) -> Option<u32> {
        let at = number.checked_sub(self.first)?;
        let Some(Message::Rendezvous { rkey, complete, .. }) = self.messages.get_mut(at as usize) else { return None };
        *complete = true;
        Some(*rkey)
    }

    /// Runs the callbacks of receives with complete messages, in order. Returns whether there were any.
    pub fn deliver(&mut self) -> bool {
        let mut progress = false;
        while !self.receivers.is_empty()
            && matches!(self.messages.front(), Some(Message::Eager(_) | Message::Rendezvous { complete: true, .. }))
        {
            let bytes = match self.messages.pop_front() {
                Some(Message::Eager(bytes)) => bytes,
                Some(Message::Rendezvous { buffer, .. }) => buffer.into_bytes(),
                None => return progress,
            };
            self.first += 1;
            progress = true;
            if let Some(done) = self.receivers.pop_front() {
                done(Ok(bytes));
            }
        }
        progress
    }

    /// Runs the callbacks that no message will reach.
    pub fn fail(&mut self, error: &TransportError) {
        self.receivers.drain(..).for_each(|done| done(Err(error.clone())));
    }
}
