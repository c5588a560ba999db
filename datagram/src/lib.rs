//! Datagrams between processes, over any provider with reliable datagram endpoints and `FI_MSG`.
//!
//! A [`MessageEndpoint`] belongs to one thread at a time, which sends with [`MessageEndpoint::send`] and drives everything with
//! [`MessageEndpoint::poll`]. Nothing blocks and nothing is allocated per message. A message is a small header and a payload; with
//! [`MessageEndpoint::send_borrowed`] the payload is sent from where it lies.
//!
//! **Order.** None is promised: a long message may be overtaken by a short one.
//!
//! **Dead peers.** libfabric says nothing about a peer that one only receives from. So a peer that has been quiet for
//! [`Config::ping_after`] is asked to answer, and one that does not answer within [`Config::lost_after`], or to which sending
//! fails, becomes [`Event::Lost`], once and for good (until [`MessageEndpoint::forget`]). Another endpoint that has its address later is
//! another peer: neither gets what was meant for the other. The answer is given in `poll`: who owns
//! an endpoint must poll it more often than `lost_after`.
//!
//! **Closing.** [`MessageEndpoint::shutdown`] lets everything out and parts from the peers, who then see [`LostReason::Closed`]. Just
//! dropping an endpoint is abrupt: what is still on its way may be destroyed, and peers find out as if it had died.
//!
//! **Providers.** Tested: `tcp` of libfabric 2.5; for 1.17, whose `tcp` has no reliable datagrams, its `net` is taken. Over `ofi_rxm` (asked
//! for by name, or where there is nothing else) it works too, but of the sends under way to a peer that dies, some are never completed:
//! their slots and borrowed payloads come back when the endpoint is dropped.
//!
//! **Trust.** A message says itself from whom it is; parts are checked for length, not for truth.

#[allow(unsafe_code)]
mod endpoint;
#[allow(unsafe_code)]
mod long;
#[allow(unsafe_code)]
mod outbox;
#[allow(unsafe_code)]
mod pool;
#[allow(unsafe_code)]
mod sending;
mod wire;

use std::time::Duration;

pub use endpoint::MessageEndpoint;
pub use long::LongReceived;
pub use outbox::Outbox;

use ferrogin_libfabric::Error;

/// Longest endpoint name that peers may have, bytes.
pub const NAME_MAX: usize = 64;

/// How to open a [`MessageEndpoint`]. Both ends must agree on the largest message.
#[derive(Clone, Debug)]
pub struct Config {
    /// The provider; where it has no reliable datagrams of its own, `;ofi_rxm` over it is taken.
    pub provider: String,
    /// The local address to listen on; peers reach the endpoint there. None leaves the choice to the provider.
    pub source: Option<String>,
    /// Bytes of the largest header, at most 65535.
    pub max_header: usize,
    /// Bytes of the largest payload.
    pub max_payload: usize,
    /// Messages that may be under way (or waiting for a connection) at once.
    pub tx_depth: usize,
    /// Receive buffers, each as large as the largest message.
    pub rx_depth: usize,
    /// Peers that may be known at once; messages from more are dropped.
    pub max_peers: usize,
    /// A peer not heard of for so long is asked to answer.
    pub ping_after: Duration,
    /// A peer that does not answer for so long is lost.
    pub lost_after: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            provider: "tcp".to_owned(),
            source: Some("127.0.0.1".to_owned()),
            max_header: 64,
            max_payload: 64 << 10,
            tx_depth: 128,
            rx_depth: 128,
            max_peers: 4096,
            ping_after: Duration::from_secs(1),
            lost_after: Duration::from_secs(10),
        }
    }
}

/// A peer of one endpoint. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer(pub(crate) u32);

impl Peer {
    /// A small number, counted up from 0 in the order in which peers became known: for tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The peer whose [`Peer::index`] is `index`.
    pub fn from_index(index: usize) -> Self {
        Self(index as u32)
    }
}

/// Something that happened, told by [`MessageEndpoint::poll`].
#[derive(Debug)]
pub enum Event<'a> {
    /// A message came in. A sender that was not known has become a peer.
    Message {
        /// The sender.
        from: Peer,
        /// The header that it gave.
        header: &'a [u8],
        /// The payload that it gave.
        payload: &'a [u8],
    },
    /// A borrowed payload is not read any more: the message is on its way.
    Sent {
        /// The receiver.
        peer: Peer,
        /// The token given to [`MessageEndpoint::send_borrowed`].
        token: u64,
    },
    /// A borrowed payload is not read any more: the message did not go out, or not whole.
    SendFailed {
        /// The receiver, which is lost.
        peer: Peer,
        /// The token given to [`MessageEndpoint::send_borrowed`].
        token: u64,
    },
    /// A peer is gone. What was sent to it may or may not have arrived.
    Lost {
        /// The peer.
        peer: Peer,
        /// How it was found out.
        reason: LostReason,
    },
}

/// How the loss of a peer was found out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostReason {
    /// It said so: its endpoint was shut down.
    #[error("the peer closed its endpoint")]
    Closed,
    /// It did not answer.
    #[error("the peer has not answered for {0:.1?}: it is dead, stopped, or does not poll")]
    Silent(Duration),
    /// Sending failed.
    #[error("{0}")]
    Failed(Error),
    /// Another endpoint has its address.
    #[error("another endpoint has the peer's address now")]
    Replaced,
}

/// Why a message was not accepted. It was not sent, and nothing was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// As many messages are under way as may be: poll, then try again.
    #[error("all send slots are in use: poll, then send again")]
    Full,
    /// The header or the payload is longer than the configured largest.
    #[error("header or payload is longer than the endpoint's configuration allows")]
    TooLong,
    /// The peer is lost or forgotten.
    #[error("the peer is gone")]
    Gone,
}
