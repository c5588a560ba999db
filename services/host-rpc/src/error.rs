//! Errors of calls and connections.

use std::sync::Arc;
use std::time::Duration;

use crate::{Method, Status, TransportError};

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// The deadline passed first. The client tells the server; the method may or may not have run.
    #[error("{peer} did not answer method {method} within {limit:.1?}; the method may have run or not")]
    Timeout {
        /// The server.
        peer: Arc<str>,
        /// The method.
        method: Method,
        /// The time limit of the call.
        limit: Duration,
    },
    /// The caller cancelled the call.
    #[error("the call was cancelled")]
    Cancelled,
    /// The server answered with an error.
    #[error("{peer}: {status}")]
    Status {
        /// The server.
        peer: Arc<str>,
        /// Its answer.
        status: Status,
    },
    /// The server answered a streaming call before it took all parts; the answer says why.
    #[error("{peer} has answered and accepts no further parts")]
    Answered {
        /// The server.
        peer: Arc<str>,
    },
    /// The caller sent a part after [`crate::CallStream::finish`].
    #[error("no part can follow finish(): send all parts before it")]
    Finished,
    /// The connection ended before the answer.
    #[error("the connection to {peer} ended before the answer: {why}; connect again")]
    Disconnected {
        /// The server.
        peer: Arc<str>,
        /// How the connection ended.
        why: TransportError,
    },
    /// The server broke the protocol.
    #[error("{peer} broke the RPC protocol: {violation}")]
    Protocol {
        /// The server.
        peer: Arc<str>,
        /// The violation.
        violation: Violation,
    },
    /// The server ended the connection, because it found that this end broke the protocol.
    #[error(
        "{peer} ended the connection, because this end broke the RPC protocol: {why}; run the same release on both ends"
    )]
    Refused {
        /// The server.
        peer: Arc<str>,
        /// The violation, in the server's words.
        why: Arc<str>,
    },
    /// The server does not accept a body that long.
    #[error(
        "a body of {len} bytes is longer than {peer} accepts ({max} bytes); split it, or raise the server's max_body"
    )]
    TooLarge {
        /// The server.
        peer: Arc<str>,
        /// Length of the body in bytes.
        len: usize,
        /// Length of the longest body that the server accepts, in bytes.
        max: usize,
    },
    /// [`crate::Call::wait`] was called on the thread that would deliver the answer. The call is cancelled.
    #[error(
        "waiting for {peer} on this callback thread would block the answer: use a callback, or wait on another thread"
    )]
    WouldDeadlock {
        /// The server.
        peer: Arc<str>,
    },
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The message is shorter than a header or does not start with one.
    #[error("a message of {0} bytes is not a frame")]
    NotAFrame(usize),
    /// The peer uses another version of the protocol.
    #[error("the peer uses protocol version {0}; run the same release on both ends")]
    Version(u8),
    /// The kind of frame is unknown.
    #[error("frame kind {0} is unknown")]
    Kind(u8),
    /// The body is longer than the receiver accepts.
    #[error("the frame announces a body of {len} bytes, and at most {max} are allowed")]
    TooLarge {
        /// The length that the header announces, in bytes.
        len: u64,
        /// Length of the longest body that the receiver accepts, in bytes.
        max: usize,
    },
    /// The length of the message contradicts the frame's header.
    #[error("a message brought {got} bytes of a body where {expected} were missing")]
    Length {
        /// Bytes received.
        got: usize,
        /// Bytes that were missing.
        expected: usize,
    },
    /// The answer names a call that is not open.
    #[error("the answer names call {0}, which is not open")]
    UnknownCall(u64),
    /// The request reuses the number of an open call.
    #[error("call number {0} is already in use")]
    DuplicateCall(u64),
    /// The client has more calls open than the server granted.
    #[error("the client has more calls open than the {0} that the server granted")]
    NoCredit(u32),
    /// More parts of a call arrived than the receiver granted, or a part after the last one.
    #[error("a part of a call arrived without a grant of its receiver")]
    PartNotGranted,
    /// The frame is of a kind that only the other end sends.
    #[error("only this end may send frames of this kind")]
    UnexpectedFrame,
}
