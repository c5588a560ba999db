//! Messages that no receive of the protocol matches: unknown tags, and payloads without a length.

use super::endpoint::{
    Addr, Endpoint, Found, ID_MASK, NO_SESSION, Operation, PAYLOAD, Pattern, Receive, ReceiveResult, Token, token,
};
use super::{Tags, find};
use crate::Violation;

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
                let token = token(Operation::PeekUnknown, NO_SESSION, index as u32);
                unknown.is_peeking = self.endpoint.peek(None, unknown.pattern, token);
                if !unknown.is_peeking {
                    self.receive_unknown(index);
                }
            }
        }
        self.endpoint
            .cancel(&|token| Token::parse(token).is_some_and(|token| token.operation == Operation::ReceiveUnknown));
    }

    /// Receives a message with an unknown tag, if the endpoint can't peek or the message belongs to no peer. The next
    /// peek cancels the receive: one that stays posted slows down the matching of every other message.
    fn receive_unknown(&mut self, index: usize) {
        let pattern = self.unknown[index].pattern;
        let token = token(Operation::ReceiveUnknown, NO_SESSION, index as u32);
        self.unknown[index].is_peeking = self.receive_and_drop(None, pattern, token);
    }

    /// Receives a message whose contents aren't used; false if that isn't possible now.
    fn receive_and_drop(&mut self, from: Option<Addr>, pattern: Pattern, token: u64) -> bool {
        let receive = Receive { from, pattern, buffer: Vec::new(), len: UNKNOWN_BUFFER, token };
        matches!(self.endpoint.receive(receive), ReceiveResult::Posted)
    }

    /// Handles the result of a peek.
    pub(super) fn peeked(&mut self, Token { operation, session: number, id: index }: Token, found: Option<Found>) {
        if operation == Operation::PeekPayload {
            return self.payload_peeked(number, found);
        }
        let index = index as usize;
        let peer = find(&mut self.sessions, number).map(|session| session.addr);
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
            for (number, session) in self.sessions.iter().enumerate() {
                let Some(session) = session else { continue };
                let token = token(Operation::PeekUnknown, number as u32, index as u32);
                self.endpoint.peek(Some(session.addr), Pattern { tag, ignore: 0 }, token);
            }
        }
    }

    /// Receives and drops a message that a peek found. If that fails now, a later peek finds the message again.
    fn discard(&mut self, from: Addr, tag: u64) {
        self.receive_and_drop(Some(from), Pattern { tag, ignore: 0 }, token(Operation::Discard, NO_SESSION, 0));
    }

    /// Looks for payloads of the session's peer that no receive matches.
    pub(super) fn peek_payload(&mut self, number: u32) {
        if let Some(session) = find(&mut self.sessions, number) {
            let pattern = Pattern { tag: PAYLOAD, ignore: ID_MASK };
            self.endpoint.peek(Some(session.addr), pattern, token(Operation::PeekPayload, number, 0));
        }
    }

    fn payload_peeked(&mut self, number: u32, found: Option<Found>) {
        let (now, discards) = (self.now, self.endpoint.abilities().can_discard_stale);
        let Some(session) = find(&mut self.sessions, number) else { return };
        let id = found.map(|found| (found.tag & ID_MASK) as u32);
        match id.filter(|id| session.incoming.is_stale(*id)) {
            Some(id) if discards => {
                let from = session.addr;
                self.discard(from, PAYLOAD | u64::from(id));
                self.peek_payload(number);
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
