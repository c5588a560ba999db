//! Errors of this crate.

use ferrogin_rendezvous::BootstrapError;
use std::path::PathBuf;

/// A call of this crate failed.
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
    /// The plugin's table lacks a function that NCCL calls.
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
    /// The caller passed an invalid argument.
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

/// Returns the name of a `ncclResult_t`.
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
