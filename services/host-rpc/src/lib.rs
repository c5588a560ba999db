#![doc = include_str!("../README.md")]
//!
//! A [`Server`] has numbered methods; a [`Client`] calls them, many at a time. A call has a deadline and can be cancelled. The server grants
//! credits; a call without a credit waits at the client. Bodies of any length are sent from the memory of the caller and handed over in the
//! memory that received them.
//!
//! **One call** passes through four modules on its way out and back: the client, the connection, which makes frames ([`frame`]) of calls and
//! answers, the transport, and the server.
//!
//! ```text
//! Client::call ─► Connection::send ─► Transport::send  ~~~►  Connection::received ─► Session::on_request ─► method
//!    (waits for      (packed while a                                                    (waits for a          │
//!     a credit)       message is sent)                                                   worker)              ▼
//! callback     ◄─ Connection::received  ◄~~~  Transport::send ◄─ Connection::send ◄───────────── Responder::reply
//! ```
//!
//! **Frames** have a header of 32 bytes ([`frame`]). A short body follows the header in the same message. A longer body follows in messages
//! of its own: one up to [`Settings::piece`] bytes, several beyond.
//!
//! **End of a call.** Every call ends once: with the result, with a [`Status`] of the server, at its deadline, or with the connection.
//! Everything that a peer sends is checked. A peer that breaks the protocol loses its connection; other connections are not affected.

mod body;
mod client;
mod connection;
mod deadline;
mod error;
pub mod frame;
pub mod mlx5;
mod server;
mod status;
mod transport;

pub use body::{Body, Data};
pub use client::{Call, Client};
pub use error::{RpcError, Violation};
pub use ferrogin_channel::Payload;
pub use server::{Context, Responder, Server, ServerHandle};
pub use status::Status;
pub use transport::{ReceiveDone, SendDone, Transport, TransportError};

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

/// Compiles the examples of the manual.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rpc.md")]
mod manual {}
