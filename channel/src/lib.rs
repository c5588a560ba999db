//! Message channels: whole messages, in order, over a network that delivers and completes out of order.
//!
//! A [`Reactor`] is a libfabric endpoint and the thread that drives it. A [`Listener`] has an [`Address`] of at most 128 bytes, which the
//! application carries to the other side; [`Reactor::connect`] opens a [`Channel`] to it. [`Channel::write`] and [`Channel::read`] move whole
//! buffers and call back. [`Channel::send`] and [`Channel::receive`] do the same as futures, which can be waited for without an executor.
//!
//! ```no_run
//! use ferrogin_channel::{Config, Reactor};
//! use ferrogin_libfabric::Libfabric;
//!
//! let lib = Libfabric::load(None)?;
//! let (server, client) = (Reactor::open(&lib, &Config::default())?, Reactor::open(&lib, &Config::default())?);
//! let listener = server.listen()?;
//! let (a, b) = (client.connect(listener.address()), listener.accept());
//! let (a, b) = (a.wait()?, b.wait()?);
//! a.write(b"hello", |sent| assert!(sent.is_ok()));
//! assert_eq!(b.receive().wait()?, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Layers.** `proto` is the protocol, without I/O and threads. `transport` carries tagged messages: with tags that the provider matches, or
//! with software matching over datagrams. `reactor` is the thread that drives both; `shared` is the way of requests to it.
//!
//! **Protocol.** Message `id` of a direction is two tagged messages: its length (8 bytes, little endian) with tag `1 << 32 | id`, and its payload
//! with tag `1 << 33 | id`. Ids count up and wrap at 2^32. The reader posts receives for lengths with the ignore mask `0xffff_ffff`, learns the
//! id from the tag, and posts a receive for exactly that payload. Completions arrive in any order and only mark their message; callbacks run
//! in the order of ids. Control messages with a third kind of tag open, watch and close channels.
//!
//! **Peers.** All peers use the same tags and ids. Receives for lengths and payloads are directed (`FI_DIRECTED_RECV`): each matches messages
//! of one peer. Two endpoints have at most one channel between them at a time. The ids of the next channel begin far from those of the one
//! before, so stale messages are recognised and dropped; the same holds for a new endpoint at the address of one that is gone.
//!
//! **Flow.** At most [`Config::depth`] writes and as many reads of a channel are in flight; more wait in order. At most 256 messages of a channel
//! are sent and not read; further writes wait for reads.
//!
//! **Ends.** Every callback runs once: with the message or the buffer, or with an error that names the peer. A peer that is quiet for
//! [`Config::ping_after`] gets a ping, and is given up [`Config::lost_after`] later. A message that has begun and does not continue for that long,
//! plus one second for each 4 MiB in flight, ends its channel too.

mod buffer_pool;
mod config;
mod error;
#[allow(unsafe_code)]
mod event_fd;
mod handle;
mod parker;
mod payload;
mod pending;
mod proto;
mod reactor;
mod shared;
mod transport;

#[cfg(test)]
mod tests;

pub use buffer_pool::recycle;
pub use config::{Config, Matching};
pub use error::{ChannelError, Reason, Violation};
pub use handle::{Channel, Listener, Ticket};
pub use payload::Payload;
pub use pending::Pending;
pub use proto::wire::{ADDRESS_MAX, Address};
pub use reactor::Reactor;

/// The manual's examples compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/channel.md")]
mod manual {}
