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
    /// The peer cannot be sent to.
    Failed(Payload, Error),
}

/// A receive.
pub(crate) struct Receive {
    /// The sender; None for a short message from any peer.
    pub from: Option<Addr>,
    pub pattern: Pattern,
    /// The memory for the message. Its contents are lost.
    pub buffer: Vec<u8>,
    /// Bytes of the longest message.
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

/// The end of an operation.
#[derive(Debug)]
pub(crate) enum Event {
    /// A send ended: the transport does not read the payload any more.
    Sent { token: u64, body: Payload, result: Result<(), Error> },
    /// A receive ended: the buffer has the message. `from` is the sender, if the transport knows it; of a truncated message it may not.
    Received { token: u64, bytes: Vec<u8>, tag: u64, from: Option<Addr>, result: Result<(), ReceiveError> },
    /// A peek ended: tag and sender of the first message that matches the pattern; the sender if the transport knows it.
    Peeked { token: u64, found: Option<(u64, Option<Addr>)> },
    /// The connection to a peer is over. Messages that it sent before may still be received.
    Lost { peer: Addr, error: Error },
}

/// Bytes of payloads that a stream gets at a time, if they are more than two payloads: enough to keep the stream busy, and few enough
/// that control data of later payloads does not wait long behind them.
pub(crate) const PAYLOAD_WINDOW: usize = 4 << 20;

/// Number and bytes of the payloads in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFlight {
    count: usize,
    bytes: usize,
}

impl InFlight {
    /// Another payload of `len` bytes may start: two may always, more up to `limit` bytes in all.
    pub fn has_room(self, len: usize, limit: usize) -> bool {
        self.count < 2 || self.bytes.saturating_add(len) <= limit
    }

    /// A payload of `len` bytes starts.
    pub fn begin(&mut self, len: usize) {
        (self.count, self.bytes) = (self.count + 1, self.bytes + len);
    }

    /// A payload of `len` bytes ends.
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
    /// Bytes of the longest message.
    pub max_message: usize,
    /// Bytes of payloads of one channel that the transport should have at a time, if they are more than two payloads.
    pub payload_window: usize,
    /// A message of an endpoint that is gone can be received and dropped without harm to a new endpoint at its address.
    pub can_discard_stale: bool,
}

impl Properties {
    /// Of an endpoint of a provider, without a payload window.
    pub fn new(name: Box<[u8]>, provider: String, max_message: usize) -> Self {
        let (payload_window, can_discard_stale, carrier) = (usize::MAX, true, Carrier::Tags);
        Self { name, provider, carrier, max_message, payload_window, can_discard_stale }
    }

    /// Of an endpoint over TCP.
    pub fn of_tcp(max_message: usize) -> Self {
        Self { carrier: Carrier::Tcp, ..Self::new(Box::default(), "tcp".to_owned(), max_message) }
    }
}

/// Tagged messages of one endpoint. A buffer moves in with an operation and out with the event of that operation. The transport keeps it
/// alive and unchanged meanwhile, even when the channel of the operation has ended. Sends and receives end in any order. Messages of
/// one sender with equal tags match in the order of sending, if the network keeps that order.
pub(crate) trait Transport: Send + 'static {
    /// What the transport is and can do. It stays the same.
    fn properties(&self) -> &Properties;
    /// Lets peers reach a listener that has a secret; gives the name by which they do.
    fn listen(&mut self, _listener: u32, _secret: u64) -> Result<Box<[u8]>, Error> {
        Ok(self.properties().name.clone())
    }
    /// Ends that. Channels of the listener stay.
    fn unlisten(&mut self, _listener: u32) {}
    /// The peer at that address, whose listener has that secret. Where each channel has its own connection, this one is new.
    fn connect(&mut self, name: &[u8], secret: u64) -> Result<Addr, Error>;
    /// The sender of a hello, and its name: `stated` is the one in the hello, and `from` the sender, if the transport knows it.
    fn identify(&mut self, from: Option<Addr>, stated: &[u8]) -> Result<(Addr, Box<[u8]>), Error>;
    /// Ends the connection of a channel, if it has its own, after everything that was sent. Operations on it have no more events.
    fn disconnect(&mut self, _peer: Addr) {}
    /// Sends `body` to `to`, at once or with the next [`Transport::flush`]. `more`: the caller sends more to `to` at once, and the receiver
    /// has no use for this message alone.
    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, more: bool) -> SendResult;
    /// Sends messages that were held back to travel together.
    fn flush(&mut self) {}
    /// Receives a message.
    fn receive(&mut self, receive: Receive) -> ReceiveResult;
    /// Looks for an unmatched message of `from` (None: of any peer) and leaves it there: [`Event::Peeked`] follows. False when the transport
    /// cannot peek.
    fn peek(&mut self, _from: Option<Addr>, _pattern: Pattern, _token: u64) -> bool {
        false
    }
    /// Cancels receives: each still gives one event.
    fn cancel(&mut self, which: &dyn Fn(u64) -> bool);
    /// Makes progress at the time `now` and appends the events.
    fn poll(&mut self, now: Instant, events: &mut Vec<Event>) -> Result<(), Error>;
    /// A descriptor that becomes readable when a poll has work, if the transport has one.
    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
    /// When a poll has work that the descriptor does not show.
    fn wakes(&self) -> Option<Instant> {
        None
    }
    /// True when no event is missed by a wait for the descriptor now.
    fn may_wait(&self) -> bool {
        true
    }
}
