//! What RPC needs of a transport: the narrow trait that the message channel and mlx5 queue pairs implement.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes to send, kept unchanged by the transport until the send's callback.
#[derive(Debug)]
pub enum Bytes {
    /// All of a vector.
    Owned(Vec<u8>),
    /// A part of bytes that others use too.
    Shared(Arc<Vec<u8>>, Range<usize>),
}

impl Bytes {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Shared(bytes, range) => &bytes[range.clone()],
        }
    }
}

/// How a connection ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// One of the ends closed it, as it should.
    #[error("the connection was closed")]
    Closed,
    /// Anything else: the peer died, the network failed. The text names the peer.
    #[error("{0}")]
    Failed(Arc<str>),
}

/// Called when a message is out and its bytes are not used any more, or cannot be sent.
pub type SendDone = Box<dyn FnOnce(Result<(), TransportError>) + Send>;
/// Called with a message.
pub type ReceiveDone = Box<dyn FnOnce(Result<Vec<u8>, TransportError>) + Send>;

/// One connection that carries whole messages in both directions, each direction in order.
///
/// Methods do not block; they may be called from any thread and from callbacks. Every callback is called once, with an error when
/// the connection ends before: sends in the order of sends, receives in the order of receives, one after the
/// other, from a thread of the transport and never from within a method. What is
/// sent and not received yet waits at either side; the transport need not bound it, for RPC does by its credits.
pub trait Transport: Send + Sync + 'static {
    /// The peer, for people.
    fn peer(&self) -> &str;
    /// Bytes of the longest message.
    fn max_message(&self) -> usize;
    /// Sends one message. Two messages sent one after the other by one thread arrive in that order.
    fn send(&self, bytes: Bytes, done: SendDone);
    /// Receives one message.
    fn receive(&self, done: ReceiveDone);
    /// Lets what was sent go out, and ends the connection, at the latest after `limit`. Receives end with
    /// [`TransportError::Closed`].
    fn close(&self, limit: Duration);
    /// True on the thread that calls back, if the transport can tell: whoever waited there for an answer would wait for ever.
    fn is_own_thread(&self) -> bool {
        false
    }
    /// After [`Transport::close`]: what was sent is out and the peer knows of the end, or the limit is over. True where the transport
    /// sees to that by itself, however soon its user ends.
    fn is_closed(&self) -> bool {
        true
    }
}

/// Longer than anybody waits, and short enough to be added to any time.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The time so much after another.
pub(crate) fn later(time: Instant, limit: Duration) -> Instant {
    time + limit.min(FOREVER)
}
