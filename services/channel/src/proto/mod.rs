//! The channel protocol, without I/O or threads: user requests and events of a [`carrier`] go in, frames for the
//! carrier and [`Callback`]s come out.
//!
//! Each message of a direction has a 32-bit id. The first id is agreed when the channel opens; ids count up and wrap
//! to 0. Control messages open, watch and close channels ([`wire`] has the layout):
//!
//! | kind | meaning |
//! |---|---|
//! | hello, welcome | exchange channel numbers, secrets, first ids, and the longest message that each side accepts |
//! | refuse | the listener refuses a hello, with a reason |
//! | path challenge, path response | the endpoint that sent a hello proves that it has the name in it |
//! | ping, pong | liveness |
//! | read | the sender has read every message before an id, and whether a read waits for that one |
//! | offer | the next message is too long to wait unread |
//! | close, close ack | an orderly close |
//! | abort | the channel ends, with a reason |
//!
//! **Secrets.** A hello has the listener's secret, and without it gets no answer, so no process can make an endpoint
//! write to a third one; that connect times out. Every later control message has the secret that its receiver chose
//! for the channel.
//!
//! **Unread messages.** A channel has at most 256 messages sent and unread, so a fast writer doesn't fill the queues of
//! the reader's provider. The reader reports every 64; further writes wait in order, and so do their callbacks. Where
//! the carrier limits unread bytes too (over TCP 16 MiB), the reader also reports after a quarter of them, and a
//! message for which no report would make room is offered: it's sent once a read waits for it.
//!
//! **Close.** A close waits for its confirmation, so nothing is lost even if closing the endpoint drops what a card
//! hasn't delivered, as over `efa`. The confirmation is often an endpoint's last message.
//!
//! **Violations** end a channel: a length whose size isn't 8 or that exceeds the agreed limit, a payload longer or
//! shorter than its length, a length without a payload or the reverse (for `lost_after`), a repeated id or one far out
//! of order, an unknown tag, a malformed control message, another version.

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

/// Which read it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadId {
    pub channel: u32,
    pub ticket: u64,
}

/// A callback that is due, with its argument.
pub(crate) enum Callback {
    Write(WriteDone, Result<Payload, ChannelError>),
    Read(ReadDone, Result<(u64, Vec<u8>), ChannelError>, ReadId),
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
