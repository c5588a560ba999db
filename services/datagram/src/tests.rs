//! The death of peers, with a clock that the test advances. The limits are hours, so polls do not run the timers themselves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::outbox::Outbox;
use super::{Config, Event, LostReason, MessageEndpoint, Peer, SendError};
use ferrogin_libfabric::Libfabric;
use ferrogin_test_support::libraries;
use ferrogin_test_support::wait::poll_until;

const PING_AFTER: Duration = Duration::from_secs(3600);
const LOST_AFTER: Duration = Duration::from_secs(8 * 3600);
/// A longer step of the clock is a pause of the caller.
const STEP: Duration = Duration::from_secs(2 * 3600);
const SLOTS: usize = 32;

fn open(lib: &Arc<Libfabric>) -> MessageEndpoint {
    let (ping_after, lost_after) = (PING_AFTER, LOST_AFTER);
    let config = Config { tx_depth: SLOTS, rx_depth: SLOTS, ping_after, lost_after, ..Config::default() };
    MessageEndpoint::open(lib, &config).unwrap()
}

/// An endpoint with a clock.
struct Clocked {
    endpoint: MessageEndpoint,
    now: Instant,
    messages: usize,
    lost: Vec<(Peer, LostReason)>,
}

impl Clocked {
    fn open(lib: &Arc<Libfabric>) -> Self {
        let endpoint = open(lib);
        let now = endpoint.now;
        Self { endpoint, now, messages: 0, lost: Vec::new() }
    }

    fn poll(&mut self) {
        let Self { endpoint, messages, lost, .. } = self;
        let on_event = |_: &mut Outbox, event: Event<'_>| match event {
            Event::Message { .. } => *messages += 1,
            Event::Lost { peer, reason } => lost.push((peer, reason)),
            other => panic!("{other:?}"),
        };
        endpoint.poll(on_event).unwrap();
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.endpoint.timers(self.now);
        self.poll();
    }

    /// A message to the peer arrives there, and one of the peer arrives here.
    fn exchange(&mut self, with: &mut MessageEndpoint) -> Peer {
        let to = self.endpoint.add_peer(with.address()).unwrap();
        self.endpoint.send(to, b"hello", &[7; 1000]).unwrap();
        let expected = self.messages + 1;
        poll_until("an answer", || {
            self.poll();
            let answer = |outbox: &mut Outbox, event: Event<'_>| match event {
                Event::Message { from, header, payload } => outbox.send(from, header, payload).unwrap(),
                other => panic!("{other:?}"),
            };
            with.poll(answer).unwrap();
            self.messages == expected
        });
        to
    }

    /// Advances the clock until a peer is lost, at most by its limits and a step for each.
    fn advance_to_loss(&mut self) {
        let limit = self.now + PING_AFTER + LOST_AFTER + 2 * STEP;
        while self.lost.is_empty() {
            assert!(self.now < limit, "the peer's death is not reported");
            self.advance(STEP);
        }
    }
}

#[test]
fn quiet_peer_that_answers_pings_stays() {
    for lib in libraries("quiet_peer_that_answers_pings_stays") {
        let (mut here, mut there) = (Clocked::open(&lib), open(&lib));
        let peer = here.exchange(&mut there);
        for _ in 0..3 * LOST_AFTER.as_secs() / PING_AFTER.as_secs() {
            here.advance(PING_AFTER);
            assert!(here.endpoint.peers[peer.index()].pinged_at.is_some());
            poll_until("an answer to the ping", || {
                there.poll(|_, event| panic!("{event:?}")).unwrap();
                here.poll();
                here.endpoint.peers[peer.index()].pinged_at.is_none()
            });
        }
        assert_eq!(here.lost, []);
    }
}

#[test]
fn silent_peer_is_lost_at_its_limit() {
    for lib in libraries("silent_peer_is_lost_at_its_limit") {
        let (mut here, mut there) = (Clocked::open(&lib), open(&lib));
        let peer = here.exchange(&mut there);
        // The other end is not polled any more.
        here.advance(PING_AFTER);
        for _ in 0..LOST_AFTER.as_secs() / STEP.as_secs() {
            assert_eq!(here.lost, []);
            here.advance(STEP);
        }
        assert_eq!(here.lost, [(peer, LostReason::Silent(PING_AFTER + LOST_AFTER))]);
        assert_eq!(here.endpoint.send(peer, &[], &[]), Err(SendError::Gone));
        // A message of a lost peer is no event.
        there.poll(|_, event| panic!("{event:?}")).unwrap();
        here.advance(STEP);
        assert_eq!(here.lost.len(), 1);
    }
}

/// The answer may be waiting unread.
#[test]
fn limit_starts_again_after_pause_of_the_caller() {
    for lib in libraries("limit_starts_again_after_pause_of_the_caller") {
        let (mut here, mut there) = (Clocked::open(&lib), open(&lib));
        here.exchange(&mut there);
        here.advance(PING_AFTER);
        here.advance(2 * LOST_AFTER);
        assert_eq!(here.lost, []);
        here.advance_to_loss();
        assert_eq!(here.lost, [(Peer(0), LostReason::Silent(PING_AFTER + 3 * LOST_AFTER))]);
    }
}

#[test]
fn dead_peer_is_reported_to_quiet_endpoint() {
    for lib in libraries("dead_peer_is_reported_to_quiet_endpoint") {
        let (mut here, mut there) = (Clocked::open(&lib), open(&lib));
        let peer = here.exchange(&mut there);
        drop(there);
        here.advance_to_loss();
        assert_eq!(here.lost[0].0, peer);
        assert_eq!(here.endpoint.send(peer, &[], &[]), Err(SendError::Gone));
    }
}

#[test]
fn dead_peer_keeps_no_slot_of_its_sender() {
    for lib in libraries("dead_peer_keeps_no_slot_of_its_sender") {
        let (mut here, mut there, mut other) = (Clocked::open(&lib), open(&lib), open(&lib));
        let peer = here.exchange(&mut there);
        drop(there);
        while here.endpoint.send(peer, b"x", &[1; 50_000]) == Ok(()) {}
        here.advance_to_loss();
        poll_until("free slots", || {
            here.poll();
            here.endpoint.free_slots() == SLOTS
        });
        here.exchange(&mut other);
        here.endpoint.forget(peer);
        here.exchange(&mut other);
    }
}

#[test]
fn peer_that_never_existed_is_reported() {
    for lib in libraries("peer_that_never_existed_is_reported") {
        let mut here = Clocked::open(&lib);
        let mut address = here.endpoint.address().to_vec();
        // Port 1 of this host has no listener.
        (address[2], address[3]) = (0, 1);
        let peer = here.endpoint.add_peer(&address).unwrap();
        here.endpoint.send(peer, b"anyone", &[0; 10]).unwrap();
        here.advance_to_loss();
        assert_eq!(here.lost[0].0, peer);
    }
}
