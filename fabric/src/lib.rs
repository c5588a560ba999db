//! libfabric, loaded at run time: bindings, owned handles, and a small message layer.
//!
//! Nothing is linked: [`Libfabric::load`] takes six functions from the shared library, and everything else goes through the
//! operations tables of the objects themselves, so that one build runs with libfabric 1.17 as with the newest.
//!
//! - [`Libfabric`], [`Hints`], [`Info`]: finding a card. [`Fabric`], [`Domain`], [`AddressVector`], [`CompletionQueue`],
//!   [`Counter`], [`Endpoint`], [`MemoryRegion`]: owned handles. Each keeps what it was made from alive and closes itself on
//!   drop, so any order of drops is right.
//! - [`GdaOps`]: the EFA provider's operations for queues that a device (or our device code on the CPU) drives itself.
//! - [`msg`]: datagrams between processes over any provider with reliable datagram endpoints: the software card's wire.
//! - [`bindings`]: the C interface, for who writes a provider.
//!
//! **Versions.** The bindings describe libfabric 2.6. Structs grew at their tails over time: an `fi_info` and its parts are always
//! allocated by the library itself; attributes that we pass are of the newest size, and providers read the tail only for API
//! versions that have it; operations tables carry their size, which is looked at before an entry is read. The API version
//! asked for is the library's own, but no newer than the bindings.
//!
//! **Threads.** Handles are `Send` and `Sync`: a [`Domain`] opens only with `FI_THREAD_SAFE`, which [`Hints`] ask for by default.

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
mod counter;
#[allow(unsafe_code)]
mod domain;
#[allow(unsafe_code)]
mod endpoint;
mod error;
#[allow(unsafe_code)]
mod gda;
#[allow(unsafe_code)]
mod hints;
#[allow(unsafe_code)]
mod info;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
pub mod msg;
#[allow(unsafe_code)]
mod table;

pub use address::{AddressVector, FiAddr};
pub use completion::{Completion, CompletionError, CompletionQueue, CqAttr, CqDmaBuf, Read};
pub use counter::{Counter, Location};
pub use domain::{Domain, Fabric};
pub use endpoint::Endpoint;
pub use error::Error;
pub use gda::{CqMemory, FEATURE_CNTR_OPEN_EXT, GdaOps, Target, WqMemory};
pub use hints::{Hints, MR_MODE_ALL};
pub use info::{Info, PciAddress};
pub use library::{Libfabric, Version};
pub use memory::{MemoryKind, MemoryRegion, Region};
