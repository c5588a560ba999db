//! The state of software matching: what each peer has sent and what waits for it.

use std::collections::{HashMap, VecDeque};

use ferrogin_datagram::Peer;
use ferrogin_libfabric::{Error, bindings};

use super::records::Header;
use crate::Payload;
use crate::proto::transport::{Addr, Event, InFlight, Receive};

/// A message that waits for a receive.
pub(super) enum Unmatched {
    Eager(u64, Vec<u8>),
    Rts(Header),
}

impl Unmatched {
    pub fn tag(&self) -> u64 {
        match self {
            Self::Eager(tag, _) => *tag,
            Self::Rts(header) => header.tag,
        }
    }
}

/// A matched receive of a long message whose payload has not arrived completely.
pub(super) struct Rendezvous {
    pub from: Peer,
    /// The endpoint uses it if the payload is direct.
    pub buffer: Vec<u8>,
    pub direct: bool,
    pub total: usize,
    pub missing: usize,
    pub tag: u64,
    /// None when the receive was cancelled and the endpoint still uses the buffer.
    pub token: Option<u64>,
}

/// A send that has not ended.
pub(super) struct PendingSend {
    pub to: Peer,
    pub body: Payload,
    pub token: u64,
    pub tag: u64,
    /// The receiver's number of the receive, and how many bytes were sent; None before the CTS.
    pub cts: Option<(u64, usize)>,
    /// The payload goes as one tagged message of the provider, and counts as `outbound` of its peer.
    pub direct: bool,
    /// Sends that the endpoint has not completed.
    pub in_flight: usize,
    /// The first record (eager or RTS) is sent or in the batch.
    pub started: bool,
    pub error: Option<Error>,
    /// Nothing more is sent.
    pub over: bool,
}

/// The state of one peer.
#[derive(Default)]
pub(super) struct PeerState {
    /// The batch: records that are not sent yet. See [`State::append_record`].
    pub records: Vec<u8>,
    /// The peer is in [`State::unflushed`].
    pub queued: bool,
    pub posted: VecDeque<Receive>,
    /// Receives with the RTS that they matched and its bytes. They get a CTS when fewer direct payloads are `inbound`.
    pub matched_rts: VecDeque<(Receive, Header, usize)>,
    pub inbound: InFlight,
    /// Direct payloads that have their CTS and wait until fewer are `outbound`: a peer that grants every RTS and reads nothing must not
    /// get all slots of the endpoint.
    pub cleared: VecDeque<u32>,
    pub outbound: InFlight,
    pub unmatched: VecDeque<Unmatched>,
    /// The peer cannot be reached any more.
    pub lost: Option<Error>,
    /// The peer closed its endpoint: messages that it sent before may still arrive.
    pub closed: bool,
}

/// Everything but the endpoint.
#[derive(Default)]
pub(super) struct State {
    /// Largest payload and records of a datagram, and the longest inline message, bytes.
    pub data_bytes: usize,
    pub records: usize,
    pub max_inline: usize,
    pub peers: Vec<PeerState>,
    /// Peers with records that are not sent.
    pub unflushed: Vec<Peer>,
    /// Receives for messages of any peer.
    pub any_source: VecDeque<Receive>,
    pub sends: HashMap<u32, PendingSend>,
    pub rendezvous: HashMap<u64, Rendezvous>,
    pub next_number: u32,
    /// Sends that the endpoint had no slot for.
    pub waiting: VecDeque<u32>,
    /// Answers that the endpoint had no slot for.
    pub replies: VecDeque<(Peer, Header)>,
    pub events: Vec<Event>,
}

impl State {
    pub fn peer(&mut self, peer: Peer) -> &mut PeerState {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, PeerState::default);
        }
        &mut self.peers[peer.index()]
    }
}

pub(super) fn addr(peer: Peer) -> Addr {
    Addr(peer.index() as u64)
}

pub(super) fn reset(text: String) -> Error {
    Error::Call { call: "fi_send", code: bindings::FI_ECONNRESET, text }
}
