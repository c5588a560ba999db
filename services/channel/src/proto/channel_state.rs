//! The state of one channel, and of a listener, inside the engine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::carrier::Peer;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::{Callback, CloseDone, OpenDone};
use crate::{ChannelError, Violation};

/// How far a channel has got.
pub(crate) enum Phase {
    /// The hello has been sent.
    Connecting {
        done: OpenDone,
        deadline: Instant,
        limit: Duration,
    },
    Open,
    /// The channel ended with this error; it posts nothing more.
    Ended(ChannelError),
}

/// A close in progress.
pub(crate) struct Closing {
    pub done: Vec<CloseDone>,
    pub deadline: Instant,
    /// The limit that the deadline was computed from.
    pub limit: Duration,
    /// The close has been sent to the peer, after everything that was written.
    pub announced: bool,
}

/// The peer's side of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemoteChannel {
    /// The peer's number for the channel.
    pub id: u32,
    /// The secret that messages to the peer contain.
    pub secret: u64,
}

/// The state of one channel.
pub(crate) struct ChannelState {
    /// The peer's endpoint in readable form.
    pub peer: Arc<str>,
    /// The peer's number at the carrier.
    pub addr: Peer,
    pub phase: Phase,
    pub outgoing: Outgoing,
    pub incoming: Incoming,
    /// The secret that messages from the peer must contain.
    pub secret: u64,
    pub remote: RemoteChannel,
    /// Length of the longest message that may be written, in bytes.
    pub max_write: usize,
    pub closing: Option<Closing>,
    /// The peer is closing: the id after its last message, and since when this end waits without hearing anything.
    pub remote_close: Option<(u32, Instant)>,
    /// The user has dropped all handles.
    pub released: bool,
    pub last_heard: Instant,
    /// When the ping that is still unanswered was sent.
    pub pinged_at: Option<Instant>,
    /// Whether the channel is on the engine's list of those to pump.
    pub is_scheduled: bool,
}

impl ChannelState {
    pub fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ended(_))
    }

    /// Returns whether the peer is closing and not all of its messages have been read.
    pub fn has_unread(&self) -> bool {
        self.remote_close.is_some_and(|(end, _)| end != self.incoming.next_id())
    }

    /// Returns the error that refuses a write of `len` bytes, if any.
    pub fn refuses_write(&self, len: usize) -> Option<ChannelError> {
        let max = self.max_write;
        match &self.phase {
            Phase::Ended(error) => Some(error.clone()),
            _ if self.closing.is_some() => Some(self.closed_locally()),
            _ if self.remote_close.is_some() => Some(self.closed_by_remote()),
            _ => (len > max).then(|| ChannelError::TooLong { peer: Arc::clone(&self.peer), len, max }),
        }
    }

    /// Returns the error that refuses further reads, if any.
    pub fn refuses_reads(&self) -> Option<ChannelError> {
        match (&self.phase, self.remote_close) {
            (Phase::Ended(error), _) => Some(error.clone()),
            _ if self.closing.is_some() => Some(self.closed_locally()),
            (_, Some((end, _))) if end == self.incoming.next_id() => Some(self.closed_by_remote()),
            _ => None,
        }
    }

    pub fn closed_locally(&self) -> ChannelError {
        ChannelError::ClosedHere { peer: Arc::clone(&self.peer) }
    }

    pub fn closed_by_remote(&self) -> ChannelError {
        ChannelError::Closed { peer: Arc::clone(&self.peer) }
    }

    pub fn protocol_violation(&self, violation: Violation) -> ChannelError {
        ChannelError::Protocol { peer: Arc::clone(&self.peer), violation }
    }
}

/// The state of a listener.
#[derive(Default)]
pub(crate) struct Listening {
    /// Channels that opened and haven't been accepted yet.
    pub arrived: VecDeque<u32>,
    /// Accepts waiting for a channel, with their tickets.
    pub waiting: VecDeque<(u64, OpenDone)>,
}

impl Listening {
    /// Ends all accepts with `error`.
    pub fn fail(&mut self, error: &ChannelError, callbacks: &mut Vec<Callback>) {
        callbacks.extend(self.waiting.drain(..).map(|(_, done)| Callback::Open(done, Err(error.clone()))));
    }

    /// Drops an ended channel; true if it hadn't been accepted yet.
    pub fn drop_channel(&mut self, channel: u32) -> bool {
        let before = self.arrived.len();
        self.arrived.retain(|arrived| *arrived != channel);
        self.arrived.len() < before
    }
}
