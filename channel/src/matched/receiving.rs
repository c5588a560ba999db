//! The receiving half: messages meet receives, what is announced is cleared, and bytes come in.

use std::collections::VecDeque;

use super::{
    Error, Event, Fault, Filling, Header, Kind, NUMBERS, Outbox, PAYLOADS, Pattern, Peer, Posted, State, UNMATCHED,
    Unmatched, addr, bindings, secret,
};

/// Takes those out of a queue that `which` names.
fn take_out<T>(queue: &mut VecDeque<T>, which: impl Fn(&T) -> bool) -> VecDeque<T> {
    let (out, stay) = std::mem::take(queue).into_iter().partition(which);
    *queue = stay;
    out
}

impl State {
    pub(super) fn arrived(&mut self, outbox: &mut Outbox<'_>, from: Peer, header: Header, bytes: &[u8]) {
        match self.posted_for(from, header.tag) {
            Some(posted) if header.kind == Kind::Whole => self.fill(from, posted, header.tag, bytes),
            Some(posted) => self.clear(outbox, from, posted, header),
            None => {
                let unmatched = &mut self.peer(from).unmatched;
                if unmatched.len() >= UNMATCHED {
                    log::warn!("a message was dropped: its peer is {UNMATCHED} messages ahead of its reader");
                } else if header.kind == Kind::Whole {
                    unmatched.push_back(Unmatched::Whole(header.tag, bytes.to_vec()));
                } else {
                    unmatched.push_back(Unmatched::Announced(header));
                }
            }
        }
    }

    /// Takes the receive that a message of `from` meets.
    fn posted_for(&mut self, from: Peer, tag: u64) -> Option<Posted> {
        let take = |queue: &mut VecDeque<Posted>| {
            let at = queue.iter().position(|posted| posted.pattern.matches(tag))?;
            queue.remove(at)
        };
        take(&mut self.peer(from).posted).or_else(|| take(&mut self.anyone))
    }

    fn fill(&mut self, from: Peer, posted: Posted, tag: u64, bytes: &[u8]) {
        let Posted { mut room, len, token, .. } = posted;
        let fits = bytes.len() <= len;
        room.clear();
        room.extend_from_slice(&bytes[..bytes.len().min(len)]);
        let result = if fits { Ok(()) } else { Err(Fault::Truncated) };
        self.events.push(Event::Received { token, bytes: room, tag, from: Some(addr(from)), result });
    }

    /// A receive meets an announced message. Few are cleared at a time: what a stream holds beyond that is only in the way of what is
    /// said about others, and out of the cache when it is read.
    fn clear(&mut self, outbox: &mut Outbox<'_>, from: Peer, posted: Posted, header: Header) {
        let state = self.peer(from);
        // Receives for anyone are few, and for short messages: whoever announces one and does not send it does not keep them.
        let total = usize::try_from(header.total).ok().filter(|total| posted.directed && *total <= posted.len);
        match total {
            None => self.decline(outbox, from, posted, &header),
            Some(total) if header.at_once && !(state.met.is_empty() && state.coming.has_room(total, PAYLOADS)) => {
                state.met.push_back((posted, header, total));
            }
            Some(total) => self.clear_now(outbox, from, posted, &header, total),
        }
    }

    /// Clears what has waited for others of that peer.
    pub(super) fn clear_more(&mut self, outbox: &mut Outbox<'_>, from: Peer) {
        loop {
            let state = self.peer(from);
            if !state.met.front().is_some_and(|(_, _, total)| state.coming.has_room(*total, PAYLOADS)) {
                return;
            }
            let Some((posted, header, total)) = state.met.pop_front() else { return };
            self.clear_now(outbox, from, posted, &header, total);
        }
    }

    fn clear_now(&mut self, outbox: &mut Outbox<'_>, from: Peer, posted: Posted, header: &Header, total: usize) {
        let Posted { mut room, token, .. } = posted;
        // A number that no other peer can guess: whoever knows the tag may fill the room.
        let filling = secret() & NUMBERS;
        let mut at_once = header.at_once && !self.filling.contains_key(&filling);
        if at_once {
            room.clear();
            room.reserve_exact(total);
            // SAFETY: room for that many bytes on the heap, kept untouched (`filling`, then `given_up`) until the
            // receive is over; whatever is left then is dropped after the endpoint.
            at_once = unsafe { outbox.receive_long(filling, room.as_mut_ptr(), total, filling) };
        }
        if at_once {
            self.peer(from).coming.begin(total);
        } else {
            // Every byte is written over: what is there need not be cleared.
            room.resize(total, 0);
        }
        self.filling.insert(filling, Filling { from, room, at_once, total, missing: total, tag: header.tag, token });
        let answer = Header { at_once, ..Header::new(Kind::Clear, header.number, filling, total) };
        self.answer(outbox, from, answer);
    }

    /// Ends a receive that is too short for what was announced.
    fn decline(&mut self, outbox: &mut Outbox<'_>, from: Peer, posted: Posted, header: &Header) {
        let Posted { token, room: bytes, .. } = posted;
        let (tag, result) = (header.tag, Err(Fault::Truncated));
        self.events.push(Event::Received { token, bytes, tag, from: Some(addr(from)), result });
        let answer = Header { total: header.total, ..Header::new(Kind::Decline, header.number, 0, 0) };
        self.answer(outbox, from, answer);
    }

    fn answer(&mut self, outbox: &mut Outbox<'_>, to: Peer, answer: Header) {
        self.replies.push_back((to, answer));
        self.reply(outbox);
    }

    pub(super) fn piece(&mut self, from: Peer, header: Header, bytes: &[u8]) {
        let filling = self.filling.get_mut(&header.tag).filter(|filling| filling.from == from && !filling.at_once);
        let Some(filling) = filling else { return };
        let place =
            usize::try_from(header.offset).ok().and_then(|at| filling.room.get_mut(at..)?.get_mut(..bytes.len()));
        let missing = filling.missing.checked_sub(bytes.len());
        let (Some(place), Some(missing), true) = (place, missing, header.total == filling.total as u64) else {
            log::warn!("a piece that does not fit was dropped");
            return;
        };
        place.copy_from_slice(bytes);
        filling.missing = missing;
        if missing == 0
            && let Some(Filling { room, tag, token, .. }) = self.filling.remove(&header.tag)
        {
            self.events.push(Event::Received { token, bytes: room, tag, from: Some(addr(from)), result: Ok(()) });
        }
    }

    /// A receive for a message that comes at once is over.
    pub(super) fn received(&mut self, outbox: &mut Outbox<'_>, number: u64, result: Result<usize, Error>) {
        if let Some((from, _, total)) = self.given_up.remove(&number) {
            self.has_come(outbox, from, total);
            return;
        }
        let Some(Filling { from, mut room, tag, token, total, .. }) = self.filling.remove(&number) else { return };
        self.has_come(outbox, from, total);
        let result = match result {
            Ok(len) => {
                // SAFETY: the endpoint wrote that many bytes at its start, and the capacity has them.
                unsafe { room.set_len(len.min(room.capacity())) };
                Ok(())
            }
            Err(Error::Call { code: bindings::FI_ETRUNC, .. }) => Err(Fault::Truncated),
            Err(error) => Err(Fault::Failed(error)),
        };
        self.events.push(Event::Received { token, bytes: room, tag, from: Some(addr(from)), result });
    }

    fn has_come(&mut self, outbox: &mut Outbox<'_>, from: Peer, total: usize) {
        self.peer(from).coming.end(total);
        self.clear_more(outbox, from);
    }

    /// Takes receives that are under way out: their tokens, and their rooms unless the endpoint has them.
    pub(super) fn give_up(&mut self, which: impl Fn(&Filling) -> bool) -> Vec<(u64, Vec<u8>)> {
        let Self { filling, given_up, .. } = self;
        let over = filling.extract_if(|_, filling| which(filling)).map(|(number, filling)| {
            let Filling { from, room, at_once, token, total, .. } = filling;
            if !at_once {
                return (token, room);
            }
            given_up.insert(number, (from, room, total));
            (token, Vec::new())
        });
        over.collect()
    }

    /// Takes rooms back that a peer that is gone would fill. Those of a living one stay lent until its bytes are there: without
    /// them the provider would stop reading what it sends.
    pub(super) fn take_back(&self, outbox: &Outbox<'_>, from: Peer) {
        for (number, _) in self.given_up.iter().filter(|(_, (of, ..))| *of == from) {
            outbox.cancel_long(*number);
        }
    }

    pub(super) fn meet(&mut self, outbox: &mut Outbox<'_>, from: Peer, posted: Posted, message: Unmatched) {
        match message {
            Unmatched::Whole(tag, bytes) => self.fill(from, posted, tag, &bytes),
            Unmatched::Announced(header) => self.clear(outbox, from, posted, header),
        }
    }

    /// An unmatched message of `from` that a pattern takes.
    pub(super) fn unmatched(&mut self, from: Peer, pattern: Pattern) -> Option<Unmatched> {
        let queue = &mut self.peer(from).unmatched;
        let at = queue.iter().position(|message| pattern.matches(message.tag()))?;
        queue.remove(at)
    }

    /// Ends receives early.
    pub(super) fn cancel(&mut self, outbox: &mut Outbox<'_>, which: &dyn Fn(u64) -> bool) {
        let mut over = Vec::new();
        let queues = self.peers.iter_mut().map(|state| &mut state.posted).chain([&mut self.anyone]);
        for queue in queues {
            let posted = take_out(queue, |posted| which(posted.token));
            over.extend(posted.into_iter().map(|posted| (posted.token, posted.room)));
        }
        for index in 0..self.peers.len() {
            let peer = Peer::from_index(index);
            // Their messages can meet other receives, before those that came later.
            let mut before = Vec::new();
            for (posted, header, _) in take_out(&mut self.peers[index].met, |(posted, ..)| which(posted.token)) {
                over.push((posted.token, posted.room));
                match self.posted_for(peer, header.tag) {
                    Some(posted) => self.clear(outbox, peer, posted, header),
                    None if self.peers[index].lost.is_none() => before.push(header),
                    None => {}
                }
            }
            for header in before.into_iter().rev() {
                self.peers[index].unmatched.push_front(Unmatched::Announced(header));
            }
        }
        over.extend(self.give_up(|filling| which(filling.token)));
        for (token, bytes) in over {
            let result = Err(Fault::Cancelled);
            self.events.push(Event::Received { token, bytes, tag: 0, from: None, result });
        }
        for peer in 0..self.peers.len() as u32 {
            if self.peers[peer as usize].lost.is_some() {
                self.take_back(outbox, Peer::from_index(peer as usize));
            }
        }
    }
}
