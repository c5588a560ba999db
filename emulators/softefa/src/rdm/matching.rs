//! Matches messages with receives. Receives wait for messages and messages for receives, each in order.

use std::collections::VecDeque;
use std::ffi::c_void;

use super::super::call::Buffers;
use super::packet::{Head, TAGGED};
use soft_nic::address::Address;

/// A receive that waits for a message.
#[derive(Debug)]
pub(super) struct Receive {
    pub buffers: Buffers,
    pub context: *mut c_void,
    /// The sender, if the receive takes messages from only one.
    pub from: Option<Address>,
    pub tag: u64,
    /// Bits of the tag that are ignored.
    pub ignore: u64,
    pub wanted: bool,
    /// The number of the multi-receive buffer, if the receive is one.
    pub multi: Option<u32>,
}

impl Receive {
    fn takes(&self, head: &Head) -> bool {
        self.from.is_none_or(|from| from == head.from) && (self.tag ^ head.tag) & !self.ignore == 0
    }
}

/// A message that waits for a receive.
#[derive(Debug)]
pub(super) struct Waiting {
    pub head: Head,
    /// The bytes after the head.
    pub payload: Vec<u8>,
}

/// One matching space: tagged and untagged messages are matched separately.
#[derive(Debug, Default)]
pub(super) struct Space {
    receives: VecDeque<Receive>,
    messages: VecDeque<Waiting>,
}

impl Space {
    /// Finds the receive that a message matches. It stays in its place.
    pub(super) fn find_receive(&self, head: &Head) -> Option<usize> {
        self.receives.iter().position(|receive| receive.takes(head))
    }

    pub(super) fn receive(&self, at: usize) -> Option<&Receive> {
        self.receives.get(at)
    }

    pub(super) fn take_receive(&mut self, at: usize) -> Option<Receive> {
        self.receives.remove(at)
    }

    pub(super) fn post(&mut self, receive: Receive) {
        self.receives.push_back(receive);
    }

    /// Finds the message that a receive matches.
    pub(super) fn find_message(&self, receive: &Receive) -> Option<usize> {
        self.messages.iter().position(|message| receive.takes(&message.head))
    }

    pub(super) fn message(&self, at: usize) -> Option<&Waiting> {
        self.messages.get(at)
    }

    pub(super) fn take_message(&mut self, at: usize) -> Option<Waiting> {
        self.messages.remove(at)
    }

    pub(super) fn keep(&mut self, head: Head, payload: &[u8]) {
        self.messages.push_back(Waiting { head, payload: payload.to_vec() });
    }

    /// Removes the receive with this context.
    pub(super) fn cancel(&mut self, context: *mut c_void) -> Option<Receive> {
        let at = self.receives.iter().position(|receive| receive.context == context)?;
        self.receives.remove(at)
    }
}

/// Returns a message's space.
pub(super) fn space_of(head: &Head) -> usize {
    usize::from(head.flags & TAGGED != 0)
}

#[cfg(test)]
mod tests {

    use super::super::packet::Kind;
    use super::*;
    use soft_nic::address::Gid;

    fn address(qpn: u16) -> Address {
        Address { gid: Gid { address: None, secret: [4; 8] }, qpn, qkey: 6 }
    }

    fn head(from: u16, tag: u64) -> Head {
        Head { kind: Kind::Eager, flags: TAGGED, seq: 0, from: address(from), len: 0, tag, data: 0, id: 0 }
    }

    fn receive(from: Option<u16>, tag: u64, ignore: u64) -> Receive {
        let context = tag as *mut c_void;
        let from = from.map(address);
        Receive { buffers: Buffers::none(), context, from, tag, ignore, wanted: true, multi: None }
    }

    #[test]
    fn first_matching_receive_is_taken() {
        let mut space = Space::default();
        space.post(receive(Some(7), 1, 0));
        space.post(receive(None, 2, 0));
        space.post(receive(None, 0x10, 0xf));
        assert_eq!(space.find_receive(&head(5, 1)), None, "from somebody else");
        assert_eq!(space.find_receive(&head(7, 1)), Some(0));
        assert_eq!(space.find_receive(&head(5, 2)), Some(1));
        assert_eq!(space.find_receive(&head(5, 0x1c)), Some(2));
        assert_eq!(space.find_receive(&head(5, 0x2c)), None);
        assert!(space.cancel(2 as *mut c_void).is_some());
        assert!(space.cancel(2 as *mut c_void).is_none());
        assert_eq!(space.find_receive(&head(5, 2)), None);
    }

    #[test]
    fn unexpected_messages_match_in_order() {
        let mut space = Space::default();
        space.keep(head(1, 5), b"first");
        space.keep(head(2, 5), b"second");
        let at = space.find_message(&receive(None, 5, 0)).unwrap();
        assert_eq!(space.take_message(at).unwrap().payload, b"first");
        assert_eq!(space.find_message(&receive(Some(1), 5, 0)), None);
        assert_eq!(space.find_message(&receive(Some(2), 0, u64::MAX)), Some(0));
    }
}
