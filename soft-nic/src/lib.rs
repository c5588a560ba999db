//! A software EFA card, as a libfabric provider.
//!
//! `libsoftefa-fi.so` in a directory of `FI_PROVIDER_PATH` gives libfabric the provider `softefa`: the card executes the
//! bytes that software writes into its rings as the hardware does, and is strict where the hardware is.

mod address;
mod card;
mod config;
mod cuda;
mod fault;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
#[allow(unsafe_code)]
pub mod fuzz;
mod host;
mod log;
mod memory;
pub mod mlx5;
mod place;
#[allow(unsafe_code)]
mod provider;
mod random;
mod wire;

pub use config::ConfigError;
pub use provider::{fi_prov_ini, softefa_help};
