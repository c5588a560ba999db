//! The receiving half: messages match receives, an RTS gets its CTS, and payloads arrive.

use std::collections::VecDeque;

use super::{
    Error, Event, Header, Kind, MAX_UNMATCHED, Outbox, PAYLOAD_WINDOW, Pattern, Peer, Posted, RECEIVE_IDS,
    ReceiveError, Rendezvous, State, Unmatched, addr, bindings, secret,
};

/// Takes the entries out of a queue that `which` selects.
fn take_out<T>(queue: &mut VecDeque<T>, which: impl Fn(&T) -> bool) -> VecDeque<T> {
    let (out, stay) = std::mem::take(queue).into_iter().partition(which);
    *queue = stay;
    out
}

impl State {
    pub(super) fn incoming_message(&mut self, outbox: &mut Outbox, from: Peer, header: Header, bytes: &[u8]) {
        match self.posted_for(from, header.tag) {
            Some(posted) if header.kind == Kind::Eager => self.deliver_eager(from, posted, header.tag, bytes),
            Some(posted) => self.receive_rts(outbox, from, posted, header),
            None => {
                let unmatched = &mut self.peer(from).unmatched;
                if unmatched.len() >= MAX_UNMATCHED {
                    log::warn!("a message was dropped: its peer is {MAX_UNMATCHED} messages unstarted of its reader");
                } else if header.kind == Kind::Eager {
                    unmatched.push_back(Unmatched::Eager(header.tag, bytes.to_vec()));
                } else {
                    unmatched.push_back(Unmatched::Rts(header));
                }
            }
        }
    }

    /// Takes the receive that a message of `from` matches.
    fn posted_for(&mut self, from: Peer, tag: u64) -> Option<Posted> {
        let take = |queue: &mut VecDeque<Posted>| {
            let at = queue.iter().position(|posted| posted.pattern.matches(tag))?;
            queue.remove(at)
        };
        take(&mut self.peer(from).posted).or_else(|| take(&mut self.any_source))
    }

    fn deliver_eager(&mut self, from: Peer, posted: Posted, tag: u64, bytes: &[u8]) {
        let Posted { mut buffer, len, token, .. } = posted;
        let fits = bytes.len() <= len;
        buffer.clear();
        buffer.extend_from_slice(&bytes[..bytes.len().min(len)]);
        let result = if fits { Ok(()) } else { Err(ReceiveError::Truncated) };
        self.events.push(Event::Received { token, bytes: buffer, tag, from: Some(addr(from)), result });
    }

    /// A receive matches an RTS. Few messages get their CTS at a time: further payloads in the stream would only delay records of other
    /// messages, and leave the cache before they are read.
    fn receive_rts(&mut self, outbox: &mut Outbox, from: Peer, posted: Posted, header: Header) {
        let state = self.peer(from);
        // Receives for any peer are few and for short messages: an RTS without its payload must not occupy one.
        let total = usize::try_from(header.total).ok().filter(|total| posted.directed && *total <= posted.len);
        match total {
            None => self.decline(outbox, from, posted, &header),
            Some(total)
                if header.direct
                    && !(state.matched_rts.is_empty() && state.inbound.has_room(total, PAYLOAD_WINDOW)) =>
            {
                state.matched_rts.push_back((posted, header, total));
            }
            Some(total) => self.grant(outbox, from, posted, &header, total),
        }
    }

    /// Sends the CTS of messages that waited for other payloads of that peer.
    pub(super) fn grant_waiting(&mut self, outbox: &mut Outbox, from: Peer) {
        loop {
            let state = self.peer(from);
            if !state.matched_rts.front().is_some_and(|(_, _, total)| state.inbound.has_room(*total, PAYLOAD_WINDOW)) {
                return;
            }
            let Some((posted, header, total)) = state.matched_rts.pop_front() else { return };
            self.grant(outbox, from, posted, &header, total);
        }
    }

    fn grant(&mut self, outbox: &mut Outbox, from: Peer, posted: Posted, header: &Header, total: usize) {
        let Posted { mut buffer, token, .. } = posted;
        // A number that no other peer can guess: a sender that knows the tag can write the buffer.
        let rendezvous = secret() & RECEIVE_IDS;
        let mut direct = header.direct && !self.rendezvous.contains_key(&rendezvous);
        if direct {
            buffer.clear();
            buffer.reserve_exact(total);
            // SAFETY: the heap buffer has `total` bytes; `rendezvous`, then `abandoned`, keeps it unused until the receive ends, and
            // both are dropped after the endpoint.
            direct = unsafe { outbox.receive_long(rendezvous, buffer.as_mut_ptr(), total, rendezvous) };
        }
        if direct {
            self.peer(from).inbound.begin(total);
        } else {
            // Data records overwrite every byte of the buffer.
            buffer.resize(total, 0);
        }
        self.rendezvous
            .insert(rendezvous, Rendezvous { from, buffer, direct, total, missing: total, tag: header.tag, token });
        let reply = Header { direct, ..Header::new(Kind::Cts, header.number, rendezvous, total) };
        self.reply(outbox, from, reply);
    }

    /// Ends a receive that is too short for a long message.
    fn decline(&mut self, outbox: &mut Outbox, from: Peer, posted: Posted, header: &Header) {
        let Posted { token, buffer: bytes, .. } = posted;
        let (tag, result) = (header.tag, Err(ReceiveError::Truncated));
        self.events.push(Event::Received { token, bytes, tag, from: Some(addr(from)), result });
        let reply = Header { total: header.total, ..Header::new(Kind::Decline, header.number, 0, 0) };
        self.reply(outbox, from, reply);
    }

    fn reply(&mut self, outbox: &mut Outbox, to: Peer, reply: Header) {
        self.replies.push_back((to, reply));
        self.send_replies(outbox);
    }

    pub(super) fn data(&mut self, from: Peer, header: Header, bytes: &[u8]) {
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
            && let Some(Rendezvous { buffer, tag, token, .. }) = self.rendezvous.remove(&header.tag)
        {
            self.events.push(Event::Received { token, bytes: buffer, tag, from: Some(addr(from)), result: Ok(()) });
        }
    }

    /// The receive of a direct payload ended.
    pub(super) fn direct_received(&mut self, outbox: &mut Outbox, number: u64, result: Result<usize, Error>) {
        if let Some((from, _, total)) = self.abandoned.remove(&number) {
            self.inbound_done(outbox, from, total);
            return;
        }
        let Some(Rendezvous { from, mut buffer, tag, token, total, .. }) = self.rendezvous.remove(&number) else {
            return;
        };
        self.inbound_done(outbox, from, total);
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

    fn inbound_done(&mut self, outbox: &mut Outbox, from: Peer, total: usize) {
        self.peer(from).inbound.end(total);
        self.grant_waiting(outbox, from);
    }

    /// Abandons matched receives: gives their tokens, and their buffers unless the endpoint still uses them.
    pub(super) fn abandon(&mut self, which: impl Fn(&Rendezvous) -> bool) -> Vec<(u64, Vec<u8>)> {
        let Self { rendezvous, abandoned, .. } = self;
        let over = rendezvous.extract_if(|_, rendezvous| which(rendezvous)).map(|(number, rendezvous)| {
            let Rendezvous { from, buffer, direct, token, total, .. } = rendezvous;
            if !direct {
                return (token, buffer);
            }
            abandoned.insert(number, (from, buffer, total));
            (token, Vec::new())
        });
        over.collect()
    }

    /// Cancels abandoned receives of a peer that is gone. Those of a live peer stay posted until its payload has arrived: without a
    /// receive the provider would stop to read from that peer.
    pub(super) fn cancel_abandoned(&self, outbox: &Outbox, from: Peer) {
        for (number, _) in self.abandoned.iter().filter(|(_, (of, ..))| *of == from) {
            outbox.cancel_long(*number);
        }
    }

    pub(super) fn match_message(&mut self, outbox: &mut Outbox, from: Peer, posted: Posted, message: Unmatched) {
        match message {
            Unmatched::Eager(tag, bytes) => self.deliver_eager(from, posted, tag, &bytes),
            Unmatched::Rts(header) => self.receive_rts(outbox, from, posted, header),
        }
    }

    /// Takes the first unmatched message of `from` that a pattern matches.
    pub(super) fn unmatched(&mut self, from: Peer, pattern: Pattern) -> Option<Unmatched> {
        let queue = &mut self.peer(from).unmatched;
        let at = queue.iter().position(|message| pattern.matches(message.tag()))?;
        queue.remove(at)
    }

    /// Cancels receives.
    pub(super) fn cancel(&mut self, outbox: &mut Outbox, which: &dyn Fn(u64) -> bool) {
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
        over.extend(self.abandon(|rendezvous| which(rendezvous.token)));
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
