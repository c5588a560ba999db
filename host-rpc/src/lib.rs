//! Request and response between CPUs, over anything that carries whole messages in order: the EFA message channel, mlx5.
//!
//! A [`Server`] has numbered methods; a [`Client`] calls them, many at a time. Calls have deadlines, can be cancelled, and never
//! run ahead of the server: it grants credits, and a call without one waits here. Bodies of any length are sent from where they lie
//! and handed over where they were received.
//!
//! ```no_run
//! use ferrogin_channel::{Config, Reactor};
//! use ferrogin_libfabric::Libfabric;
//! use host_rpc::{Client, Server, Settings};
//! use std::time::Duration;
//!
//! let lib = Libfabric::load(None)?;
//! let (here, there) = (Reactor::open(&lib, &Config::default())?, Reactor::open(&lib, &Config::default())?);
//! let server = Server::new(Settings::default()).method(1, |_, body| Ok(body.into_vec().into()));
//! let server = server.start();
//! let address = server.listen(here.listen()?);
//! let client = Client::new(there.connect(&address).wait()?, Settings::default());
//! let answer = client.call(1, b"hello".to_vec(), Duration::from_secs(1)).wait()?;
//! assert_eq!(answer.into_vec(), b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Frames** have a header of 32 bytes ([`frame`]). A short body stands behind it in the same message; a longer one follows in messages
//! of its own, which the order of the transport keeps together: one up to [`Settings::piece`], pieces beyond.
//!
//! **Ends.** Every call ends once: with the answer, with what the server said instead, at its deadline, or with the connection. What a
//! peer sends is checked; a peer that breaks the protocol loses its connection, and no other does.

mod body;
mod channel;
mod client;
mod connection;
mod error;
pub mod frame;
pub mod mlx5;
mod server;
mod sweep;
mod transport;

pub use body::{Body, Data};
pub use client::{Call, Client};
pub use error::{RpcError, Status, Violation};
pub use server::{Context, Responder, Running, Server};
pub use transport::{Bytes, ReceiveDone, SendDone, Transport, TransportError};

use std::time::Duration;

/// How a client or a server behaves. Both ends need not agree.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Calls of one client that the server takes at a time: the credits it grants.
    pub credits: u32,
    /// Bytes of the longest body that is taken.
    pub max_body: usize,
    /// Longest body that travels in the message of its header: it is copied there.
    pub inline: usize,
    /// Longest body that travels in one message of its own; longer ones go in pieces of that size.
    pub piece: usize,
    /// Threads of the server for its methods; with none, methods run on the transport's thread, which suits those that are quick.
    pub workers: usize,
    /// Time that closing and shutting down get.
    pub close_within: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            credits: 64,
            max_body: 1 << 30,
            inline: 8 << 10,
            piece: 8 << 20,
            workers: 2,
            close_within: Duration::from_secs(5),
        }
    }
}

/// The manual's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/rpc.md")]
mod manual {}
