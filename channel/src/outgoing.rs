//! The writing half of a channel: messages under way in the order of their ids, and those that wait for room.
//!
//! Each message is two sends, which complete in any order, those of later messages before those of earlier ones too. A
//! completion only marks; [`Outgoing::settle`] then looks from the front and calls whoever is whole.
//!
//! Lengths go out at once, and into a stream long payloads a few at a time: so the reader learns the next lengths while a payload
//! is on its way, and has receives posted before their payloads come. A provider that gets a payload for which there is none must
//! keep or stop it.

use std::collections::VecDeque;

use super::engine::{Call, Operation, token};
use super::transport::{Addr, Sending, Transport, UnderWay};
use super::wire::{LENGTH, PAYLOAD};
use super::{ChannelError, Payload, WriteDone};
use ferrogin_libfabric::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Waiting,
    Posted,
    Done,
}

struct Flying {
    length: Part,
    payload: Part,
    bytes: usize,
    /// Here before it is posted and after it has completed.
    body: Option<Payload>,
    done: WriteDone,
}

struct Queued {
    ticket: u64,
    body: Payload,
    done: WriteDone,
}

/// Messages that may be with the peer without having been read there.
pub(super) const AHEAD: u32 = 256;

/// The writing half.
pub(super) struct Outgoing {
    channel: u32,
    /// Id of the front of `flying`.
    first: u32,
    flying: VecDeque<Flying>,
    /// Entries of `flying` whose lengths are posted, and those of them whose payloads are too.
    lengths: usize,
    posted: usize,
    /// Payloads that are posted and not completed.
    payloads: UnderWay,
    queued: VecDeque<Queued>,
    depth: usize,
    /// The peer has read everything before this message.
    read: u32,
    /// The peer closes: the id of the first message that it has not read, and what that one and later ones end with.
    end: Option<(u32, ChannelError)>,
}

impl Outgoing {
    pub fn new(channel: u32, start: u32, depth: usize) -> Self {
        Self {
            channel,
            first: start,
            flying: VecDeque::new(),
            lengths: 0,
            posted: 0,
            payloads: UnderWay::default(),
            queued: VecDeque::new(),
            depth,
            read: start,
            end: None,
        }
    }

    /// Counts from another id; nothing was written yet.
    pub fn start_at(&mut self, id: u32) {
        (self.first, self.read) = (id, id);
    }

    /// The id that the next message gets.
    pub fn next_id(&self) -> u32 {
        self.first.wrapping_add(self.flying.len() as u32)
    }

    /// Nothing is under way or waits.
    pub fn is_idle(&self) -> bool {
        self.flying.is_empty() && self.queued.is_empty()
    }

    /// Bytes that are posted and not completed.
    pub fn bytes_under_way(&self) -> usize {
        self.payloads.bytes()
    }

    pub fn push(&mut self, ticket: u64, body: Payload, done: WriteDone) {
        self.queued.push_back(Queued { ticket, body, done });
    }

    /// Takes a write back that has not begun.
    pub fn cancel(&mut self, ticket: u64) -> Option<WriteDone> {
        let at = self.queued.iter().position(|queued| queued.ticket == ticket)?;
        self.queued.remove(at).map(|queued| queued.done)
    }

    /// Posts what can be posted. True when the transport said "again".
    pub fn pump<T: Transport>(&mut self, transport: &mut T, peer: Addr, calls: &mut Vec<Call>) -> Result<bool, Error> {
        let again = self.post(transport, peer)?;
        self.settle(calls);
        Ok(again)
    }

    fn post<T: Transport>(&mut self, transport: &mut T, peer: Addr) -> Result<bool, Error> {
        if self.end.is_some() {
            return Ok(false);
        }
        let mut again = self.post_payloads(transport, peer)?;
        while !again && (self.lengths < self.flying.len() || self.begin()) {
            again = self.post_length(transport, peer)? || self.post_payloads(transport, peer)?;
        }
        Ok(again)
    }

    /// Takes a message from the queue, if there is one and it may begin.
    fn begin(&mut self) -> bool {
        if self.flying.len() >= self.depth || self.next_id().wrapping_sub(self.read) >= AHEAD {
            return false;
        }
        let Some(Queued { body, done, .. }) = self.queued.pop_front() else { return false };
        let bytes = body.len();
        let (length, payload, body) = (Part::Waiting, Part::Waiting, Some(body));
        self.flying.push_back(Flying { length, payload, bytes, body, done });
        true
    }

    /// Posts the length of the next message that has not posted it. True when the transport said "again".
    fn post_length<T: Transport>(&mut self, transport: &mut T, peer: Addr) -> Result<bool, Error> {
        let id = self.first.wrapping_add(self.lengths as u32);
        let Some(entry) = self.flying.get_mut(self.lengths) else { return Ok(false) };
        let word = Payload::word(entry.bytes as u64);
        let token = token(Operation::SendLength, self.channel, id);
        let more = self.payloads.has_room(entry.bytes, transport.payloads_at_a_time());
        entry.length = match transport.send(peer, LENGTH | u64::from(id), word, token, more) {
            Sending::Posted => Part::Posted,
            Sending::Done(_) => Part::Done,
            Sending::Again(_) => return Ok(true),
            Sending::Failed(_, error) => return Err(error),
        };
        self.lengths += 1;
        Ok(false)
    }

    /// Posts payloads behind their lengths, as many as may be. True when the transport said "again".
    fn post_payloads<T: Transport>(&mut self, transport: &mut T, peer: Addr) -> Result<bool, Error> {
        while self.posted < self.lengths {
            let id = self.first.wrapping_add(self.posted as u32);
            let entry = &mut self.flying[self.posted];
            if !self.payloads.has_room(entry.bytes, transport.payloads_at_a_time()) {
                return Ok(false);
            }
            let Some(body) = entry.body.take() else { return Ok(false) };
            let token = token(Operation::SendPayload, self.channel, id);
            match transport.send(peer, PAYLOAD | u64::from(id), body, token, false) {
                Sending::Posted => {
                    entry.payload = Part::Posted;
                    self.payloads.begin(entry.bytes);
                }
                Sending::Done(body) => (entry.payload, entry.body) = (Part::Done, Some(body)),
                Sending::Again(body) => {
                    entry.body = Some(body);
                    return Ok(true);
                }
                Sending::Failed(body, error) => {
                    entry.body = Some(body);
                    return Err(error);
                }
            }
            self.posted += 1;
        }
        Ok(false)
    }

    /// The peer says that it has read everything before message `id`. What is old or impossible changes nothing.
    pub fn read_to(&mut self, id: u32) {
        if id.wrapping_sub(self.read) <= self.next_id().wrapping_sub(self.read) {
            self.read = id;
        }
    }

    /// A send completed.
    pub fn sent(&mut self, operation: Operation, id: u32, body: Payload, calls: &mut Vec<Call>) {
        let Some(entry) = self.flying.get_mut(id.wrapping_sub(self.first) as usize) else { return };
        if operation == Operation::SendLength {
            entry.length = Part::Done;
        } else {
            if entry.payload == Part::Posted {
                self.payloads.end(entry.bytes);
            }
            entry.payload = Part::Done;
            entry.body = Some(body);
        }
        self.settle(calls);
    }

    fn settle(&mut self, calls: &mut Vec<Call>) {
        let whole = |entry: &Flying| entry.length == Part::Done && entry.payload == Part::Done;
        while self.posted > 0 && self.flying.front().is_some_and(whole) {
            let Some(Flying { body: Some(body), done, .. }) = self.flying.pop_front() else { return };
            self.first = self.first.wrapping_add(1);
            self.lengths -= 1;
            self.posted -= 1;
            calls.push(Call::Write(done, Ok(body)));
        }
        if let Some((unread, error)) = &self.end
            && unread.wrapping_sub(self.first).wrapping_sub(1) as usize >= self.flying.len()
        {
            let error = error.clone();
            self.fail(&error, calls);
        }
    }

    /// The peer closes and has read everything before message `unread`: those writes come to their end, the others fail after them.
    pub fn end_at(&mut self, unread: u32, error: ChannelError, calls: &mut Vec<Call>) {
        self.end = Some((unread, error));
        self.settle(calls);
    }

    /// Ends all writes with an error, in their order.
    pub fn fail(&mut self, error: &ChannelError, calls: &mut Vec<Call>) {
        (self.lengths, self.posted, self.payloads) = (0, 0, UnderWay::default());
        let flying = self.flying.drain(..).map(|entry| entry.done);
        let queued = self.queued.drain(..).map(|entry| entry.done);
        calls.extend(flying.chain(queued).map(|done| Call::Write(done, Err(error.clone()))));
    }
}
