//! Errors that end a channel or one operation on it.

use std::sync::Arc;
use std::time::Duration;

use ferrogin_libfabric::Error;
use zerocopy::{Immutable, KnownLayout, TryFromBytes};

use crate::carrier::tags::endpoint::LENGTH_BUFFER;

/// Why a write, a read, a connect or a close failed. The messages name the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer closed the channel. Everything it wrote before that was delivered.
    #[error("{peer} closed the channel")]
    Closed {
        /// The peer.
        peer: Arc<str>,
    },
    /// This side closed the channel.
    #[error("this side closed the channel to {peer}")]
    ClosedHere {
        /// The peer.
        peer: Arc<str>,
    },
    /// This side cancelled the operation.
    #[error("the operation on the channel to {peer} was cancelled")]
    Cancelled {
        /// The peer.
        peer: Arc<str>,
    },
    /// The peer did not answer.
    #[error("{peer} has not answered for {silent:.1?}: it is dead, stopped or cut off")]
    Silent {
        /// The peer.
        peer: Arc<str>,
        /// Time since its last message.
        silent: Duration,
    },
    /// The peer aborted the channel.
    #[error("{peer} aborted the channel: {reason}")]
    Aborted {
        /// The peer.
        peer: Arc<str>,
        /// The reason it sent.
        reason: Reason,
    },
    /// An operation on the channel failed in libfabric.
    #[error("the channel to {peer} failed: {source}")]
    Failed {
        /// The peer.
        peer: Arc<str>,
        /// The libfabric error.
        source: Error,
    },
    /// The peer violated the protocol.
    #[error("{peer} violated the channel protocol: {violation}")]
    Protocol {
        /// The peer.
        peer: Arc<str>,
        /// The violation.
        violation: Violation,
    },
    /// The peer refused the channel.
    #[error("{peer} refused the channel: {reason}")]
    Refused {
        /// The peer.
        peer: Arc<str>,
        /// The reason it sent.
        reason: Reason,
    },
    /// A message is too long. It was not sent, and the channel stays open.
    #[error(
        "a message of {len} bytes to {peer} is longer than {max} bytes, the most that both ends and the provider carry: send it in parts"
    )]
    TooLong {
        /// The peer.
        peer: Arc<str>,
        /// Length of the message in bytes.
        len: usize,
        /// Length of the longest possible message in bytes.
        max: usize,
    },
    /// The peer did not act within the limit.
    #[error("{peer} did not {what} within {limit:.1?}")]
    Timeout {
        /// The peer.
        peer: Arc<str>,
        /// What the peer was expected to do.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The bytes or text are not a usable listener address.
    #[error("this is not a usable address of a channel listener: {what}")]
    BadAddress {
        /// What is wrong with it.
        what: String,
    },
    /// The peer's address cannot be used.
    #[error("{peer} cannot be reached: {source}")]
    Unreachable {
        /// The peer.
        peer: Arc<str>,
        /// The libfabric error.
        source: Error,
    },
    /// No peer can connect to this side.
    #[error("this side cannot listen: {0}")]
    CannotListen(Error),
    /// A callback waited for an operation on its own reactor.
    #[error(
        "a callback cannot wait for {peer}, because its own thread receives the answer: use a callback, or wait on another thread"
    )]
    OwnThread {
        /// The peer.
        peer: Arc<str>,
    },
    /// The reactor has stopped.
    #[error("the reactor that served the channel has stopped")]
    Stopped,
    /// The reactor's endpoint failed as a whole.
    #[error("the endpoint of this side failed: {0}; check the network card of this host (its driver's log)")]
    Endpoint(Error),
}

/// Why a peer refused or aborted a channel; the number goes over the wire.
#[derive(Clone, Copy, Debug, Immutable, KnownLayout, PartialEq, Eq, TryFromBytes, thiserror::Error)]
#[repr(u64)]
pub enum Reason {
    /// No listener has the address.
    #[error("no listener has that address")]
    NotListening = 1,
    /// The versions differ.
    #[error("it has another version of the channel protocol: run the same version of ferrogin on both ends")]
    Version = 2,
    /// The listener's backlog is full, or the endpoint has too many peers.
    #[error("too many channels wait to be accepted, or it has too many peers")]
    Busy = 3,
    /// The two endpoints already have a channel between them.
    #[error("the two endpoints have a channel already: open another reactor")]
    PairInUse = 4,
    /// This side violated the protocol.
    #[error("it detected a protocol violation by this side")]
    Violation = 5,
    /// The peer stopped.
    #[error("it stopped")]
    Stopped = 6,
    /// A later endpoint has the peer's address, or the same endpoint opened a later channel.
    #[error("a later channel from the same address replaced it")]
    Replaced = 7,
    /// A reason from a later version.
    #[error("for a reason that this version does not know")]
    Unknown = 0,
}

impl Reason {
    pub(crate) fn of(code: u64) -> Self {
        Self::try_read_from_bytes(&code.to_ne_bytes()).unwrap_or(Self::Unknown)
    }
}

fn length_size(bytes: usize) -> String {
    if bytes > LENGTH_BUFFER { format!("more than {LENGTH_BUFFER} bytes") } else { format!("{bytes} bytes") }
}

/// How a peer violated the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A length message that is not 8 bytes long.
    #[error("the length of message {id} has {} instead of 8", length_size(*bytes))]
    LengthSize {
        /// Id of the message.
        id: u32,
        /// Size of the length message in bytes; 17 stands for more than 16.
        bytes: usize,
    },
    /// A length beyond the agreed limit.
    #[error("message {id} would have {len} bytes, more than {max}")]
    TooLong {
        /// Id of the message.
        id: u32,
        /// Length of the message in bytes.
        len: u64,
        /// The agreed limit in bytes.
        max: usize,
    },
    /// A repeated id, or an id far from the next one.
    #[error("message {id} arrived twice or far out of order (message {expected} is next)")]
    OutOfTurn {
        /// Id of the message.
        id: u32,
        /// Id of the oldest incomplete message.
        expected: u32,
    },
    /// A payload shorter than its length.
    #[error("message {id} has {got} bytes but its length states {stated}")]
    PayloadLength {
        /// Id of the message.
        id: u32,
        /// The length that the length message states.
        stated: usize,
        /// Length of the payload in bytes.
        got: usize,
    },
    /// A payload longer than its length.
    #[error("message {id} is longer than its length states ({stated} bytes)")]
    PayloadTooLong {
        /// Id of the message.
        id: u32,
        /// The length that the length message states.
        stated: usize,
    },
    /// A part of a message did not arrive.
    #[error("message {id} has begun, but its {missing} did not arrive for {waited:.1?}")]
    Missing {
        /// Id of the message.
        id: u32,
        /// "length" or "payload".
        missing: &'static str,
        /// How long this side waited.
        waited: Duration,
    },
    /// A control message that is not one.
    #[error("a control message is malformed")]
    Control,
    /// A tag that no part of the protocol uses.
    #[error("a message arrived with the unknown tag {tag:#x}")]
    UnknownTag {
        /// The tag.
        tag: u64,
    },
}
