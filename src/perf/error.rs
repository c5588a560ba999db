//! A measurement's errors, with their fixes.

use crate::stdout;
use ferrogin_device::Status;
use mini_nccl::BootstrapError;
use std::path::PathBuf;

/// A failure of `perf`, `compare` or `plot`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The arguments are not valid.
    #[error("{0}")]
    Usage(String),
    /// The host API failed.
    #[error(transparent)]
    Host(#[from] ferrogin::Error),
    /// The ranks did not meet.
    #[error(transparent)]
    Meet(BootstrapError),
    /// A rank was lost between two phases.
    #[error("{0}. That rank's output has the cause; if it only needs longer, use fewer iterations (-n)")]
    Lost(BootstrapError),
    /// Ranks have different arguments.
    #[error(
        "rank {rank} has {name} {theirs}, but rank {own} has {ours}: start all ranks with the same arguments and the same ferrogin"
    )]
    Disagreement {
        /// The other rank.
        rank: usize,
        /// This rank.
        own: usize,
        /// The option.
        name: String,
        /// Its value on the other rank.
        theirs: String,
        /// Its value on this rank.
        ours: String,
    },
    /// An operation of the device API failed.
    #[error("rank {rank}: {operation} of {bytes} bytes failed: {status}. {}", fix(*.status))]
    Operation {
        /// This rank.
        rank: usize,
        /// The operation.
        operation: &'static str,
        /// Bytes of one operation.
        bytes: u64,
        /// The device API's status.
        status: Status,
    },
    /// The device failed.
    #[error("rank {rank}: {operation} failed: {text}. Standard error has the driver's lines")]
    Gpu {
        /// This rank.
        rank: usize,
        /// The operation.
        operation: &'static str,
        /// The driver's error.
        text: String,
    },
    /// A call between CPUs failed.
    #[error("rank {rank}: rpc failed: {text}")]
    Rpc {
        /// This rank.
        rank: usize,
        /// The error.
        text: String,
    },
    /// The RMA plugin failed.
    #[error("rank {rank}: the RMA plugin failed: {text}")]
    Rma {
        /// This rank.
        rank: usize,
        /// The error.
        text: String,
    },
    /// `--verify` found data other than what was sent.
    #[error(
        "rank {rank}: {operation} of {bytes} bytes left wrong data: {what}. Please report it: data must be right \
         after a flush and a signal"
    )]
    WrongData {
        /// This rank.
        rank: usize,
        /// The operation.
        operation: &'static str,
        /// Bytes of one operation.
        bytes: u64,
        /// What differs.
        what: String,
    },
    /// Standard output cannot be written.
    #[error(transparent)]
    Stdout(#[from] stdout::Error),
    /// A file cannot be read or written.
    #[error("cannot {action} {path}: {text}", path = path.display())]
    File {
        /// "read" or "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error, or what is wrong with the content.
        text: String,
    },
}

fn fix(status: Status) -> &'static str {
    match status {
        Status::CardError => "Standard error names the failed request",
        Status::Timeout => {
            "The peer did not answer within a wait's time limit (30 s, or FERROGIN_TIMEOUT if that is less): its \
             output has the cause"
        }
        Status::Unsupported => "This card cannot do the operation",
        _ => "An earlier message has the cause",
    }
}
