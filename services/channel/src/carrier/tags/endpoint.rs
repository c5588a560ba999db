//! What a carrier over tagged messages needs of a provider: messages that are matched as libfabric matches them.

use std::os::fd::RawFd;

use ferrogin_libfabric::Error;

use crate::Payload;
use crate::proto::carrier::Peer;

/// Tag of message 0's length; other messages add their id.
pub(crate) const LENGTH: u64 = 1 << 32;
/// Tag of message 0's payload; other messages add their id.
pub(crate) const PAYLOAD: u64 = 1 << 33;
/// Tag of control messages; the message's kind is added.
pub(crate) const CONTROL: u64 = 1 << 34;
/// The id part of a tag.
pub(crate) const ID_MASK: u64 = 0xffff_ffff;
/// Bytes of the receive buffer for a length. A length has 8 bytes; the longer buffer shows when a length message is too
/// long.
pub(crate) const LENGTH_BUFFER: usize = 16;

/// Which messages a receive matches: those whose tag equals `tag` in all bits that are clear in `ignore`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub tag: u64,
    pub ignore: u64,
}

impl Pattern {
    #[cfg(test)]
    pub fn matches(self, tag: u64) -> bool {
        (tag ^ self.tag) & !self.ignore == 0
    }
}

/// What an operation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    SendLength,
    SendPayload,
    ReceiveLength,
    ReceivePayload,
    SendControl,
    ReceiveControl,
    ReceiveUnknown,
    PeekUnknown,
    PeekPayload,
    Discard,
}

/// The messages of one channel: the peer, and a number that is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionId {
    pub peer: Peer,
    pub number: u64,
}

/// What identifies an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub operation: Operation,
    /// None for an operation that belongs to no session.
    pub session: Option<SessionId>,
    /// Id of the message, or an index.
    pub id: u32,
}

/// An endpoint in the address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Addr(pub u64);

/// A message to send.
pub(crate) struct Send {
    pub to: Addr,
    pub tag: u64,
    pub body: Payload,
    pub token: Token,
    /// The caller is about to send more to the same endpoint, which has no use for this message alone.
    pub more: bool,
}

/// The result of a send.
#[derive(Debug)]
pub(crate) enum SendResult {
    /// The send is in flight: [`Completion::Sent`] returns the payload.
    Posted,
    /// The bytes were copied: there is no completion.
    Done(Payload),
    /// Not now: retry after a poll.
    Retry(Payload),
    /// Nothing can be sent to the endpoint.
    Failed(Payload, Error),
}

/// A receive to post.
pub(crate) struct Receive {
    /// The sender; None for a short message from any endpoint.
    pub from: Option<Addr>,
    pub pattern: Pattern,
    /// The memory for the message. Its contents are lost.
    pub buffer: Vec<u8>,
    /// Length of the longest message, in bytes.
    pub len: usize,
    pub token: Token,
}

/// The result of a receive.
#[derive(Debug)]
pub(crate) enum ReceiveResult {
    /// The receive is posted: [`Completion::Received`] returns the buffer.
    Posted,
    /// Not now: retry after a poll.
    Retry(Vec<u8>),
    /// The endpoint refused it.
    Failed(Vec<u8>, Error),
}

/// Why a receive failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveError {
    /// The message was longer than the buffer.
    Truncated,
    /// The receive was cancelled before a message matched.
    Cancelled,
    /// Anything else.
    Failed(Error),
}

/// The end of a receive.
#[derive(Debug)]
pub(crate) struct Received {
    pub token: Token,
    /// The buffer, which has the message.
    pub bytes: Vec<u8>,
    pub tag: u64,
    /// The sender, if known; for a truncated message it may not be.
    pub from: Option<Addr>,
    pub result: Result<(), ReceiveError>,
}

/// The first message that matches the pattern of a peek.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub tag: u64,
    /// Its sender, if the endpoint knows it.
    pub from: Option<Addr>,
}

/// The end of an operation.
#[derive(Debug)]
pub(crate) enum Completion {
    /// A send ended: the endpoint no longer reads the payload.
    Sent {
        token: Token,
        body: Payload,
        result: Result<(), Error>,
    },
    Received(Received),
    Peeked {
        token: Token,
        found: Option<Found>,
    },
}

/// What an endpoint is and can do.
pub(crate) struct Abilities {
    /// The address of this endpoint.
    pub name: Box<[u8]>,
    /// The provider, for people.
    pub provider: String,
    /// Length of the longest message, in bytes.
    pub max_message: usize,
    /// How many payload bytes of one peer the endpoint should have at a time, if that is more than two payloads.
    pub payload_window: usize,
    /// Whether a message from an endpoint that is gone can be received and dropped without harm to a new endpoint at
    /// its address.
    pub can_discard_stale: bool,
}

/// Tagged messages of one endpoint. A buffer moves in with an operation and out with that operation's completion. Until
/// then, the endpoint keeps it alive and unchanged. Sends and receives end in any order. Messages from one sender with
/// equal tags match in the order they were sent, if the network keeps that order.
pub(crate) trait Endpoint: std::marker::Send + 'static {
    /// Returns what the endpoint is and can do, which never changes.
    fn abilities(&self) -> &Abilities;
    /// Inserts a name that isn't in the address vector yet.
    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error>;
    fn send(&mut self, send: Send) -> SendResult;
    fn receive(&mut self, receive: Receive) -> ReceiveResult;
    /// Looks for an unmatched message from `from` (None: any endpoint) and leaves it in place: [`Completion::Peeked`]
    /// follows. False if the endpoint can't peek.
    fn peek(&mut self, from: Option<Addr>, pattern: Pattern, token: Token) -> bool;
    /// Cancels receives: each still produces one completion.
    fn cancel(&mut self, which: &dyn Fn(Token) -> bool);
    /// Makes progress and appends the completions.
    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<(), Error>;
    /// Returns a descriptor that becomes readable when a poll has work, if the endpoint has one.
    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
    /// Returns whether waiting on the descriptor now would miss no completion.
    fn may_wait(&self) -> bool {
        true
    }
}
