//! The settings of a client or a server.

use std::time::Duration;

/// The settings of a client or a server. The two ends need not agree.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Credits that the server grants: how many calls one client may have open at a time.
    pub credits: u32,
    /// Length of the longest body that this end accepts, in bytes.
    pub max_body: usize,
    /// Length of the longest body that is copied into its header's message, in bytes.
    pub inline: usize,
    /// Length of the longest body that is sent as one message of its own, in bytes; a longer one is split into pieces
    /// of this size.
    pub piece: usize,
    /// Worker threads of the server. Without workers, methods run on the transport's thread, so they must be quick and
    /// not block; an async method's future is polled there once, and afterwards, when it's woken, on a thread that a
    /// server with async methods has in any case.
    pub workers: usize,
    /// Time limit for closing a connection.
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
