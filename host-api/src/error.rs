//! Errors, and their codes in C.

use ferrogin_ffi::nccl;
use ferrogin_rendezvous::BootstrapError;
use nccl_gin_ferrogin::registry::HandleError;

/// The class of an error. The numbers are those of `ncclResult_t` and of `ferrogin_status` in C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// A CUDA driver call failed.
    Cuda = nccl::UNHANDLED_CUDA_ERROR,
    /// A system call or a libfabric call failed.
    System = nccl::SYSTEM_ERROR,
    /// A bug in ferrogin.
    Internal = nccl::INTERNAL_ERROR,
    /// An argument has an invalid value.
    InvalidArgument = nccl::INVALID_ARGUMENT,
    /// The machine, the settings or the order of calls don't allow the call.
    InvalidUsage = nccl::INVALID_USAGE,
    /// Another rank failed, exited, or didn't answer in time.
    Remote = nccl::REMOTE_ERROR,
}

/// Why a call failed. The text has the cause and the fix.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The plugin's part of the call failed.
    #[error(transparent)]
    Plugin(#[from] nccl_gin_ferrogin::error::Error),
    /// The ranks didn't meet.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The ranks didn't meet, and no launcher or setting told them where.
    #[error(
        "{0}. Ranks of different terminals or sessions need FERROGIN_BOOTSTRAP: set it to the same name, or host:port, for all ranks"
    )]
    Apart(BootstrapError),
    /// An argument has an invalid value.
    #[error("{0}")]
    Argument(String),
    /// The machine or the order of calls doesn't allow the call.
    #[error("{0}")]
    Usage(String),
    /// The caller's allgather failed.
    #[error("the allgather that the caller passed to open failed: {0}")]
    Allgather(String),
    /// Another rank failed in open.
    #[error("rank {rank} failed in open: {text}")]
    Peer {
        /// The rank.
        rank: usize,
        /// That rank's error.
        text: String,
    },
    /// Two ranks can't work together.
    #[error("{0}")]
    Disagreement(String),
}

impl Error {
    /// Returns the class of the error.
    pub fn status(&self) -> Status {
        match self {
            Self::Plugin(error) => match error.result() {
                nccl::UNHANDLED_CUDA_ERROR => Status::Cuda,
                nccl::SYSTEM_ERROR => Status::System,
                nccl::INVALID_ARGUMENT => Status::InvalidArgument,
                nccl::INVALID_USAGE => Status::InvalidUsage,
                nccl::REMOTE_ERROR => Status::Remote,
                _ => Status::Internal,
            },
            Self::Bootstrap(error) | Self::Apart(error) => match error {
                BootstrapError::Environment(_) => Status::InvalidUsage,
                BootstrapError::Socket { .. } => Status::System,
                _ => Status::Remote,
            },
            Self::Argument(_) => Status::InvalidArgument,
            Self::Usage(_) | Self::Disagreement(_) => Status::InvalidUsage,
            Self::Allgather(_) | Self::Peer { .. } => Status::Remote,
        }
    }
}

impl From<HandleError> for Error {
    fn from(error: HandleError) -> Self {
        Self::Plugin(error.into())
    }
}
