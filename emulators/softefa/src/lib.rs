//! The software EFA card as a libfabric provider named `softefa`.
//!
//! libfabric loads the provider if `libsoftefa-fi.so` is in a directory of `FI_PROVIDER_PATH`. The card itself is the
//! `soft-nic` crate.
//!
//! The provider has the two fabrics of libfabric's `efa` provider. `efa-direct` is the bare card: messages of one
//! packet, remote memory, and the queues themselves for programs that drive them. `efa` adds a protocol: messages of
//! any length, in order, with tags.
//!
//! Layouts and rules come from libfabric's public headers, and from `fi_efa(7)` for the GDA operations.
#![allow(unsafe_code)]

mod av;
mod bindings;
mod call;
mod cntr;
mod completion;
mod cq;
mod data_path;
mod direct;
mod domain;
mod domain_ops;
mod entry;
mod ep;
mod ep_ops;
mod eq;
mod fabric;
mod fabric_ops;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    //! The message parser, for the fuzz targets' harness.
    pub use crate::rdm::check_packet as messages;
}
mod gda;
mod guard;
mod info;
mod library;
mod mr;
mod object;
mod ops_msg;
mod ops_rma;
mod options;
mod queue_pair;
mod rdm;
mod requests;
mod unsupported;
mod wait;

use std::sync::OnceLock;

use ferrogin_libfabric::bindings as fi;

/// The address of the provider struct: libfabric keeps the pointer and writes to the context.
struct Provider(*mut fi::fi_provider);

// SAFETY: written once, in `fi_prov_ini`; afterwards only libfabric touches it, under its own locks.
unsafe impl Send for Provider {}
// SAFETY: written once, in `fi_prov_ini`; afterwards only libfabric touches it, under its own locks.
unsafe impl Sync for Provider {}

extern "C" fn cleanup() {}

/// Parses a part of this package's version.
const fn number(text: &str) -> u32 {
    match u32::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("cargo's versions are numbers"),
    }
}

/// The entry point that libfabric loads from `*fi.so`.
///
/// The result is valid until the process ends, because the library is linked never to be unloaded.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut fi::fi_provider {
    static PROVIDER_STRUCT: OnceLock<Provider> = OnceLock::new();
    PROVIDER_STRUCT
        .get_or_init(|| {
            Provider(Box::into_raw(Box::new(fi::fi_provider {
                version: library::version(
                    number(env!("CARGO_PKG_VERSION_MAJOR")),
                    number(env!("CARGO_PKG_VERSION_MINOR")),
                ),
                fi_version: library::version(fi::FI_MAJOR_VERSION, fi::FI_MINOR_VERSION),
                context: fi::fi_context::default(),
                name: library::PROVIDER.as_ptr(),
                getinfo: Some(info::getinfo),
                fabric: Some(fabric_ops::open),
                cleanup: Some(cleanup),
            })))
        })
        .0
}
