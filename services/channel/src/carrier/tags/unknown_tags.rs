//! Messages that no receive of the protocol matches: unknown tags, and payloads without a length.

use super::endpoint::{Addr, Endpoint, Found, ID_MASK, Operation, PAYLOAD, Pattern, Receive, ReceiveResult, Token};
use super::{Tags, find, of_peer};
use crate::Violation;
use crate::proto::carrier::Peer;

/// Bytes of the receive buffer for a message with an unknown tag. Its contents are not used.
const UNKNOWN_BUFFER: usize = 8;

/// Patterns that together match exactly the tags that the protocol doesn't use. The upper 32 bits of those it uses are
/// 1, 2 or 4.
pub(super) fn patterns() -> impl Iterator<Item = Pattern> {
    // One pattern for each of the upper parts 0, 3, 5, 6 and 7; one for each bit from 35 up.
    let low = [0u64, 3, 5, 6, 7].into_iter().map(|high| Pattern { tag: high << 32, ignore: ID_MASK });
    low.chain((35..64).map(|bit| Pattern { tag: 1 << bit, ignore: !(1 << bit) }))
}

impl<E: Endpoint> Tags<E> {
    /// Looks for messages with unknown tags.
    pub(super) fn peek_unknown_tags(&mut self) {
        for index in 0..self.unknown.len() {
            let unknown = &mut self.unknown[index];
            if !unknown.is_peeking {
                let token = Token { operation: Operation::PeekUnknown, session: None, id: index as u32 };
                unknown.is_peeking = self.endpoint.peek(None, unknown.pattern, token);
                if !unknown.is_peeking {
                    self.receive_unknown(index);
                }
            }
        }
        self.endpoint.cancel(&|token| token.operation == Operation::ReceiveUnknown);
    }

    /// Receives a message with an unknown tag, if the endpoint can't peek or the message belongs to no peer. The next
    /// peek cancels the receive: one that stays posted slows down the matching of every other message.
    fn receive_unknown(&mut self, index: usize) {
        let pattern = self.unknown[index].pattern;
        let token = Token { operation: Operation::ReceiveUnknown, session: None, id: index as u32 };
        self.unknown[index].is_peeking = self.receive_and_drop(None, pattern, token);
    }

    /// Receives a message whose contents aren't used; false if that isn't possible now.
    fn receive_and_drop(&mut self, from: Option<Addr>, pattern: Pattern, token: Token) -> bool {
        let receive = Receive { from, pattern, buffer: Vec::new(), len: UNKNOWN_BUFFER, token };
        matches!(self.endpoint.receive(receive), ReceiveResult::Posted)
    }

    /// Handles the result of a peek.
    pub(super) fn peeked(&mut self, Token { operation, session, id: index }: Token, found: Option<Found>) {
        let session = session.and_then(|id| find(&mut self.peers, id));
        let (id, peer) = (session.as_ref().map(|session| session.id), session.map(|session| session.addr));
        if operation == Operation::PeekPayload {
            if let Some(id) = id {
                self.payload_peeked(id.peer, found);
            }
            return;
        }
        let index = index as usize;
        if peer.is_none()
            && let Some(unknown) = self.unknown.get_mut(index)
        {
            unknown.is_peeking = false;
        }
        let Some(Found { tag, from }) = found else { return };
        if let Some(from) = from.or(peer) {
            self.discard(from, tag);
            self.violated(Violation::UnknownTag { tag }, Some(from));
        } else if self.suspected_tag.replace(tag) == Some(tag) {
            // The peeks for each peer didn't find it, so it belongs to no peer.
            self.suspected_tag = None;
            self.receive_unknown(index);
        } else {
            for session in self.peers.iter().filter_map(|known| known.session.as_deref()) {
                let token = Token { operation: Operation::PeekUnknown, session: Some(session.id), id: index as u32 };
                self.endpoint.peek(Some(session.addr), Pattern { tag, ignore: 0 }, token);
            }
        }
    }

    /// Receives and drops a message that a peek found. If that fails now, a later peek finds the message again.
    fn discard(&mut self, from: Addr, tag: u64) {
        let token = Token { operation: Operation::Discard, session: None, id: 0 };
        self.receive_and_drop(Some(from), Pattern { tag, ignore: 0 }, token);
    }

    /// Looks for payloads of the peer that no receive matches.
    pub(super) fn peek_payload(&mut self, peer: Peer) {
        if let Some(session) = of_peer(&mut self.peers, peer) {
            let token = Token { operation: Operation::PeekPayload, session: Some(session.id), id: 0 };
            self.endpoint.peek(Some(session.addr), Pattern { tag: PAYLOAD, ignore: ID_MASK }, token);
        }
    }

    fn payload_peeked(&mut self, peer: Peer, found: Option<Found>) {
        let (now, discards) = (self.now, self.endpoint.abilities().can_discard_stale);
        let Some(session) = of_peer(&mut self.peers, peer) else { return };
        let id = found.map(|found| (found.tag & ID_MASK) as u32);
        match id.filter(|id| session.incoming.is_stale(*id)) {
            Some(id) if discards => {
                let from = session.addr;
                self.discard(from, PAYLOAD | u64::from(id));
                self.peek_payload(peer);
            }
            Some(_) => {}
            None => session.incoming.payload_peeked(id, now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_patterns_match_exactly_the_unused_tags() {
        let known = |tag: u64| matches!(tag >> 32, 1 | 2 | 4);
        let caught = |tag: u64| patterns().any(|pattern| pattern.matches(tag));
        for high in (0..256u64).chain((0..32).map(|bit| 1 << bit)).chain([u64::from(u32::MAX)]) {
            for low in [0, 1, ID_MASK] {
                let tag = high << 32 | low;
                assert_ne!(known(tag), caught(tag), "{tag:#x}");
            }
        }
    }
}
