//! One channel inside the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::again::Pair;
use super::engine::{CloseDone, OpenDone};
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::transport::Addr;
use super::{ChannelError, Violation};

/// What users learn of a channel that opened.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    pub channel: u32,
    pub peer: Arc<str>,
    /// Bytes of the longest message that may be written.
    pub max_write: usize,
}

pub(super) enum State {
    /// A hello is out.
    Connecting {
        done: OpenDone,
        deadline: Instant,
        limit: Duration,
    },
    Open,
    /// Over, for this reason; nothing is posted any more.
    Ended(ChannelError),
}

/// A close in progress.
pub(super) struct Closing {
    pub done: Vec<CloseDone>,
    pub deadline: Instant,
    /// The time that was given.
    pub limit: Duration,
    /// The peer was told: all that was written is out.
    pub told: bool,
}

pub(super) struct Link {
    pub peer: Arc<str>,
    /// The name of its endpoint.
    pub name: Box<[u8]>,
    pub addr: Addr,
    pub state: State,
    pub out: Outgoing,
    pub inc: Incoming,
    /// The peer must know it.
    pub secret: u64,
    /// The peer's number of the channel, and its secret.
    pub theirs: (u32, u64),
    pub max_write: usize,
    pub closing: Option<Closing>,
    /// The peer closes: id after its last message, and since when we know.
    pub their_end: Option<(u32, Instant)>,
    /// No user holds it any more.
    pub forgotten: bool,
    pub heard: Instant,
    /// When payloads without a length were last looked for.
    pub looked: Instant,
    /// Since when an answer to a ping is due.
    pub asked: Option<Instant>,
    /// It is to be pumped.
    pub marked: bool,
}

impl Link {
    pub fn is_live(&self) -> bool {
        !matches!(self.state, State::Ended(_))
    }

    /// What the next channel with the same endpoint must know.
    pub fn pair(&self, channel: u32) -> Pair {
        Pair { channel, write: self.out.next_id(), read: self.inc.next_id() }
    }

    /// The peer closes, and has written what is not read yet.
    pub fn has_unread(&self) -> bool {
        self.their_end.is_some_and(|(end, _)| end != self.inc.next_id())
    }

    /// Why writes are refused, if they are.
    pub fn refuses_writes(&self) -> Option<ChannelError> {
        match &self.state {
            State::Ended(error) => Some(error.clone()),
            _ if self.closing.is_some() => Some(self.closed_here()),
            _ if self.their_end.is_some() => Some(self.closed_there()),
            _ => None,
        }
    }

    /// Why reads are refused, if they are.
    pub fn refuses_reads(&self) -> Option<ChannelError> {
        match (&self.state, self.their_end) {
            (State::Ended(error), _) => Some(error.clone()),
            _ if self.closing.is_some() => Some(self.closed_here()),
            (_, Some((end, _))) if end == self.inc.next_id() => Some(self.closed_there()),
            _ => None,
        }
    }

    pub fn closed_here(&self) -> ChannelError {
        ChannelError::ClosedHere { peer: Arc::clone(&self.peer) }
    }

    pub fn closed_there(&self) -> ChannelError {
        ChannelError::Closed { peer: Arc::clone(&self.peer) }
    }

    pub fn broken(&self, violation: Violation) -> ChannelError {
        ChannelError::Protocol { peer: Arc::clone(&self.peer), violation }
    }
}
