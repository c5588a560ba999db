//! A connection to another card: what waits to be sent on it, and what has partly arrived.

use std::collections::{HashMap, VecDeque};

use ferrogin_datagram::Peer;

use super::qp::Token;
use crate::address::Gid;
use crate::wire::packet::Header;
use crate::wire::shm;

/// What carries the packets.
pub(crate) enum Link {
    /// The card itself.
    Loopback,
    /// The other side had no time to accept yet.
    Dialing,
    /// Somebody connected and has not said who it is.
    Accepting(shm::Accepting),
    /// Shared memory.
    Shm(Box<shm::Link>),
    /// Messages; packets can go out when both sides have said hello.
    Message { peer: Peer, greeting: Greeting },
}

/// How far the hello of a message connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Greeting {
    /// To be said.
    Due,
    /// Said; the answer is awaited.
    Said,
    /// Both sides agreed.
    Done,
}

/// A write whose pieces have not all arrived. Pieces come in any order, so bytes are counted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Partial {
    pub missing: u32,
    pub status: u8,
}

/// An answer to a read that is being sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Serving {
    pub header: Header,
    pub sent: u32,
}

pub(crate) struct Connection {
    /// The other card; `None` before its hello.
    pub peer: Option<Gid>,
    pub link: Link,
    /// This card has an address handle for the other.
    pub known: bool,
    /// Answers without payload. They go first, because they set the other side free; but where a packet is dear they
    /// ride behind others or wait for company.
    pub answers: VecDeque<Header>,
    /// The engine's look at which the oldest of them came.
    pub answers_since: u32,
    /// Reads to be answered.
    pub serving: VecDeque<Serving>,
    /// Requests to be sent.
    pub requests: VecDeque<Token>,
    /// Writes that have partly arrived, by token.
    pub partials: HashMap<u64, Partial>,
    /// Requests given to this connection and not completed.
    pub waiting: u32,
    /// The card's clock when something last arrived, or when waiting began.
    pub heard_us: u64,
    /// Something was ever heard.
    pub responsive: bool,
}

impl Connection {
    fn new(peer: Option<Gid>, link: Link, now_us: u64) -> Self {
        Self {
            peer,
            link,
            known: false,
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
        Self::new(Some(own), Link::Loopback, 0)
    }

    pub(crate) fn dialing(peer: Gid, now_us: u64) -> Self {
        Self::new(Some(peer), Link::Dialing, now_us)
    }

    pub(crate) fn message(gid: Gid, peer: Peer, greeting: Greeting, now_us: u64) -> Self {
        Self::new(Some(gid), Link::Message { peer, greeting }, now_us)
    }

    pub(crate) fn accepting(socket: shm::Accepting, now_us: u64) -> Self {
        Self::new(None, Link::Accepting(socket), now_us)
    }

    /// Packets can go out.
    pub(crate) fn is_open(&self) -> bool {
        match &self.link {
            Link::Loopback => true,
            Link::Shm(link) => link.is_open(),
            Link::Message { greeting, .. } => *greeting == Greeting::Done,
            Link::Dialing | Link::Accepting(_) => false,
        }
    }

    /// Something waits to go out.
    pub(crate) fn has_work(&self) -> bool {
        !(self.answers.is_empty() && self.serving.is_empty() && self.requests.is_empty())
    }
}
