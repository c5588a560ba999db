//! A small NCCL: loads a GIN plugin and calls it in the order of the contract.
//!
//! It has what the tests, the tool and the benches need of NCCL and no more: the loader's symbol search
//! ([`Plugin`]), the call order of a communicator ([`Comm`]: init, devices, properties, listen, connect, closeListen,
//! …, closeColl, finalize), windows ([`Window`]), GIN contexts ([`GinContext`]), a debug logger ([`log`]), an
//! out-of-band exchange between the ranks of a job ([`Bootstrap`]) and launchers for such a job ([`launch`]).
//!
//! ```
//! use mini_nccl::{Bootstrap, Plugin};
//!
//! // One rank alone: an allgather gives back what went in.
//! let alone = Bootstrap::single();
//! assert_eq!(alone.allgather(b"handle").unwrap(), vec![b"handle".to_vec()]);
//! // A plugin that is not there is an error that names the path.
//! let error = Plugin::load("/nonexistent/libnccl-gin-x.so").unwrap_err();
//! assert!(error.to_string().contains("/nonexistent/libnccl-gin-x.so"));
//! ```

pub mod bootstrap;
pub mod comm;
pub mod context;
mod error;
#[allow(unsafe_code)]
mod ffi;
pub mod launch;
pub mod log;
pub mod memory;
pub mod plugin;
pub mod window;

pub use bootstrap::Bootstrap;
pub use comm::Comm;
pub use context::GinContext;
pub use error::{BootstrapError, Error};
pub use memory::DeviceMemory;
pub use plugin::Plugin;
pub use window::Window;

/// Time that a step between ranks may take: FERROGIN_TIMEOUT in seconds, or 60 s. A value that means nothing counts as
/// unset here; the plugin, whose setting it is, refuses it.
pub fn timeout_from_env() -> std::time::Duration {
    let seconds = std::env::var("FERROGIN_TIMEOUT").ok().and_then(|text| text.parse().ok());
    std::time::Duration::from_secs(seconds.filter(|seconds| (1..=86_400).contains(seconds)).unwrap_or(60))
}
