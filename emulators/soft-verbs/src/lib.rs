//! The software EFA card as libibverbs and libefa: the front end that libfabric's own `efa` provider and other programs of verbs use.
//!
//! `link.sh` makes `libibverbs.so.1` of this crate's static library; `libefa.so.1` is another name of the same file. The card itself is the
//! crate `soft-nic`.
//!
//! Layouts: the public headers of rdma-core (`bindings.rs`). Rules and errors: rdma-core's efa and the kernel's driver, as the tests state
//! them.
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
    //! The types of the calls, for the harness of the fuzz targets.
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
#[allow(non_upper_case_globals)]
mod unsupported;
mod uses;
