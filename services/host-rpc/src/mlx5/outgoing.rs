//! Posted messages, in the order of sends, and their callbacks.

use std::collections::VecDeque;

use super::memory::ExposedPayload;
use crate::{SendDone, TransportError};

/// The bytes that the peer reads, and the index of the window that exposes them.
pub(super) type Exposed = (ExposedPayload, usize);

/// A message that is posted, or whose callback is waiting for an earlier message's.
struct Message {
    done: SendDone,
    finished: bool,
    /// Set for a rendezvous message that the peer hasn't read yet.
    exposed: Option<Exposed>,
}

#[derive(Default)]
pub(super) struct Outgoing {
    messages: VecDeque<Message>,
    /// The number of the first message.
    first: u64,
}

impl Outgoing {
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds a message and returns its number.
    pub fn push(&mut self, done: SendDone, exposed: Option<Exposed>) -> u64 {
        let number = self.first + self.messages.len() as u64;
        self.messages.push_back(Message { done, finished: false, exposed });
        number
    }

    /// Marks a message as sent. Runs its callback, after those of the earlier messages.
    pub fn finish(&mut self, number: u64) {
        if let Some(message) = self.messages.get_mut((number - self.first) as usize) {
            message.finished = true;
            message.exposed = None;
        }
        while self.messages.front().is_some_and(|message| message.finished) {
            self.first += 1;
            if let Some(message) = self.messages.pop_front() {
                (message.done)(Ok(()));
            }
        }
    }

    /// Called when the peer has read the message that this window exposes.
    pub fn finish_exposed(&mut self, window: usize) {
        let uses_window = |message: &Message| message.exposed.as_ref().is_some_and(|(_, index)| *index == window);
        if let Some(at) = self.messages.iter().position(uses_window) {
            self.finish(self.first + at as u64);
        }
    }

    /// Runs the callbacks of all messages.
    pub fn fail(&mut self, error: &TransportError) {
        for message in self.messages.drain(..) {
            (message.done)(if message.finished { Ok(()) } else { Err(error.clone()) });
        }
    }
}
