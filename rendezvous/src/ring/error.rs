//! Errors of the control plane.

use super::gone::Departure;
use super::step::Step;
use crate::interface::InterfaceError;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

/// Why set-up failed.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// A system call failed.
    #[error("{call} failed: {source}")]
    Socket {
        /// The call.
        call: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// This host's address has no free port, or is unusable.
    #[error(
        "cannot listen on {address} (the system chooses the port): {source}; NCCL_SOCKET_IFNAME chooses the \
         interface, and net.ipv4.ip_local_port_range (sysctl) the ports"
    )]
    Listen {
        /// The address.
        address: IpAddr,
        /// The system's error.
        source: io::Error,
    },
    /// No interface is usable.
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    /// A rank's handle wasn't made by this plugin.
    #[error(
        "the handle of rank {rank} was not made by listen of this plugin (protocol version {version}); run the same \
         ferrogin on all ranks"
    )]
    BadHandle {
        /// The rank.
        rank: usize,
        /// This plugin's protocol version.
        version: u16,
    },
    /// This rank's handle isn't in its own place in NCCL's list.
    #[error(
        "handle number {rank} is not the handle of the listen communicator that rank {rank} passes to connect: NCCL's \
         handles and ranks are in different orders, or the listen communicator was used before; please report it"
    )]
    WrongOrder {
        /// This rank.
        rank: usize,
    },
    /// A peer's host doesn't answer, or no process listens there.
    #[error(
        "cannot connect to rank {rank} at {at}: {source}; check that rank {rank} still runs, and that the firewall, the \
         security group and NCCL_SOCKET_IFNAME let the hosts connect"
    )]
    Unreachable {
        /// The peer.
        rank: usize,
        /// Its address.
        at: Arc<str>,
        /// The system's error.
        source: io::Error,
    },
    /// A peer didn't do its part before the deadline.
    #[error(
        "rank {rank} at {at} did not answer in {} within {seconds} s: it is stopped, its host is down, or it did not make the same \
         call; see the log of rank {rank}, and raise FERROGIN_TIMEOUT if it only starts slowly",
        step.name()
    )]
    Timeout {
        /// The peer.
        rank: usize,
        /// Its address.
        at: Arc<str>,
        /// The step.
        step: Step,
        /// The timeout.
        seconds: u64,
    },
    /// The stream to a peer closed.
    #[error("rank {rank} at {at} closed its connection in {}; look for the first error in the log of rank {rank}", step.name())]
    PeerClosed {
        /// The peer.
        rank: usize,
        /// Its address.
        at: Arc<str>,
        /// The step.
        step: Step,
    },
    /// A running peer closed its communicator before doing its part. It may have learned of another rank's failure.
    #[error(
        "rank {rank} closed its communicator before {} was done, without saying why; look for the first error in the \
         log of rank {rank}",
        step.name()
    )]
    PeerLeft {
        /// The peer.
        rank: usize,
        /// The step.
        step: Step,
    },
    /// A neighbour reports that another rank closed its communicator.
    #[error(
        "rank {reporter} aborted {} because rank {left} closed its communicator, without saying why; look for the \
         first error in the log of rank {left}",
        step.name()
    )]
    AbortedAfterClose {
        /// The neighbour.
        reporter: usize,
        /// The rank that closed its communicator.
        left: usize,
        /// The step.
        step: Step,
    },
    /// A neighbour reports that another rank failed.
    #[error(
        "rank {reporter} aborted {} because rank {failed} failed; look for the first error in the log of rank {failed}",
        step.name()
    )]
    Aborted {
        /// The neighbour.
        reporter: usize,
        /// The rank that failed.
        failed: usize,
        /// The step.
        step: Step,
    },
    /// A neighbour has given up on this rank.
    #[error(
        "rank {reporter} gave up on this rank, rank {rank}, in {}: this process was late by {seconds} s. Look for what stopped it, \
         such as a debugger, a signal, or a machine without a free core, and raise FERROGIN_TIMEOUT if that is to be expected",
        step.name()
    )]
    Late {
        /// This rank.
        rank: usize,
        /// The neighbour.
        reporter: usize,
        /// The step.
        step: Step,
        /// How long this process said nothing.
        seconds: u64,
    },
    /// A peer couldn't do its part, and said so through the exchange.
    #[error("rank {rank} failed in {}; the log of rank {rank} has the reason", step.name())]
    PeerFailed {
        /// The peer.
        rank: usize,
        /// The step.
        step: Step,
    },
    /// A peer is in another step.
    #[error(
        "rank {rank} is in {remote}, but this rank is in {}: the two ranks made their collective calls in different orders; \
         make the same collective calls in the same order on all ranks",
        step.name()
    )]
    DifferentCall {
        /// The peer.
        rank: usize,
        /// This rank's step.
        step: Step,
        /// The peer's step.
        remote: String,
    },
    /// A peer sent bytes that aren't a valid frame at this point.
    #[error("rank {rank} sent an invalid frame in {}; run the same ferrogin on all ranks", step.name())]
    InvalidFrame {
        /// The peer.
        rank: usize,
        /// The step.
        step: Step,
    },
    /// This rank's own block is too large to send.
    #[error("this rank sends {bytes} bytes in {}, more than {limit}; request fewer contexts or signals", step.name())]
    BlockTooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
        /// The step.
        step: Step,
    },
    /// A rank has gone from a ring that goes on without it.
    #[error(
        "rank {rank} has ended or closed its communicator, and {} needs all ranks; go on without it with signals, or close the communicator \
         and open one without rank {rank}",
        step.name()
    )]
    Gone {
        /// The rank that went first.
        rank: usize,
        /// The step.
        step: Step,
    },
    /// The other ranks go on without this one.
    #[error(
        "the other ranks have given up on this one, rank {rank}, and go on without it. Look for what stopped it, such as a debugger, a signal, \
         or a network or card that failed, and see the log of the other ranks"
    )]
    GivenUp {
        /// This rank.
        rank: usize,
    },
    /// An earlier failure ended this communicator.
    #[error(
        "this communicator failed earlier because rank {failed} failed or left; close it, and look for the first error in the log of rank \
         {failed}"
    )]
    AlreadyFailed {
        /// The rank that failed.
        failed: usize,
    },
}

impl RingError {
    /// Returns the rank that failed or left, if known.
    pub fn failed_rank(&self) -> Option<usize> {
        match self {
            Self::Unreachable { rank, .. }
            | Self::Timeout { rank, .. }
            | Self::PeerClosed { rank, .. }
            | Self::PeerLeft { rank, .. }
            | Self::Late { rank, .. }
            | Self::Gone { rank, .. }
            | Self::GivenUp { rank }
            | Self::PeerFailed { rank, .. }
            | Self::DifferentCall { rank, .. }
            | Self::BadHandle { rank, .. }
            | Self::InvalidFrame { rank, .. } => Some(*rank),
            Self::AbortedAfterClose { left, .. } => Some(*left),
            Self::Aborted { failed, .. } | Self::AlreadyFailed { failed } => Some(*failed),
            Self::Socket { .. }
            | Self::Listen { .. }
            | Self::Interface(_)
            | Self::WrongOrder { .. }
            | Self::BlockTooLarge { .. } => None,
        }
    }

    /// Returns the rank that has gone, and how, if that is why a collective call failed.
    pub(super) fn departure(&self) -> Option<(usize, Departure)> {
        match self {
            Self::PeerClosed { rank, .. } | Self::Timeout { rank, .. } | Self::Gone { rank, .. } => {
                Some((*rank, Departure::Lost))
            }
            Self::PeerLeft { rank, .. } => Some((*rank, Departure::Closed)),
            _ => None,
        }
    }

    /// Returns true if a rank closed its communicator, in which case it's unknown which rank failed first.
    pub fn is_after_close(&self) -> bool {
        matches!(self, Self::PeerLeft { .. } | Self::AbortedAfterClose { .. })
    }
}
