//! The writing half of a channel: messages in flight, in order of their ids, and messages in the queue.
//!
//! The carrier returns the bodies in any order. One that is back only marks its message; [`Outgoing::complete`] then
//! calls back from the front.

use std::collections::VecDeque;

use super::carrier::{Carrier, Peer};
use super::{Callback, WriteDone};
use crate::{ChannelError, Payload};

struct InFlightWrite {
    /// None while the carrier has it.
    body: Option<Payload>,
    done: WriteDone,
}

struct QueuedWrite {
    ticket: u64,
    body: Payload,
    done: WriteDone,
}

/// How many messages the peer may have without having read them.
pub(crate) const UNREAD_WINDOW: u32 = 256;

/// The writing half.
#[derive(Default)]
pub(crate) struct Outgoing {
    /// Id of the front of `in_flight`.
    first: u32,
    in_flight: VecDeque<InFlightWrite>,
    queued: VecDeque<QueuedWrite>,
    depth: usize,
    /// Lengths of the messages that the peer hasn't read, the first in front; their sum, and its limit.
    unread: VecDeque<usize>,
    unread_bytes: usize,
    unread_bytes_max: usize,
    /// The message that was offered to the peer, and the one that a read of the peer waits for.
    offered: Option<u32>,
    awaited: Option<u32>,
    /// The peer is closing: the id of the first message it hasn't read, and the error for that message and later ones.
    peer_close: Option<(u32, ChannelError)>,
}

impl Outgoing {
    pub fn new(depth: usize, unread_bytes_max: usize) -> Self {
        Self { depth, unread_bytes_max, ..Self::default() }
    }

    /// Sets the id of the first message, before any is written.
    pub fn start_at(&mut self, id: u32) {
        self.first = id;
    }

    /// Returns the id that the next message gets.
    pub fn next_id(&self) -> u32 {
        self.first.wrapping_add(self.in_flight.len() as u32)
    }

    /// Returns whether no message is in flight or queued.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.queued.is_empty()
    }

    pub fn push(&mut self, ticket: u64, body: Payload, done: WriteDone) {
        self.queued.push_back(QueuedWrite { ticket, body, done });
    }

    /// Cancels a write that hasn't started.
    pub fn cancel(&mut self, ticket: u64) -> Option<WriteDone> {
        let at = self.queued.iter().position(|queued| queued.ticket == ticket)?;
        self.queued.remove(at).map(|queued| queued.done)
    }

    /// Sends what the windows allow.
    pub fn pump(&mut self, carrier: &mut dyn Carrier, peer: Peer, callbacks: &mut Vec<Callback>) {
        while self.has_room()
            && let Some(QueuedWrite { body, done, .. }) = self.queued.pop_front()
        {
            let id = self.next_id();
            self.unread.push_back(body.len());
            self.unread_bytes += body.len();
            let body = carrier.send(peer, id, body);
            self.in_flight.push_back(InFlightWrite { body, done });
            self.complete(callbacks);
        }
    }

    /// Returns whether the next message may be sent.
    fn has_room(&self) -> bool {
        self.peer_close.is_none()
            && self.in_flight.len() < self.depth
            && self.unread.len() < UNREAD_WINDOW as usize
            && self.queued.front().is_none_or(|next| self.may_wait_unread(next.body.len()))
    }

    /// Returns whether the peer holds the next message, of `len` bytes, until it's read, or a read waits for it.
    fn may_wait_unread(&self, len: usize) -> bool {
        self.unread_bytes.saturating_add(len) <= self.unread_bytes_max || self.awaited == Some(self.next_id())
    }

    /// Id of the next message, if it must be offered to the peer: it has no room there, and no report of the peer may
    /// make enough.
    pub fn offer(&mut self) -> Option<u32> {
        let (id, len) = (self.next_id(), self.queued.front()?.body.len());
        let must_offer = len > report_bytes(self.unread_bytes_max) && !self.may_wait_unread(len);
        if self.peer_close.is_some() || !must_offer || self.offered == Some(id) {
            return None;
        }
        self.offered = Some(id);
        Some(id)
    }

    /// Handles the peer's report that it has read every message before `id`, and whether a read waits for that one. An
    /// old or impossible report changes nothing.
    pub fn peer_read_to(&mut self, id: u32, is_awaited: bool) {
        let first_unread = self.next_id().wrapping_sub(self.unread.len() as u32);
        let read = id.wrapping_sub(first_unread) as usize;
        if read > self.unread.len() {
            return;
        }
        self.unread_bytes -= self.unread.drain(..read).sum::<usize>();
        if is_awaited {
            self.awaited = Some(id);
        }
    }

    /// Called when a message has been sent.
    pub fn sent(&mut self, id: u32, body: Payload, callbacks: &mut Vec<Callback>) {
        if let Some(entry) = self.in_flight.get_mut(id.wrapping_sub(self.first) as usize) {
            entry.body = Some(body);
            self.complete(callbacks);
        }
    }

    /// Calls back for complete messages, from the front.
    fn complete(&mut self, callbacks: &mut Vec<Callback>) {
        while self.in_flight.front().is_some_and(|entry| entry.body.is_some())
            && let Some(InFlightWrite { body, done }) = self.in_flight.pop_front()
        {
            self.first = self.first.wrapping_add(1);
            callbacks.extend(body.map(|body| Callback::Write(done, Ok(body))));
        }
        if let Some((unread, error)) = &self.peer_close
            && unread.wrapping_sub(self.first).wrapping_sub(1) as usize >= self.in_flight.len()
        {
            let error = error.clone();
            self.fail(&error, callbacks);
        }
    }

    /// The peer is closing and has read every message before `unread`: those writes succeed, and then later ones fail.
    pub fn end_at(&mut self, unread: u32, error: ChannelError, callbacks: &mut Vec<Callback>) {
        self.peer_close = Some((unread, error));
        self.complete(callbacks);
    }

    /// Ends all writes with `error`, in order.
    pub fn fail(&mut self, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        let in_flight = self.in_flight.drain(..).map(|entry| entry.done);
        let queued = self.queued.drain(..).map(|entry| entry.done);
        callbacks.extend(in_flight.chain(queued).map(|done| Callback::Write(done, Err(error.clone()))));
    }
}

/// Returns how many bytes are read between two reports to the peer, which holds at most `unread_bytes_max`.
pub(super) fn report_bytes(unread_bytes_max: usize) -> usize {
    unread_bytes_max / 4
}
