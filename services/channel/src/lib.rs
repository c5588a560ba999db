#![doc = include_str!("../README.md")]
//!
//! A [`Reactor`] is an endpoint and the thread that drives it. A [`Listener`] has an [`Address`] of at most 128 bytes,
//! which the application carries to the other side; [`Reactor::connect`] opens a [`Channel`] to it. [`Channel::write`]
//! and [`Channel::read`] move whole buffers and call back. [`Channel::send`] and [`Channel::receive`] do the same as
//! futures, which a thread can also block on.
//!
//! **Layers.** `proto` is the protocol, without I/O or threads. It talks to a `carrier`, which delivers the messages of
//! a peer whole and in order: over TCP, or with tags that a libfabric provider matches. `reactor` is the thread that
//! drives both; `shared` passes requests to it.
//!
//! **Manual.** `docs/channel.md` describes the guarantees and limits. In short: over tags a message is two tagged
//! messages, its length and its payload, and over TCP one frame; completions arrive in any order, while callbacks run
//! once each in message order, with the message or with an error that names the peer.

mod buffer_pool;
mod carrier;
mod config;
mod error;
mod handle;
mod parker;
mod payload;
mod pending;
mod proto;
mod reactor;
#[allow(unsafe_code)]
mod shared;

#[cfg(test)]
mod tests;

pub use buffer_pool::recycle;
pub use config::Config;
pub use error::{ChannelError, Reason, Violation};
pub use handle::{Channel, Listener, Ticket};
pub use payload::Payload;
pub use pending::Pending;
pub use proto::wire::{ADDRESS_MAX, Address};
pub use reactor::Reactor;

/// Compiles the manual's examples.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/channel.md")]
mod manual {}
