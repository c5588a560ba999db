#![doc = include_str!("../README.md")]
//!
//! It has the parts of NCCL that the tests, the tool and the benches need: the loader's symbol search ([`Plugin`]), the
//! call order of a communicator ([`Comm`]: init, devices, properties, listen, connect, closeListen, …, closeColl,
//! finalize), windows ([`Window`]), GIN contexts ([`GinContext`]), the same for RMA plugins ([`rma`]), a debug logger
//! ([`log`]), an out-of-band exchange between the ranks of a job ([`Bootstrap`], from the crate `ferrogin-rendezvous`),
//! and launchers for such a job ([`launch`]).

pub mod comm;
mod connection;
pub mod context;
mod error;
#[allow(unsafe_code)]
mod ffi;
pub mod launch;
pub mod log;
pub mod memory;
pub mod plugin;
pub mod rma;
pub mod window;

pub use comm::Comm;
pub use context::GinContext;
pub use error::Error;
pub use ferrogin_rendezvous::{self as bootstrap, Bootstrap, BootstrapError};
pub use memory::{DeviceMemory, GpuMemory};
pub use plugin::Plugin;
pub use window::Window;

/// Returns the time limit for a step between ranks: FERROGIN_TIMEOUT in seconds, default 60. An invalid value is
/// ignored here, because the plugin reports it.
pub fn timeout_from_env() -> std::time::Duration {
    let seconds = std::env::var("FERROGIN_TIMEOUT").ok().and_then(|text| text.parse().ok());
    std::time::Duration::from_secs(seconds.filter(|seconds| (1..=86_400).contains(seconds)).unwrap_or(60))
}
