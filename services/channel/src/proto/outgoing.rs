//! The writing half of a channel: messages in flight, in order of their ids, and messages in the queue.
//!
//! Each message is two sends, which complete in any order, even relative to the sends of other messages. A completion only marks its
//! message; [`Outgoing::complete`] then calls back for complete messages from the front.
//!
//! Lengths go out at once. Long payloads go into a stream a few at a time, so that the reader learns the next lengths while a payload is in
//! flight, and posts receives before the payloads arrive. A provider has to buffer or stop a payload that has no receive.

use std::collections::VecDeque;

use ferrogin_libfabric::Error;

use super::callback::{Callback, WriteDone};
use super::operation::{Operation, token};
use super::tags::{LENGTH, PAYLOAD};
use super::transport::{Addr, InFlight, SendResult, Transport};
use crate::{ChannelError, Payload};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendState {
    Waiting,
    Posted,
    Done,
}

struct InFlightWrite {
    length: SendState,
    payload: SendState,
    bytes: usize,
    /// None while the transport has it.
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
    channel: u32,
    /// Id of the front of `in_flight`.
    first: u32,
    in_flight: VecDeque<InFlightWrite>,
    /// Entries of `in_flight` whose lengths are posted, and those whose payloads are posted too.
    lengths_posted: usize,
    payloads_posted: usize,
    /// Payloads that are posted and not complete.
    payloads_in_flight: InFlight,
    queued: VecDeque<QueuedWrite>,
    depth: usize,
    /// The peer has read every message before this id.
    read_by_peer: u32,
    /// The peer is closing: the id of the first message it hasn't read, and the error for that message and later ones.
    peer_close: Option<(u32, ChannelError)>,
}

impl Outgoing {
    pub fn new(channel: u32, start: u32, depth: usize) -> Self {
        Self { channel, first: start, read_by_peer: start, depth, ..Self::default() }
    }

    /// Sets the id of the first message, before any is written.
    pub fn start_at(&mut self, id: u32) {
        (self.first, self.read_by_peer) = (id, id);
    }

    /// The id that the next message gets.
    pub fn next_id(&self) -> u32 {
        self.first.wrapping_add(self.in_flight.len() as u32)
    }

    /// True if no message is in flight or queued.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.queued.is_empty()
    }

    /// Bytes of payloads that are posted and not complete.
    pub fn bytes_in_flight(&self) -> usize {
        self.payloads_in_flight.bytes()
    }

    pub fn push(&mut self, ticket: u64, body: Payload, done: WriteDone) {
        self.queued.push_back(QueuedWrite { ticket, body, done });
    }

    /// Cancels a write that hasn't started.
    pub fn cancel(&mut self, ticket: u64) -> Option<WriteDone> {
        let at = self.queued.iter().position(|queued| queued.ticket == ticket)?;
        self.queued.remove(at).map(|queued| queued.done)
    }

    /// Posts what can be posted. Returns true if the transport must be retried.
    pub fn pump(
        &mut self,
        transport: &mut dyn Transport,
        peer: Addr,
        callbacks: &mut Vec<Callback>,
    ) -> Result<bool, Error> {
        loop {
            let (first, retry) = (self.first, self.post(transport, peer)?);
            self.complete(callbacks);
            // Sends that are done at once complete messages without an event, which makes room for the next ones.
            if retry || self.first == first || self.queued.is_empty() {
                return Ok(retry);
            }
        }
    }

    fn post(&mut self, transport: &mut dyn Transport, peer: Addr) -> Result<bool, Error> {
        if self.peer_close.is_some() {
            return Ok(false);
        }
        let mut retry = self.post_payloads(transport, peer)?;
        while !retry && (self.lengths_posted < self.in_flight.len() || self.begin()) {
            retry = self.post_length(transport, peer)? || self.post_payloads(transport, peer)?;
        }
        Ok(retry)
    }

    /// Takes a message from the queue, if there is one and the windows allow it.
    fn begin(&mut self) -> bool {
        if self.in_flight.len() >= self.depth || self.next_id().wrapping_sub(self.read_by_peer) >= UNREAD_WINDOW {
            return false;
        }
        let Some(QueuedWrite { body, done, .. }) = self.queued.pop_front() else { return false };
        let bytes = body.len();
        let (length, payload, body) = (SendState::Waiting, SendState::Waiting, Some(body));
        self.in_flight.push_back(InFlightWrite { length, payload, bytes, body, done });
        true
    }

    /// Posts the next length. Returns true if the transport must be retried.
    fn post_length(&mut self, transport: &mut dyn Transport, peer: Addr) -> Result<bool, Error> {
        let id = self.first.wrapping_add(self.lengths_posted as u32);
        let Some(entry) = self.in_flight.get_mut(self.lengths_posted) else { return Ok(false) };
        let word = Payload::word(entry.bytes as u64);
        let token = token(Operation::SendLength, self.channel, id);
        let more = self.payloads_in_flight.has_room(entry.bytes, transport.properties().payload_window);
        entry.length = match transport.send(peer, LENGTH | u64::from(id), word, token, more) {
            SendResult::Posted => SendState::Posted,
            SendResult::Done(_) => SendState::Done,
            SendResult::Retry(_) => return Ok(true),
            SendResult::Failed(_, error) => return Err(error),
        };
        self.lengths_posted += 1;
        Ok(false)
    }

    /// Posts payloads after their lengths, as many as the window allows. Returns true if the transport must be retried.
    fn post_payloads(&mut self, transport: &mut dyn Transport, peer: Addr) -> Result<bool, Error> {
        while self.payloads_posted < self.lengths_posted {
            let id = self.first.wrapping_add(self.payloads_posted as u32);
            let entry = &mut self.in_flight[self.payloads_posted];
            if !self.payloads_in_flight.has_room(entry.bytes, transport.properties().payload_window) {
                return Ok(false);
            }
            let Some(body) = entry.body.take() else { return Ok(false) };
            let token = token(Operation::SendPayload, self.channel, id);
            match transport.send(peer, PAYLOAD | u64::from(id), body, token, false) {
                SendResult::Posted => {
                    entry.payload = SendState::Posted;
                    self.payloads_in_flight.begin(entry.bytes);
                }
                SendResult::Done(body) => (entry.payload, entry.body) = (SendState::Done, Some(body)),
                SendResult::Retry(body) => {
                    entry.body = Some(body);
                    return Ok(true);
                }
                SendResult::Failed(body, error) => {
                    entry.body = Some(body);
                    return Err(error);
                }
            }
            self.payloads_posted += 1;
        }
        Ok(false)
    }

    /// Handles the peer's report that it has read every message before `id`. An old or impossible report changes nothing.
    pub fn peer_read_to(&mut self, id: u32) {
        if id.wrapping_sub(self.read_by_peer) <= self.next_id().wrapping_sub(self.read_by_peer) {
            self.read_by_peer = id;
        }
    }

    /// Called when a send has completed.
    pub fn sent(&mut self, operation: Operation, id: u32, body: Payload, callbacks: &mut Vec<Callback>) {
        let Some(entry) = self.in_flight.get_mut(id.wrapping_sub(self.first) as usize) else { return };
        if operation == Operation::SendLength {
            entry.length = SendState::Done;
        } else {
            if entry.payload == SendState::Posted {
                self.payloads_in_flight.end(entry.bytes);
            }
            entry.payload = SendState::Done;
            entry.body = Some(body);
        }
        self.complete(callbacks);
    }

    /// Calls back for complete messages, from the front.
    fn complete(&mut self, callbacks: &mut Vec<Callback>) {
        let whole = |entry: &InFlightWrite| entry.length == SendState::Done && entry.payload == SendState::Done;
        while self.payloads_posted > 0 && self.in_flight.front().is_some_and(whole) {
            let Some(InFlightWrite { body: Some(body), done, .. }) = self.in_flight.pop_front() else { return };
            self.first = self.first.wrapping_add(1);
            self.lengths_posted -= 1;
            self.payloads_posted -= 1;
            callbacks.push(Callback::Write(done, Ok(body)));
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
        (self.lengths_posted, self.payloads_posted, self.payloads_in_flight) = (0, 0, InFlight::default());
        let in_flight = self.in_flight.drain(..).map(|entry| entry.done);
        let queued = self.queued.drain(..).map(|entry| entry.done);
        callbacks.extend(in_flight.chain(queued).map(|done| Callback::Write(done, Err(error.clone()))));
    }
}
