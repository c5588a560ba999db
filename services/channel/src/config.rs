//! How an endpoint for channels is opened.

use std::fmt;
use std::time::Duration;

use zerocopy::{Immutable, KnownLayout, TryFromBytes};

/// How tags are matched with receives. Both ends of a channel must match alike; an [`Address`](crate::Address) says how its endpoint
/// matches.
#[derive(Clone, Copy, Debug, Immutable, KnownLayout, PartialEq, Eq, TryFromBytes)]
#[repr(u8)]
pub enum Matching {
    /// The provider matches its own tagged messages (`FI_TAGGED`).
    Provider = 1,
    /// This crate matches, over datagrams of the provider (`FI_MSG`).
    Software = 2,
}

impl Matching {
    /// The matching with this number, which goes over the wire.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::try_read_from_bytes(&[code]).ok()
    }
}

impl fmt::Display for Matching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Provider => "tags of the provider",
            Self::Software => "software matching over datagrams",
        })
    }
}

/// How to open a [`Reactor`](crate::Reactor).
#[derive(Clone, Debug)]
pub struct Config {
    /// The provider. A provider without reliable datagrams of its own is used with `;ofi_rxm` over it.
    pub provider: String,
    /// The local address of the endpoint, at which peers reach it. None leaves the choice to the provider.
    pub source: Option<String>,
    /// How tags are matched. None: by the provider, except over `tcp`, where that is slower, and over providers without tagged messages.
    pub matching: Option<Matching>,
    /// Writes, and reads, of one channel that libfabric has at a time; at least one.
    pub depth: usize,
    /// Bytes of the longest message that is taken. A peer that sends a longer one violates the protocol.
    pub max_message: usize,
    /// Peers, present and past, with which an endpoint has channels.
    pub max_peers: usize,
    /// A peer that sent nothing for this long gets a ping.
    pub ping_after: Duration,
    /// A peer that does not answer a ping for this long is given up.
    pub lost_after: Duration,
    /// How long a connect may take.
    pub connect_within: Duration,
    /// How long the thread polls without work before it sleeps.
    pub busy_poll: Duration,
    /// Id of the first message of each channel.
    pub start_id: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            provider: "tcp".to_owned(),
            source: Some("127.0.0.1".to_owned()),
            matching: None,
            depth: 64,
            max_message: 1 << 30,
            max_peers: 65536,
            ping_after: Duration::from_secs(1),
            lost_after: Duration::from_secs(10),
            connect_within: Duration::from_secs(10),
            busy_poll: Duration::from_micros(50),
            start_id: 0,
        }
    }
}
