#![doc = include_str!("../README.md")]
//!
//! | module | content |
//! |---|---|
//! | [`comm`] | open, barrier |
//! | [`introduction`] | the block through which ranks agree before they connect |
//! | [`window`], [`context`] | memory that peers access; queues that kernels post on |
//! | [`device`] | the device API, for kernels on CPU threads |
//! | [`capi`] | the C ABI: `ferrogin/host.h` |
//!
//! The crate adds no networking of its own: it uses the objects beneath the NCCL functions of the plugin,
//! [`nccl_gin_ferrogin`].

pub mod capi;
pub mod comm;
pub mod context;
pub mod error;
pub mod introduction;
pub mod lsa;
pub mod window;

pub use comm::{Comm, Options};
pub use context::{Context, ContextOptions, PeerFailure};
pub use error::{Error, Status};
pub use ferrogin_device as device;
pub use ferrogin_rendezvous as bootstrap;
pub use window::{Memory, Window};
