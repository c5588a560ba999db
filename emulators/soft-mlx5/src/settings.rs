//! The behaviour of a card.

use crate::cq_writer::CompressedLayout;
use std::net::Ipv4Addr;
use std::time::Duration;

/// The behaviour of a card.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Seed of all random choices; `None` for a random seed.
    pub seed: Option<u64>,
    /// The longest delay of a key change.
    pub max_bind_delay: Duration,
    /// The time for which a message waits for the peer to post a receive; `None` for no limit.
    pub rnr_timeout: Option<Duration>,
    /// The layout of compressed queues: the software card has both.
    pub compressed_layout: CompressedLayout,
    /// The IP address for other cards.
    pub listen: Ipv4Addr,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: None,
            max_bind_delay: Duration::from_micros(200),
            rnr_timeout: None,
            compressed_layout: CompressedLayout::Enhanced,
            listen: Ipv4Addr::LOCALHOST,
        }
    }
}
