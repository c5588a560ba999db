//! Message channels: whole messages, in order, over a fabric that delivers and completes out of order.
//!
//! A [`Reactor`] is a libfabric endpoint and the thread that drives it. A [`Listener`] has an address of at most 128 bytes, which
//! the other side gets by any means; [`Reactor::connect`] opens a [`Channel`] to it. [`Channel::write`] and
//! [`Channel::read`] move whole buffers and call back; [`Channel::send`] and [`Channel::receive`] are the same, as futures that can
//! be waited for without an executor.
//!
//! ```no_run
//! use ferrogin_libfabric::Libfabric;
//! use ferrogin_channel::{Config, Reactor};
//!
//! let lib = Libfabric::load(None)?;
//! let (here, there) = (Reactor::open(&lib, &Config::default())?, Reactor::open(&lib, &Config::default())?);
//! let listener = here.listen()?;
//! let (a, b) = (there.connect(listener.address()), listener.accept());
//! let (a, b) = (a.wait()?, b.wait()?);
//! a.write(b"hello", |sent| assert!(sent.is_ok()));
//! assert_eq!(b.receive().wait()?, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Protocol.** Message `id` of a direction is two tagged messages: its length (8 bytes, little endian) with tag `1 << 32 | id`, and
//! its bytes with tag `1 << 33 | id`; ids count up and wrap at 2^32. The reader posts receives for lengths with the ignore mask
//! `0xffff_ffff`, learns the id from the tag, and posts a receive for exactly that payload. Completions, in whatever order,
//! only mark; a scan from the oldest message calls. Channels are opened, watched and closed by control messages of a third kind.
//!
//! **Peers never mix**, although tags and ids of different peers are the same: receives for lengths and payloads are directed
//! (`FI_DIRECTED_RECV`): they take messages of one peer only, and the address vector, not the message, says who that is. Two endpoints
//! have at most one channel between them at a time. The ids of the next one begin far from those of the one before, so that what
//! that one left behind is known as such and thrown away; so does a new endpoint at the address of one that is gone.
//!
//! **Flow.** At most [`Config::depth`] writes and as many reads are with libfabric at a time; more wait in order. Messages that are
//! written and not read are kept by the provider, which on most of them means by the reader's memory: 256 of a channel at most, further
//! writes wait for reads.
//!
//! **Ends.** Every callback is called once: with the message or the buffer, or with an error that names the peer. Quiet peers are
//! asked to answer after [`Config::ping_after`] and given up after [`Config::lost_after`] more; a message that was begun and does not go
//! on for that long (and four MiB per second of what is under way) ends its channel as well.

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
