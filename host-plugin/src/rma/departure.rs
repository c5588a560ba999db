//! How ranks end a context without losing anything, without I/O.
//!
//! A rank that destroys its context first waits until its own requests are complete. Then it tells every other rank that it's leaving, and
//! keeps receiving until each of them is leaving too, or has replied that it has nothing under way to this rank. Ranks don't have to
//! destroy a context together: one that keeps its context replies from its normal polling.

/// One rank's view of who has left.
#[derive(Debug)]
pub struct Departure {
    peers: Vec<Peer>,
    /// Peers that are leaving and wait for a reply.
    asking: Vec<usize>,
    is_leaving: bool,
    /// Messages in flight.
    sending: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Peer {
    /// It has nothing under way to this rank.
    is_finished: bool,
    /// This rank has told it that nothing is under way to it.
    is_told: bool,
}

impl Departure {
    /// Creates the view of rank `rank` of `nranks`.
    pub fn new(rank: usize, nranks: usize) -> Self {
        let mut peers = vec![Peer::default(); nranks];
        peers[rank] = Peer { is_finished: true, is_told: true };
        Self { peers, asking: Vec::new(), is_leaving: false, sending: 0 }
    }

    /// Notes that a peer is leaving.
    pub fn peer_leaves(&mut self, peer: usize) {
        self.peer_finished(peer);
        if !self.peers[peer].is_told && !self.asking.contains(&peer) {
            self.asking.push(peer);
        }
    }

    /// Notes that a peer has nothing under way to this rank, or never will again.
    pub fn peer_finished(&mut self, peer: usize) {
        self.peers[peer].is_finished = true;
    }

    /// Returns a leaving peer to which nothing is under way; the caller sends it the reply.
    pub fn reply(&mut self, is_under_way: impl Fn(usize) -> bool) -> Option<usize> {
        let at = self.asking.iter().position(|peer| !is_under_way(*peer))?;
        let peer = self.asking.swap_remove(at);
        self.tell(peer);
        Some(peer)
    }

    fn tell(&mut self, peer: usize) {
        self.peers[peer].is_told = true;
        self.sending += 1;
    }

    /// Starts to leave, with nothing under way. Returns the peers to tell; none the next time.
    pub fn leave(&mut self) -> Vec<usize> {
        self.is_leaving = true;
        self.asking.clear();
        let untold: Vec<_> = (0..self.peers.len()).filter(|peer| !self.peers[*peer].is_told).collect();
        untold.iter().for_each(|peer| self.tell(*peer));
        untold
    }

    /// Notes that a message of this rank has been sent.
    pub fn sent(&mut self) {
        self.sending -= 1;
    }

    /// Returns the peers that may still have something under way to this rank; none unless it's leaving.
    pub fn awaited(&self) -> impl Iterator<Item = usize> {
        let waits = |(_, peer): &(_, &Peer)| self.is_leaving && !peer.is_finished;
        self.peers.iter().enumerate().filter(waits).map(|(peer, _)| peer)
    }

    /// Returns true once this rank may leave.
    pub fn is_complete(&self) -> bool {
        self.is_leaving && self.sending == 0 && self.awaited().next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_leaves_once_every_peer_is_leaving_or_has_replied() {
        let mut here = Departure::new(0, 3);
        assert_eq!((here.is_complete(), here.awaited().count()), (false, 0), "not leaving yet");
        assert_eq!(here.leave(), [1, 2]);
        assert!(here.leave().is_empty(), "told once");
        here.peer_leaves(1);
        assert_eq!(here.reply(|_| false), None, "this rank's own message is the reply");
        assert!(here.awaited().eq([2]));
        here.peer_finished(2);
        assert!(!here.is_complete(), "two messages are in flight");
        here.sent();
        here.sent();
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
        assert_eq!([here.reply(|_| false), here.reply(|_| false)], [Some(0), None]);
        here.peer_leaves(3);
        assert_eq!(here.reply(|_| false), None, "one reply to each");
        // Those that have left need no other message.
        assert_eq!(here.leave(), [2]);
        (0..3).for_each(|_| here.sent());
        here.peer_leaves(2);
        assert!(here.is_complete());
    }

    #[test]
    fn leaving_answers_the_peers_that_ask() {
        let mut here = Departure::new(0, 2);
        here.peer_leaves(1);
        assert_eq!(here.reply(|_| true), None);
        assert_eq!(here.leave(), [1]);
        assert_eq!(here.reply(|_| false), None);
        here.sent();
        assert!(here.is_complete());
    }

    #[test]
    fn rank_alone_leaves_at_once() {
        let mut here = Departure::new(0, 1);
        assert!(here.leave().is_empty() && here.is_complete());
    }
}
