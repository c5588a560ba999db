//! The status of an answer that is not a result: its meaning, and its code and body on the wire.

use crate::{Body, Method, RpcError};

const NO_METHOD: u32 = 1;
const DEADLINE_EXCEEDED: u32 = 2;
const CANCELLED: u32 = 3;
const SHUTTING_DOWN: u32 = 4;
const FAILED: u32 = 5;
const NO_ANSWER: u32 = 6;

/// What a server answers if it has no result for the call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Status {
    /// The server has no such method.
    #[error("the server has no method {0}")]
    NoMethod(Method),
    /// The deadline passed before the method started.
    #[error("the deadline passed before the method started")]
    DeadlineExceeded,
    /// The call was cancelled before the method started, or the method stopped because of the cancellation.
    #[error("the call was cancelled")]
    Cancelled,
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The method failed, with its own error code and message.
    #[error("the method failed ({code}): {text}")]
    Failed {
        /// The method's error code.
        code: u32,
        /// The method's message.
        text: String,
    },
    /// The method panicked, or dropped its responder without an answer.
    #[error("the method ended without an answer")]
    NoAnswer,
}

impl Status {
    /// Returns a failure of the method itself.
    pub fn failed(code: u32, text: impl Into<String>) -> Self {
        Self::Failed { code, text: text.into() }
    }

    /// Returns the code and body of the answer. A message that would make the body longer than `max_body` is truncated.
    pub(crate) fn emit(&self, max_body: usize) -> (u32, Vec<u8>) {
        let code = match self {
            Self::NoMethod(_) => NO_METHOD,
            Self::DeadlineExceeded => DEADLINE_EXCEEDED,
            Self::Cancelled => CANCELLED,
            Self::ShuttingDown => SHUTTING_DOWN,
            Self::Failed { code, text } if max_body >= 4 => {
                let text = truncated(text, max_body - 4);
                return (FAILED, [&code.to_le_bytes()[..], text.as_bytes()].concat());
            }
            Self::Failed { .. } | Self::NoAnswer => NO_ANSWER,
        };
        (code, Vec::new())
    }

    /// Parses the status in an answer of `method`; `None` if the answer is a result. An unknown code means
    /// [`Status::NoAnswer`].
    pub(crate) fn parse(code: u32, method: Method, body: &Body) -> Option<Self> {
        Some(match code {
            0 => return None,
            NO_METHOD => Self::NoMethod(method),
            DEADLINE_EXCEEDED => Self::DeadlineExceeded,
            CANCELLED => Self::Cancelled,
            SHUTTING_DOWN => Self::ShuttingDown,
            FAILED => match body.bytes().split_first_chunk::<4>() {
                Some((code, text)) => {
                    Self::failed(u32::from_le_bytes(*code), String::from_utf8_lossy(text).into_owned())
                }
                None => Self::NoAnswer,
            },
            _ => Self::NoAnswer,
        })
    }
}

/// Returns at most the first `max` bytes of a text, in whole characters.
pub(crate) fn truncated(text: &str, max: usize) -> &str {
    let end = (0..=text.len().min(max)).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// For methods that pass on an error of their own [stream](crate::ServerStream): the caller is gone or no longer
/// interested. An error of a call that the method itself made counts as its own failure.
impl From<RpcError> for Status {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Cancelled => Self::Cancelled,
            other => Self::failed(0, other.to_string()),
        }
    }
}
