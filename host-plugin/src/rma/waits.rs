//! How long each peer has kept this rank's requests waiting. Not every provider notices that a peer has been stopped.

use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy)]
struct Wait {
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
        Self { limit, events: 0, peers: vec![Wait { event: 0, seen: 0, since: now }; nranks] }
    }

    /// Notes that a peer's first request has started, or that a request to it has made progress.
    pub fn note(&mut self, peer: usize) {
        self.events += 1;
        self.peers[peer].event = self.events;
    }

    /// Returns a peer whose requests have made no progress for too long, if there is one among those `under_way`. The
    /// time begins with the first check after its last event. If there are several, requests to the one with the
    /// earliest event may hold up the others.
    pub fn expired(&mut self, now: Instant, under_way: impl Iterator<Item = usize>) -> Option<usize> {
        let mut expired = Vec::new();
        for peer in under_way {
            let wait = &mut self.peers[peer];
            if wait.seen != wait.event {
                (wait.seen, wait.since) = (wait.event, now);
            } else if now.saturating_duration_since(wait.since) >= self.limit {
                expired.push((wait.event, peer));
            }
        }
        expired.into_iter().min().map(|(_, peer)| peer)
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
        waits.note(1);
        waits.note(2);
        assert_eq!(waits.expired(begin, [1, 2].into_iter()), None);
        assert_eq!(waits.expired(begin + LIMIT - MOMENT, [1, 2].into_iter()), None);
        waits.note(1);
        assert_eq!(waits.expired(begin + LIMIT, [1, 2].into_iter()), Some(2));
        assert_eq!(waits.expired(begin + LIMIT, [1].into_iter()), None, "no requests to the other one");
        assert_eq!(waits.expired(begin + 2 * LIMIT - MOMENT, [1].into_iter()), None);
        assert_eq!(waits.expired(begin + 2 * LIMIT, [1].into_iter()), Some(1));
    }

    #[test]
    fn first_peer_to_fall_silent_is_named() {
        let start = Instant::now();
        for (order, named) in [([0, 1, 2], 0), ([2, 0, 1], 2), ([1, 2, 0], 1)] {
            let mut waits = Waits::new(3, LIMIT, start);
            order.into_iter().for_each(|peer| waits.note(peer));
            assert_eq!(waits.expired(start, 0..3), None);
            assert_eq!(waits.expired(start + LIMIT, 0..3), Some(named), "{order:?}");
        }
    }
}
