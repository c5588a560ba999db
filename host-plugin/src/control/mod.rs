//! Control plane: how the ranks of a communicator find each other and exchange addresses and keys during set-up.
//!
//! `listen` opens an endpoint of libfabric for message channels ([`ferrogin_channel`]) and describes it, with a secret,
//! in NCCL's 128-byte handle; `connect` makes a ring, in which every rank sends to the next and receives from the one before.
//! Only who knows the secret is let in. Everything ends by a deadline, and a rank that fails says so to both neighbours, so
//! that all ranks learn of it, and of which rank it was, without waiting.

mod frame;
mod handle;
mod ring;

#[cfg(test)]
mod tests;

pub use handle::Listener;
pub use ring::Ring;

use std::io;
use std::sync::Arc;

/// What the ranks are doing together. Ranks in different steps have made different calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Step {
    /// `connect`.
    Connect = 1,
    /// `regMrSym`.
    RegisterWindow = 2,
    /// `createContext`: shapes, addresses and keys.
    CreateContext = 3,
    /// `createContext`: every rank is ready for traffic.
    ContextReady = 4,
}

impl Step {
    /// The call that messages name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::RegisterWindow => "regMrSym",
            Self::CreateContext | Self::ContextReady => "createContext",
        }
    }

    fn of(code: u16) -> Option<Self> {
        [Self::Connect, Self::RegisterWindow, Self::CreateContext, Self::ContextReady]
            .into_iter()
            .find(|step| *step as u16 == code)
    }
}

/// Set-up cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A socket call of our own failed.
    #[error("{call} failed: {source}; check that this host has an interface for NCCL (NCCL_SOCKET_IFNAME)")]
    Socket {
        /// Its name.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The endpoint for set-up cannot be opened.
    #[error("libfabric's provider {provider} does not carry set-up's messages: {source}; check FERROGIN_CONTROL")]
    Endpoint {
        /// The provider.
        provider: String,
        /// Why.
        source: io::Error,
    },
    /// No interface to be reached by.
    #[error("no interface is up that NCCL_SOCKET_IFNAME={filter:?} allows")]
    NoInterface {
        /// The variable.
        filter: String,
    },
    /// The handle of a rank was not made by this plugin.
    #[error(
        "the handle of rank {rank} is not one that listen of this plugin (version {version}) made; run the same ferrogin on all ranks"
    )]
    BadHandle {
        /// Whose.
        rank: usize,
        /// Our version of the handle.
        version: u16,
    },
    /// Our own handle is not at our place in the list.
    #[error(
        "the handle at place {rank} is not the one of the listen communicator passed: handles and ranks are in different orders"
    )]
    WrongOrder {
        /// This rank.
        rank: usize,
    },
    /// A peer cannot be reached.
    #[error(
        "cannot reach rank {rank} at {at} ({source}): it has ended, or a firewall or NCCL_SOCKET_IFNAME keeps the hosts apart"
    )]
    Unreachable {
        /// Which.
        rank: usize,
        /// Where it should be.
        at: Arc<str>,
        /// Why not.
        source: io::Error,
    },
    /// A peer does not answer.
    #[error("rank {rank} at {at} did not answer in {} within {seconds} s (FERROGIN_TIMEOUT): it has ended, hangs, or did not make the same call; see its log", step.name())]
    Timeout {
        /// Which.
        rank: usize,
        /// Its endpoint.
        at: Arc<str>,
        /// In what.
        step: Step,
        /// How long we waited.
        seconds: u64,
    },
    /// A peer closed its connection.
    #[error("rank {rank} at {at} is gone in {}; look for the first error in its log", step.name())]
    PeerGone {
        /// Which.
        rank: usize,
        /// Its endpoint.
        at: Arc<str>,
        /// In what.
        step: Step,
    },
    /// Another rank lost a peer.
    #[error("rank {reporter} gave up {} because of rank {culprit}; look for the first error in the log of rank {culprit}", step.name())]
    Aborted {
        /// Who says so.
        reporter: usize,
        /// Because of whom.
        culprit: usize,
        /// In what.
        step: Step,
    },
    /// A peer could not do its part, and said why in its own log.
    #[error("rank {rank} failed in {}; its log says why", step.name())]
    PeerFailed {
        /// Which.
        rank: usize,
        /// In what.
        step: Step,
    },
    /// A peer is doing something else.
    #[error("rank {rank} is in {theirs} and not in {}: NCCL's calls came in different orders on the two ranks", step.name())]
    OutOfStep {
        /// Which.
        rank: usize,
        /// What we do.
        step: Step,
        /// What it does.
        theirs: String,
    },
    /// Bytes that are no frame of this protocol.
    #[error("rank {rank} sent bytes that make no sense in {}; run the same ferrogin on all ranks", step.name())]
    Garbled {
        /// Who.
        rank: usize,
        /// In what.
        step: Step,
    },
    /// An earlier failure ended this communicator.
    #[error("this communicator failed earlier because of rank {culprit}; close it")]
    Dead {
        /// Who was the cause.
        culprit: usize,
    },
}

impl ControlError {
    /// The rank that is the cause, as far as one is known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Unreachable { rank, .. }
            | Self::Timeout { rank, .. }
            | Self::PeerGone { rank, .. }
            | Self::PeerFailed { rank, .. }
            | Self::OutOfStep { rank, .. }
            | Self::BadHandle { rank, .. }
            | Self::Garbled { rank, .. } => Some(*rank),
            Self::Aborted { culprit, .. } | Self::Dead { culprit } => Some(*culprit),
            Self::Socket { .. } | Self::Endpoint { .. } | Self::NoInterface { .. } | Self::WrongOrder { .. } => None,
        }
    }
}
