//! The interface between RPC and the transport that carries its messages, and the message channel behind that
//! interface.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrogin_channel::{Channel, ChannelError, Payload};

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// One of the two ends closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// The connection failed: the peer died or the network failed. The text names the peer.
    #[error("{0}")]
    Failed(Arc<str>),
}

/// Callback of a send: the message is out and the transport no longer uses its bytes, or the send failed.
pub type SendDone = Box<dyn FnOnce(Result<(), TransportError>) + Send>;
/// Callback of a receive.
pub type ReceiveDone = Box<dyn FnOnce(Result<Vec<u8>, TransportError>) + Send>;

/// One connection that carries whole messages in both directions, each direction in order.
///
/// Methods do not block; any thread and any callback may call them. The transport calls every callback exactly once,
/// with an error if the connection ends first. Callbacks of sends run in the order of the sends, callbacks of receives
/// in the order of the receives, one at a time, on a thread of the transport and never from within a method. The
/// transport need not limit how many messages are sent but not yet received: RPC credits do.
pub trait Transport: Send + Sync + 'static {
    /// Returns the peer's name, for log lines and errors.
    fn peer(&self) -> &str;
    /// Returns the length of the longest message in bytes.
    fn max_message(&self) -> usize;
    /// Sends one message. Messages that one thread sends one after another arrive in that order.
    fn send(&self, message: Payload, done: SendDone);
    /// Receives one message.
    fn receive(&self, done: ReceiveDone);
    /// Sends queued messages and then ends the connection, after `limit` at the latest. Outstanding receives end with
    /// [`TransportError::Closed`]; the peer's receives do so after they got every message sent before.
    fn close(&self, limit: Duration);
    /// Returns true on the thread that runs the callbacks, if the transport can tell. Waiting for an answer on that
    /// thread would never end.
    fn is_own_thread(&self) -> bool {
        false
    }
    /// After [`Transport::close`]: true once everything queued is out and the peer knows of the end, or the limit has
    /// passed. A transport that guarantees both even if the process exits at once always returns true.
    fn is_closed(&self) -> bool {
        true
    }
}

fn transport_error(error: &ChannelError) -> TransportError {
    match error {
        ChannelError::Closed { .. } | ChannelError::ClosedHere { .. } | ChannelError::Stopped => TransportError::Closed,
        other => TransportError::Failed(other.to_string().into()),
    }
}

impl Transport for Channel {
    fn peer(&self) -> &str {
        Self::peer(self)
    }

    fn max_message(&self) -> usize {
        Self::max_message(self)
    }

    fn send(&self, message: Payload, done: SendDone) {
        self.write(message, move |result| done(result.map(Payload::recycle).map_err(|e| transport_error(&e))));
    }

    fn receive(&self, done: ReceiveDone) {
        self.read(move |result| done(result.map_err(|e| transport_error(&e))));
    }

    fn close(&self, limit: Duration) {
        drop(Self::close(self, limit));
    }

    fn is_own_thread(&self) -> bool {
        Self::is_own_thread(self)
    }

    fn is_closed(&self) -> bool {
        Self::is_closed(self)
    }
}

/// Stands for "no limit": a hundred years, which can still be added to any [`Instant`].
pub(crate) const NO_LIMIT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Returns the time `limit` after `start`.
pub(crate) fn deadline_after(start: Instant, limit: Duration) -> Instant {
    start + limit.min(NO_LIMIT)
}
