//! Scenarios for two and more ranks, run on CPU threads through the plugin.
//!
//! A scenario is a row of [`scenario::SCENARIOS`]: a few steps, each of which sets up the window, runs a device
//! [`program`] on every rank at once, and compares notes. Programs use the device API and plain memory alone and take
//! all they need from a [`plan::Plan`], so the same list can be run by another [`runner::Runner`], on a GPU.
//!
//! Who: [`world`] is a rank's communicator, window and context. What: [`scenario`]. How: [`runner`]. How fast:
//! [`measure`].

pub mod measure;
pub mod plan;
#[allow(unsafe_code)]
pub mod program;
pub mod runner;
pub mod scenario;
pub mod world;

use mini_nccl::{BootstrapError, Error};

/// Why a run of scenarios ended early.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The plugin, or the exchange between ranks.
    #[error(transparent)]
    Nccl(#[from] Error),
    /// The device API refused the context.
    #[error("the device code does not accept context {id} of the plugin: {status}")]
    Context {
        /// Context id.
        id: u32,
        /// What it said.
        status: ferrogin_device::Status,
    },
    /// A program failed on some rank.
    #[error("{name}: {}", failures.join("; "))]
    Failed {
        /// The scenario and its step.
        name: String,
        /// One line for each rank that failed.
        failures: Vec<String>,
    },
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    Usage(String),
}

impl From<BootstrapError> for RunError {
    fn from(error: BootstrapError) -> RunError {
        RunError::Nccl(error.into())
    }
}
