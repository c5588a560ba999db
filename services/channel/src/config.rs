//! Configuration of a reactor.

use std::sync::Arc;
use std::time::Duration;

use ferrogin_libfabric::Libfabric;

/// Options for opening a [`Reactor`](crate::Reactor).
#[derive(Clone, Debug)]
pub struct Config {
    /// The libfabric that has the provider; None for the installed one. `tcp` needs neither.
    pub libfabric: Option<Arc<Libfabric>>,
    /// `tcp`, or a libfabric provider with tagged messages and directed receives (`efa`, `softefa`, `shm`). A provider
    /// without reliable datagrams of its own gets `;ofi_rxm` on top.
    pub provider: String,
    /// The local address at which peers reach listeners, optionally with a port (`192.0.2.1:7000`). None: over `tcp`,
    /// the addresses selected by NCCL's variables NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY; otherwise the provider's
    /// choice.
    pub source: Option<String>,
    /// A secret that this side shares with its peers, over `tcp` only. Peers that know it connect by `HOST:PORT`, and
    /// the reactor has one listener at a time. None: each listener has a secret of its own, which is part of its
    /// address. Use at least 16 random characters, because a short text can be guessed.
    pub secret: Option<String>,
    /// How many writes, and how many reads, of one channel are posted to libfabric at a time; at least one.
    pub depth: usize,
    /// The longest message that is accepted, in bytes. A peer that sends a longer one violates the protocol.
    pub max_message: usize,
    /// How many peers an endpoint can have channels with; except over `tcp`, past peers count too.
    pub max_peers: usize,
    /// How long a peer may send nothing before it gets a ping.
    pub ping_after: Duration,
    /// How long a peer may leave a ping unanswered before it's given up.
    pub lost_after: Duration,
    /// How long a connect may take.
    pub connect_within: Duration,
    /// How long the thread polls without finding work before it sleeps.
    pub busy_poll: Duration,
    /// Id of each channel's first message.
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

impl Config {
    /// How long channels that are closing may take when the reactor is dropped.
    pub(crate) fn close_limit(&self) -> Duration {
        (self.lost_after / 10).clamp(Duration::from_secs(1), Duration::from_secs(60))
    }

    /// Time between two runs of the timers.
    pub(crate) fn timer_interval(&self) -> Duration {
        (self.ping_after / 4).min(self.lost_after / 8).max(Duration::from_millis(1))
    }
}
