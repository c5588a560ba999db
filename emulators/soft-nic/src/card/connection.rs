//! A connection to another card: what is queued for sending, and which requests have arrived in part.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;

use super::qp::Token;
use crate::address::Gid;
use crate::wire::packet::Header;
use crate::wire::{shm, tcp};

/// A card that owes answers and has sent no packet for this long is unresponsive. A connecting side has this long to
/// prove it is a card.
pub(crate) const SILENCE_US: u64 = 5_000_000;

/// What carries the packets.
pub(crate) enum Transport {
    /// The card itself.
    Loopback,
    /// The other card has not accepted yet, or it is the one to connect.
    Connecting,
    /// A peer has connected but is not proven yet.
    Accepting(shm::Accepting),
    /// Shared memory.
    Shm(Box<shm::RingPair>),
    /// A stream to or from a card on another host.
    Tcp(Box<tcp::Stream>),
}

impl Transport {
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Loopback | Self::Connecting => None,
            Self::Accepting(accepting) => accepting.fd(),
            Self::Shm(rings) => Some(rings.fd()),
            Self::Tcp(stream) => Some(stream.fd()),
        }
    }
}

/// A write that has arrived only in part. Packets arrive in any order, so the card counts bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Partial {
    pub missing: u32,
    pub status: u8,
}

/// A peer's read that this card is answering.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Serving {
    pub header: Header,
    pub sent: u32,
}

pub(crate) struct Connection {
    /// The other card; `None` if it connected and is not proven yet.
    pub peer: Option<Gid>,
    pub transport: Transport,
    /// The other card connected.
    pub accepted: bool,
    /// The connection that the other side opened between the same cards: in shared memory, each card connects for its
    /// own requests.
    pub opposite: Option<u32>,
    /// This card has an address handle for the other.
    pub has_handle: bool,
    /// Answers without payload. They are sent first, because the peer waits for them.
    pub answers: VecDeque<Header>,
    /// The stream has collected nothing but acknowledgements since poll `answers_since` of the engine.
    pub only_answers: bool,
    pub answers_since: u32,
    /// The peer's unanswered reads.
    pub serving: VecDeque<Serving>,
    /// Requests to be sent.
    pub requests: VecDeque<Token>,
    /// Writes that have arrived in part, by token.
    pub partials: HashMap<u64, Partial>,
    /// Requests given to this connection that have not completed.
    pub waiting: u32,
    /// The card's clock when the connection was made, a packet arrived, or the first unanswered request was queued,
    /// whichever was last.
    pub heard_us: u64,
    /// The peer has sent a packet on this connection.
    pub responsive: bool,
    /// When to try to connect again, by the card's clock.
    pub retry_us: u64,
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
            only_answers: false,
            answers_since: 0,
            serving: VecDeque::new(),
            requests: VecDeque::new(),
            partials: HashMap::new(),
            waiting: 0,
            heard_us: now_us,
            responsive: false,
            retry_us: 0,
        }
    }

    pub(crate) fn loopback(own: Gid) -> Self {
        Self::new(Some(own), Transport::Loopback, 0)
    }

    pub(crate) fn connecting(peer: Gid, now_us: u64) -> Self {
        Self::new(Some(peer), Transport::Connecting, now_us)
    }

    /// Makes a connection that the other side opened.
    pub(crate) fn accepting(transport: Transport, now_us: u64) -> Self {
        Self { accepted: true, ..Self::new(None, transport, now_us) }
    }

    /// Whether packets can go out.
    pub(crate) fn is_open(&self) -> bool {
        match &self.transport {
            Transport::Loopback => true,
            Transport::Shm(rings) => rings.is_open(),
            Transport::Tcp(stream) => stream.is_open(),
            Transport::Connecting | Transport::Accepting(_) => false,
        }
    }

    /// Whether the other side connected and has sent nothing that only a card knows.
    pub(crate) fn is_silent(&self) -> bool {
        match &self.transport {
            Transport::Accepting(accepting) => accepting.is_silent(),
            Transport::Tcp(stream) => stream.is_silent(),
            _ => false,
        }
    }

    /// Whether the other side connected and is not proven.
    pub(crate) fn is_unproven(&self) -> bool {
        match &self.transport {
            Transport::Accepting(_) => true,
            Transport::Tcp(stream) => stream.is_silent() || stream.unproven().is_some(),
            _ => false,
        }
    }

    /// Whether the other side connected and this card has welcomed it as `peer`.
    pub(crate) fn is_welcome(&self, peer: &Gid) -> bool {
        matches!(&self.transport, Transport::Tcp(stream) if stream.unproven() == Some(*peer))
    }

    /// Whether answers are still queued or not yet taken by the socket.
    pub(crate) fn owes(&self) -> bool {
        let unsent = matches!(&self.transport, Transport::Tcp(stream) if stream.has_output());
        self.is_open() && (unsent || !self.answers.is_empty() || !self.serving.is_empty())
    }

    /// Whether this card is answering a read of one of its queue pairs.
    pub(crate) fn serves(&self, qpn: u16) -> bool {
        self.is_open() && self.serving.iter().any(|serving| serving.header.dst_qpn == qpn)
    }

    /// Whether the other side owed something and has been silent for [`SILENCE_US`]. The loopback connection is never
    /// late: its requests may wait for a receive.
    pub(crate) fn is_late(&self, now_us: u64) -> bool {
        let owes = self.waiting > 0 && !matches!(self.transport, Transport::Loopback);
        (self.is_unproven() || owes) && now_us.saturating_sub(self.heard_us) > SILENCE_US
    }

    /// Whether something is queued for sending.
    pub(crate) fn has_work(&self) -> bool {
        !(self.answers.is_empty() && self.serving.is_empty() && self.requests.is_empty())
    }
}
