//! The channel protocol, without I/O or threads: user requests and events of a [`carrier`] go in, frames for the carrier and [`Callback`]s
//! come out.

pub(crate) mod carrier;
pub(crate) mod channel_state;
pub(crate) mod engine;
pub(crate) mod incoming;
pub(crate) mod name;
pub(crate) mod outgoing;
pub(crate) mod wire;

use std::sync::Arc;

use crate::{ChannelError, Payload};

/// The callback of a write.
pub(crate) type WriteDone = Box<dyn FnOnce(Result<Payload, ChannelError>) + Send>;
/// The callback of a read, with the message and its number among the messages read.
pub(crate) type ReadDone = Box<dyn FnOnce(Result<(u64, Vec<u8>), ChannelError>) + Send>;
/// The callback of a connect or an accept.
pub(crate) type OpenDone = Box<dyn FnOnce(Result<Opened, ChannelError>) + Send>;
/// The callback of a close.
pub(crate) type CloseDone = Box<dyn FnOnce(Result<(), ChannelError>) + Send>;

/// A channel that opened.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    pub channel: u32,
    pub peer: Arc<str>,
    /// Length of the longest message that may be written, in bytes.
    pub max_write: usize,
}

/// A callback that is due, with its argument. A read also has its ticket.
pub(crate) enum Callback {
    Write(WriteDone, Result<Payload, ChannelError>),
    Read(ReadDone, Result<(u64, Vec<u8>), ChannelError>, u64),
    Open(OpenDone, Result<Opened, ChannelError>),
    Close(CloseDone, Result<(), ChannelError>),
}

impl Callback {
    pub fn run(self) {
        match self {
            Self::Write(done, result) => done(result),
            Self::Read(done, result, _) => done(result),
            Self::Open(done, result) => done(result),
            Self::Close(done, result) => done(result),
        }
    }
}
