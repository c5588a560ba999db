//! Scenarios for two and more ranks, run on CPU threads through the plugin.
//!
//! A scenario is a row of [`scenario::SCENARIOS`]: a few steps. Each step sets up the window, runs a device [`program`] on all ranks
//! at once, and compares the ranks' results. Programs use only the device API, plain memory and their [`plan::Plan`], so another
//! [`runner::Runner`] can run the same list on a GPU.
//!
//! [`world`] is a rank's communicator, window and contexts. [`measure`] measures latencies and rates by the loops of [`timed`].

pub mod measure;
pub mod plan;
#[allow(unsafe_code)]
pub mod program;
pub mod runner;
pub mod scenario;
#[allow(unsafe_code)]
pub mod timed;
pub mod world;

use mini_nccl::{BootstrapError, Error};

/// The error of a run of scenarios.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A call of the plugin, or the exchange between ranks, failed.
    #[error(transparent)]
    Nccl(#[from] Error),
    /// The device API refused a context.
    #[error("the device code refuses context {id} of the plugin: {status}")]
    Context {
        /// Context id.
        id: u32,
        /// The status.
        status: ferrogin_device::Status,
    },
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
