//! The error of the exchange.

use crate::ring::RingError;
use std::time::Duration;

/// Failure of the exchange between the ranks of a job.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The launcher's variables are missing or contradictory.
    #[error("{0}")]
    Environment(String),
    /// Rank 0 cannot listen, or another rank cannot connect.
    #[error(
        "rank {rank} cannot {action} {address}: {text}; all ranks need the same address: `host:port` with an address of rank 0's host and \
         a free port there"
    )]
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
    /// A rank did not call before the deadline.
    #[error(
        "rank {rank} waited {waited:?} for {missing}: see the log of that rank, and raise FERROGIN_TIMEOUT if it only starts slowly"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The missing ranks, and the problem of a process that was refused.
        missing: String,
        /// The timeout.
        waited: Duration,
    },
    /// A rank ended, or left the job.
    #[error("rank {rank}: {event}")]
    PeerClosed {
        /// This rank.
        rank: usize,
        /// The rank that ended, and the sign of its end.
        event: String,
    },
    /// A message that no rank of this job sends.
    #[error(
        "rank {rank}: {problem}; start all ranks with the same number of ranks, and each job with an address of its own"
    )]
    Protocol {
        /// This rank.
        rank: usize,
        /// The message.
        problem: String,
    },
    /// The ranks met, and a later exchange failed.
    #[error(transparent)]
    Ring(#[from] RingError),
}
