#![doc = include_str!("../README.md")]
//!
//! A [`MessageEndpoint`] belongs to one thread at a time, which sends with [`Outbox::send`] and drives everything with
//! [`MessageEndpoint::poll`]. Nothing blocks and nothing is allocated per message. A message is a small header and a payload; with
//! [`Outbox::send_borrowed`] the payload is sent from where it lies.
//!
//! **Order.** Messages may arrive in any order: a short one may overtake a long one.
//!
//! **Dead peers.** libfabric does not report the death of a peer to which nothing is sent. So a peer that is quiet for [`Config::ping_after`]
//! gets a ping. A peer that does not answer within [`Config::lost_after`], or to which a send fails, is reported as [`Event::Lost`], once,
//! and stays lost (until [`Outbox::forget`]). A later endpoint at its address is another peer: neither gets messages for the
//! other. `poll` answers pings: the owner of an endpoint must call it more often than `lost_after`.
//!
//! **Closing.** [`MessageEndpoint::shutdown`] sends everything and closes; peers then see [`LostReason::Closed`]. An endpoint that is only
//! dropped may lose messages in flight, and peers detect it like a dead peer.
//!
//! **Silent connections.** Over TCP the endpoint ends connections to its port on which no message arrives for 10 s, and connections that are quiet for
//! longer than a live peer. Of connections without a byte beyond a quarter of the process's limit of descriptors, which its endpoints share, it ends
//! the oldest at once, first those of the address that has the most. [`MessageEndpoint::close_port`] ignores later connects.
//!
//! **Providers.** Tested: `tcp` of libfabric 2.5; for 1.17, whose `tcp` has no reliable datagrams, its `net` is taken. Over `ofi_rxm`
//! (asked for by name, or where nothing else exists) it works too, but some sends in flight to a peer that dies never complete: their slots
//! and borrowed payloads are released when the endpoint is dropped.
//!
//! **Trust.** A message names its sender itself. Lengths of its parts are checked; the name is not proven. An owner that wants a proof
//! sets [`Config::admission`]: a message of an endpoint that was not admitted then changes nothing here, and goes to the second callback of
//! [`MessageEndpoint::poll_admitting`], which may admit the endpoint by [`Outbox::admit`].

mod config;
#[allow(unsafe_code)]
mod endpoint;
mod event;
#[allow(unsafe_code)]
mod long;
#[allow(unsafe_code)]
mod outbox;
mod peer;
mod peers;
#[allow(unsafe_code)]
mod pool;
#[cfg(test)]
mod tests;
mod wire;

pub use config::{Config, NAME_MAX};
pub use endpoint::MessageEndpoint;
pub use event::{Event, LostReason, Peer, SendError, Unadmitted};
pub use long::LongReceived;
pub use outbox::Outbox;
