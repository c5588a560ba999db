//! The error of a failed call, and its NCCL result code.

use crate::config::ConfigError;
use crate::device::DeviceError;
use crate::registry::HandleError;
use efa_dp_direct::queue::InitError;
use ferrogin_ffi::nccl;
use ferrogin_rendezvous::ring::RingError;

/// The error of a call. Its text is the call's one WARN line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pointer argument is NULL or misaligned.
    #[error("the pointer {0} is NULL or misaligned")]
    Null(&'static str),
    /// A handle is invalid or closed.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// This process inherited the plugin's state through `fork`.
    #[error(
        "process {child} is a fork() of process {parent}, and the plugin's threads run in process {parent} only: use the plugin in \
         the process that called init, or start the new process with exec"
    )]
    Forked {
        /// The process that called `init`.
        parent: u32,
        /// This process.
        child: u32,
    },
    /// An argument has an invalid value.
    #[error("{0}")]
    Argument(String),
    /// This machine or configuration doesn't allow the call.
    #[error("{0}")]
    Usage(String),
    /// An environment variable has an invalid value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Set-up with the other ranks failed.
    #[error(transparent)]
    Control(#[from] RingError),
    /// A device memory call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A libfabric call failed.
    #[error("{what}: {source}")]
    Fabric {
        /// The operation.
        what: String,
        /// libfabric's error.
        source: ferrogin_libfabric::Error,
    },
    /// NCCL's structs can't describe a queue.
    #[error(
        "the queue structs of backendVersion {backend_version} cannot describe a queue of the card: {source}; pass another backendVersion"
    )]
    Queue {
        /// NCCL's backendVersion.
        backend_version: i32,
        /// The value that doesn't fit.
        source: InitError,
    },
    /// An operation of an RMA context failed, now or before.
    #[error("{0}")]
    Peer(String),
    /// A card has too few completion counters.
    #[error("{0}")]
    Budget(String),
    /// A system call failed.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        source: std::io::Error,
    },
}

/// The result of a call on a data path. With the error on the heap, it fits in registers.
pub type DataResult<T> = Result<T, Box<Error>>;

impl From<Box<Error>> for Error {
    fn from(error: Box<Error>) -> Self {
        *error
    }
}

impl Error {
    /// Returns NCCL's result code for the error.
    pub fn result(&self) -> nccl::Result {
        match self {
            Self::Null(_) | Self::Handle(_) | Self::Argument(_) => nccl::INVALID_ARGUMENT,
            Self::Usage(_) | Self::Forked { .. } | Self::Config(_) | Self::Queue { .. } => nccl::INVALID_USAGE,
            Self::Control(error) => match error {
                RingError::BadHandle { .. } | RingError::WrongOrder { .. } => nccl::INVALID_ARGUMENT,
                RingError::Socket { .. } | RingError::Listen { .. } | RingError::Interface(_) => nccl::SYSTEM_ERROR,
                RingError::BlockTooLarge { .. } => nccl::INVALID_USAGE,
                _ => nccl::REMOTE_ERROR,
            },
            Self::Peer(_) => nccl::REMOTE_ERROR,
            Self::Device(error) => match error {
                DeviceError::NoGpu { .. } => nccl::INVALID_USAGE,
                DeviceError::Cuda { .. } => nccl::UNHANDLED_CUDA_ERROR,
                DeviceError::NotMapped { .. } | DeviceError::WrongMemory { .. } => nccl::INVALID_ARGUMENT,
                DeviceError::System { .. } => nccl::SYSTEM_ERROR,
                DeviceError::Bounds { .. } => nccl::INTERNAL_ERROR,
            },
            Self::Fabric { .. } | Self::Budget(_) | Self::System { .. } => nccl::SYSTEM_ERROR,
        }
    }

    /// For `map_err`: wraps a libfabric error in the operation `what`.
    pub fn fabric(what: impl Into<String>) -> impl FnOnce(ferrogin_libfabric::Error) -> Self {
        move |source| Self::Fabric { what: what.into(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrogin_rendezvous::ring::Step;

    #[test]
    fn error_codes_distinguish_arguments_peers_and_system() {
        let closed = RingError::PeerClosed { rank: 3, at: "10.0.0.7:80".into(), step: Step::Connect };
        assert_eq!(Error::from(closed).result(), nccl::REMOTE_ERROR);
        assert_eq!(Error::Null("ctx").result(), nccl::INVALID_ARGUMENT);
        assert_eq!(Error::from(DeviceError::NotMapped { address: 1, len: 1 }).result(), nccl::INVALID_ARGUMENT);
        assert_eq!(Error::Budget(String::new()).result(), nccl::SYSTEM_ERROR);
    }
}
