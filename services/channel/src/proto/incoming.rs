//! The reading half of a channel: reads, in order, and the messages that wait for one.

use std::collections::VecDeque;

use super::outgoing::{UNREAD_WINDOW, report_bytes};
use super::{Callback, ReadDone, ReadId};
use crate::ChannelError;

/// How many messages are read between two reports to the peer.
const READ_REPORT_INTERVAL: u32 = UNREAD_WINDOW / 4;

struct QueuedRead {
    id: ReadId,
    done: ReadDone,
}

/// What the peer is told about the messages that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadReport {
    /// Id of the first unread message.
    pub id: u32,
    /// A read waits for that message, which the peer offered.
    pub is_awaited: bool,
}

/// The reading half.
#[derive(Default)]
pub(crate) struct Incoming {
    /// Id of the next message.
    next: u32,
    /// The value of `next` in the last report to the peer, and how many bytes were read since; how many the peer holds
    /// unread.
    reported: u32,
    unreported_bytes: usize,
    unread_bytes_max: usize,
    /// The long message that the peer offered: it's sent once a read waits for it.
    offered: Option<u32>,
    reads: VecDeque<QueuedRead>,
    /// How many messages the carrier was asked for and hasn't delivered.
    asked: usize,
    /// How many messages were delivered; and those that no read has: they came back, or came for a read that was
    /// cancelled. By number. Reads get them when the channel is pumped.
    delivered: u64,
    unclaimed: VecDeque<(u64, Vec<u8>)>,
}

impl Incoming {
    pub fn new(unread_bytes_max: usize) -> Self {
        Self { unread_bytes_max, ..Self::default() }
    }

    /// Sets the id of the peer's first message.
    pub fn start_at(&mut self, id: u32) {
        (self.next, self.reported) = (id, id);
    }

    /// Id of the message that the carrier delivers next.
    pub fn next_id(&self) -> u32 {
        self.next
    }

    /// Returns what to report to the peer, if a report is due.
    pub fn report(&mut self) -> Option<ReadReport> {
        let is_awaited = self.offered == Some(self.next) && !self.reads.is_empty();
        let is_due = self.next.wrapping_sub(self.reported) >= READ_REPORT_INTERVAL
            || self.unreported_bytes > report_bytes(self.unread_bytes_max);
        if !is_awaited && !is_due {
            return None;
        }
        if is_awaited {
            self.offered = None;
        }
        (self.reported, self.unreported_bytes) = (self.next, 0);
        Some(ReadReport { id: self.next, is_awaited })
    }

    /// The peer offers its message `id`, which is too long to wait unread.
    pub fn offer(&mut self, id: u32) {
        self.offered = Some(id);
    }

    /// Adds a read; true if the carrier must be asked for a message.
    pub fn push(&mut self, id: ReadId, done: ReadDone) -> bool {
        self.reads.push_back(QueuedRead { id, done });
        let must_ask = self.asked + self.unclaimed.len() < self.reads.len();
        self.asked += usize::from(must_ask);
        must_ask
    }

    /// Cancels a read. The next read gets the message it was waiting for.
    pub fn cancel(&mut self, id: ReadId) -> Option<ReadDone> {
        let at = self.reads.iter().position(|queued| queued.id == id)?;
        self.reads.remove(at).map(|queued| queued.done)
    }

    /// Called when the carrier delivers the next message.
    pub fn message(&mut self, bytes: Vec<u8>, callbacks: &mut Vec<Callback>) {
        self.asked = self.asked.saturating_sub(1);
        self.next = self.next.wrapping_add(1);
        self.unreported_bytes = self.unreported_bytes.saturating_add(bytes.len());
        self.unclaimed.push_back((self.delivered, bytes));
        self.delivered += 1;
        self.deliver_next(callbacks);
    }

    /// Takes back a delivered message.
    pub fn take_back(&mut self, number: u64, bytes: Vec<u8>) {
        let at = self.unclaimed.partition_point(|(before, _)| *before < number);
        self.unclaimed.insert(at, (number, bytes));
    }

    /// Drops the messages that no read has.
    pub fn drop_unclaimed(&mut self) {
        self.unclaimed.clear();
    }

    /// Delivers messages, in order, to waiting reads.
    pub fn deliver_next(&mut self, callbacks: &mut Vec<Callback>) {
        while !self.reads.is_empty()
            && let Some(message) = self.unclaimed.pop_front()
        {
            callbacks.extend(self.reads.pop_front().map(|read| Callback::Read(read.done, Ok(message), read.id)));
        }
    }

    /// Returns whether reads are waiting.
    pub fn has_reads(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Ends all reads, in order: with messages that are there, then with `error`.
    pub fn fail(&mut self, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        self.deliver_next(callbacks);
        callbacks.extend(self.reads.drain(..).map(|read| Callback::Read(read.done, Err(error.clone()), read.id)));
    }

    /// The peer's last message is the one before `end`: reads end once it has been read.
    pub fn end_at(&mut self, end: u32, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        if end == self.next {
            self.fail(error, callbacks);
        }
    }
}
