//! A connection to another card: what is queued for sending, and which requests have arrived in part.

use std::collections::{HashMap, VecDeque};

use ferrogin_datagram::Peer;

use super::qp::Token;
use crate::address::Gid;
use crate::wire::handshake::{Initiator, Session};
use crate::wire::packet::Header;
use crate::wire::shm;

/// A card that owes answers and has sent no packet for this long does not respond. A side that connects has this long to
/// prove that it is a card.
pub(crate) const SILENCE_US: u64 = 5_000_000;

/// A message of a handshake, kept until the wire is not being polled.
pub(crate) struct HandshakeMessage {
    pub is_hello: bool,
    pub address: Vec<u8>,
    pub number: u64,
    pub bytes: Vec<u8>,
}

/// What carries the packets.
pub(crate) enum Transport {
    /// The card itself.
    Loopback,
    /// The other card has not accepted yet.
    Connecting,
    /// A peer has connected and is not proven.
    Accepting(shm::Accepting),
    /// Shared memory.
    Shm(Box<shm::RingPair>),
    /// Datagrams of a libfabric provider. Packets can be sent once the handshake is done.
    Datagram { peer: Peer, stage: Stage },
}

/// How far the handshake of a datagram connection has come.
#[derive(Debug)]
pub(crate) enum Stage {
    /// The hello is still to be sent.
    Pending(Initiator),
    /// The hello is sent, and the answer has not arrived.
    HelloSent(Initiator),
    /// This card knows that the other card sent the hello or the answer. The first packet that the session opens proves that it
    /// sent them for this session.
    Agreed { session: Box<Session>, proven: bool },
}

/// A write of which some packets have not arrived. Packets arrive in any order, so the card counts bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Partial {
    pub missing: u32,
    pub status: u8,
}

/// A read of a peer that this card is answering.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Serving {
    pub header: Header,
    pub sent: u32,
}

pub(crate) struct Connection {
    /// The other card; `None` before a good hello.
    pub peer: Option<Gid>,
    pub transport: Transport,
    /// The other card connected, for its requests.
    pub accepted: bool,
    /// The connection between the same cards that the other side made: each card connects for its own requests.
    pub opposite: Option<u32>,
    /// This card has an address handle for the other.
    pub has_handle: bool,
    /// Answers without payload. They are sent first, because the peer waits for them. Where a packet is expensive, answers
    /// travel behind another packet or wait for more answers.
    pub answers: VecDeque<Header>,
    /// The engine's poll in which the oldest answer was queued.
    pub answers_since: u32,
    /// Reads of the peer that are to be answered.
    pub serving: VecDeque<Serving>,
    /// Requests to be sent.
    pub requests: VecDeque<Token>,
    /// Writes that have arrived in part, by token.
    pub partials: HashMap<u64, Partial>,
    /// Requests given to this connection and not completed.
    pub waiting: u32,
    /// The card's clock when the connection was made, a packet last arrived, or the first unanswered request was queued.
    pub heard_us: u64,
    /// A packet of the peer has arrived on this connection.
    pub responsive: bool,
}

impl Connection {
    pub(crate) fn new(peer: Option<Gid>, transport: Transport, now_us: u64) -> Self {
        Self {
            peer,
            transport,
            accepted: false,
            opposite: None,
            has_handle: false,
            answers: VecDeque::new(),
            answers_since: 0,
            serving: VecDeque::new(),
            requests: VecDeque::new(),
            partials: HashMap::new(),
            waiting: 0,
            heard_us: now_us,
            responsive: false,
        }
    }

    pub(crate) fn loopback(own: Gid) -> Self {
        Self::new(Some(own), Transport::Loopback, 0)
    }

    pub(crate) fn connecting(peer: Gid, now_us: u64) -> Self {
        Self::new(Some(peer), Transport::Connecting, now_us)
    }

    pub(crate) fn datagram(gid: Gid, peer: Peer, stage: Stage, now_us: u64) -> Self {
        Self::new(Some(gid), Transport::Datagram { peer, stage }, now_us)
    }

    pub(crate) fn accepting(socket: shm::Accepting, now_us: u64) -> Self {
        Self { accepted: true, ..Self::new(None, Transport::Accepting(socket), now_us) }
    }

    /// Packets can go out.
    pub(crate) fn is_open(&self) -> bool {
        match &self.transport {
            Transport::Loopback => true,
            Transport::Shm(rings) => rings.is_open(),
            Transport::Datagram { stage, .. } => matches!(stage, Stage::Agreed { proven: true, .. }),
            Transport::Connecting | Transport::Accepting(_) => false,
        }
    }

    /// The other side connected, and has sent nothing that only a card knows.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(&self.transport, Transport::Accepting(accepting) if accepting.is_silent())
    }

    /// The other side connected, and is not proven.
    pub(crate) fn is_unproven(&self) -> bool {
        match &self.transport {
            Transport::Accepting(_) => true,
            Transport::Datagram { stage, .. } => matches!(stage, Stage::Agreed { proven: false, .. }),
            Transport::Loopback | Transport::Connecting | Transport::Shm(_) => false,
        }
    }

    /// The other side had to say something and did not for [`SILENCE_US`]. The card itself answers at once; its requests to itself may wait
    /// for a receive.
    pub(crate) fn is_late(&self, now_us: u64) -> bool {
        let owes = self.waiting > 0 && !matches!(self.transport, Transport::Loopback);
        (self.is_unproven() || owes) && now_us.saturating_sub(self.heard_us) > SILENCE_US
    }

    /// Something is queued for sending.
    pub(crate) fn has_work(&self) -> bool {
        !(self.answers.is_empty() && self.serving.is_empty() && self.requests.is_empty())
    }
}
