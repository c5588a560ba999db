//! Scenarios for two or more ranks, run on CPU threads or as kernels on a GPU, through the plugin.
//!
//! A scenario is a row of [`scenario::SCENARIOS`]: a few [`step`]s. Each step sets up the window, runs a device
//! [`program`] on all ranks at once, and compares the ranks' results. Programs use only the device API, plain memory
//! and their [`plan::Plan`]. They are in the crate `scenario-kernels`, which compiles for CPU threads and to PTX; the
//! [`runner::Runner`]s launch them.
//!
//! [`world`] holds a rank's communicator, window and contexts. [`measure`] measures latencies and rates with the loops
//! of [`timed`].

mod driver;
pub mod gpu;
pub mod machine;
pub mod measure;
pub mod runner;
pub mod scenario;
pub mod segments;
pub mod step;
pub mod world;

pub use scenario_kernels::{plan, program, timed};

use mini_nccl::{BootstrapError, Error};

/// Why a run of scenarios failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A call to the plugin, or the exchange between ranks, failed.
    #[error(transparent)]
    Nccl(#[from] Error),
    /// The device that FERROGIN_DEVICE selects, or its driver, failed.
    #[error("{0}")]
    Gpu(String),
    /// A program failed on a rank.
    #[error("{name}: {}", failures.join("; "))]
    Failed {
        /// The scenario and its step.
        name: String,
        /// One line for each rank that failed.
        failures: Vec<String>,
    },
    /// An argument is not valid.
    #[error("{0}")]
    Usage(String),
}

impl From<BootstrapError> for RunError {
    fn from(error: BootstrapError) -> RunError {
        RunError::Nccl(error.into())
    }
}
