#![doc = include_str!("../README.md")]
//!
//! A [`Server`] has named methods, blocking or async; a [`Client`] calls them, many at a time. A call has a deadline
//! and can be cancelled. The server grants credits; a call without a credit waits at the client. Bodies of any length
//! are sent from the caller's memory and handed over in the memory that received them. Bodies that shouldn't be in
//! memory all at once are sent in parts ([`Client::stream`]).
//!
//! **One call** passes through four modules on its way out and back: the client, the connection, which turns calls and
//! answers into frames ([`frame`]), the transport, and the server.
//!
//! ```text
//! Client::call ─► Connection::send ─► Transport::send  ~~~►  Connection::received ─► Session::on_request ─► method
//!    (waits for      (packed while a                                                    (waits for a          │
//!     a credit)       message is sent)                                                   worker)              ▼
//! callback     ◄─ Connection::received  ◄~~~  Transport::send ◄─ Connection::send ◄───────────── Responder::reply
//! ```
//!
//! A request waits in a queue of this crate in only three cases: at the client, without a credit; behind a message that
//! is being sent; and, if the server has workers, until one is free.
//!
//! **Frames** have a header of 32 bytes ([`frame`]) and a body:
//!
//! | body | how it is sent | copies |
//! |---|---|---|
//! | up to [`Settings::inline`] | in the header's message | one at each end: for short bodies a copy is cheaper than a message |
//! | up to [`Settings::piece`] | in a message of its own | none: [`Body::into_vec`] returns the receive's memory |
//! | longer | in pieces of [`Settings::piece`] bytes | [`Body::pieces`] none, [`Body::bytes`] and [`Body::into_vec`] one |
//!
//! The channels' buffer pool keeps the memory of long bodies that were dropped or sent, up to 64 MiB.
//!
//! **End of a call.** Every call ends once: with the result, with a [`Status`] from the server, at its deadline, or
//! with the connection. Everything a peer sends is checked. A peer that breaks the protocol loses its connection; other
//! connections are not affected.

mod body;
mod client;
mod connection;
mod deadline;
mod error;
pub mod frame;
mod method;
pub mod mlx5;
mod parts;
mod server;
mod settings;
mod status;
mod stream;
mod transport;

pub use body::{Body, Data};
pub use client::{Call, Client};
pub use error::{RpcError, Violation};
pub use ferrogin_channel::Payload;
pub use method::Method;
pub use server::{Context, Responder, Server, ServerHandle};
pub use settings::Settings;
pub use status::Status;
pub use stream::{CallStream, ServerStream};
pub use transport::{ReceiveDone, SendDone, Transport, TransportError};

/// Compiles the manual's examples.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rpc.md")]
mod manual {}
