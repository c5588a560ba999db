//! Software tag matching over [datagrams](ferrogin_datagram), for providers whose tagged messages are missing, slow or unreliable.
//!
//! An eager message fits into one datagram; short ones share a datagram (see [`records`]). A longer message starts with an RTS. When the RTS
//! matches a receive, the receiver answers with a CTS, and the payload goes out of the sender's buffer: as one tagged message of the
//! provider into the receiver's buffer, which was posted before the CTS, if both ends can (`direct`); otherwise in data records, in any
//! order, each with its offset. So no long message is ever buffered without a receive.

mod receiving;
mod records;
mod sending;
mod state;
#[cfg(test)]
mod tests;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrogin_datagram::{LostReason, MessageEndpoint, Outbox, Peer, SendError};
use ferrogin_libfabric::{Error, Libfabric, bindings, find_datagrams};

use super::purpose::Purpose;
use crate::proto::tags::Pattern;
use crate::proto::transport::{Addr, Event, Properties, Receive, ReceiveError, ReceiveResult, SendResult, Transport};
use crate::{Config, Matching, Payload};
use records::{HEADER, Header, INLINE, Kind, MAX_INLINE, RECORDS, Records};
use state::{State, Unmatched, addr, reset};

/// Payload bytes of a datagram, if the provider carries that many.
const DATA_BYTES: usize = 64 << 10;
/// Bytes of a datagram beyond its records and payload: prefix and name.
const OVERHEAD: usize = 256;
/// Bytes of the longest message; offsets have 64 bits.
const MAX_MESSAGE: usize = 1 << 40;
/// Time for peers to confirm that the endpoint closes.
const CLOSE_GRACE: Duration = Duration::from_millis(100);

/// Software tag matching over an endpoint for datagrams.
pub(crate) struct SoftwareTags {
    // First, so that it is closed before the buffers that it uses are freed.
    endpoint: MessageEndpoint,
    state: State,
    properties: Properties,
}

impl SoftwareTags {
    /// Opens an endpoint of the provider that `config` names, with receives or to try whether it opens.
    pub fn open(lib: &Arc<Libfabric>, config: &Config, purpose: Purpose) -> Result<Self, Error> {
        let info = find_datagrams(lib, &config.provider, config.source.as_deref(), bindings::FI_MSG)?;
        let max = info.max_msg_size();
        let records = RECORDS.min(max / 4);
        let data_bytes = max.saturating_sub(OVERHEAD + records).min(DATA_BYTES);
        if records < 2 * HEADER || data_bytes < HEADER {
            let what = format!("{} carries messages up to {max} bytes: too short for channels", info.provider());
            return Err(Error::Argument { what });
        }
        let open = match purpose {
            Purpose::Messages => MessageEndpoint::open_with_long,
            Purpose::Check => MessageEndpoint::open_without_receives,
        };
        let endpoint = open(
            lib,
            &ferrogin_datagram::Config {
                admission: true,
                provider: config.provider.clone(),
                source: config.source.clone(),
                max_header: records,
                max_payload: data_bytes,
                tx_depth: 64,
                rx_depth: 64,
                max_peers: config.max_peers,
                ping_after: config.ping_after,
                lost_after: config.lost_after,
            },
            info,
        )?;
        let state = State { data_bytes, records, max_inline: MAX_INLINE.min(records - HEADER), ..State::default() };
        let (name, provider) = (endpoint.address().into(), endpoint.provider().to_owned());
        let properties =
            Properties { watches_peers: true, ..Properties::new(name, provider, Matching::Software, MAX_MESSAGE) };
        Ok(Self { endpoint, state, properties })
    }
}

impl State {
    /// A datagram arrived.
    fn datagram(&mut self, outbox: &mut Outbox, from: Peer, records: &[u8], payload: &[u8]) {
        for (header, bytes) in (Records { records, payload }) {
            match header.kind {
                Kind::Eager | Kind::Rts => self.incoming_message(outbox, from, header, bytes),
                Kind::Cts => self.clear_to_send(outbox, from, &header),
                Kind::Decline => self.declined(from, header.number),
                Kind::Data => self.data(from, header, bytes),
            }
        }
    }

    /// A peer is gone: nothing more can be sent to it. Messages still arrive only if it closed its endpoint itself.
    fn peer_lost(&mut self, outbox: &Outbox, peer: Peer, reason: &LostReason) {
        let error = match reason {
            LostReason::Failed(error) => error.clone(),
            other => reset(other.to_string()),
        };
        let state = self.peer(peer);
        state.lost = Some(error.clone());
        state.closed = *reason == LostReason::Closed;
        state.records.clear();
        state.cleared.clear();
        // A long message that the peer did not send will not arrive.
        state.unmatched.retain(|message| matches!(message, Unmatched::Eager(..)));
        let hit: Vec<u32> = self.sends.iter().filter(|(_, out)| out.to == peer).map(|(number, _)| *number).collect();
        for number in hit {
            if let Some(out) = self.sends.get_mut(&number) {
                out.over = true;
                out.error.get_or_insert(error.clone());
            }
            self.settle(number);
        }
        if *reason == LostReason::Closed {
            return self.cancel_abandoned(outbox, peer);
        }
        self.events.push(Event::Lost { peer: addr(peer), error: error.clone() });
        let state = self.peer(peer);
        let matched_rts = std::mem::take(&mut state.matched_rts).into_iter().map(|(posted, ..)| posted);
        let posted: Vec<_> = std::mem::take(&mut state.posted).into_iter().chain(matched_rts).collect();
        let rendezvous = self.abandon(|rendezvous| rendezvous.from == peer);
        self.cancel_abandoned(outbox, peer);
        for (token, bytes) in posted.into_iter().map(|posted| (posted.token, posted.buffer)).chain(rendezvous) {
            let result = Err(ReceiveError::Failed(error.clone()));
            self.events.push(Event::Received { token, bytes, tag: 0, from: None, result });
        }
    }
}

/// The message that a datagram begins with; empty if it is a long one.
fn first_message<'a>(records: &'a [u8], payload: &'a [u8]) -> &'a [u8] {
    let first = Records { records, payload }.parse_next();
    first.filter(|(header, _)| header.kind == Kind::Eager).map_or(&[], |(_, bytes)| bytes)
}

impl Transport for SoftwareTags {
    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn insert(&mut self, name: &[u8]) -> Result<Addr, Error> {
        let peer = self.endpoint.add_peer(name)?;
        self.state.peer(peer);
        Ok(addr(peer))
    }

    fn send(&mut self, to: Addr, tag: u64, body: Payload, token: u64, _: bool) -> SendResult {
        let peer = Peer::from_index(to.0 as usize);
        if let Some(error) = self.state.peer(peer).lost.clone() {
            return SendResult::Failed(body, error);
        }
        if body.len() <= self.state.max_inline {
            let header = Header { flags: INLINE, ..Header::new(Kind::Eager, 0, tag, body.len()) };
            return match self.state.append_record(self.endpoint.outbox(), peer, &header, body.as_slice()) {
                Ok(()) => SendResult::Done(body),
                Err(SendError::Full) => SendResult::Retry(body),
                Err(error) => SendResult::Failed(body, reset(error.to_string())),
            };
        }
        // One slot for the batch before it and one for the message: no later message overtakes it.
        if self.endpoint.free_slots() < 2 {
            return SendResult::Retry(body);
        }
        let number = self.state.begin_send(peer, tag, body, token);
        self.state.continue_send(self.endpoint.outbox(), number);
        SendResult::Posted
    }

    fn receive(&mut self, posted: Receive) -> ReceiveResult {
        let pattern = posted.pattern;
        let Some(from) = posted.from else {
            let mut peers = (0..self.state.peers.len()).map(Peer::from_index);
            match peers.find_map(|peer| Some((peer, self.state.unmatched(peer, pattern)?))) {
                Some((peer, message)) => self.state.match_message(self.endpoint.outbox(), peer, posted, message),
                None => self.state.any_source.push_back(posted),
            }
            return ReceiveResult::Posted;
        };
        let peer = Peer::from_index(from.0 as usize);
        if let Some(message) = self.state.unmatched(peer, pattern) {
            self.state.match_message(self.endpoint.outbox(), peer, posted, message);
            return ReceiveResult::Posted;
        }
        let state = self.state.peer(peer);
        match &state.lost {
            Some(error) if !state.closed => ReceiveResult::Failed(posted.buffer, error.clone()),
            _ => {
                state.posted.push_back(posted);
                ReceiveResult::Posted
            }
        }
    }

    fn peek(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool {
        let peers = from.map_or(0..self.state.peers.len(), |from| from.0 as usize..from.0 as usize + 1);
        let found = peers.map(Peer::from_index).find_map(|peer| {
            let waiting = &self.state.peers.get(peer.index())?.unmatched;
            let tag = waiting.iter().map(Unmatched::tag).find(|tag| pattern.matches(*tag))?;
            Some((tag, Some(addr(peer))))
        });
        self.state.events.push(Event::Peeked { token, found });
        true
    }

    fn cancel(&mut self, which: &dyn Fn(u64) -> bool) {
        self.state.cancel(self.endpoint.outbox(), which);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        self.poll_admitting(events, &|_, _| true)
    }

    fn poll_admitting(&mut self, events: &mut Vec<Event>, admits: &dyn Fn(&[u8], &[u8]) -> bool) -> Result<(), Error> {
        let Self { endpoint, state, .. } = self;
        state.flush(endpoint.outbox());
        let on_event = |outbox: &mut Outbox, event: ferrogin_datagram::Event<'_>| match event {
            ferrogin_datagram::Event::Message { from, header, payload } => {
                state.datagram(outbox, from, header, payload)
            }
            ferrogin_datagram::Event::Sent { token, .. } => state.send_completed(outbox, token, true),
            ferrogin_datagram::Event::SendFailed { token, .. } => state.send_completed(outbox, token, false),
            ferrogin_datagram::Event::Lost { peer, reason } => state.peer_lost(outbox, peer, &reason),
        };
        endpoint.poll_admitting(on_event, |outbox, first| {
            if admits(first.address, first_message(first.header, first.payload))
                && let Err(error) = outbox.admit(first.address, first.number)
            {
                log::warn!("a peer cannot be answered: {error}");
            }
        })?;
        for over in endpoint.take_long() {
            state.direct_received(endpoint.outbox(), over.token, over.result);
        }
        state.retry(endpoint.outbox());
        events.append(&mut state.events);
        Ok(())
    }

    fn close_port(&mut self) -> bool {
        self.endpoint.close_port()
    }

    fn flush(&mut self) {
        self.state.flush(self.endpoint.outbox());
    }

    fn wait_fd(&self) -> Option<RawFd> {
        // No event announces that the provider takes what it refused before: the caller must poll.
        let state = &self.state;
        let sent = state.waiting.is_empty() && state.replies.is_empty() && state.unflushed.is_empty();
        self.endpoint.wait_fd().filter(|_| sent && !self.endpoint.must_retry())
    }

    fn may_wait(&self) -> bool {
        // The next poll reports what ended in another call.
        self.state.events.is_empty() && self.endpoint.may_wait()
    }
}

impl Drop for SoftwareTags {
    fn drop(&mut self) {
        let begin = Instant::now();
        let mut events = Vec::new();
        while !self.state.unflushed.is_empty()
            && begin.elapsed() < CLOSE_GRACE
            && self.poll_admitting(&mut events, &|_, _| false).is_ok()
        {}
        if let Err(error) = self.endpoint.shutdown(CLOSE_GRACE, |_, _| ()) {
            log::debug!("closing the endpoint: {error}");
        }
    }
}
