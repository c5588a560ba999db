//! Hellos waiting for an answer, and what is remembered of earlier channels with the same endpoint.

use std::time::Instant;

use super::channel_state::{ChannelState, RemoteChannel};
use super::transport::Addr;
use super::wire::Control;

/// Distance between the ids of consecutive channels with one endpoint. Multiples of it, modulo 2^32, stay far apart.
const ID_DISTANCE: u32 = 0x9e37_79b1;

/// The last channel with an endpoint.
pub(crate) struct PriorChannel {
    pub channel: u32,
    /// Ids after the last messages that it wrote and read, set when the channel ends.
    pub write: u32,
    pub read: u32,
}

impl PriorChannel {
    pub fn of(state: &ChannelState, channel: u32) -> Self {
        Self { channel, write: state.outgoing.next_id(), read: state.incoming.next_id() }
    }

    /// Ids of the first messages that the next channel writes and reads. Never 0, which stands for any id.
    pub fn next(&self) -> (u32, u32) {
        let far = |id: u32| id.wrapping_add(ID_DISTANCE).max(1);
        (far(self.write), far(self.read))
    }
}

/// A hello that hasn't been answered yet.
pub(crate) struct PendingHello {
    pub addr: Addr,
    pub name: Box<[u8]>,
    pub listener: u32,
    pub remote: RemoteChannel,
    /// Length of the longest message that the sender accepts, in bytes.
    pub max: u64,
    /// Id of the sender's first message.
    pub read: u32,
    /// Id of this end's first message; 0 for any.
    pub write: u32,
    /// The challenge, once sent.
    pub challenge: Option<PathChallenge>,
}

/// A challenge to the endpoint that a hello names: the sender of the hello must return the nonce.
pub(crate) struct PathChallenge {
    pub nonce: u64,
    pub last_sent: Instant,
    pub times_sent: u32,
}

impl PendingHello {
    pub fn new(addr: Addr, listener: u32, message: &Control, name: &[u8]) -> Self {
        Self {
            addr,
            name: name.into(),
            listener,
            remote: RemoteChannel { id: message.from, secret: message.sender_secret },
            max: message.value,
            read: message.id,
            write: message.start_id,
            challenge: None,
        }
    }
}
