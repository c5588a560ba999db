//! The sending half: records share datagrams, and long messages wait for their CTS.

use ferrogin_datagram::{Outbox, Peer, SendError};

use super::records::{HEADER, Header, Kind};
use super::state::{PeerState, PendingSend, State, reset};
use crate::Payload;
use crate::proto::transport::{Event, PAYLOAD_WINDOW};

impl State {
    /// Begins a send; gives its number.
    pub fn begin_send(&mut self, to: Peer, tag: u64, body: Payload, token: u64) -> u32 {
        // After a wrap, sends with low numbers may still wait for their receives.
        while self.sends.contains_key(&self.next_number) {
            self.next_number = self.next_number.wrapping_add(1);
        }
        let number = self.next_number;
        self.next_number = number.wrapping_add(1);
        let (cts, direct, in_flight, started, error, over) = (None, false, 0, false, None, false);
        let out = PendingSend { to, body, token, tag, cts, direct, in_flight, started, error, over };
        self.sends.insert(number, out);
        number
    }

    /// Appends a record to a peer's batch. The batch is sent by [`State::flush`], with a longer message, or when it is full.
    pub fn append_record(
        &mut self,
        outbox: &mut Outbox,
        to: Peer,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), SendError> {
        self.make_room(outbox, to, HEADER + bytes.len())?;
        let state = self.peer(to);
        state.records.extend_from_slice(&header.emit());
        state.records.extend_from_slice(bytes);
        if !std::mem::replace(&mut state.queued, true) {
            self.unflushed.push(to);
        }
        Ok(())
    }

    /// Sends the batch to a peer if it has no room for `len` bytes.
    fn make_room(&mut self, outbox: &mut Outbox, to: Peer, len: usize) -> Result<(), SendError> {
        let has_room = self.peer(to).records.len() + len <= self.records;
        if has_room { Ok(()) } else { self.flush_to(outbox, to) }
    }

    /// Sends the batch to a peer.
    fn flush_to(&mut self, outbox: &mut Outbox, to: Peer) -> Result<(), SendError> {
        let records = &mut self.peers[to.index()].records;
        if records.is_empty() {
            return Ok(());
        }
        let result = outbox.send(to, records, &[]);
        if result != Err(SendError::Full) {
            records.clear();
        }
        result
    }

    /// Sends the batch to a peer and a last record, whose bytes are the payload of the datagram and are not copied.
    ///
    /// # Safety
    /// The bytes are valid for reads until the endpoint has completed the send or is dropped.
    unsafe fn send_borrowed_record(
        &mut self,
        outbox: &mut Outbox,
        to: Peer,
        header: &Header,
        (data, len): (*const u8, usize),
        token: u64,
    ) -> Result<(), SendError> {
        self.make_room(outbox, to, HEADER)?;
        let records = &mut self.peers[to.index()].records;
        let before = records.len();
        records.extend_from_slice(&header.emit());
        // SAFETY: the caller keeps the bytes valid until the send has completed or the endpoint is dropped.
        let result = unsafe { outbox.send_borrowed(to, records, data, len, token) };
        records.truncate(if result == Err(SendError::Full) { before } else { 0 });
        result
    }

    /// Sends the batches, as far as the endpoint has slots.
    pub fn flush(&mut self, outbox: &mut Outbox) {
        let mut unflushed = std::mem::take(&mut self.unflushed);
        unflushed.retain(|to| {
            // The endpoint reports a peer that is gone as lost.
            let full = self.flush_to(outbox, *to) == Err(SendError::Full);
            self.peers[to.index()].queued = full;
            full
        });
        self.unflushed = unflushed;
    }

    /// Gives as much of a send to the endpoint as it takes; false when the endpoint has no slot.
    fn push(&mut self, outbox: &mut Outbox, number: u32) -> bool {
        loop {
            let Some(out) = self.sends.get(&number).filter(|out| !out.over) else { return true };
            let total = out.body.len();
            let whole = total <= self.data_bytes;
            let (kind, tag, from, to) = match (out.started, out.cts) {
                (false, _) if whole => (Kind::Eager, out.tag, 0, total),
                (false, _) => (Kind::Rts, out.tag, 0, 0),
                (true, Some((receive, at))) => {
                    let part = if out.direct { total } else { self.data_bytes };
                    (Kind::Data, receive, at, (at + part).min(total))
                }
                (true, None) => return true,
            };
            let direct = if out.started { out.direct } else { !whole && outbox.has_long() };
            let header = Header { offset: from as u64, ..Header::new(kind, number, tag, total).direct(direct) };
            let (peer, bytes, token) = (out.to, &out.body.as_slice()[from..to], u64::from(number));
            let (data, len) = (bytes.as_ptr(), bytes.len());
            let sent = if kind == Kind::Rts {
                self.append_record(outbox, peer, &header, &[])
            } else if kind == Kind::Data && direct {
                // Records for other messages do not wait behind the payload.
                let flushed = self.flush_to(outbox, peer);
                // SAFETY: the payload's bytes are on the heap or static, because `send` copies words inline; `sends` keeps them
                // until every send of them has completed.
                flushed.and_then(|()| unsafe { outbox.send_long(peer, tag, data, len, token) })
            } else {
                // SAFETY: the payload's bytes are on the heap or static, because `send` copies words inline; `sends` keeps them
                // until every send of them has completed.
                unsafe { self.send_borrowed_record(outbox, peer, &header, (data, len), token) }
            };
            let Some(out) = self.sends.get_mut(&number) else { return true };
            match sent {
                Ok(()) => {
                    out.in_flight += usize::from(kind != Kind::Rts);
                    out.started = true;
                    if let Some((_, at)) = &mut out.cts {
                        *at = to;
                    }
                    out.over = to == total;
                }
                Err(SendError::Full) => return false,
                Err(error) => {
                    out.error = Some(reset(error.to_string()));
                    out.over = true;
                }
            }
        }
    }

    /// Ends a send when the endpoint has completed all its parts.
    pub fn settle(&mut self, number: u32) {
        if self.sends.get(&number).is_some_and(|out| out.over && out.in_flight == 0)
            && let Some(PendingSend { to, body, token, direct, error, .. }) = self.sends.remove(&number)
        {
            if direct {
                self.peer(to).outbound.end(body.len());
            }
            let result = error.map_or(Ok(()), Err);
            self.events.push(Event::Sent { token, body, result });
        }
    }

    /// Gives the endpoint more of a send; false when the endpoint has no slot.
    fn advance(&mut self, outbox: &mut Outbox, number: u32) -> bool {
        let taken = self.push(outbox, number);
        self.settle(number);
        taken
    }

    /// Gives the endpoint more of a send, now or when it has a slot.
    pub fn continue_send(&mut self, outbox: &mut Outbox, number: u32) {
        if !self.advance(outbox, number) {
            self.waiting.push_back(number);
        }
    }

    /// Sends what the endpoint had no slot for.
    pub fn retry(&mut self, outbox: &mut Outbox) {
        self.send_replies(outbox);
        while let Some(number) = self.waiting.pop_front() {
            if !self.advance(outbox, number) {
                return self.waiting.push_front(number);
            }
        }
    }

    /// A CTS arrived.
    pub fn clear_to_send(&mut self, outbox: &mut Outbox, from: Peer, header: &Header) {
        if let Some(out) = self.sends.get_mut(&header.number)
            && out.to == from
            && out.started
            && out.cts.is_none()
            && !out.over
        {
            out.cts = Some((header.tag, 0));
            if header.is_direct() && outbox.has_long() {
                self.peer(from).cleared.push_back(header.number);
                self.start_direct_sends(outbox, from);
            } else {
                self.continue_send(outbox, header.number);
            }
        }
    }

    /// Starts direct payloads to a peer, as many as the window permits.
    fn start_direct_sends(&mut self, outbox: &mut Outbox, peer: Peer) {
        while let Some(number) = self.peer(peer).cleared.pop_front() {
            let Some(out) = self.sends.get_mut(&number) else { continue };
            let PeerState { cleared, outbound, .. } = &mut self.peers[peer.index()];
            if !outbound.has_room(out.body.len(), PAYLOAD_WINDOW) {
                return cleared.push_front(number);
            }
            outbound.begin(out.body.len());
            out.direct = true;
            self.continue_send(outbox, number);
        }
    }

    /// The receive for a long message is too short.
    pub fn declined(&mut self, from: Peer, number: u32) {
        if let Some(out) = self.sends.get_mut(&number).filter(|out| out.to == from) {
            out.over = true;
            self.peer(from).cleared.retain(|cleared| *cleared != number);
            self.settle(number);
        }
    }

    /// Appends the waiting answers to the batches.
    pub fn send_replies(&mut self, outbox: &mut Outbox) {
        while let Some((to, header)) = self.replies.pop_front() {
            if self.append_record(outbox, to, &header, &[]) == Err(SendError::Full) {
                return self.replies.push_front((to, header));
            }
        }
    }

    /// The endpoint completed the send of a payload.
    pub fn send_completed(&mut self, outbox: &mut Outbox, token: u64, good: bool) {
        let number = token as u32;
        let Some(out) = self.sends.get_mut(&number) else { return };
        out.in_flight = out.in_flight.saturating_sub(1);
        if !good {
            out.over = true;
            out.error.get_or_insert_with(|| reset("the datagram did not go out".to_owned()));
        }
        let to = out.to;
        self.settle(number);
        self.start_direct_sends(outbox, to);
    }
}
