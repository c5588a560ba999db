//! The border between the protocol and the network: ordered messages, and control messages, to and from peers.
//!
//! A carrier knows nothing of channels: it delivers the messages of a peer whole, in order and once, and says when the
//! peer is lost. How many messages may be on their way is the protocol's matter.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use ferrogin_libfabric::Error;

use super::wire::{Control, Transport};
use crate::{Payload, Violation};

/// A peer's number at its carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Peer(pub u32);

/// A request for a channel, from a peer that knows the secret of a listener.
#[derive(Debug)]
pub(crate) struct Hello {
    pub peer: Peer,
    /// The name of the peer's endpoint.
    pub name: Box<[u8]>,
    pub listener: u32,
    pub message: Control,
}

/// Why a peer is lost.
#[derive(Debug)]
pub(crate) enum Loss {
    /// The connection ended, or the peer takes no message.
    Connection(Error),
    /// A control message could not be sent.
    Unreachable(Error),
    /// A message could not be received.
    Receive(Error),
    /// The peer violated the protocol.
    Violation(Violation),
}

/// What happened at a carrier.
#[derive(Debug)]
pub(crate) enum Event {
    Hello(Hello),
    /// Any other control message. Its secret says whose it is.
    Control(Control),
    /// The peer's next message, for the oldest read.
    Message {
        from: Peer,
        bytes: Vec<u8>,
    },
    /// A message was sent: the carrier no longer reads the body.
    Sent {
        to: Peer,
        id: u32,
        body: Payload,
    },
    Lost {
        peer: Peer,
        loss: Loss,
    },
}

/// Ids of the first messages of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FirstIds {
    pub write: u32,
    pub read: u32,
}

/// What a carrier knows about the messages of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// When a part of a message last arrived.
    pub last_heard: Instant,
    /// Bytes of messages that are on their way from the peer, and to it.
    pub reading: usize,
    pub writing: usize,
}

/// How to wait for an event.
#[derive(Default)]
pub(crate) struct Wait {
    /// Becomes readable when a poll has work. None if the carrier has no such descriptor.
    pub fd: Option<RawFd>,
    /// When a poll will have work that the descriptor doesn't show.
    pub until: Option<Instant>,
}

/// What a carrier is and can do.
pub(crate) struct Properties {
    /// The address of this endpoint. Empty where each listener has its own.
    pub name: Box<[u8]>,
    /// The provider, for people.
    pub provider: String,
    pub transport: Transport,
    /// Length of the longest message, in bytes.
    pub max_message: usize,
    /// Bytes of messages that a peer holds for later reads. Others stay at the writer until a read waits for them.
    pub unread_bytes: usize,
}

/// The slowest transfer that doesn't count as stalled, in bytes per second.
const SLOWEST: u64 = 4 << 20;

/// Returns the time allowed beyond a limit while `bytes` bytes are in flight.
pub(crate) fn transfer_time(bytes: usize) -> Duration {
    Duration::from_millis((bytes as u64).saturating_mul(1000) / SLOWEST)
}

/// Frames to and from peers. A buffer moves in with a message or a read, and out with an event. Until then the carrier
/// keeps it alive and unchanged, even if the channel has ended.
pub(crate) trait Carrier: Send + 'static {
    /// Returns what the carrier is and can do, which never changes.
    fn properties(&self) -> &Properties;
    /// Lets peers that know `secret` reach a listener, and returns the name by which they do.
    fn listen(&mut self, listener: u32, secret: u64) -> Result<Box<[u8]>, Error>;
    /// Stops that. The listener's channels stay open.
    fn unlisten(&mut self, _listener: u32) {}
    /// Returns the peer at address `name` whose listener has `secret`. Where each channel has its own connection, this
    /// opens one.
    fn connect(&mut self, name: &[u8], secret: u64) -> Result<Peer, Error>;
    /// Sends the hello of a new channel, with the ids and the endpoint name that the peer needs.
    fn send_hello(&mut self, to: Peer, hello: Control);
    /// Begins the messages of a channel whose peer sent `greeting`, a hello or a welcome.
    fn open(&mut self, peer: Peer, greeting: &Control) -> FirstIds;
    /// Ends the channel with a peer once all control messages are out. Its messages and reads produce no more events.
    fn close(&mut self, peer: Peer);
    /// Sends a control message. It may overtake messages, and messages may overtake it.
    fn send_control(&mut self, to: Peer, message: Control);
    /// Sends the next message of an open channel, at once or with the next [`Carrier::flush`]. Returns the body if its
    /// bytes were copied; otherwise [`Event::Sent`] returns it, in any order.
    fn send(&mut self, to: Peer, id: u32, body: Payload) -> Option<Payload>;
    /// Sends the peer no further message: those that haven't begun to be sent never will be.
    fn stop_sending(&mut self, to: Peer);
    /// Asks for one more message of an open channel, in the memory of `buffer` if the message fits its capacity.
    fn read(&mut self, from: Peer, buffer: Vec<u8>);
    /// Sends what was held back to travel together.
    fn flush(&mut self);
    /// Makes progress at the time `now` and appends the events. True if anything happened, even without an event.
    fn poll(&mut self, now: Instant, events: &mut Vec<Event>) -> Result<bool, Error>;
    /// Returns how far the messages of a peer have got.
    fn progress(&self, peer: Peer) -> Progress;
    /// Finds a message of the peer that has begun and makes no progress for `limit` and the time that its transfer may
    /// take.
    fn overdue(&mut self, _peer: Peer, _now: Instant, _limit: Duration) -> Option<Violation> {
        None
    }
    /// Counts the time of [`Carrier::overdue`] anew, after a pause of this thread.
    fn restart_deadlines(&mut self, _peer: Peer) {}
    /// Returns whether no control message is waiting or in flight.
    fn is_idle(&self) -> bool {
        true
    }
    /// Returns how to wait for the next event; None if a poll has work now.
    fn wait(&self) -> Option<Wait> {
        Some(Wait::default())
    }
}
