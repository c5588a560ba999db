//! Messages on their way from a peer. A receive for a length matches any message; a receive for a payload matches
//! exactly one. A reorder buffer puts the messages in order of their ids.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use super::endpoint::{
    Addr, Endpoint, ID_MASK, LENGTH, LENGTH_BUFFER, Operation, PAYLOAD, Pattern, Receive, ReceiveResult, SessionId,
    Token,
};
use crate::proto::carrier::transfer_time;
use crate::{Violation, buffer_pool};

/// How many ids a message may be ahead of the oldest incomplete one.
const REORDER_WINDOW: usize = 1 << 16;

/// A message in the reorder buffer.
enum Arrival {
    /// The length has arrived.
    LengthKnown(usize),
    /// The receive for the payload is posted.
    Posted(usize),
    Complete(Vec<u8>),
}

/// A payload without a length, while no message has begun.
#[derive(Clone, Copy)]
struct OrphanPayload {
    id: u32,
    /// When a peek first found it.
    since: Instant,
}

/// The sizes of a channel.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// How many messages are received at a time.
    pub depth: usize,
    /// Length of the longest message, in bytes.
    pub max_message: usize,
}

/// Messages on their way from a peer.
pub(crate) struct Incoming {
    session: SessionId,
    peer: Addr,
    /// Id of the next message to deliver: the front of `window`.
    next: u32,
    window: VecDeque<Option<Arrival>>,
    /// The memory of the reads that wait for messages.
    reads: VecDeque<Vec<u8>>,
    /// How many receives for lengths are posted, and free buffers for them.
    length_receives: usize,
    length_buffers: Vec<Vec<u8>>,
    limits: Limits,
    /// Since when the front message has been waited for, while it or a later one has begun.
    stalled_since: Option<Instant>,
    orphan_payload: Option<OrphanPayload>,
    /// A channel with the same endpoint existed before, and its messages may still arrive.
    pub follows_prior: bool,
}

impl Incoming {
    pub fn new(session: SessionId, peer: Addr, limits: Limits, follows_prior: bool) -> Self {
        Self {
            session,
            peer,
            next: 0,
            window: VecDeque::new(),
            reads: VecDeque::new(),
            length_receives: 0,
            length_buffers: Vec::new(),
            limits,
            stalled_since: None,
            orphan_payload: None,
            follows_prior,
        }
    }

    /// Sets the id of the peer's first message.
    pub fn start_at(&mut self, id: u32) {
        self.next = id;
    }

    /// Returns whether message `id` belongs to an earlier channel.
    pub fn is_stale(&self, id: u32) -> bool {
        let far = id.wrapping_sub(self.next).min(self.next.wrapping_sub(id));
        self.follows_prior && far as usize >= REORDER_WINDOW
    }

    /// Id of the message that the next read gets.
    pub fn next_id(&self) -> u32 {
        self.next
    }

    pub fn read(&mut self, buffer: Vec<u8>) {
        self.reads.push_back(buffer);
    }

    /// Returns the bytes of payloads whose receives are posted.
    pub fn bytes_in_flight(&self) -> usize {
        self.window.iter().map(|entry| if let Some(Arrival::Posted(len)) = entry { *len } else { 0 }).sum()
    }

    /// Posts what can be posted. Returns true if the endpoint must be retried.
    pub fn pump(&mut self, endpoint: &mut dyn Endpoint) -> Result<bool, Error> {
        let wanted = self.reads.len().min(self.limits.depth);
        let mut begun = 0;
        for ahead in 0..wanted.min(self.window.len()) {
            let id = self.next.wrapping_add(ahead as u32);
            let Some(entry) = &mut self.window[ahead] else { continue };
            begun += 1;
            let Arrival::LengthKnown(len) = *entry else { continue };
            let mut buffer = std::mem::take(&mut self.reads[ahead]);
            if buffer.capacity() < len {
                buffer = buffer_pool::take(len).unwrap_or(buffer);
            }
            let pattern = Pattern { tag: PAYLOAD | u64::from(id), ignore: 0 };
            let token = Token { operation: Operation::ReceivePayload, session: Some(self.session), id };
            match endpoint.receive(Receive { from: Some(self.peer), pattern, buffer, len, token }) {
                ReceiveResult::Posted => *entry = Arrival::Posted(len),
                ReceiveResult::Retry(buffer) => {
                    self.reads[ahead] = buffer;
                    return Ok(true);
                }
                ReceiveResult::Failed(_, error) => return Err(error),
            }
        }
        // Lengths arrive in any order. For every length that arrives before a read waits for it, another receive is
        // posted.
        while self.length_receives + begun < wanted {
            let buffer = self.length_buffers.pop().unwrap_or_default();
            let pattern = Pattern { tag: LENGTH, ignore: ID_MASK };
            let token = Token { operation: Operation::ReceiveLength, session: Some(self.session), id: 0 };
            match endpoint.receive(Receive { from: Some(self.peer), pattern, buffer, len: LENGTH_BUFFER, token }) {
                ReceiveResult::Posted => self.length_receives += 1,
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
        let too_long = Violation::TooLong { id, len: stated, max: self.limits.max_message };
        let len = usize::try_from(stated).ok().filter(|len| *len <= self.limits.max_message).ok_or(too_long)?;
        let ahead = id.wrapping_sub(self.next) as usize;
        if ahead >= REORDER_WINDOW {
            return Err(Violation::OutOfTurn { id, expected: self.next });
        }
        while self.window.len() <= ahead {
            self.window.push_back(None);
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
    pub fn payload(&mut self, id: u32, bytes: Vec<u8>) -> Result<(), Violation> {
        let entry = self.window.get_mut(id.wrapping_sub(self.next) as usize).and_then(Option::as_mut);
        let Some(entry) = entry else { return Ok(()) };
        let Arrival::Posted(stated) = *entry else { return Ok(()) };
        if bytes.len() != stated {
            return Err(Violation::PayloadLength { id, stated, got: bytes.len() });
        }
        *entry = Arrival::Complete(bytes);
        Ok(())
    }

    /// Returns the violation for a payload that is longer than its length.
    pub fn too_long(&self, id: u32) -> Violation {
        let stated = match self.window.get(id.wrapping_sub(self.next) as usize) {
            Some(Some(Arrival::Posted(stated))) => *stated,
            _ => 0,
        };
        Violation::PayloadTooLong { id, stated }
    }

    /// Takes the next message, if it's complete.
    pub fn take_complete(&mut self) -> Option<Vec<u8>> {
        if !matches!(self.window.front(), Some(Some(Arrival::Complete(_)))) {
            return None;
        }
        let Some(Some(Arrival::Complete(bytes))) = self.window.pop_front() else { return None };
        self.reads.pop_front();
        self.stalled_since = None;
        self.next = self.next.wrapping_add(1);
        Some(bytes)
    }

    /// Finds a message that has begun but makes no progress for `limit` and the time for its bytes.
    pub fn overdue(&mut self, now: Instant, limit: Duration) -> Option<Violation> {
        if self.is_waiting() {
            self.stalled_since = None;
            let OrphanPayload { id, since } = self.orphan_payload?;
            let waited = now.duration_since(since);
            return (waited >= limit).then_some(Violation::Missing { id, missing: "length", waited });
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
        let allowed = limit + transfer_time(self.bytes_in_flight().max(bytes));
        (waited >= allowed).then_some(Violation::Missing { id: self.next, missing, waited })
    }

    /// Restarts deadlines after a pause of this thread.
    pub fn restart_deadlines(&mut self) {
        (self.stalled_since, self.orphan_payload) = (None, None);
    }

    /// Returns whether reads are waiting and no message has begun.
    pub fn is_waiting(&self) -> bool {
        !self.reads.is_empty() && self.window.is_empty()
    }

    /// Called when a peek for payloads found the one of message `id`, or none.
    pub fn payload_peeked(&mut self, id: Option<u32>, now: Instant) {
        let id = id.filter(|_| self.is_waiting());
        let before = self.orphan_payload.filter(|before| Some(before.id) == id);
        self.orphan_payload = before.or(id.map(|id| OrphanPayload { id, since: now }));
    }
}
