//! Errors of the exchange.

use crate::ring::RingError;
use std::time::Duration;

/// Why the exchange between a job's ranks failed.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The launcher's variables are missing or contradictory.
    #[error("{0}")]
    Environment(String),
    /// Rank 0 can't listen, or another rank can't connect.
    #[error(
        "rank {rank} cannot {action} {address}: {text}; all ranks need the same address: `host:port` with an address of rank 0's host and \
         a free port there"
    )]
    Socket {
        /// This rank.
        rank: usize,
        /// "listen on" or "connect to".
        action: &'static str,
        /// Rank 0's address.
        address: String,
        /// The system's message.
        text: String,
    },
    /// A rank didn't call before the deadline.
    #[error(
        "rank {rank} waited {waited:?} for {missing}: see the log of that rank, and raise FERROGIN_TIMEOUT if it only starts slowly"
    )]
    Timeout {
        /// This rank.
        rank: usize,
        /// The missing ranks, and why a process was refused, if one was.
        missing: String,
        /// The timeout.
        waited: Duration,
    },
    /// A rank exited, or left the job.
    #[error("rank {rank}: {event}")]
    PeerClosed {
        /// This rank.
        rank: usize,
        /// Which rank ended, and how this rank noticed.
        event: String,
    },
    /// A message that no rank of this job sends.
    #[error(
        "rank {rank}: {problem}; start all ranks with the same number of ranks, and each job with an address of its own"
    )]
    Protocol {
        /// This rank.
        rank: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// The ranks met, and a later exchange failed.
    #[error(transparent)]
    Ring(#[from] RingError),
}
