//! How an endpoint for channels is opened.

use std::sync::Arc;
use std::time::Duration;

use ferrogin_libfabric::Libfabric;

/// How to open a [`Reactor`](crate::Reactor).
#[derive(Clone, Debug)]
pub struct Config {
    /// The libfabric of the provider; None for the installed one, which `tcp` does not need.
    pub libfabric: Option<Arc<Libfabric>>,
    /// `tcp`, or a libfabric provider with tagged messages and directed receives (`efa`, `softefa`, `shm`). A provider without reliable
    /// datagrams of its own is used with `;ofi_rxm` over it.
    pub provider: String,
    /// The local address at which peers reach listeners; it may have a port (`192.0.2.1:7000`). None: over `tcp` the addresses that NCCL's
    /// variables NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY choose, otherwise the provider's choice.
    pub source: Option<String>,
    /// A text that only this side and its peers know, over `tcp` only. Peers that have it connect by `HOST:PORT`, and the reactor has one
    /// listener at a time. None: each listener has a secret of its own, which its address contains. Use at least 16 random characters,
    /// because a short text can be guessed.
    pub secret: Option<String>,
    /// Writes, and reads, of one channel that libfabric has at a time; at least one.
    pub depth: usize,
    /// Bytes of the longest message that is taken. A peer that sends a longer one violates the protocol.
    pub max_message: usize,
    /// Peers with which an endpoint has channels; except over `tcp` also peers of the past.
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
            libfabric: None,
            provider: "tcp".to_owned(),
            source: Some("127.0.0.1".to_owned()),
            secret: None,
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
