//! A card's settings.

use crate::cq_writer::CompressedLayout;
use std::net::Ipv4Addr;
use std::time::Duration;

/// A card's settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The seed for all random choices; `None` for a random seed.
    pub seed: Option<u64>,
    /// The longest delay before a key change takes effect.
    pub max_bind_delay: Duration,
    /// How long a message waits for the peer to post a receive; `None` for no limit.
    pub rnr_timeout: Option<Duration>,
    /// The layout of compressed queues; the software card supports both.
    pub compressed_layout: CompressedLayout,
    /// The IP address at which other cards reach this one.
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
