//! Messages on their way to a peer.
//!
//! Each is two sends, which complete in any order, even relative to the sends of other messages. Lengths go out at
//! once. Long payloads go into a stream a few at a time, so that the reader learns the next lengths while a payload is
//! in flight, and posts receives before the payloads arrive. A provider has to buffer or stop a payload that has no
//! receive.

use std::collections::VecDeque;

use ferrogin_libfabric::Error;

use super::endpoint::{Addr, Endpoint, LENGTH, Operation, PAYLOAD, Send, SendResult, SessionId, Token};
use crate::Payload;

/// How many payload bytes a stream gets at a time, if that is more than two payloads: enough to keep the stream busy,
/// but few enough that control data of later payloads doesn't wait long behind them.
pub(crate) const PAYLOAD_WINDOW: usize = 4 << 20;

struct Message {
    /// How many of its two parts haven't been sent. An endpoint reports each once.
    unsent: u8,
    bytes: usize,
    /// None while the endpoint has it.
    body: Option<Payload>,
}

/// Messages on their way to a peer.
pub(crate) struct Outgoing {
    session: SessionId,
    peer: Addr,
    /// Id of the first of `messages`.
    first: u32,
    messages: VecDeque<Message>,
    /// How many messages have their lengths posted, and how many their payloads too.
    lengths_posted: usize,
    payloads_posted: usize,
    /// How many payloads are posted and not complete, and their bytes.
    in_flight: usize,
    bytes_in_flight: usize,
    is_stopped: bool,
}

impl Outgoing {
    pub fn new(session: SessionId, peer: Addr, first: u32) -> Self {
        Self {
            session,
            peer,
            first,
            messages: VecDeque::new(),
            lengths_posted: 0,
            payloads_posted: 0,
            in_flight: 0,
            bytes_in_flight: 0,
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
        self.bytes_in_flight
    }

    /// Adds the next message.
    pub fn push(&mut self, body: Payload) {
        self.messages.push_back(Message { unsent: 2, bytes: body.len(), body: Some(body) });
    }

    /// Returns whether another payload of `len` bytes may start: two always may, more only up to the endpoint's window.
    fn has_room(&self, len: usize, endpoint: &dyn Endpoint) -> bool {
        self.in_flight < 2 || self.bytes_in_flight.saturating_add(len) <= endpoint.abilities().payload_window
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
        let bytes = self.messages[self.lengths_posted].bytes;
        let token = Token { operation: Operation::SendLength, session: Some(self.session), id };
        let (tag, body, more) = (LENGTH | u64::from(id), Payload::word(bytes as u64), self.has_room(bytes, endpoint));
        match endpoint.send(Send { to: self.peer, tag, body, token, more }) {
            SendResult::Posted => {}
            SendResult::Done(_) => self.messages[self.lengths_posted].unsent -= 1,
            SendResult::Retry(_) => return Ok(true),
            SendResult::Failed(_, error) => return Err(error),
        }
        self.lengths_posted += 1;
        Ok(false)
    }

    /// Posts payloads after their lengths, as many as the window allows. Returns true if the endpoint must be retried.
    fn post_payloads(&mut self, endpoint: &mut dyn Endpoint) -> Result<bool, Error> {
        while self.payloads_posted < self.lengths_posted {
            let id = self.first.wrapping_add(self.payloads_posted as u32);
            if !self.has_room(self.messages[self.payloads_posted].bytes, endpoint) {
                return Ok(false);
            }
            let message = &mut self.messages[self.payloads_posted];
            let Some(body) = message.body.take() else { return Ok(false) };
            let token = Token { operation: Operation::SendPayload, session: Some(self.session), id };
            match endpoint.send(Send { to: self.peer, tag: PAYLOAD | u64::from(id), body, token, more: false }) {
                SendResult::Posted => {
                    self.in_flight += 1;
                    self.bytes_in_flight += message.bytes;
                }
                SendResult::Done(body) => {
                    message.unsent -= 1;
                    message.body = Some(body);
                }
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
            message.unsent -= 1;
        }
    }

    /// Called when the payload of a message has been sent.
    pub fn payload_sent(&mut self, id: u32, body: Payload) {
        if let Some(message) = self.messages.get_mut(id.wrapping_sub(self.first) as usize) {
            message.unsent -= 1;
            message.body = Some(body);
            self.in_flight -= 1;
            self.bytes_in_flight -= message.bytes;
        }
    }

    /// Takes the first message, with its id, if both of its parts have been sent.
    pub fn take_sent(&mut self) -> Option<(u32, Payload)> {
        if self.messages.front()?.unsent > 0 {
            return None;
        }
        let id = self.first;
        self.first = id.wrapping_add(1);
        self.lengths_posted -= 1;
        self.payloads_posted -= 1;
        Some((id, self.messages.pop_front()?.body?))
    }
}
