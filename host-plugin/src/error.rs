//! Why a call of the plugin failed, and what NCCL is told.

use crate::config::ConfigError;
use crate::control::ControlError;
use crate::device::DeviceError;
use crate::registry::HandleError;
use efa_dp_direct::queue::InitError;
use ferrogin_ffi::nccl;

/// A failed call. Its text is the one WARN line that NCCL's user sees.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A pointer that NCCL must give is NULL.
    #[error("the {0} pointer is NULL")]
    Null(&'static str),
    /// A handle that is none, or is closed.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// An argument has a value that cannot be.
    #[error("{0}")]
    Argument(String),
    /// A call that is not allowed with this configuration.
    #[error("{0}")]
    Usage(String),
    /// A variable of the environment.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Set-up with the other ranks.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Device memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// libfabric or its provider.
    #[error("{what}: {source}")]
    Fabric {
        /// What was being done.
        what: String,
        /// What came back.
        source: ferrogin_libfabric::Error,
    },
    /// A queue that NCCL's structs cannot describe.
    #[error("endpoint {endpoint} has {source}")]
    Queue {
        /// Which.
        endpoint: String,
        /// What is wrong with it.
        source: InitError,
    },
    /// More was asked for than a card has.
    #[error("{0}")]
    Budget(String),
    /// A failure of the system.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl Error {
    /// NCCL's code for it.
    pub fn result(&self) -> nccl::Result {
        match self {
            Self::Null(_) | Self::Handle(_) | Self::Argument(_) => nccl::INVALID_ARGUMENT,
            Self::Usage(_) | Self::Config(_) | Self::Queue { .. } => nccl::INVALID_USAGE,
            Self::Control(error) => match error {
                ControlError::BadHandle { .. } | ControlError::WrongOrder { .. } => nccl::INVALID_ARGUMENT,
                ControlError::Socket { .. } | ControlError::Endpoint { .. } | ControlError::NoInterface { .. } => {
                    nccl::SYSTEM_ERROR
                }
                _ => nccl::REMOTE_ERROR,
            },
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

    /// For `map_err`: libfabric failed while `what` was being done.
    pub fn fabric(what: impl Into<String>) -> impl FnOnce(ferrogin_libfabric::Error) -> Self {
        let what = what.into();
        move |source| Self::Fabric { what, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Step;

    #[test]
    fn codes_tell_whose_fault_it_is() {
        let gone = ControlError::PeerGone { rank: 3, at: "10.0.0.7:80".into(), step: Step::Connect };
        assert_eq!(Error::from(gone).result(), nccl::REMOTE_ERROR);
        assert_eq!(Error::Null("ctx").result(), nccl::INVALID_ARGUMENT);
        assert_eq!(Error::from(DeviceError::NotMapped { address: 1, len: 1 }).result(), nccl::INVALID_ARGUMENT);
        assert_eq!(Error::Budget(String::new()).result(), nccl::SYSTEM_ERROR);
    }
}
