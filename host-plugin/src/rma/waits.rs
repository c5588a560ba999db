//! How long each peer has kept this rank's requests waiting. Not every provider notices that a peer has been stopped.

use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy)]
struct Wait {
    /// Parts of requests that haven't completed yet.
    parts: u64,
    /// The number of the last event.
    event: u64,
    /// The last event that a check saw, and when.
    seen: u64,
    since: Instant,
}

/// The peers' waits. An event, such as the completion of a part, only counts; the clock is read by the checks.
#[derive(Debug)]
pub struct Waits {
    limit: Duration,
    events: u64,
    peers: Vec<Wait>,
}

impl Waits {
    /// Creates the waits for `nranks` peers, each of which has to make progress within `limit`.
    pub fn new(nranks: usize, limit: Duration, now: Instant) -> Self {
        Self { limit, events: 0, peers: vec![Wait { parts: 0, event: 0, seen: 0, since: now }; nranks] }
    }

    /// Notes that a part of a request to a peer has started. If it's the only one, that's an event.
    #[inline(always)]
    pub fn part_started(&mut self, peer: usize) {
        if self.peers[peer].parts == 0 {
            self.note(peer);
        }
        self.peers[peer].parts += 1;
    }

    /// Notes that a part has completed.
    #[inline(always)]
    pub fn part_done(&mut self, peer: usize) {
        self.note(peer);
        self.peers[peer].parts -= 1;
    }

    /// Notes that a request to a peer has made progress.
    #[inline(always)]
    pub fn note(&mut self, peer: usize) {
        self.events += 1;
        self.peers[peer].event = self.events;
    }

    /// Notes that a peer is lost, with its requests. They may have held up those to the others, whose time begins again.
    pub fn lost(&mut self, peer: usize) {
        self.peers[peer].parts = 0;
        self.events += 1;
        self.peers.iter_mut().for_each(|wait| wait.event = self.events);
    }

    /// Returns true if a request to this peer is incomplete.
    pub fn is_under_way(&self, peer: usize) -> bool {
        self.peers[peer].parts > 0
    }

    /// Returns the peers with incomplete requests.
    pub fn under_way(&self) -> impl Iterator<Item = usize> {
        self.peers.iter().enumerate().filter(|(_, wait)| wait.parts > 0).map(|(peer, _)| peer)
    }

    /// Returns how many parts haven't completed yet.
    pub fn parts(&self) -> u64 {
        self.peers.iter().map(|wait| wait.parts).sum()
    }

    /// Returns a peer whose requests have made no progress for too long, if there is one. The time begins with the
    /// first check after its last event. If there are several, requests to the one with the earliest event may hold up
    /// the others.
    pub fn expired(&mut self, now: Instant) -> Option<usize> {
        let mut expired = None;
        for (peer, wait) in self.peers.iter_mut().enumerate().filter(|(_, wait)| wait.parts > 0) {
            if wait.seen != wait.event {
                (wait.seen, wait.since) = (wait.event, now);
            } else if now.saturating_duration_since(wait.since) >= self.limit {
                expired = expired.into_iter().chain([(wait.event, peer)]).min();
            }
        }
        expired.map(|(_, peer)| peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);
    const MOMENT: Duration = Duration::from_millis(1);

    #[test]
    fn peer_without_progress_expires_after_the_limit() {
        let start = Instant::now();
        let mut waits = Waits::new(3, LIMIT, start);
        // The peers had nothing to do for a while.
        let begin = start + 10 * LIMIT;
        [1, 1, 1, 2].into_iter().for_each(|peer| waits.part_started(peer));
        assert_eq!((waits.parts(), waits.under_way().collect()), (4, vec![1, 2]));
        assert_eq!(waits.expired(begin), None);
        assert_eq!(waits.expired(begin + LIMIT - MOMENT), None);
        waits.part_done(1);
        assert_eq!(waits.expired(begin + LIMIT), Some(2));
        waits.part_done(2);
        assert!(!waits.is_under_way(2) && waits.is_under_way(1));
        assert_eq!(waits.expired(begin + LIMIT), None, "no requests to the other one");
        waits.part_started(1);
        assert_eq!(waits.expired(begin + 2 * LIMIT - MOMENT), None);
        assert_eq!(waits.expired(begin + 2 * LIMIT), Some(1), "another part is no progress");
    }

    #[test]
    fn time_of_the_others_begins_again_once_a_peer_is_lost() {
        let start = Instant::now();
        let mut waits = Waits::new(3, LIMIT, start);
        [0, 0, 1, 2].into_iter().for_each(|peer| waits.part_started(peer));
        assert_eq!((waits.expired(start), waits.expired(start + LIMIT)), (None, Some(0)));
        waits.lost(0);
        assert_eq!((waits.parts(), waits.expired(start + LIMIT)), (2, None));
        assert_eq!(waits.expired(start + 2 * LIMIT - MOMENT), None);
        assert_eq!(waits.expired(start + 2 * LIMIT), Some(1));
    }

    #[test]
    fn first_peer_to_fall_silent_is_named() {
        let start = Instant::now();
        for (order, named) in [([0, 1, 2], 0), ([2, 0, 1], 2), ([1, 2, 0], 1)] {
            let mut waits = Waits::new(3, LIMIT, start);
            order.into_iter().for_each(|peer| waits.part_started(peer));
            assert_eq!(waits.expired(start), None);
            assert_eq!(waits.expired(start + LIMIT), Some(named), "{order:?}");
        }
    }
}
