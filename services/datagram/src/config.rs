//! How to open an endpoint.

use std::time::Duration;

/// Longest endpoint name that peers may have, bytes.
pub const NAME_MAX: usize = 64;

/// How to open a [`MessageEndpoint`](crate::MessageEndpoint). Both ends must agree on the largest message.
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
    /// Endpoints become peers by [`Outbox::admit`](crate::Outbox::admit) alone, not by a message.
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
