//! Messages that no receive of the protocol matches: unknown tags, and payloads without a length.

use super::Engine;
use crate::Violation;
use crate::proto::operation::{NO_CHANNEL, Operation, parse_token, token};
use crate::proto::tags::{ID_MASK, PAYLOAD, Pattern};
use crate::proto::transport::{Addr, Receive, ReceiveResult};

/// Bytes of the receive buffer for a message with an unknown tag. Its contents are not used.
const UNKNOWN_BUFFER: usize = 8;

impl Engine {
    /// Looks for messages with unknown tags.
    pub(super) fn peek_unknown_tags(&mut self) {
        for index in 0..self.unknown.len() {
            let (pattern, peeking) = &mut self.unknown[index];
            if !*peeking {
                *peeking = self.transport.peek(None, *pattern, token(Operation::PeekUnknown, NO_CHANNEL, index as u32));
                if !*peeking {
                    self.receive_unknown(index);
                }
            }
        }
        self.transport.cancel(&|token| {
            parse_token(token).is_some_and(|(operation, _, _)| operation == Operation::ReceiveUnknown)
        });
    }

    /// Receives a message with an unknown tag, if the transport can't peek or the message belongs to no peer. The next peek cancels the
    /// receive: one that stays posted slows down the matching of every other message.
    fn receive_unknown(&mut self, index: usize) {
        let pattern = self.unknown[index].0;
        self.unknown[index].1 = self.receive_and_drop(Operation::ReceiveUnknown, index as u32, None, pattern);
    }

    /// Receives a message whose contents aren't used; false if that isn't possible now.
    fn receive_and_drop(&mut self, operation: Operation, index: u32, from: Option<Addr>, pattern: Pattern) -> bool {
        let (token, buffer) = (token(operation, NO_CHANNEL, index), Vec::new());
        let receive = Receive { from, pattern, buffer, len: UNKNOWN_BUFFER, token };
        matches!(self.transport.receive(receive), ReceiveResult::Posted)
    }

    /// Handles the result of a peek.
    pub(super) fn peeked(
        &mut self,
        operation: Operation,
        channel: u32,
        index: u32,
        found: Option<(u64, Option<Addr>)>,
    ) {
        let now = self.now;
        if operation == Operation::PeekPayload {
            let discards = self.transport.properties().can_discard_stale;
            let Some(state) = self.state_of(channel).filter(|state| state.is_live()) else { return };
            let addr = state.addr;
            let id = found.map(|(tag, _)| (tag & ID_MASK) as u32);
            match id.filter(|id| state.incoming.is_stale(*id)) {
                Some(id) if discards => {
                    self.discard(addr, PAYLOAD | u64::from(id));
                    self.peek_payload(channel);
                }
                Some(_) => {}
                None => state.incoming.payload_peeked(id, now),
            }
            return;
        }
        let index = index as usize;
        let peer_of_channel = self.state_of(channel).map(|state| state.addr);
        if peer_of_channel.is_none()
            && let Some((_, peeking)) = self.unknown.get_mut(index)
        {
            *peeking = false;
        }
        let Some((tag, from)) = found else { return };
        if let Some(from) = from.or(peer_of_channel) {
            self.discard(from, tag);
            self.unknown_tag(tag, Some(from));
        } else if self.suspected_tag.replace(tag) == Some(tag) {
            // The peeks for each peer didn't find it, so it belongs to no peer.
            self.suspected_tag = None;
            self.receive_unknown(index);
        } else {
            for channel in 0..self.channels.len() as u32 {
                let Some(from) = self.state_of(channel).map(|state| state.addr) else { continue };
                let token = token(Operation::PeekUnknown, channel, index as u32);
                self.transport.peek(Some(from), Pattern { tag, ignore: 0 }, token);
            }
        }
    }

    /// Receives and drops a message that a peek found. If that fails now, a later peek finds the message again.
    fn discard(&mut self, from: Addr, tag: u64) {
        self.receive_and_drop(Operation::Discard, 0, Some(from), Pattern { tag, ignore: 0 });
    }

    /// Looks for payloads of the channel's peer that no receive matches.
    pub(super) fn peek_payload(&mut self, channel: u32) {
        let Some(from) = self.state_of(channel).map(|state| state.addr) else { return };
        let pattern = Pattern { tag: PAYLOAD, ignore: ID_MASK };
        self.transport.peek(Some(from), pattern, token(Operation::PeekPayload, channel, 0));
    }

    pub(super) fn unknown_tag(&mut self, tag: u64, from: Option<Addr>) {
        match from.and_then(|from| self.by_addr.get(&from)).copied() {
            Some(channel) => self.protocol_violation(channel, Violation::UnknownTag { tag }),
            None => log::warn!("a message with tag {tag:#x} from an unknown sender was dropped"),
        }
    }
}
