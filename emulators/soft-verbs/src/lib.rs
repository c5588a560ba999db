//! The software EFA card as libibverbs and libefa: the front end for libfabric's own `efa` provider and other verbs
//! programs.
//!
//! `link.sh` links `libibverbs.so.1` from this crate's static library; `libefa.so.1` is another name for the same file.
//! The card itself is the `soft-nic` crate.
//!
//! The layouts come from rdma-core's public headers (`bindings.rs`). Rules and errors follow rdma-core's efa and the
//! kernel driver; the tests spell them out.
#![allow(unsafe_code)]

mod ah;
#[allow(non_camel_case_types, non_snake_case, missing_docs, dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]
#[allow(clippy::multiple_unsafe_ops_per_block, unused_imports)]
mod bindings;
mod channel;
mod context;
mod counter;
mod cq;
mod device;
mod dv;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    //! The calls' types, for the fuzz harness.
    pub use crate::bindings::*;
    pub use crate::guard::QUIET;
}
mod guard;
mod mr;
mod objects;
mod params;
mod pd;
mod post;
mod qp;
mod qp_create;
mod queues;
mod table;
mod text;
mod turn;
#[allow(non_upper_case_globals)]
mod unsupported;
