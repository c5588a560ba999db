//! Requests to the engine's thread.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ferrogin_channel::Payload;

use crate::{ReceiveDone, SendDone};

/// A request to the engine.
pub(super) enum Request {
    Send(Payload, SendDone),
    Receive(ReceiveDone),
    Close(Instant),
}

#[derive(Default)]
pub(super) struct Inbox {
    pub queue: VecDeque<Request>,
    /// The engine has ended and reads no further requests.
    pub ended: bool,
}

#[derive(Default)]
pub(super) struct Shared {
    inbox: Mutex<Inbox>,
}

impl Shared {
    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}
