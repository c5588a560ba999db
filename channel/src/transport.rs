//! What the channel needs of the network: tagged messages, matched as libfabric matches them.

use super::Payload;
use ferrogin_libfabric::Error;

/// A peer in the transport's address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Addr(pub u64);

/// Which messages a receive takes: those whose tag is `tag` in all bits that `ignore` has not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub tag: u64,
    pub ignore: u64,
}

impl Pattern {
    pub fn matches(self, tag: u64) -> bool {
        (tag ^ self.tag) & !self.ignore == 0
    }
}

/// What became of a send.
#[derive(Debug)]
pub(crate) enum Sending {
    /// It is under way: [`Event::Sent`] gives the payload back.
    Posted,
    /// The bytes were copied out: there is no event.
    Done(Payload),
    /// Not now: try again after a poll.
    Again(Payload),
    /// The peer cannot be sent to.
    Failed(Payload, Error),
}

/// What became of a receive.
#[derive(Debug)]
pub(crate) enum Receiving {
    /// It is posted: [`Event::Received`] gives the buffer back.
    Posted,
    /// Not now: try again after a poll.
    Again(Vec<u8>),
    /// The endpoint refuses.
    Failed(Vec<u8>, Error),
}

/// How a receive ended badly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The message was longer than the room.
    Truncated,
    /// It was cancelled before a message came.
    Cancelled,
    /// Anything else.
    Failed(Error),
}

/// An operation is over.
#[derive(Debug)]
pub(crate) enum Event {
    /// A send; the transport does not read the payload any more.
    Sent { token: u64, body: Payload, result: Result<(), Error> },
    /// A receive; the buffer holds what came. `from` is the sender if the transport can tell.
    /// It need not be known of a message that was cut off.
    Received { token: u64, bytes: Vec<u8>, tag: u64, from: Option<Addr>, result: Result<(), Fault> },
    /// A look at what waits: tag and sender of the first message that the pattern takes, the sender if the transport can tell.
    Seen { token: u64, found: Option<(u64, Option<Addr>)> },
    /// A peer cannot be reached any more, and does not answer. What it sent before may still be received.
    Lost { peer: Addr, error: Error },
}

/// Bytes of payloads that are handed to a stream at a time, if those are more than two payloads: enough to keep it busy, and few
/// enough that what is said about later ones does not wait long behind them.
pub(super) const PAYLOADS: usize = 4 << 20;

/// Payloads that are handed over and not over yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UnderWay {
    count: usize,
    bytes: usize,
}

impl UnderWay {
    /// One more of `len` bytes may go: two may always, and others up to `limit` bytes in all.
    pub fn has_room(self, len: usize, limit: usize) -> bool {
        self.count < 2 || self.bytes.saturating_add(len) <= limit
    }

    /// One of `len` bytes begins.
    pub fn begin(&mut self, len: usize) {
        (self.count, self.bytes) = (self.count + 1, self.bytes + len);
    }

    /// One of `len` bytes is over.
    pub fn end(&mut self, len: usize) {
        (self.count, self.bytes) = (self.count.saturating_sub(1), self.bytes.saturating_sub(len));
    }

    /// Bytes of all.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

/// Tagged messages of one endpoint. Buffers move in with an operation and out with its event: whoever implements this keeps
/// them alive and unchanged meanwhile, even when the operation's user has lost interest. Sends and receives may end in any order.
/// Between messages of one sender with equal tags the order of matching is the order of sending, if the network has one.
pub(crate) trait Transport: Send + 'static {
    /// Our own address, which peers insert.
    fn name(&self) -> &[u8];
    /// For people: the provider.
    fn provider(&self) -> &str;
    /// Bytes of the longest message.
    fn max_message(&self) -> usize;
    /// Bytes of payloads of one channel that it is to have at a time, if those are more than two payloads.
    fn payloads_at_a_time(&self) -> usize {
        usize::MAX
    }
    /// What an endpoint sent that is gone can be taken away without harm to another that has its address now.
    fn discards_leftovers(&self) -> bool {
        true
    }
    /// Makes a peer known.
    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error>;
    /// Sends `body` to `to`, at once or with the next [`Transport::flush`]. `more`: the caller sends more to `to` at once, and this is of
    /// no use without that.
    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, more: bool) -> Sending;
    /// Lets go what was sent and held back to go together.
    fn flush(&mut self) {}
    /// Takes a message of at most `len` bytes from `from` (None: from anyone, a short one) into `room`, whose contents are lost.
    fn receive(&mut self, from: Option<Addr>, pattern: Pattern, room: Vec<u8>, len: usize, token: u64) -> Receiving;
    /// Looks for a message of `from` (None: of anyone) that waits for a receive, and leaves it there: [`Event::Seen`] comes. False when
    /// the transport cannot look.
    fn look(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool;
    /// Asks for receives to end early: each still gives one event.
    fn cancel(&mut self, which: &dyn Fn(u64) -> bool);
    /// Makes progress and appends what has ended.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Error>;
    /// A descriptor that becomes readable when there is something to poll for, if the transport has one.
    fn wait_fd(&self) -> Option<std::os::fd::RawFd>;
    /// True when it is safe to wait for the descriptor now.
    fn may_wait(&self) -> bool;
}
