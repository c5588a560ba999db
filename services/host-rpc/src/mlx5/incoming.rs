//! The peer's messages, in order of arrival, and the callbacks waiting for them.

use std::collections::VecDeque;

use mlx5::device::DeviceError;
use mlx5::wqe::{Remote, Sge};

use super::memory::ReadBuffer;
use crate::{ReceiveDone, TransportError};

/// The most bytes that one READ fetches.
const MAX_READ: u64 = 1 << 30;
/// The most bytes of messages that have a buffer, unless there is only one. A peer's further announcements wait without
/// memory.
const MAX_BUFFERED: u64 = 1 << 30;

enum Message {
    Eager(Vec<u8>),
    Rendezvous(Rendezvous),
}

/// A message that a window of the peer exposes.
struct Rendezvous {
    rkey: u32,
    length: u64,
    /// Allocated for the first READ.
    buffer: Option<ReadBuffer>,
    /// How many bytes are in posted READs.
    requested: u64,
    /// Set once the last READ has completed.
    complete: bool,
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
    /// Total length of the messages that have a buffer.
    buffered: u64,
    receivers: VecDeque<ReceiveDone>,
}

impl Incoming {
    pub fn add_receiver(&mut self, done: ReceiveDone) {
        self.receivers.push_back(done);
    }

    pub fn push_eager(&mut self, bytes: Vec<u8>) {
        self.messages.push_back(Message::Eager(bytes));
    }

    /// Adds a message of `length` bytes that the window `rkey` exposes.
    pub fn push_rendezvous(&mut self, length: u64, rkey: u32) {
        self.unread.push_back(self.first + self.messages.len() as u64);
        self.messages.push_back(Message::Rendezvous(Rendezvous {
            rkey,
            length,
            buffer: None,
            requested: 0,
            complete: false,
        }));
    }

    /// Returns the next READ to post, if a message needs one. `allocate` makes a buffer of so many bytes.
    ///
    /// # Errors
    /// `allocate` fails.
    pub fn next_read(
        &mut self,
        allocate: impl FnOnce(u64) -> Result<ReadBuffer, DeviceError>,
    ) -> Result<Option<Read>, DeviceError> {
        let Some(&number) = self.unread.front() else { return Ok(None) };
        let Some(Message::Rendezvous(message)) = self.messages.get_mut((number - self.first) as usize) else {
            return Ok(None);
        };
        let buffer = match &mut message.buffer {
            Some(buffer) => buffer,
            None if self.buffered > 0 && self.buffered + message.length > MAX_BUFFERED => return Ok(None),
            none => {
                let buffer = none.insert(allocate(message.length)?);
                self.buffered += message.length;
                buffer
            }
        };
        let (start, length) = (message.requested, (message.length - message.requested).min(MAX_READ));
        message.requested += length;
        let is_last = message.requested == message.length;
        let read = Read {
            remote: Remote { addr: start, rkey: message.rkey },
            into: Sge { addr: buffer.mr.addr + start, length: length as u32, lkey: buffer.mr.lkey },
            completes: is_last.then_some(number),
        };
        if is_last {
            self.unread.pop_front();
        }
        Ok(Some(read))
    }

    /// Called when a message's last READ has completed. Returns the key of its window.
    pub fn complete(&mut self, number: u64) -> Option<u32> {
        let at = number.checked_sub(self.first)?;
        let Some(Message::Rendezvous(message)) = self.messages.get_mut(at as usize) else { return None };
        message.complete = true;
        Some(message.rkey)
    }

    /// Runs the callbacks of receives with complete messages, in order. Returns whether there were any.
    pub fn deliver(&mut self) -> bool {
        let mut progress = false;
        while !self.receivers.is_empty() {
            let bytes = match self.messages.pop_front() {
                Some(Message::Eager(bytes)) => bytes,
                Some(Message::Rendezvous(Rendezvous { complete: true, length, buffer: Some(buffer), .. })) => {
                    self.buffered -= length;
                    buffer.into_bytes()
                }
                Some(unread) => {
                    self.messages.push_front(unread);
                    return progress;
                }
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

    /// Returns whether the first message is complete.
    pub fn has_complete(&self) -> bool {
        match self.messages.front() {
            Some(Message::Eager(_)) => true,
            Some(Message::Rendezvous(message)) => message.complete,
            None => false,
        }
    }

    /// Runs the callbacks that no message will reach.
    pub fn fail(&mut self, error: &TransportError) {
        self.receivers.drain(..).for_each(|done| done(Err(error.clone())));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mlx5::device::Device;
    use soft_mlx5::Settings;

    use super::*;

    #[test]
    fn announcements_beyond_the_limit_wait_without_memory() {
        let card: Arc<dyn Device> = soft_mlx5::open(Settings { seed: Some(5), ..Settings::default() }).unwrap();
        let pd = card.alloc_pd().unwrap();
        let mut allocated = Vec::new();
        let mut incoming = Incoming::default();
        for length in [MAX_BUFFERED * 2, 8, MAX_BUFFERED] {
            incoming.push_rendezvous(length, 7);
        }
        let mut reads = |incoming: &mut Incoming| {
            let mut completed = Vec::new();
            while let Some(read) = incoming
                .next_read(|length| {
                    allocated.push(length);
                    ReadBuffer::new(&*card, &pd, 8)
                })
                .unwrap()
            {
                completed.extend(read.completes);
            }
            (allocated.clone(), completed)
        };
        // The first message, in two reads, is over the limit alone.
        assert_eq!(reads(&mut incoming), (vec![MAX_BUFFERED * 2], vec![0]));
        incoming.add_receiver(Box::new(|bytes| assert!(bytes.is_ok())));
        assert!(!incoming.deliver());
        assert_eq!(incoming.complete(0), Some(7));
        assert!(incoming.deliver());
        assert_eq!(reads(&mut incoming), (vec![MAX_BUFFERED * 2, 8], vec![1]));
    }
}
