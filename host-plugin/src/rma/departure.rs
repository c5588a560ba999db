//! How ranks end a context without losing anything, without I/O.
//!
//! A rank that destroys its context first waits until its own requests are complete. Then it tells every other rank that it's leaving, and
//! keeps receiving until each of them has replied that it has nothing under way to this rank. Ranks don't have to destroy a context
//! together: one that keeps its context replies from its normal polling, and is done with the rank that has left. The reply is the last
//! message between two ranks, so it also says that everything before it has arrived.

/// One rank's view of who has left.
#[derive(Debug)]
pub struct Departure {
    peers: Vec<Peer>,
    /// Peers that are leaving and wait for a reply.
    asking: Vec<usize>,
    is_leaving: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Peer {
    /// It has replied, or has left.
    is_done: bool,
    is_told: bool,
    has_reply: bool,
    /// A message to it is in flight.
    is_sending: bool,
}

impl Departure {
    /// Creates the view of rank `rank` of `nranks`.
    pub fn new(rank: usize, nranks: usize) -> Self {
        let mut peers = vec![Peer::default(); nranks];
        peers[rank].is_done = true;
        Self { peers, asking: Vec::new(), is_leaving: false }
    }

    /// Notes that a peer is leaving.
    pub fn peer_leaves(&mut self, peer: usize) {
        if !self.peers[peer].has_reply && !self.asking.contains(&peer) {
            self.asking.push(peer);
        }
    }

    /// Notes that a peer has replied.
    pub fn peer_replied(&mut self, peer: usize) {
        self.peers[peer].is_done = true;
    }

    /// Notes that a peer is gone.
    pub fn peer_gone(&mut self, peer: usize) {
        self.peers[peer] = Peer { is_done: true, has_reply: true, ..self.peers[peer] };
        self.asking.retain(|asking| *asking != peer);
    }

    /// Returns a leaving peer to which nothing is under way; the caller sends it the reply. If this rank is leaving too, its own message has
    /// arrived by then, so that the reply is the last one.
    pub fn reply(&mut self, is_under_way: impl Fn(usize) -> bool) -> Option<usize> {
        let is_due = |peer: &usize| !is_under_way(*peer) && !self.peers[*peer].is_sending;
        let peer = self.asking.swap_remove(self.asking.iter().position(is_due)?);
        let state = &mut self.peers[peer];
        (state.has_reply, state.is_sending) = (true, true);
        state.is_done |= !state.is_told;
        Some(peer)
    }

    /// Starts to leave, with nothing under way. Returns the peers to tell; none the next time.
    pub fn leave(&mut self) -> Vec<usize> {
        self.is_leaving = true;
        let asking = &self.asking;
        let peers = self.peers.iter_mut().enumerate();
        let untold = peers.filter(|(rank, peer)| !peer.is_done && !peer.is_told && !asking.contains(rank));
        let tell = |(rank, peer): (usize, &mut Peer)| {
            (peer.is_told, peer.is_sending) = (true, true);
            rank
        };
        untold.map(tell).collect()
    }

    /// Notes that a message to a peer has been sent.
    pub fn sent(&mut self, peer: usize) {
        self.peers[peer].is_sending = false;
    }

    /// Returns the peers that may still have something under way to this rank; none unless it's leaving.
    pub fn awaited(&self) -> impl Iterator<Item = usize> {
        let waits = |(_, peer): &(_, &Peer)| self.is_leaving && !peer.is_done;
        self.peers.iter().enumerate().filter(waits).map(|(peer, _)| peer)
    }

    /// Returns true once this rank may leave.
    pub fn is_complete(&self) -> bool {
        self.is_leaving && self.asking.is_empty() && self.peers.iter().all(|peer| peer.is_done && !peer.is_sending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: fn(usize) -> bool = |_| false;

    #[test]
    fn rank_leaves_once_every_peer_has_replied() {
        let mut here = Departure::new(0, 3);
        assert_eq!((here.is_complete(), here.awaited().count()), (false, 0), "not leaving yet");
        assert_eq!(here.leave(), [1, 2]);
        assert!(here.leave().is_empty(), "told once");
        here.sent(1);
        here.sent(2);
        here.peer_replied(2);
        assert!(here.awaited().eq([1]) && !here.is_complete());
        here.peer_replied(1);
        assert!(here.is_complete());
    }

    #[test]
    fn ranks_that_leave_together_both_reply() {
        let mut here = Departure::new(0, 2);
        assert_eq!(here.leave(), [1]);
        here.peer_leaves(1);
        assert_eq!(here.reply(NOTHING), None, "its own message is in flight");
        here.sent(1);
        assert_eq!(here.reply(NOTHING), Some(1));
        here.peer_replied(1);
        assert!(!here.is_complete(), "the reply is in flight");
        here.sent(1);
        assert!(here.is_complete());
    }

    #[test]
    fn reply_waits_for_requests_to_the_leaving_peer() {
        let mut here = Departure::new(1, 4);
        here.peer_leaves(0);
        here.peer_leaves(0);
        here.peer_leaves(3);
        assert_eq!(here.reply(|peer| peer == 0), Some(3));
        assert_eq!(here.reply(|peer| peer == 0), None);
        here.peer_leaves(3);
        // A rank that has left, or will with the reply, needs no other message.
        assert_eq!(here.leave(), [2]);
        assert_eq!([here.reply(NOTHING), here.reply(NOTHING)], [Some(0), None], "one reply to each");
        [0, 2, 3].into_iter().for_each(|peer| here.sent(peer));
        assert!(here.awaited().eq([2]));
        here.peer_replied(2);
        assert!(here.is_complete());
    }

    #[test]
    fn nobody_waits_for_a_peer_that_is_gone() {
        let mut here = Departure::new(0, 3);
        assert_eq!(here.leave(), [1, 2]);
        here.peer_leaves(1);
        for peer in [1, 2] {
            here.sent(peer);
            here.peer_gone(peer);
        }
        assert_eq!(here.reply(NOTHING), None);
        assert!(here.is_complete());
    }

    #[test]
    fn rank_alone_leaves_at_once() {
        let mut here = Departure::new(0, 1);
        assert!(here.leave().is_empty() && here.is_complete());
    }
}
