//! What an endpoint reports of its peers and messages.

use ferrogin_libfabric::Error;
use std::time::Duration;

/// A peer of one endpoint. Its number is not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer(pub(crate) u32);

impl Peer {
    /// The number of the peer, counted up from 0: for tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The peer whose [`Peer::index`] is `index`.
    pub fn from_index(index: usize) -> Self {
        Self(index as u32)
    }
}

/// An event that [`MessageEndpoint::poll`](crate::MessageEndpoint::poll) reports.
#[derive(Debug)]
pub enum Event<'a> {
    /// A message arrived. An unknown sender has become a peer.
    Message {
        /// The sender.
        from: Peer,
        /// The header that the sender gave.
        header: &'a [u8],
        /// The payload that the sender gave.
        payload: &'a [u8],
    },
    /// The endpoint does not use a borrowed payload any more: the message was sent.
    Sent {
        /// The receiver.
        peer: Peer,
        /// The token given to [`Outbox::send_borrowed`](crate::Outbox::send_borrowed).
        token: u64,
    },
    /// The endpoint does not use a borrowed payload any more: the message was not sent completely.
    SendFailed {
        /// The receiver, which is lost.
        peer: Peer,
        /// The token given to [`Outbox::send_borrowed`](crate::Outbox::send_borrowed).
        token: u64,
    },
    /// A peer is lost. Messages to it may or may not have arrived.
    Lost {
        /// The peer.
        peer: Peer,
        /// Why it counts as lost.
        reason: LostReason,
    },
}

/// A message of an endpoint that was not admitted ([`Config::admission`](crate::Config::admission)).
#[derive(Debug)]
pub struct Unadmitted<'a> {
    /// The address that the message gives as its sender's.
    pub address: &'a [u8],
    /// The number that the message gives as its sending endpoint's.
    pub number: u64,
    /// The header that the sender gave.
    pub header: &'a [u8],
    /// The payload that the sender gave.
    pub payload: &'a [u8],
}

/// Why a peer is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostReason {
    /// The peer shut its endpoint down.
    #[error("the peer closed its endpoint")]
    Closed,
    /// The peer did not answer.
    #[error("the peer has not answered for {0:.1?}: it is dead, stopped, or does not poll")]
    Silent(Duration),
    /// A send failed.
    #[error("{0}")]
    Failed(Error),
    /// A later endpoint has the peer's address.
    #[error("a later endpoint has the peer's address")]
    Replaced,
}

/// Why a message was not accepted. It is not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// All send slots are in use: poll, then send again.
    #[error("all send slots are in use: poll, then send again")]
    Full,
    /// The header or the payload is longer than the configured largest.
    #[error("header or payload is longer than the endpoint's configuration allows")]
    TooLong,
    /// The peer is lost or forgotten.
    #[error("the peer is gone")]
    Gone,
}
