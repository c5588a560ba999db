//! What can go wrong.

use std::path::PathBuf;
use std::time::Duration;

/// Failure of a call of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The dynamic loader refused the plugin.
    #[error("cannot load plugin {path}: {text}", path = path.display())]
    Load {
        /// What was to be loaded.
        path: PathBuf,
        /// The dynamic loader's words.
        text: String,
    },
    /// The library has neither of the symbols that NCCL looks for.
    #[error("{path} exports no {symbol}: it is not a GIN plugin of that version", path = path.display())]
    NoSymbol {
        /// The library.
        path: PathBuf,
        /// The symbol.
        symbol: &'static str,
    },
    /// An entry of the plugin's table that NCCL calls is null.
    #[error("the plugin's table has a null {entry}")]
    NullEntry {
        /// Name of the entry.
        entry: &'static str,
    },
    /// A call of the plugin failed.
    #[error("{call} failed: {name} ({code}){warn}", name = result_name(*code), warn = after_colon(warn))]
    Call {
        /// Name of the table's entry.
        call: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// The last WARN line of the plugin, or nothing.
        warn: String,
    },
    /// The plugin answered success but broke the contract.
    #[error("{call}: the plugin broke the contract: {what}")]
    Contract {
        /// Name of the table's entry.
        call: &'static str,
        /// What NCCL relies on and did not get.
        what: String,
    },
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// Memory could not be had.
    #[error("{call} of {bytes} bytes failed: {source}")]
    Memory {
        /// The system call.
        call: &'static str,
        /// Its size.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The exchange between ranks failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
}

/// Failure of the exchange between the ranks of a job.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BootstrapError {
    /// The environment does not say which rank this is, or says it badly.
    #[error("{0}")]
    Environment(String),
    /// Rank 0 cannot be reached, or cannot listen.
    #[error("rank {rank} cannot {what} {address}: {text}")]
    Socket {
        /// This rank.
        rank: usize,
        /// "listen on" or "connect to".
        what: &'static str,
        /// The rendezvous address.
        address: String,
        /// What the system said.
        text: String,
    },
    /// A rank did not come in time.
    #[error("rank {rank} waited {waited:?} in {step} for {missing}")]
    Timeout {
        /// This rank.
        rank: usize,
        /// Step of the exchange.
        step: &'static str,
        /// Who did not come.
        missing: String,
        /// The deadline.
        waited: Duration,
    },
    /// A rank ended, or left the job.
    #[error("rank {rank}: {gone} in {step}")]
    PeerGone {
        /// This rank.
        rank: usize,
        /// Who went, and what was seen of it.
        gone: String,
        /// Step of the exchange.
        step: &'static str,
    },
    /// Bytes that no rank of this job sends.
    #[error("rank {rank}: {what}; are two jobs using one FERROGIN_BOOTSTRAP?")]
    Protocol {
        /// This rank.
        rank: usize,
        /// What came.
        what: String,
    },
}

/// Name of a `ncclResult_t`.
pub fn result_name(code: i32) -> &'static str {
    use ferrogin_ffi::nccl;
    match code {
        nccl::SUCCESS => "ncclSuccess",
        nccl::UNHANDLED_CUDA_ERROR => "ncclUnhandledCudaError",
        nccl::SYSTEM_ERROR => "ncclSystemError",
        nccl::INTERNAL_ERROR => "ncclInternalError",
        nccl::INVALID_ARGUMENT => "ncclInvalidArgument",
        nccl::INVALID_USAGE => "ncclInvalidUsage",
        nccl::REMOTE_ERROR => "ncclRemoteError",
        _ => "unknown ncclResult_t",
    }
}

fn after_colon(warn: &str) -> String {
    if warn.is_empty() { String::new() } else { format!(": {warn}") }
}
