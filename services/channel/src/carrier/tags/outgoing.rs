//! Messages on their way to a peer.
//!
//! Each is two sends, which complete in any order, even relative to the sends of other messages. Lengths go out at
//! once. Long payloads go into a stream a few at a time, so that the reader learns the next lengths while a payload is
//! in flight, and posts receives before the payloads arrive. A provider has to buffer or stop a payload that has no
//! receive.

use std::collections::VecDeque;

use ferrogin_libfabric::Error;

use super::endpoint::{Addr, Endpoint, LENGTH, Operation, PAYLOAD, Send, SendResult, token};
use crate::Payload;

/// How many payload bytes a stream gets at a time, if that is more than two payloads: enough to keep the stream busy,
/// but few enough that control data of later payloads doesn't wait long behind them.
pub(crate) const PAYLOAD_WINDOW: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendState {
    Waiting,
    Posted,
    Done,
}

struct Message {
    length: SendState,
    payload: SendState,
    bytes: usize,
    /// None while the endpoint has it.
    body: Option<Payload>,
}

/// Number and bytes of the payloads in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct InFlight {
    count: usize,
    bytes: usize,
}

impl InFlight {
    /// Returns whether another payload of `len` bytes may start: two always may, more only up to `limit` bytes in all.
    fn has_room(self, len: usize, limit: usize) -> bool {
        self.count < 2 || self.bytes.saturating_add(len) <= limit
    }
}

/// Messages on their way to a peer.
pub(crate) struct Outgoing {
    session: u32,
    peer: Addr,
    /// Id of the first of `messages`.
    first: u32,
    messages: VecDeque<Message>,
    /// How many messages have their lengths posted, and how many their payloads too.
    lengths_posted: usize,
    payloads_posted: usize,
    /// Payloads that are posted and not complete.
    in_flight: InFlight,
    is_stopped: bool,
}

impl Outgoing {
    pub fn new(session: u32, peer: Addr, first: u32) -> Self {
        Self {
            session,
            peer,
            first,
            messages: VecDeque::new(),
            lengths_posted: 0,
            payloads_posted: 0,
            in_flight: InFlight::default(),
            is_stopped: false,
        }
    }

    /// Sets the id of the first message, before any is sent.
    pub fn start_at(&mut self, id: u32) {
        self.first = id;
    }

    /// Returns the id that the next message gets.
    pub fn next_id(&self) -> u32 {
        self.first.wrapping_add(self.messages.len() as u32)
    }

    /// Returns the bytes of payloads that are posted and not complete.
    pub fn bytes_in_flight(&self) -> usize {
        self.in_flight.bytes
    }

    /// Adds the next message.
    pub fn push(&mut self, body: Payload) {
        let (length, payload, bytes) = (SendState::Waiting, SendState::Waiting, body.len());
        self.messages.push_back(Message { length, payload, bytes, body: Some(body) });
    }

    /// Posts nothing more.
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Posts what can be posted. Returns true if the endpoint must be retried.
    pub fn pump(&mut self, endpoint: &mut dyn Endpoint) -> Result<bool, Error> {
        if self.is_stopped {
            return Ok(false);
        }
        let mut retry = self.post_payloads(endpoint)?;
        while !retry && self.lengths_posted < self.messages.len() {
            retry = self.post_length(endpoint)? || self.post_payloads(endpoint)?;
        }
        Ok(retry)
    }

    /// Posts the next length. Returns true if the endpoint must be retried.
    fn post_length(&mut self, endpoint: &mut dyn Endpoint) -> Result<bool, Error> {
        let id = self.first.wrapping_add(self.lengths_posted as u32);
        let Some(message) = self.messages.get_mut(self.lengths_posted) else { return Ok(false) };
        let more = self.in_flight.has_room(message.bytes, endpoint.abilities().payload_window);
        let (body, token) = (Payload::word(message.bytes as u64), token(Operation::SendLength, self.session, id));
        let send = Send { to: self.peer, tag: LENGTH | u64::from(id), body, token, more };
        message.length = match endpoint.send(send) {
            SendResult::Posted => SendState::Posted,
            SendResult::Done(_) => SendState::Done,
            SendResult::Retry(_) => return Ok(true),
            SendResult::Failed(_, error) => return Err(error),
        };
        self.lengths_posted += 1;
        Ok(false)
    }

    /// Posts payloads after their lengths, as many as the window allows. Returns true if the endpoint must be retried.
    fn post_payloads(&mut self, endpoint: &mut dyn Endpoint) -> Result<bool, Error> {
        while self.payloads_posted < self.lengths_posted {
            let id = self.first.wrapping_add(self.payloads_posted as u32);
            let message = &mut self.messages[self.payloads_posted];
            if !self.in_flight.has_room(message.bytes, endpoint.abilities().payload_window) {
                return Ok(false);
            }
            let Some(body) = message.body.take() else { return Ok(false) };
            let token = token(Operation::SendPayload, self.session, id);
            match endpoint.send(Send { to: self.peer, tag: PAYLOAD | u64::from(id), body, token, more: false }) {
                SendResult::Posted => {
                    message.payload = SendState::Posted;
                    self.in_flight.count += 1;
                    self.in_flight.bytes += message.bytes;
                }
                SendResult::Done(body) => (message.payload, message.body) = (SendState::Done, Some(body)),
                SendResult::Retry(body) => {
                    message.body = Some(body);
                    return Ok(true);
                }
                SendResult::Failed(body, error) => {
                    message.body = Some(body);
                    return Err(error);
                }
            }
            self.payloads_posted += 1;
        }
        Ok(false)
    }

    /// Called when the length of a message has been sent.
    pub fn length_sent(&mut self, id: u32) {
        if let Some(message) = self.messages.get_mut(id.wrapping_sub(self.first) as usize) {
            message.length = SendState::Done;
        }
    }

    /// Called when the payload of a message has been sent.
    pub fn payload_sent(&mut self, id: u32, body: Payload) {
        if let Some(message) = self.messages.get_mut(id.wrapping_sub(self.first) as usize) {
            (message.payload, message.body) = (SendState::Done, Some(body));
            self.in_flight.count -= 1;
            self.in_flight.bytes -= message.bytes;
        }
    }

    /// Takes the first message, with its id, if both of its parts have been sent.
    pub fn take_sent(&mut self) -> Option<(u32, Payload)> {
        let first = self.messages.front()?;
        if first.length != SendState::Done || first.payload != SendState::Done {
            return None;
        }
        let id = self.first;
        self.first = id.wrapping_add(1);
        self.lengths_posted -= 1;
        self.payloads_posted -= 1;
        Some((id, self.messages.pop_front()?.body?))
    }
}
