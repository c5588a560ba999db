//! How calls and connections end badly.

use std::sync::Arc;
use std::time::Duration;

use crate::TransportError;

/// Why a call has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// The deadline came first. The server is told, and may have done its work or not.
    #[error("{peer} did not answer method {method} within {limit:.1?}")]
    Timeout {
        /// The server.
        peer: Arc<str>,
        /// The method.
        method: u32,
        /// The call's time.
        limit: Duration,
    },
    /// The call was cancelled here.
    #[error("the call was cancelled")]
    Cancelled,
    /// The server answered with an error.
    #[error("{peer}: {status}")]
    Status {
        /// The server.
        peer: Arc<str>,
        /// What it said.
        status: Status,
    },
    /// The connection is over.
    #[error("the connection to {peer} is over: {why}")]
    Lost {
        /// The server.
        peer: Arc<str>,
        /// How it ended.
        why: TransportError,
    },
    /// The peer broke the protocol.
    #[error("{peer} broke the protocol: {violation}")]
    Protocol {
        /// Who.
        peer: Arc<str>,
        /// How.
        violation: Violation,
    },
    /// The server does not take a body of that length.
    #[error("a body of {len} bytes is longer than {max}, the most that {peer} takes")]
    TooLarge {
        /// The server.
        peer: Arc<str>,
        /// Its bytes.
        len: usize,
        /// The most.
        max: usize,
    },
    /// The answer was waited for on a thread that is needed to bring it. The call is cancelled.
    #[error(
        "waiting for {peer} in a callback would keep its answer from coming: use a callback, or wait on another thread"
    )]
    OwnThread {
        /// The server.
        peer: Arc<str>,
    },
}

/// What a server answers instead of a body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// It has no such method.
    #[error("there is no method {0}")]
    NoMethod(u32),
    /// The deadline was over before the method began.
    #[error("the deadline was over before the method began")]
    Late,
    /// The call was cancelled before the method began, or the method gave up because of that.
    #[error("the call was cancelled")]
    Cancelled,
    /// It shuts down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The method failed: a number and words of its own.
    #[error("the method failed ({code}): {text}")]
    Failed {
        /// The method's number for it.
        code: u32,
        /// The method's words.
        text: String,
    },
    /// The method panicked, or ended without an answer.
    #[error("the method ended without an answer")]
    Broken,
}

impl Status {
    /// A method's own failure.
    pub fn failed(code: u32, text: impl Into<String>) -> Self {
        Self::Failed { code, text: text.into() }
    }
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Too short for a header, or not one.
    #[error("a message of {0} bytes is no frame")]
    NoFrame(usize),
    /// Another version.
    #[error("it speaks version {0}; run the same release on both ends")]
    Version(u8),
    /// A kind of frame that there is not.
    #[error("kind {0} of frame is unknown")]
    Kind(u8),
    /// A body longer than was agreed.
    #[error("a body would have {len} bytes, more than {max}")]
    TooLarge {
        /// Said.
        len: u64,
        /// Agreed.
        max: usize,
    },
    /// A message that does not fit its frame.
    #[error("{got} bytes came where at most {expected} were expected")]
    Length {
        /// What came.
        got: usize,
        /// What was left.
        expected: usize,
    },
    /// An answer to what was not asked.
    #[error("it answered call {0}, which there is not")]
    UnknownCall(u64),
    /// A call number that is in use.
    #[error("call {0} came twice")]
    CallTwice(u64),
    /// More calls than were granted.
    #[error("it makes more calls at a time than the {0} it was granted")]
    NoCredit(u32),
    /// A frame that its end does not send.
    #[error("a frame came that this end does not take")]
    Direction,
}
