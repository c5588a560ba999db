//! The interface between the protocol and the network: tagged messages, matched as libfabric matches them.

use std::os::fd::RawFd;
use std::time::Instant;

use ferrogin_libfabric::Error;

use super::tags::Pattern;
use super::wire::Carrier;
use crate::Payload;

/// A peer in the transport's address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Addr(pub u64);

/// The result of a send.
#[derive(Debug)]
pub(crate) enum SendResult {
    /// The send is in flight: [`Event::Sent`] returns the payload.
    Posted,
    /// The bytes were copied: there is no event.
    Done(Payload),
    /// Not now: retry after a poll.
    Retry(Payload),
    /// Nothing can be sent to the peer.
    Failed(Payload, Error),
}

/// A receive to post.
pub(crate) struct Receive {
    /// The sender; None for a short message from any peer.
    pub from: Option<Addr>,
    pub pattern: Pattern,
    /// The memory for the message. Its contents are lost.
    pub buffer: Vec<u8>,
    /// Length of the longest message, in bytes.
    pub len: usize,
    pub token: u64,
}

/// The result of a receive.
#[derive(Debug)]
pub(crate) enum ReceiveResult {
    /// The receive is posted: [`Event::Received`] returns the buffer.
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

/// The end of an operation or a connection.
#[derive(Debug)]
pub(crate) enum Event {
    /// A send ended: the transport no longer reads the payload.
    Sent { token: u64, body: Payload, result: Result<(), Error> },
    /// A receive ended: the buffer has the message. `from` is the sender, if known; for a truncated message it may not be.
    Received { token: u64, bytes: Vec<u8>, tag: u64, from: Option<Addr>, result: Result<(), ReceiveError> },
    /// A peek ended: the tag of the first message that matches the pattern, and its sender if the transport knows it.
    Peeked { token: u64, found: Option<(u64, Option<Addr>)> },
    /// The connection to a peer is lost. Messages that it sent before may still be received.
    Lost { peer: Addr, error: Error },
}

/// How many payload bytes a stream gets at a time, if that is more than two payloads: enough to keep the stream busy, but few enough that
/// control data of later payloads doesn't wait long behind them.
pub(crate) const PAYLOAD_WINDOW: usize = 4 << 20;

/// Number and bytes of the payloads in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFlight {
    count: usize,
    bytes: usize,
}

impl InFlight {
    /// True if another payload of `len` bytes may start: two always may, more only up to `limit` bytes in all.
    pub fn has_room(self, len: usize, limit: usize) -> bool {
        self.count < 2 || self.bytes.saturating_add(len) <= limit
    }

    /// Counts a payload of `len` bytes that starts.
    pub fn begin(&mut self, len: usize) {
        (self.count, self.bytes) = (self.count + 1, self.bytes + len);
    }

    /// Counts a payload of `len` bytes that ends.
    pub fn end(&mut self, len: usize) {
        (self.count, self.bytes) = (self.count.saturating_sub(1), self.bytes.saturating_sub(len));
    }

    /// Bytes of all payloads in flight.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// What a transport is and can do.
pub(crate) struct Properties {
    /// The address of this endpoint, which peers insert. Empty where each listener has its own.
    pub name: Box<[u8]>,
    /// The provider, for people.
    pub provider: String,
    /// What carries the messages.
    pub carrier: Carrier,
    /// Length of the longest message, in bytes.
    pub max_message: usize,
    /// How many payload bytes of one channel the transport should have at a time, if that is more than two payloads.
    pub payload_window: usize,
    /// Whether a message from an endpoint that is gone can be received and dropped without harm to a new endpoint at its address.
    pub can_discard_stale: bool,
}

impl Properties {
    /// Properties of a provider's endpoint, without a payload window.
    pub fn new(name: Box<[u8]>, provider: String, max_message: usize) -> Self {
        let (payload_window, can_discard_stale, carrier) = (usize::MAX, true, Carrier::Tags);
        Self { name, provider, carrier, max_message, payload_window, can_discard_stale }
    }

    /// Properties of an endpoint over TCP.
    pub fn of_tcp(max_message: usize) -> Self {
        Self { carrier: Carrier::Tcp, ..Self::new(Box::default(), "tcp".to_owned(), max_message) }
    }
}

/// Tagged messages of one endpoint. A buffer moves in with an operation and out with that operation's event. Until then, the transport
/// keeps it alive and unchanged, even if the operation's channel has ended. Sends and receives end in any order. Messages from one sender
/// with equal tags match in the order they were sent, if the network keeps that order.
pub(crate) trait Transport: Send + 'static {
    /// What the transport is and can do, which never changes.
    fn properties(&self) -> &Properties;
    /// Lets peers reach a listener that has a secret, and returns the name by which they do.
    fn listen(&mut self, _listener: u32, _secret: u64) -> Result<Box<[u8]>, Error> {
        Ok(self.properties().name.clone())
    }
    /// Stops that. The listener's channels stay open.
    fn unlisten(&mut self, _listener: u32) {}
    /// Returns the peer at address `name` whose listener has `secret`. Where each channel has its own connection, this opens one.
    fn connect(&mut self, name: &[u8], secret: u64) -> Result<Addr, Error>;
    /// Returns a hello's sender and its name: `stated` is the name in the hello, and `from` the sender, if the transport knows it.
    fn identify(&mut self, from: Option<Addr>, stated: &[u8]) -> Result<(Addr, Box<[u8]>), Error>;
    /// Ends a channel's connection, if it has its own, once everything sent is out. Operations on it produce no more events.
    fn disconnect(&mut self, _peer: Addr) {}
    /// Sends `body` to `to`, at once or with the next [`Transport::flush`]. `more` means that the caller is about to send more to `to`, and
    /// that the receiver has no use for this message alone.
    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, more: bool) -> SendResult;
    /// Sends messages that were held back to travel together.
    fn flush(&mut self) {}
    /// Receives a message.
    fn receive(&mut self, receive: Receive) -> ReceiveResult;
    /// Looks for an unmatched message from `from` (None: any peer) and leaves it in place: [`Event::Peeked`] follows. False if the
    /// transport can't peek.
    fn peek(&mut self, _from: Option<Addr>, _pattern: Pattern, _token: u64) -> bool {
        false
    }
    /// Cancels receives: each still produces one event.
    fn cancel(&mut self, which: &dyn Fn(u64) -> bool);
    /// Makes progress at the time `now` and appends the events.
    fn poll(&mut self, now: Instant, events: &mut Vec<Event>) -> Result<(), Error>;
    /// A descriptor that becomes readable when a poll has work, if the transport has one.
    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
    /// When a poll will have work that the descriptor doesn't show.
    fn wakes(&self) -> Option<Instant> {
        None
    }
    /// True if waiting on the descriptor now would miss no event.
    fn may_wait(&self) -> bool {
        true
    }
}
