//! A connection's sizes, and why one could not be made.

use std::io;

use mlx5::device::DeviceError;

/// A connection's sizes. The two ends need not agree.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Length of the longest message that is copied into a slot, in bytes.
    pub eager: u32,
    /// Number of slots for sends.
    pub sends: u16,
    /// Number of slots for receives.
    pub receives: u16,
    /// Whether to ask for compressed completions if the device supports them.
    pub compression: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { eager: 16 << 10, sends: 64, receives: 128, compression: true }
    }
}

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A size in [`Config`] is out of range.
    #[error("{0}")]
    Config(&'static str),
    /// The peer is not a connection of this kind, or has another version.
    #[error("the peer's hello is not one of this version of ferrogin; use the same release at both ends")]
    Hello,
    /// The exchange of hellos failed.
    #[error("exchanging hellos with the peer failed: {0}")]
    Exchange(#[from] io::Error),
    /// The connection's thread did not start.
    #[error("the thread of the connection did not start: {0}")]
    Thread(#[source] io::Error),
}
