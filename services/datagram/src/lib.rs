#![doc = include_str!("../README.md")]
//!
//! A [`MessageEndpoint`] belongs to one thread at a time, which sends with [`Outbox::send`] and drives everything with
//! [`MessageEndpoint::poll`]. Nothing blocks and nothing is allocated per message. A message is a small header and a payload; with
//! [`Outbox::send_borrowed`] the payload is sent from where it lies.
//!
//! **Order.** Messages may arrive in any order: a short one may overtake a long one.
//!
//! **Dead peers.** libfabric does not report the death of a peer to which nothing is sent. So a peer that is quiet for [`Config::ping_after`]
//! gets a ping. A peer that does not answer within [`Config::lost_after`], or to which a send fails, is reported as [`Event::Lost`], once,
//! and stays lost (until [`Outbox::forget`]). A later endpoint at its address is another peer: neither gets messages for the
//! other. `poll` answers pings: the owner of an endpoint must call it more often than `lost_after`.
//!
//! **Closing.** [`MessageEndpoint::shutdown`] sends everything and closes; peers then see [`LostReason::Closed`]. An endpoint that is only
//! dropped may lose messages in flight, and peers detect it like a dead peer.
//!
//! **Silent connections.** Over TCP the endpoint ends connections to its port on which no message arrives for 10 s, and connections that are quiet for
//! longer than a live peer. Of connections without a byte beyond a quarter of the process's limit of descriptors, which its endpoints share, it ends
//! the oldest at once, first those of the address that has the most. [`MessageEndpoint::close_port`] ignores later connects.
//!
//! **Providers.** Tested: `tcp` of libfabric 2.5; for 1.17, whose `tcp` has no reliable datagrams, its `net` is taken. Over `ofi_rxm`
//! (asked for by name, or where nothing else exists) it works too, but some sends in flight to a peer that dies never complete: their slots
//! and borrowed payloads are released when the endpoint is dropped.
//!
//! **Trust.** A message names its sender itself. Lengths of its parts are checked; the name is not proven. An owner that wants a proof
//! sets [`Config::admission`]: a message of an endpoint that was not admitted then changes nothing here, and goes to the second callback of
//! [`MessageEndpoint::poll_admitting`], which may admit the endpoint by [`Outbox::admit`].

#[allow(unsafe_code)]
mod endpoint;
#[allow(unsafe_code)]
mod long;
#[allow(unsafe_code)]
mod outbox;
mod peer;
mod peers;
#[allow(unsafe_code)]
mod pool;
#[cfg(test)]
mod tests;
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
    /// The provider. A provider without reliable datagrams of its own is used with `;ofi_rxm` over it.
    pub provider: String,
    /// The local address to listen on; peers reach the endpoint there. Without a port (`192.0.2.1:7000`) the provider chooses one, and
    /// with None the address too.
    pub source: Option<String>,
    /// Bytes of the largest header, at most 65535.
    pub max_header: usize,
    /// Bytes of the largest payload.
    pub max_payload: usize,
    /// Messages in flight, or waiting for a connection, at once.
    pub tx_depth: usize,
    /// Receive buffers, each as large as the largest message.
    pub rx_depth: usize,
    /// Peers at once; messages from further peers are dropped.
    pub max_peers: usize,
    /// A peer that is quiet for this long gets a ping.
    pub ping_after: Duration,
    /// A peer that does not answer a ping for this long is lost.
    pub lost_after: Duration,
    /// Endpoints become peers by [`Outbox::admit`] alone, not by a message.
    pub admission: bool,
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
            admission: false,
        }
    }
}

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

/// An event that [`MessageEndpoint::poll`] reports.
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
        /// The token given to [`Outbox::send_borrowed`].
        token: u64,
    },
    /// The endpoint does not use a borrowed payload any more: the message was not sent completely.
    SendFailed {
        /// The receiver, which is lost.
        peer: Peer,
        /// The token given to [`Outbox::send_borrowed`].
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

/// A message of an endpoint that was not admitted ([`Config::admission`]).
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
