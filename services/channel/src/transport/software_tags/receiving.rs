//! The receiving half: messages match receives, an RTS gets its CTS, and payloads arrive.

use std::collections::VecDeque;

use ferrogin_datagram::{Outbox, Peer};
use ferrogin_libfabric::{Error, bindings};

use super::records::{Header, Kind};
use super::state::{PeerState, Rendezvous, State, Unmatched, addr};
use crate::proto::outgoing::UNREAD_WINDOW;
use crate::proto::secret::secret;
use crate::proto::tags::Pattern;
use crate::proto::transport::{Event, PAYLOAD_WINDOW, Receive, ReceiveError};

/// Unmatched messages of one peer, each of 64 KiB at most: several times the window of unread messages. Further messages are dropped.
const MAX_UNMATCHED: usize = 16 * UNREAD_WINDOW as usize;
/// Bits of a receive's number, which is a tag: providers use the highest bits of tags themselves.
const RECEIVE_IDS: u64 = (1 << 62) - 1;

/// Takes the entries out of a queue that `which` selects.
fn take_out<T>(queue: &mut VecDeque<T>, which: impl Fn(&T) -> bool) -> VecDeque<T> {
    let (out, stay) = std::mem::take(queue).into_iter().partition(which);
    *queue = stay;
    out
}

impl State {
    pub fn incoming_message(&mut self, outbox: &mut Outbox, from: Peer, header: Header, bytes: &[u8]) {
        match self.posted_for(from, header.tag) {
            Some(posted) if header.kind == Kind::Eager => self.deliver_eager(from, posted, header.tag, bytes),
            Some(posted) => self.receive_rts(outbox, from, posted, header),
            None => {
                let unmatched = &mut self.peer(from).unmatched;
                if unmatched.len() >= MAX_UNMATCHED {
                    log::warn!("a message was dropped: its peer is {MAX_UNMATCHED} messages ahead of its reader");
                } else if header.kind == Kind::Eager {
                    unmatched.push_back(Unmatched::Eager(header.tag, bytes.to_vec()));
                } else {
                    unmatched.push_back(Unmatched::Rts(header));
                }
            }
        }
    }

    /// Takes the receive that a message of `from` matches.
    fn posted_for(&mut self, from: Peer, tag: u64) -> Option<Receive> {
        let take = |queue: &mut VecDeque<Receive>| {
            let at = queue.iter().position(|posted| posted.pattern.matches(tag))?;
            queue.remove(at)
        };
        take(&mut self.peer(from).posted).or_else(|| take(&mut self.any_source))
    }

    fn deliver_eager(&mut self, from: Peer, posted: Receive, tag: u64, bytes: &[u8]) {
        let Receive { mut buffer, len, token, .. } = posted;
        let fits = bytes.len() <= len;
        buffer.clear();
        buffer.extend_from_slice(&bytes[..bytes.len().min(len)]);
        let result = if fits { Ok(()) } else { Err(ReceiveError::Truncated) };
        self.events.push(Event::Received { token, bytes: buffer, tag, from: Some(addr(from)), result });
    }

    /// A receive matches an RTS. Few messages get their CTS at a time: further payloads in the stream would only delay records of other
    /// messages, and leave the cache before they are read.
    fn receive_rts(&mut self, outbox: &mut Outbox, from: Peer, posted: Receive, header: Header) {
        let state = self.peer(from);
        // Receives for any peer are few and for short messages: an RTS without its payload must not occupy one.
        let total = usize::try_from(header.total).ok().filter(|total| posted.from.is_some() && *total <= posted.len);
        match total {
            None => self.decline(outbox, from, posted, &header),
            Some(total) if header.is_direct() => {
                state.matched_rts.push_back((posted, header, total));
                self.grant_waiting(outbox, from);
            }
            Some(total) => self.grant(outbox, from, posted, &header, total),
        }
    }

    /// Sends CTS for matched RTS of direct payloads, as many as the window permits.
    fn grant_waiting(&mut self, outbox: &mut Outbox, from: Peer) {
        loop {
            let PeerState { matched_rts, inbound, .. } = self.peer(from);
            if !matched_rts.front().is_some_and(|(_, _, total)| inbound.has_room(*total, PAYLOAD_WINDOW)) {
                return;
            }
            let Some((posted, header, total)) = matched_rts.pop_front() else { return };
            self.grant(outbox, from, posted, &header, total);
        }
    }

    fn grant(&mut self, outbox: &mut Outbox, from: Peer, posted: Receive, header: &Header, total: usize) {
        let Receive { mut buffer, token, .. } = posted;
        // A number that no other peer can guess: a sender that knows the tag can write the buffer.
        let rendezvous = secret() & RECEIVE_IDS;
        let mut direct = header.is_direct() && !self.rendezvous.contains_key(&rendezvous);
        if direct {
            buffer.clear();
            buffer.reserve_exact(total);
            // SAFETY: the heap buffer has `total` bytes; `State::rendezvous` keeps it unused until the receive ends, and is dropped
            // after the endpoint.
            direct = unsafe { outbox.receive_long(rendezvous, buffer.as_mut_ptr(), total, rendezvous) };
        }
        if direct {
            self.peer(from).inbound.begin(total);
        } else {
            // Data records overwrite every byte of the buffer.
            buffer.resize(total, 0);
        }
        let (missing, tag, token) = (total, header.tag, Some(token));
        self.rendezvous.insert(rendezvous, Rendezvous { from, buffer, direct, total, missing, tag, token });
        let reply = Header::new(Kind::Cts, header.number, rendezvous, total).direct(direct);
        self.reply(outbox, from, reply);
    }

    /// Ends a receive that is too short for a long message.
    fn decline(&mut self, outbox: &mut Outbox, from: Peer, posted: Receive, header: &Header) {
        let Receive { token, buffer: bytes, .. } = posted;
        let (tag, result) = (header.tag, Err(ReceiveError::Truncated));
        self.events.push(Event::Received { token, bytes, tag, from: Some(addr(from)), result });
        let reply = Header { total: header.total, ..Header::new(Kind::Decline, header.number, 0, 0) };
        self.reply(outbox, from, reply);
    }

    fn reply(&mut self, outbox: &mut Outbox, to: Peer, reply: Header) {
        self.replies.push_back((to, reply));
        self.send_replies(outbox);
    }

    pub fn data(&mut self, from: Peer, header: Header, bytes: &[u8]) {
        let rendezvous =
            self.rendezvous.get_mut(&header.tag).filter(|rendezvous| rendezvous.from == from && !rendezvous.direct);
        let Some(rendezvous) = rendezvous else { return };
        let place =
            usize::try_from(header.offset).ok().and_then(|at| rendezvous.buffer.get_mut(at..)?.get_mut(..bytes.len()));
        let missing = rendezvous.missing.checked_sub(bytes.len());
        let (Some(place), Some(missing), true) = (place, missing, header.total == rendezvous.total as u64) else {
            log::warn!("a data record outside its message was dropped");
            return;
        };
        place.copy_from_slice(bytes);
        rendezvous.missing = missing;
        if missing == 0
            && let Some(Rendezvous { buffer, tag, token: Some(token), .. }) = self.rendezvous.remove(&header.tag)
        {
            self.events.push(Event::Received { token, bytes: buffer, tag, from: Some(addr(from)), result: Ok(()) });
        }
    }

    /// The receive of a direct payload ended.
    pub fn direct_received(&mut self, outbox: &mut Outbox, number: u64, result: Result<usize, Error>) {
        let Some(rendezvous) = self.rendezvous.remove(&number) else { return };
        let Rendezvous { from, mut buffer, tag, token, total, .. } = rendezvous;
        self.peer(from).inbound.end(total);
        self.grant_waiting(outbox, from);
        let Some(token) = token else { return };
        let result = match result {
            Ok(len) => {
                // SAFETY: the provider initialised `len` bytes from the start of the buffer, and the length stays within its capacity.
                unsafe { buffer.set_len(len.min(buffer.capacity())) };
                Ok(())
            }
            Err(Error::Call { code: bindings::FI_ETRUNC, .. }) => Err(ReceiveError::Truncated),
            Err(error) => Err(ReceiveError::Failed(error)),
        };
        self.events.push(Event::Received { token, bytes: buffer, tag, from: Some(addr(from)), result });
    }

    /// Abandons matched receives: gives their tokens, and their buffers unless the endpoint still uses them.
    pub fn abandon(&mut self, which: impl Fn(&Rendezvous) -> bool) -> Vec<(u64, Vec<u8>)> {
        let mut over = Vec::new();
        self.rendezvous.retain(|_, rendezvous| {
            if let Some(token) = rendezvous.token.filter(|_| which(rendezvous)) {
                rendezvous.token = None;
                let buffer = if rendezvous.direct { Vec::new() } else { std::mem::take(&mut rendezvous.buffer) };
                over.push((token, buffer));
            }
            rendezvous.token.is_some() || rendezvous.direct
        });
        over
    }

    /// Cancels abandoned receives of a peer that is gone. Those of a live peer stay posted until its payload has arrived: without a
    /// receive the provider would stop to read from that peer.
    pub fn cancel_abandoned(&self, outbox: &Outbox, from: Peer) {
        let is = |rendezvous: &Rendezvous| rendezvous.token.is_none() && rendezvous.from == from;
        for (number, _) in self.rendezvous.iter().filter(|(_, rendezvous)| is(rendezvous)) {
            outbox.cancel_long(*number);
        }
    }

    pub fn match_message(&mut self, outbox: &mut Outbox, from: Peer, posted: Receive, message: Unmatched) {
        match message {
            Unmatched::Eager(tag, bytes) => self.deliver_eager(from, posted, tag, &bytes),
            Unmatched::Rts(header) => self.receive_rts(outbox, from, posted, header),
        }
    }

    /// Takes the first unmatched message of `from` that a pattern matches.
    pub fn unmatched(&mut self, from: Peer, pattern: Pattern) -> Option<Unmatched> {
        let queue = &mut self.peer(from).unmatched;
        let at = queue.iter().position(|message| pattern.matches(message.tag()))?;
        queue.remove(at)
    }

    /// Cancels receives.
    pub fn cancel(&mut self, outbox: &mut Outbox, which: &dyn Fn(u64) -> bool) {
        let mut over = Vec::new();
        let queues = self.peers.iter_mut().map(|state| &mut state.posted).chain([&mut self.any_source]);
        for queue in queues {
            let posted = take_out(queue, |posted| which(posted.token));
            over.extend(posted.into_iter().map(|posted| (posted.token, posted.buffer)));
        }
        for index in 0..self.peers.len() {
            let peer = Peer::from_index(index);
            // Their messages can match other receives, before later messages do.
            let mut before = Vec::new();
            for (posted, header, _) in take_out(&mut self.peers[index].matched_rts, |(posted, ..)| which(posted.token))
            {
                over.push((posted.token, posted.buffer));
                match self.posted_for(peer, header.tag) {
                    Some(posted) => self.receive_rts(outbox, peer, posted, header),
                    None if self.peers[index].lost.is_none() => before.push(header),
                    None => {}
                }
            }
            for header in before.into_iter().rev() {
                self.peers[index].unmatched.push_front(Unmatched::Rts(header));
            }
        }
        over.extend(self.abandon(|rendezvous| rendezvous.token.is_some_and(which)));
        for (token, bytes) in over {
            let result = Err(ReceiveError::Cancelled);
            self.events.push(Event::Received { token, bytes, tag: 0, from: None, result });
        }
        for peer in 0..self.peers.len() {
            if self.peers[peer].lost.is_some() {
                self.cancel_abandoned(outbox, Peer::from_index(peer));
            }
        }
    }
}
