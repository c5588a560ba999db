//! The state of one peer.

use std::collections::VecDeque;
use std::time::Instant;

use super::pool::Context;
use ferrogin_libfabric::FiAddr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Alive,
    /// The peer closes: nothing is sent to it, and messages that it sent before are still received.
    Closed,
    /// Reported as lost: nothing is sent to it or received from it.
    Lost,
    /// Forgotten: its name is free for a new peer. It leaves the address vector when nothing to it is in flight.
    Forgotten,
    /// Removed from the address vector.
    Removed,
}

pub(super) struct PeerState {
    pub addr: FiAddr,
    pub name: Box<[u8]>,
    /// The number of the endpoint, which distinguishes endpoints with one name; None until a message of it arrives.
    pub number: Option<u64>,
    pub state: State,
    /// Sends that libfabric has accepted and not completed, including control messages.
    pub in_flight: u32,
    /// Slots that libfabric has not taken, in the order of their sends.
    pub backlog: VecDeque<u32>,
    /// A message was exchanged with the peer: its death must be detected.
    pub in_use: bool,
    pub last_heard: Instant,
    /// When the ping was sent that is not answered yet.
    pub pinged_at: Option<Instant>,
    pub control: Box<Context>,
    pub control_busy: bool,
    /// The flags of a control message to send as soon as possible.
    pub control_wanted: Option<u8>,
    /// The close was announced to the peer, and the peer has not confirmed it.
    pub close_unconfirmed: bool,
}
