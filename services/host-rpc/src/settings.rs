//! The settings of a client or a server.

use std::time::Duration;

/// The settings of a client or a server. The two ends need not agree.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Credits that the server grants: calls that one client may have open at a time.
    pub credits: u32,
    /// Bytes of the longest body that this end accepts.
    pub max_body: usize,
    /// Bytes of the longest body that is copied into the message of its header.
    pub inline: usize,
    /// Bytes of the longest body that is sent as one message of its own; a longer body is split into pieces of that size.
    pub piece: usize,
    /// Worker threads of the server. Without workers, methods run on the thread of the transport, so they must be quick and not block.
    pub workers: usize,
    /// Time limit of closing a connection.
    pub close_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            credits: 64,
            max_body: 1 << 30,
            inline: 8 << 10,
            piece: 8 << 20,
            workers: 2,
            close_timeout: Duration::from_secs(5),
        }
    }
}
