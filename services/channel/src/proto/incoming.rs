//! The reading half of a channel. A receive for a length matches any message; a receive for a payload matches exactly one. A reorder buffer
//! puts the messages in order of their ids and hands the front one, once complete, to the first read.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use super::callback::{Callback, ReadDone};
use super::operation::{Operation, token};
use super::outgoing::UNREAD_WINDOW;
use super::tags::{ID_MASK, LENGTH, LENGTH_BUFFER, PAYLOAD, Pattern};
use super::transport::{Addr, Receive, ReceiveResult, Transport};
use crate::{ChannelError, Violation, buffer_pool};

/// How many ids a message may be ahead of the oldest incomplete one.
const REORDER_WINDOW: usize = 1 << 16;
/// How many messages are read between two reports to the peer.
const READ_REPORT_INTERVAL: u32 = UNREAD_WINDOW / 4;

/// A message in the reorder buffer.
enum Arrival {
    /// The length has arrived.
    LengthKnown(usize),
    /// The receive for the payload is posted.
    Posted(usize),
    Complete(Vec<u8>),
}

struct QueuedRead {
    ticket: u64,
    buffer: Vec<u8>,
    done: ReadDone,
}

/// The reading half.
#[derive(Default)]
pub(crate) struct Incoming {
    channel: u32,
    /// Id of the next message to deliver: the front of `window`.
    next: u32,
    window: VecDeque<Option<Arrival>>,
    /// The value of `next` in the last report to the peer.
    reported: u32,
    reads: VecDeque<QueuedRead>,
    /// How many messages were delivered; and delivered messages that came back, by number. Those wait only while no read does.
    delivered: u64,
    returned: VecDeque<(u64, Vec<u8>)>,
    /// How many receives for lengths are posted, and free buffers for them.
    length_receives: usize,
    length_buffers: Vec<Vec<u8>>,
    depth: usize,
    max_message: usize,
    /// Number of the next receive for a length.
    next_length_receive: u32,
    /// Since when the front message has been waited for, while it or a later one has begun.
    stalled_since: Option<Instant>,
    /// While no message has begun: the id of a payload without a length, and when a peek first found it.
    orphan_payload: Option<(u32, Instant)>,
    /// A channel with the same endpoint existed before, and its messages may still arrive.
    pub follows_prior: bool,
}

impl Incoming {
    pub fn new(channel: u32, start: u32, depth: usize, max_message: usize) -> Self {
        Self { channel, next: start, reported: start, depth, max_message, ..Self::default() }
    }

    /// Sets the id of the peer's first message.
    pub fn start_at(&mut self, id: u32) {
        (self.next, self.reported) = (id, id);
    }

    /// True if message `id` belongs to an earlier channel.
    pub fn is_stale(&self, id: u32) -> bool {
        let far = id.wrapping_sub(self.next).min(self.next.wrapping_sub(id));
        self.follows_prior && far as usize >= REORDER_WINDOW
    }

    /// Id of the first unread message, if a report to the peer is due.
    pub fn report(&mut self) -> Option<u32> {
        if self.next.wrapping_sub(self.reported) < READ_REPORT_INTERVAL {
            return None;
        }
        self.reported = self.next;
        Some(self.next)
    }

    /// Id of the message that the next read gets.
    pub fn next_id(&self) -> u32 {
        self.next
    }

    pub fn push(&mut self, ticket: u64, buffer: Vec<u8>, done: ReadDone) {
        self.reads.push_back(QueuedRead { ticket, buffer, done });
    }

    /// Cancels a read. The next read gets the message it was waiting for.
    pub fn cancel(&mut self, ticket: u64) -> Option<ReadDone> {
        let at = self.reads.iter().position(|queued| queued.ticket == ticket)?;
        self.reads.remove(at).map(|queued| queued.done)
    }

    /// Bytes of payloads whose receives are posted.
    pub fn bytes_in_flight(&self) -> usize {
        self.window.iter().map(|entry| if let Some(Arrival::Posted(len)) = entry { *len } else { 0 }).sum()
    }

    /// Posts what can be posted. Returns true if the transport must be retried.
    pub fn pump(
        &mut self,
        transport: &mut dyn Transport,
        peer: Addr,
        callbacks: &mut Vec<Callback>,
    ) -> Result<bool, Error> {
        self.deliver(callbacks);
        let wanted = self.reads.len().min(self.depth);
        let mut begun = 0;
        for ahead in 0..wanted.min(self.window.len()) {
            let id = self.next.wrapping_add(ahead as u32);
            let Some(entry) = &mut self.window[ahead] else { continue };
            begun += 1;
            let Arrival::LengthKnown(len) = *entry else { continue };
            let mut buffer = std::mem::take(&mut self.reads[ahead].buffer);
            if buffer.capacity() < len {
                buffer = buffer_pool::take(len).unwrap_or(buffer);
            }
            let pattern = Pattern { tag: PAYLOAD | u64::from(id), ignore: 0 };
            let token = token(Operation::ReceivePayload, self.channel, id);
            match transport.receive(Receive { from: Some(peer), pattern, buffer, len, token }) {
                ReceiveResult::Posted => *entry = Arrival::Posted(len),
                ReceiveResult::Retry(buffer) => {
                    self.reads[ahead].buffer = buffer;
                    return Ok(true);
                }
                ReceiveResult::Failed(_, error) => return Err(error),
            }
        }
        // Lengths arrive in any order. For every length that arrives before a read waits for it, another receive is posted.
        while self.length_receives + begun < wanted {
            let buffer = self.length_buffers.pop().unwrap_or_default();
            let pattern = Pattern { tag: LENGTH, ignore: ID_MASK };
            let token = token(Operation::ReceiveLength, self.channel, self.next_length_receive);
            match transport.receive(Receive { from: Some(peer), pattern, buffer, len: LENGTH_BUFFER, token }) {
                ReceiveResult::Posted => {
                    self.length_receives += 1;
                    self.next_length_receive = self.next_length_receive.wrapping_add(1);
                }
                ReceiveResult::Retry(buffer) => {
                    self.length_buffers.push(buffer);
                    return Ok(true);
                }
                ReceiveResult::Failed(_, error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Called when a receive for a length ended without a message.
    pub fn length_cancelled(&mut self) {
        self.length_receives = self.length_receives.saturating_sub(1);
    }

    /// Called when a length has arrived.
    pub fn length(&mut self, tag: u64, bytes: Vec<u8>) -> Result<(), Violation> {
        self.length_receives = self.length_receives.saturating_sub(1);
        let id = (tag & ID_MASK) as u32;
        if self.is_stale(id) {
            self.length_buffers.push(bytes);
            return Ok(());
        }
        let word = bytes.as_slice().try_into().map_err(|_| Violation::LengthSize { id, bytes: bytes.len() })?;
        let stated = u64::from_le_bytes(word);
        self.length_buffers.push(bytes);
        let too_long = Violation::TooLong { id, len: stated, max: self.max_message };
        let len = usize::try_from(stated).ok().filter(|len| *len <= self.max_message).ok_or(too_long)?;
        let ahead = id.wrapping_sub(self.next) as usize;
        if ahead >= REORDER_WINDOW {
            return Err(Violation::OutOfTurn { id, expected: self.next });
        }
        if ahead >= self.window.len() {
            self.window.resize_with(ahead + 1, || None);
        }
        let entry = &mut self.window[ahead];
        if entry.is_some() {
            return Err(Violation::OutOfTurn { id, expected: self.next });
        }
        *entry = Some(Arrival::LengthKnown(len));
        self.orphan_payload = None;
        Ok(())
    }

    /// Called when a payload has arrived.
    pub fn payload(&mut self, id: u32, bytes: Vec<u8>, callbacks: &mut Vec<Callback>) -> Result<(), Violation> {
        let entry = self.window.get_mut(id.wrapping_sub(self.next) as usize).and_then(Option::as_mut);
        let Some(entry) = entry else { return Ok(()) };
        let Arrival::Posted(stated) = *entry else { return Ok(()) };
        if bytes.len() != stated {
            return Err(Violation::PayloadLength { id, stated, got: bytes.len() });
        }
        *entry = Arrival::Complete(bytes);
        self.deliver(callbacks);
        Ok(())
    }

    /// The violation for a payload that is longer than its length.
    pub fn too_long(&self, id: u32) -> Violation {
        let stated = match self.window.get(id.wrapping_sub(self.next) as usize) {
            Some(Some(Arrival::Posted(stated))) => *stated,
            _ => 0,
        };
        Violation::PayloadTooLong { id, stated }
    }

    /// Takes back a delivered message.
    pub fn take_back(&mut self, number: u64, bytes: Vec<u8>, callbacks: &mut Vec<Callback>) {
        let at = self.returned.partition_point(|(before, _)| *before < number);
        self.returned.insert(at, (number, bytes));
        self.deliver(callbacks);
    }

    /// Takes the first message that came back.
    pub fn take_returned(&mut self) -> Option<(u64, Vec<u8>)> {
        self.returned.pop_front()
    }

    /// Drops the messages that came back.
    pub fn drop_returned(&mut self) {
        self.returned.clear();
    }

    /// Delivers complete messages, in order, to waiting reads.
    fn deliver(&mut self, callbacks: &mut Vec<Callback>) {
        while !self.reads.is_empty()
            && let Some(message) = self.returned.pop_front()
        {
            callbacks.extend(self.reads.pop_front().map(|read| Callback::Read(read.done, Ok(message), read.ticket)));
        }
        while !self.reads.is_empty() && matches!(self.window.front(), Some(Some(Arrival::Complete(_)))) {
            self.stalled_since = None;
            self.next = self.next.wrapping_add(1);
            if let (Some(Some(Arrival::Complete(bytes))), Some(read)) =
                (self.window.pop_front(), self.reads.pop_front())
            {
                callbacks.push(Callback::Read(read.done, Ok((self.delivered, bytes)), read.ticket));
                self.delivered += 1;
            }
        }
    }

    /// Finds a message that has begun but makes no progress; `allowed` returns the time allowed for a number of bytes.
    pub fn overdue(&mut self, now: Instant, allowed: impl Fn(usize) -> Duration) -> Option<Violation> {
        if self.is_waiting() {
            self.stalled_since = None;
            let (id, since) = self.orphan_payload?;
            let waited = now.duration_since(since);
            return (waited >= allowed(0)).then_some(Violation::Missing { id, missing: "length", waited });
        }
        if self.reads.is_empty() {
            self.stalled_since = None;
            return None;
        }
        let since = *self.stalled_since.get_or_insert(now);
        let (missing, bytes) = match self.window.front() {
            Some(Some(Arrival::LengthKnown(bytes) | Arrival::Posted(bytes))) => ("payload", *bytes),
            Some(Some(Arrival::Complete(_))) => return None,
            Some(None) | None => ("length", 0),
        };
        let waited = now.duration_since(since);
        let under_way = self.bytes_in_flight().max(bytes);
        (waited >= allowed(under_way)).then_some(Violation::Missing { id: self.next, missing, waited })
    }

    /// Restarts deadlines after a pause of this thread.
    pub fn restart_deadlines(&mut self) {
        (self.stalled_since, self.orphan_payload) = (None, None);
    }

    /// True if reads are waiting and no message has begun.
    pub fn is_waiting(&self) -> bool {
        !self.reads.is_empty() && self.window.is_empty()
    }

    /// Called when a peek for payloads found the one of message `id`, or none.
    pub fn payload_peeked(&mut self, id: Option<u32>, now: Instant) {
        let id = id.filter(|_| self.is_waiting());
        let before = self.orphan_payload.filter(|(before, _)| Some(*before) == id);
        self.orphan_payload = before.or(id.map(|id| (id, now)));
    }

    /// True if reads are waiting.
    pub fn has_reads(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Ends all reads with `error`, in order.
    pub fn fail(&mut self, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        callbacks.extend(self.reads.drain(..).map(|read| Callback::Read(read.done, Err(error.clone()), read.ticket)));
    }

    /// The peer's last message is the one before `end`: reads end once it has been read.
    pub fn end_at(&mut self, end: u32, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        if end == self.next {
            self.fail(error, callbacks);
        }
    }
}
