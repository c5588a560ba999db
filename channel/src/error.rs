//! What ends a channel, or one operation on it.

use std::sync::Arc;
use std::time::Duration;

use ferrogin_libfabric::Error;

use crate::Matching;
use crate::proto::tags::LENGTH_BUFFER;

/// Why a write, a read, a connect or a close did not come to its end. Messages name the peer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer closed the channel; what it had written before was delivered.
    #[error("{peer} closed the channel")]
    Closed {
        /// Who.
        peer: Arc<str>,
    },
    /// This side closed the channel.
    #[error("the channel to {peer} was closed here")]
    ClosedHere {
        /// To whom.
        peer: Arc<str>,
    },
    /// The operation was cancelled here.
    #[error("the operation on the channel to {peer} was cancelled")]
    Cancelled {
        /// To whom.
        peer: Arc<str>,
    },
    /// The peer did not answer for so long.
    #[error("{peer} has not answered for {silent:.1?}: it is dead, stopped or cut off")]
    Silent {
        /// Who.
        peer: Arc<str>,
        /// Since its last sign of life.
        silent: Duration,
    },
    /// The peer gave the channel up.
    #[error("{peer} gave up the channel: {reason}")]
    Aborted {
        /// Who.
        peer: Arc<str>,
        /// What it said.
        reason: Reason,
    },
    /// libfabric failed an operation on the channel.
    #[error("the channel to {peer} failed: {source}")]
    Failed {
        /// To whom.
        peer: Arc<str>,
        /// What libfabric said.
        source: Error,
    },
    /// The peer broke the protocol.
    #[error("{peer} broke the channel's protocol: {violation}")]
    Protocol {
        /// Who.
        peer: Arc<str>,
        /// How.
        violation: Violation,
    },
    /// The peer did not let us in.
    #[error("{peer} refused the channel: {reason}")]
    Refused {
        /// Who.
        peer: Arc<str>,
        /// Why.
        reason: Reason,
    },
    /// The two ends match tags in different ways.
    #[error(
        "{peer} uses {remote}, this reactor uses {local}: open both reactors with the same Config::matching, over providers that have it"
    )]
    MatchingDiffers {
        /// The peer.
        peer: Arc<str>,
        /// The matching of this reactor.
        local: Matching,
        /// The matching of the peer.
        remote: Matching,
    },
    /// A message is longer than can be carried. It was not sent; the channel lives on.
    #[error(
        "a message of {len} bytes to {peer} is longer than {max} bytes, the most that both ends and the provider carry: send it in pieces"
    )]
    TooLong {
        /// To whom.
        peer: Arc<str>,
        /// Its bytes.
        len: usize,
        /// The most.
        max: usize,
    },
    /// Nobody answered in time.
    #[error("{peer} did not {what} within {limit:.1?}")]
    Timeout {
        /// Who.
        peer: Arc<str>,
        /// What was waited for.
        what: &'static str,
        /// How long.
        limit: Duration,
    },
    /// The bytes are no address of a listener.
    #[error("these bytes are not the address of a channel listener: {what}")]
    BadAddress {
        /// What is wrong.
        what: &'static str,
    },
    /// The peer's address cannot be used.
    #[error("{peer} cannot be reached: {source}")]
    Unreachable {
        /// Who.
        peer: Arc<str>,
        /// What libfabric said.
        source: Error,
    },
    /// An operation was waited for on the thread that serves it.
    #[error(
        "waiting for {peer} in a callback would wait for ever, for this thread brings the answer: use a callback, or wait on another thread"
    )]
    OwnThread {
        /// For whom.
        peer: Arc<str>,
    },
    /// The reactor has stopped.
    #[error("the reactor that served the channel has stopped")]
    Stopped,
    /// The reactor's endpoint failed as a whole.
    #[error("the endpoint failed: {0}")]
    Endpoint(Error),
}

/// What a peer says when it refuses or gives up a channel; the number goes over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u64)]
pub enum Reason {
    /// Nobody listens with that address.
    #[error("nobody listens at that address")]
    NotListening = 1,
    /// The versions differ.
    #[error("it speaks another version of the channel protocol: run the same ferrogin on both ends")]
    Version = 2,
    /// The listener's queue is full.
    #[error("too many channels wait to be accepted, or too many peers are known")]
    Busy = 3,
    /// The two endpoints have a channel between them.
    #[error("the two endpoints have a channel already: open another reactor")]
    PairInUse = 4,
    /// We broke the protocol, it says.
    #[error("it says that we broke the protocol")]
    Violation = 5,
    /// It was told to.
    #[error("it ended")]
    Stopped = 6,
    /// Another endpoint, or another channel of the same, is at its address now.
    #[error("somebody else is at its address now")]
    Replaced = 7,
    /// The two ends match tags in different ways.
    #[error("it matches tags in another way")]
    Matching = 8,
    /// Something newer.
    #[error("for a reason that this version does not know")]
    Unknown = 0,
}

impl Reason {
    pub(crate) fn of(code: u64) -> Self {
        [
            Self::NotListening,
            Self::Version,
            Self::Busy,
            Self::PairInUse,
            Self::Violation,
            Self::Stopped,
            Self::Replaced,
            Self::Matching,
        ]
        .into_iter()
        .find(|reason| *reason as u64 == code)
        .unwrap_or(Self::Unknown)
    }
}

fn length_size(bytes: usize) -> String {
    if bytes > LENGTH_BUFFER { format!("more than {LENGTH_BUFFER} bytes") } else { format!("{bytes} bytes") }
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A length message that is not 8 bytes long.
    #[error("the length of message {id} has {} instead of 8", length_size(*bytes))]
    LengthSize {
        /// Whose.
        id: u32,
        /// What came; 17 stands for all beyond 16.
        bytes: usize,
    },
    /// A length beyond what was agreed.
    #[error("message {id} would have {len} bytes, more than {max}")]
    TooLong {
        /// Which.
        id: u32,
        /// Said.
        len: u64,
        /// Agreed.
        max: usize,
    },
    /// Two lengths for one id, or for one that is over.
    #[error("message {id} came twice or far out of turn (message {expected} is next)")]
    OutOfTurn {
        /// Which.
        id: u32,
        /// The oldest that is not complete.
        expected: u32,
    },
    /// A payload shorter than its length.
    #[error("message {id} has {got} bytes but its length said {said}")]
    PayloadLength {
        /// Which.
        id: u32,
        /// The length message.
        said: usize,
        /// The payload.
        got: usize,
    },
    /// A payload longer than its length.
    #[error("message {id} is longer than its length said ({said} bytes)")]
    PayloadTooLong {
        /// Which.
        id: u32,
        /// The length message.
        said: usize,
    },
    /// The rest of a message did not come.
    #[error("message {id} was begun, but its {missing} did not come for {waited:.1?}")]
    Missing {
        /// Which.
        id: u32,
        /// "length" or "payload".
        missing: &'static str,
        /// How long we waited.
        waited: Duration,
    },
    /// A tag that no part of the protocol uses.
    #[error("a message came with the unknown tag {tag:#x}")]
    UnknownTag {
        /// The tag.
        tag: u64,
    },
}
