#![doc = include_str!("../README.md")]
//!
//! Nothing is linked: [`Libfabric::load`] takes six functions from the shared library, and all other calls go through the operations
//! tables of the objects. So one build runs with libfabric 1.17 and with the newest.
//!
//! - [`Libfabric`], [`Hints`], [`Info`]: finding a card. [`Fabric`], [`Domain`], [`AddressVector`], [`CompletionQueue`],
//!   [`EventQueue`], [`Counter`], [`Endpoint`], [`MemoryRegion`]: owned handles. Each keeps its parents alive and closes itself on drop, so
//!   handles can be dropped in any order.
//! - [`GdaOps`]: the EFA provider's operations for queues that a device (or device code on the CPU) drives itself.
//! - [`find_datagrams`], [`TaggedQueue`], [`entry!`]: the needs of a layer above reliable datagram endpoints.
//! - [`bindings`]: the C interface, for providers; `libfabric/bindgen.sh` generates it, and names the libfabric commit.
//!
//! **Versions.** The bindings describe libfabric 2.6. Structs grew at their ends over time. The library itself allocates every
//! `fi_info` and its parts. Attributes that this crate passes have the newest size; providers read the end only for API versions that
//! have it. Operations tables begin with their size, which this crate checks before it reads an entry. The API version of calls is the
//! library's own, but no newer than the bindings.
//!
//! **Threads.** Handles are `Send` and `Sync`: a [`Domain`] opens only with `FI_THREAD_SAFE`, the default of [`Hints`].

#[allow(
    unsafe_code,
    unsafe_op_in_unsafe_fn,
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]
pub mod bindings;

#[allow(unsafe_code)]
mod address;
#[allow(unsafe_code)]
mod completion;
#[allow(unsafe_code)]
mod context;
#[allow(unsafe_code)]
mod counter;
mod datagrams;
#[allow(unsafe_code)]
mod domain;
#[allow(unsafe_code)]
mod endpoint;
mod error;
#[allow(unsafe_code)]
mod events;
#[allow(unsafe_code)]
mod gda;
#[allow(unsafe_code)]
mod gda_queries;
#[allow(unsafe_code)]
mod hints;
#[allow(unsafe_code)]
mod info;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
pub mod progress;
#[allow(unsafe_code)]
mod query;
#[allow(unsafe_code)]
pub mod statistics;
#[allow(unsafe_code)]
pub mod table;
#[allow(unsafe_code)]
mod tagged_queue;
mod version;
#[allow(unsafe_code)]
mod wait;

pub use address::{AddressVector, FiAddr};
pub use completion::{Completion, CompletionError, CompletionQueue, CqAttr, Read};
pub use context::Context;
pub use counter::{Counter, Location};
pub use datagrams::find_datagrams;
pub use domain::{Domain, Fabric};
pub use endpoint::Endpoint;
pub use error::Error;
pub use events::EventQueue;
pub use gda::{FEATURE_CNTR_OPEN_EXT, GdaOps};
pub use gda_queries::{CqMemory, Target, WqMemory};
pub use hints::{Hints, MR_MODE_ALL};
pub use info::{Info, PciAddress};
pub use library::Libfabric;
pub use memory::{MemoryKind, MemoryRegion, Region};
pub use tagged_queue::{TaggedCompletion, TaggedQueue, TaggedRecv, TaggedSend};
pub use version::Version;
