//! How ranks end a context without losing anything, without I/O.
//!
//! A rank that destroys its context first waits until its own requests are complete. Then it tells every other rank
//! that it's leaving ([`Message::Leaving`]). A rank that has nothing under way to the one that leaves replies
//! ([`Message::Finished`]), from its normal polling if it keeps its context, and the rank that leaves confirms the
//! reply ([`Message::Goodbye`]). A goodbye is the last message between two ranks, and everything before it has been
//! received: over TCP, a process that exits before it has received everything resets the connection, and the peer loses
//! what it hasn't read yet.

use super::record;

/// What one rank tells another, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// The sender destroys its context, and has nothing under way to the receiver.
    Leaving,
    /// The sender has nothing under way to the receiver, which is leaving, and will never have.
    Finished,
    /// The sender has received [`Message::Finished`].
    Goodbye,
}

impl Message {
    /// Returns the kind of the message's record.
    pub fn kind(self) -> u8 {
        match self {
            Self::Leaving => record::LEAVING,
            Self::Finished => record::FINISHED,
            Self::Goodbye => record::GOODBYE,
        }
    }
}

/// One rank's view of who has left.
#[derive(Debug)]
pub struct Departure {
    peers: Vec<Peer>,
    /// Peers to which a message may be due, each once.
    pending: Vec<usize>,
    is_leaving: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Peer {
    /// The messages sent to it, and received from it, by [`Message`].
    sent: [bool; 3],
    received: [bool; 3],
    is_gone: bool,
    /// A message to it is in flight.
    is_sending: bool,
    is_pending: bool,
}

impl Peer {
    /// Returns the message that is due to this peer.
    fn next(&self, is_leaving: bool, is_under_way: bool) -> Option<Message> {
        let [told, replied, said_goodbye] = self.sent;
        let [is_asking, has_replied, _] = self.received;
        if self.is_gone || self.is_sending {
            None
        } else if is_leaving && !told && !replied {
            Some(Message::Leaving)
        } else if is_asking && !replied && !is_under_way {
            Some(Message::Finished)
        } else if has_replied && !said_goodbye {
            Some(Message::Goodbye)
        } else {
            None
        }
    }

    /// Returns whether nothing more will come from this peer, if this rank is leaving.
    fn is_done(&self) -> bool {
        let [told, replied, _] = self.sent;
        let [is_asking, has_replied, said_goodbye] = self.received;
        self.is_gone || ((told || replied) && (!told || has_replied) && (!is_asking || said_goodbye))
    }
}

impl Departure {
    /// Creates the view of rank `rank` of `nranks`.
    pub fn new(rank: usize, nranks: usize) -> Self {
        let mut peers = vec![Peer::default(); nranks];
        peers[rank].is_gone = true;
        Self { peers, pending: Vec::new(), is_leaving: false }
    }

    /// Notes a peer's message.
    pub fn received(&mut self, peer: usize, message: Message) {
        self.peers[peer].received[message as usize] = true;
        self.look_at(peer);
    }

    fn look_at(&mut self, peer: usize) {
        if !std::mem::replace(&mut self.peers[peer].is_pending, true) {
            self.pending.push(peer);
        }
    }

    /// Notes that a peer is gone.
    pub fn peer_gone(&mut self, peer: usize) {
        self.peers[peer].is_gone = true;
    }

    /// Returns a message that is due, which the caller sends to the peer. There is at most one in flight to each, so
    /// they arrive in order.
    pub fn next(&mut self, is_under_way: impl Fn(usize) -> bool) -> Option<(usize, Message)> {
        for at in (0..self.pending.len()).rev() {
            let rank = self.pending[at];
            let peer = &mut self.peers[rank];
            let message = peer.next(self.is_leaving, is_under_way(rank));
            // A peer that has asked waits until nothing is under way to it. The others wait for an event.
            if message.is_none() && peer.next(self.is_leaving, false).is_some() {
                continue;
            }
            peer.is_pending = false;
            self.pending.swap_remove(at);
            if let Some(message) = message {
                (peer.sent[message as usize], peer.is_sending) = (true, true);
                return Some((rank, message));
            }
        }
        None
    }

    /// Starts to leave, with nothing under way.
    pub fn leave(&mut self) {
        if !std::mem::replace(&mut self.is_leaving, true) {
            (0..self.peers.len()).rev().for_each(|peer| self.look_at(peer));
        }
    }

    /// Notes that a message to a peer has been sent.
    pub fn sent(&mut self, peer: usize) {
        self.peers[peer].is_sending = false;
        self.look_at(peer);
    }

    /// Returns the peers that may still send something to this rank; none unless it's leaving.
    pub fn awaited(&self) -> impl Iterator<Item = usize> {
        let waits = |(_, peer): &(_, &Peer)| self.is_leaving && !peer.is_done();
        self.peers.iter().enumerate().filter(waits).map(|(peer, _)| peer)
    }

    /// Returns true once this rank may leave.
    pub fn is_complete(&self) -> bool {
        let is_quiet = |peer: &Peer| peer.is_done() && !peer.is_sending && peer.next(true, false).is_none();
        self.is_leaving && self.peers.iter().all(is_quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::Message::{Finished, Goodbye, Leaving};
    use super::*;

    const NOTHING: fn(usize) -> bool = |_| false;

    /// Sends a message that is due, and returns it.
    fn send(here: &mut Departure) -> Option<(usize, Message)> {
        let (peer, message) = here.next(NOTHING)?;
        here.sent(peer);
        Some((peer, message))
    }

    #[test]
    fn rank_leaves_once_every_peer_has_replied() {
        let mut here = Departure::new(0, 2);
        assert_eq!((here.is_complete(), here.awaited().count(), send(&mut here)), (false, 0, None), "not leaving yet");
        here.leave();
        assert_eq!([send(&mut here), send(&mut here)], [Some((1, Leaving)), None]);
        assert!(here.awaited().eq([1]) && !here.is_complete());
        here.received(1, Finished);
        assert!(!here.is_complete(), "the peer waits for the goodbye");
        assert_eq!(here.next(NOTHING), Some((1, Goodbye)));
        here.received(1, Leaving);
        assert_eq!((here.next(NOTHING), here.is_complete()), (None, false), "the goodbye is in flight");
        here.sent(1);
        assert_eq!(send(&mut here), Some((1, Finished)));
        here.received(1, Goodbye);
        assert!(here.is_complete() && here.awaited().count() == 0);
    }

    #[test]
    fn ranks_that_leave_together_wait_for_each_others_goodbye() {
        let [mut here, mut there] = [Departure::new(0, 2), Departure::new(1, 2)];
        here.leave();
        there.leave();
        for message in [Leaving, Finished, Goodbye] {
            assert_eq!([send(&mut here), send(&mut there)], [Some((1, message)), Some((0, message))]);
            assert!(!here.is_complete() && !there.is_complete(), "{message:?}");
            here.received(1, message);
            there.received(0, message);
        }
        assert!(here.is_complete() && there.is_complete());
    }

    #[test]
    fn reply_waits_for_requests_to_the_leaving_peer() {
        let mut here = Departure::new(0, 3);
        here.received(1, Leaving);
        here.received(2, Leaving);
        assert_eq!(here.next(|peer| peer == 1), Some((2, Finished)));
        assert_eq!(here.next(|peer| peer == 1), None);
        here.sent(2);
        assert_eq!([send(&mut here), send(&mut here)], [Some((1, Finished)), None], "one reply to each");
        // These ranks may be gone when this one leaves, so it tells them nothing, but waits until they have the
        // replies.
        here.leave();
        here.received(1, Goodbye);
        assert_eq!(send(&mut here), None);
        assert!(here.awaited().eq([2]));
        here.received(2, Goodbye);
        assert!(here.is_complete());
    }

    #[test]
    fn nobody_waits_for_a_peer_that_is_gone() {
        let mut here = Departure::new(0, 3);
        here.leave();
        assert_eq!([send(&mut here), send(&mut here)], [Some((1, Leaving)), Some((2, Leaving))]);
        here.received(1, Leaving);
        [1, 2].into_iter().for_each(|peer| here.peer_gone(peer));
        assert_eq!(send(&mut here), None);
        assert!(here.is_complete());
    }

    #[test]
    fn rank_alone_leaves_at_once() {
        let mut here = Departure::new(0, 1);
        here.leave();
        assert!(here.is_complete());
    }
}
