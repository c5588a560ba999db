//! Errors of this crate.

use std::path::PathBuf;
use std::time::Duration;

/// Failure of a call of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The dynamic loader refused the plugin.
    #[error("cannot load plugin {path}: {text}", path = path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// The dynamic loader's message.
        text: String,
    },
    /// The library has none of NCCL's symbols.
    #[error("{path} exports no {symbol}: it is not a GIN plugin of that version", path = path.display())]
    NoSymbol {
        /// The library.
        path: PathBuf,
        /// The symbol.
        symbol: &'static str,
    },
    /// A function that NCCL calls is missing in the plugin's table.
    #[error("the plugin's table has no function {entry}")]
    NullEntry {
        /// Name of the function.
        entry: &'static str,
    },
    /// A call of the plugin failed.
    #[error("{call} failed: {name} ({code}){warn}", name = result_name(*code), warn = after_colon(warn))]
    Call {
        /// Name of the function.
        call: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// The last WARN line of the plugin, or an empty string.
        warn: String,
    },
    /// A call of the plugin succeeded but broke NCCL's contract.
    #[error("{call}: the plugin broke the contract: {violation}")]
    Contract {
        /// Name of the function.
        call: &'static str,
        /// The violation.
        violation: String,
    },
    /// An argument of the caller is not valid.
    #[error("{0}")]
    Usage(String),
    /// A system call for memory failed.
    #[error("{call} of {bytes} bytes failed: {source}")]
    Memory {
        /// The system call.
        call: &'static str,
        /// Its size.
        bytes: usize,
        /// Its error.
        source: std::io::Error,
    },
    /// The exchange between ranks failed.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
}

/// Failure of the exchange between the ranks of a job.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BootstrapError {
    /// The launcher's variables are missing or contradictory.
    #[error("{0}")]
    Environment(String),
    /// Rank 0 cannot listen, or another rank cannot connect.
    #[error("rank {rank} cannot {action} {address}: {text}")]
    Socket {
        /// This rank.
        rank: usize,
        /// "listen on" or "connect to".
        action: &'static str,
        /// The address of rank 0.
        address: String,
        /// The system's message.
        text: String,
    },
    /// A rank did not take part in a step before the deadline.
    #[error("rank {rank} waited {waited:?} in {step} for {missing}; see the log of that rank")]
    Timeout {
        /// This rank.
        rank: usize,
        /// Step of the exchange.
        step: &'static str,
        /// The missing ranks.
        missing: String,
        /// The timeout.
        waited: Duration,
    },
    /// A rank ended, or left the job.
    #[error("rank {rank}: {event} in {step}")]
    PeerClosed {
        /// This rank.
        rank: usize,
        /// The rank that ended, and the sign of its end.
        event: String,
        /// Step of the exchange.
        step: &'static str,
    },
    /// A message that no rank of this job sends.
    #[error("rank {rank}: {problem}; check that no other job uses the same FERROGIN_BOOTSTRAP")]
    Protocol {
        /// This rank.
        rank: usize,
        /// The message.
        problem: String,
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
