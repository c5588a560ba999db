//! Software matching over real datagrams: two endpoints in one process, and raw peers that send any record.

use super::*;
use crate::proto::transport::InFlight;
use ferrogin_test_support::libraries;
use ferrogin_test_support::wait::{HANG_LIMIT, poll_until};
use state::PeerState;

const LONG_BYTES: usize = 300_000;

/// With a limit for silent peers. One thread polls both ends of a test, so no pause of the machine makes a live peer look silent.
fn open_with_limit(lib: &Arc<Libfabric>, lost_after: Duration) -> SoftwareTags {
    SoftwareTags::open(
        lib,
        &Config { ping_after: Duration::from_millis(100), lost_after, ..Config::default() },
        Purpose::Messages,
    )
    .unwrap()
}

/// With a limit for silent peers that a busy machine does not reach.
fn open(lib: &Arc<Libfabric>) -> SoftwareTags {
    open_with_limit(lib, HANG_LIMIT)
}

/// Two connected ends, each with the other's address.
fn two(lib: &Arc<Libfabric>) -> ((SoftwareTags, Addr), (SoftwareTags, Addr)) {
    let (mut a, mut b) = (open(lib), open(lib));
    let to = a.insert(&b.properties.name).unwrap();
    let from = b.insert(&a.properties.name).unwrap();
    ((a, to), (b, from))
}

/// Asserts that no operation, record or count remains.
fn assert_idle(end: &SoftwareTags) {
    let State { sends, rendezvous, waiting, replies, unflushed, .. } = &end.state;
    assert!(sends.is_empty() && rendezvous.is_empty() && waiting.is_empty() && replies.is_empty());
    assert!(unflushed.is_empty());
    for PeerState { records, matched_rts, inbound, cleared, outbound, .. } in &end.state.peers {
        assert!(records.is_empty() && matched_rts.is_empty() && cleared.is_empty());
        assert_eq!([*inbound, *outbound], [InFlight::default(); 2]);
    }
}

/// Polls all ends until `done`; gives the events of each.
fn run(
    ends: &mut [&mut SoftwareTags],
    mut done: impl FnMut(&[&mut SoftwareTags], &[Vec<Event>]) -> bool,
) -> Vec<Vec<Event>> {
    let mut events: Vec<Vec<Event>> = ends.iter().map(|_| Vec::new()).collect();
    poll_until("expected events", || {
        done(ends, &events) || {
            ends.iter_mut().zip(&mut events).for_each(|(end, events)| end.poll(events).unwrap());
            false
        }
    });
    events
}

fn exact(tag: u64) -> Pattern {
    Pattern { tag, ignore: 0 }
}

fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + seed) as u8).collect()
}

fn post(end: &mut SoftwareTags, from: Addr, tag: u64, len: usize, token: u64) {
    let receive = Receive { from: Some(from), pattern: exact(tag), buffer: Vec::new(), len, token };
    assert!(matches!(end.receive(receive), ReceiveResult::Posted));
}

/// Posts a receive for any message of at most `len` bytes.
fn post_any(end: &mut SoftwareTags, from: Option<Addr>, len: usize, token: u64) {
    let pattern = Pattern { tag: 0, ignore: u64::MAX };
    let posted = end.receive(Receive { from, pattern, buffer: Vec::new(), len, token });
    assert!(matches!(posted, ReceiveResult::Posted));
}

fn send(end: &mut SoftwareTags, to: Addr, tag: u64, body: Vec<u8>, token: u64) {
    let body = Payload::from(body);
    poll_until("a slot for a message", || match end.send(to, tag, body.clone(), token, false) {
        SendResult::Posted => true,
        SendResult::Retry(_) => {
            end.poll(&mut Vec::new()).unwrap();
            false
        }
        other => panic!("{other:?}"),
    });
}

/// The end of the receive `token`, if it ended.
fn received(events: &[Event], token: u64) -> Option<(&[u8], &Result<(), ReceiveError>)> {
    events.iter().find_map(|event| match event {
        Event::Received { token: of, bytes, result, .. } if *of == token => Some((&bytes[..], result)),
        _ => None,
    })
}

#[test]
fn long_messages_land_in_posted_buffers() {
    for lib in libraries("long_messages_land_in_posted_buffers") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        let buffer = Vec::with_capacity(LONG_BYTES);
        let place = buffer.as_ptr();
        assert!(matches!(
            b.receive(Receive { from: Some(from), pattern: exact(5), buffer, len: LONG_BYTES, token: 1 }),
            ReceiveResult::Posted
        ));
        // More messages than the window has, received in another order, some of them late.
        let last = 12u64;
        send(&mut a, to, 5, bytes(5, LONG_BYTES), 1);
        for tag in 10..=last {
            send(&mut a, to, tag, bytes(tag as usize, 3 << 20), tag);
        }
        let mut direct = 0;
        let events = run(&mut [&mut a, &mut b], |ends, events| {
            direct = direct.max(ends[1].state.rendezvous.values().filter(|rendezvous| rendezvous.direct).count());
            received(&events[1], 1).is_some()
        });
        let (first, result) = received(&events[1], 1).unwrap();
        assert!(result.is_ok() && first == bytes(5, LONG_BYTES) && first.as_ptr() == place);
        for tag in (10..=last).rev() {
            post(&mut b, from, tag, 3 << 20, tag);
        }
        let count = (last - 10 + 1) as usize;
        let sent = events[0].len();
        let events = run(&mut [&mut a, &mut b], |ends, events| {
            direct = direct.max(ends[1].state.rendezvous.values().filter(|rendezvous| rendezvous.direct).count());
            events[1].len() == count && sent + events[0].len() == count + 1
        });
        for tag in 10..=last {
            let (got, result) = received(&events[1], tag).unwrap();
            assert!(result.is_ok() && got == bytes(tag as usize, 3 << 20), "{tag}");
        }
        assert!(direct > 0, "{} has tagged messages beside datagrams", a.properties.provider);
        assert_idle(&a);
        assert_idle(&b);
    }
}

#[test]
fn abandoned_receive_does_not_block_others() {
    for lib in libraries("abandoned_receive_does_not_block_others") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        post(&mut b, from, 1, LONG_BYTES, 1);
        send(&mut a, to, 1, bytes(1, LONG_BYTES), 1);
        // Until the CTS is sent.
        run(&mut [&mut a, &mut b], |ends, _| !ends[1].state.rendezvous.is_empty());
        b.cancel(&|token| token == 1);
        post(&mut b, from, 2, LONG_BYTES, 2);
        send(&mut a, to, 2, bytes(2, LONG_BYTES), 2);
        let events = run(&mut [&mut a, &mut b], |ends, events| {
            events[0].len() == 2 && received(&events[1], 2).is_some() && ends[1].state.rendezvous.is_empty()
        });
        assert!(matches!(received(&events[1], 1), Some((_, Err(ReceiveError::Cancelled)))));
        assert_eq!(received(&events[1], 2).unwrap().0, bytes(2, LONG_BYTES));
    }
}

/// A peer that sends records made by hand.
struct RawPeer {
    endpoint: MessageEndpoint,
    to: Peer,
    /// Records that arrived, and events of the other end.
    replies: Vec<Header>,
    ended: Vec<Event>,
}

impl RawPeer {
    fn new(lib: &Arc<Libfabric>, other: &mut SoftwareTags) -> (Self, Addr) {
        let config = ferrogin_datagram::Config {
            max_header: RECORDS,
            max_payload: DATA_BYTES,
            tx_depth: 64,
            rx_depth: 64,
            ..ferrogin_datagram::Config::default()
        };
        let info = find_datagrams(lib, &config.provider, None, bindings::FI_MSG).unwrap();
        let mut endpoint = MessageEndpoint::open_with_long(lib, &config, info).unwrap();
        let to = endpoint.add_peer(&other.properties.name).unwrap();
        let from = other.insert(endpoint.address()).unwrap();
        (Self { endpoint, to, replies: Vec::new(), ended: Vec::new() }, from)
    }

    fn append_record(&mut self, header: Header, payload: &[u8]) {
        self.endpoint.send(self.to, &header.emit(), payload).unwrap();
    }

    /// Polls both ends until the answer to RTS `number` arrives.
    fn reply(&mut self, other: &mut SoftwareTags, number: u32) -> Header {
        let is = |replies: &Header| replies.number == number && matches!(replies.kind, Kind::Cts | Kind::Decline);
        self.drive(other, |replies, _| replies.iter().any(is));
        let at = self.replies.iter().position(is).unwrap();
        self.replies.remove(at)
    }

    /// Sends an RTS of `total` bytes and waits for its CTS; gives the number of the receive.
    fn rts(&mut self, other: &mut SoftwareTags, direct: bool, tag: u64, total: usize) -> u64 {
        let number = tag as u32;
        self.append_record(Header::new(Kind::Rts, number, tag, total).direct(direct), &[]);
        let cts = self.reply(other, number);
        assert_eq!(cts.kind, Kind::Cts);
        assert_eq!(cts.is_direct(), direct);
        cts.tag
    }

    /// Polls both ends until the receive `token` of the other end ended; gives its bytes and its result.
    fn received(&mut self, other: &mut SoftwareTags, token: u64) -> (Vec<u8>, Result<(), ReceiveError>) {
        self.drive(other, |_, events| received(events, token).is_some());
        let (bytes, result) = received(&self.ended, token).unwrap();
        (bytes.to_vec(), result.clone())
    }

    /// Polls both ends until `done`, for the records here and the events there.
    fn drive(&mut self, other: &mut SoftwareTags, mut done: impl FnMut(&[Header], &[Event]) -> bool) {
        self.until(other, |this, _| done(&this.replies, &this.ended));
    }

    /// Polls both ends until `done`.
    fn until(&mut self, other: &mut SoftwareTags, mut done: impl FnMut(&Self, &SoftwareTags) -> bool) {
        poll_until("expected records and events", || {
            if done(self, other) {
                return true;
            }
            other.poll(&mut self.ended).unwrap();
            self.endpoint
                .poll(|_, event| {
                    if let ferrogin_datagram::Event::Message { header, payload, .. } = event {
                        self.replies.extend(Records { records: header, payload }.map(|(header, _)| header));
                    }
                })
                .unwrap();
            false
        });
    }

    fn send_long(&mut self, tag: u64, bytes: &[u8]) {
        // SAFETY: the tests keep the bytes until the receiver has them, or drop the endpoint first.
        unsafe { self.endpoint.outbox().send_long(self.to, tag, bytes.as_ptr(), bytes.len(), 1) }.unwrap();
    }
}

#[test]
fn direct_message_of_wrong_length_is_detected() {
    for lib in libraries("direct_message_of_wrong_length_is_detected") {
        let body = bytes(3, 2 * LONG_BYTES);
        let mut b = open(&lib);
        let (mut shorter, from) = RawPeer::new(&lib, &mut b);
        post(&mut b, from, 1, LONG_BYTES, 1);
        let number = shorter.rts(&mut b, true, 1, LONG_BYTES);
        // A data record for a buffer that the provider writes is dropped.
        let header = Header::new(Kind::Data, 1, number, LONG_BYTES);
        shorter.append_record(header, &body[..1000]);
        shorter.send_long(number, &body[..LONG_BYTES - 1]);
        assert_eq!(shorter.received(&mut b, 1), (body[..LONG_BYTES - 1].to_vec(), Ok(())));

        let (mut longer, from) = RawPeer::new(&lib, &mut b);
        post(&mut b, from, 2, LONG_BYTES, 2);
        let number = longer.rts(&mut b, true, 2, LONG_BYTES);
        longer.send_long(number, &body);
        assert_eq!(longer.received(&mut b, 2).1, Err(ReceiveError::Truncated));
    }
}

#[test]
fn peer_without_direct_sends_uses_data_records() {
    for lib in libraries("peer_without_direct_sends_uses_data_records") {
        let body = bytes(4, DATA_BYTES + 1000);
        let mut b = open(&lib);
        let (mut old, from) = RawPeer::new(&lib, &mut b);
        post(&mut b, from, 1, body.len(), 1);
        let tag = old.rts(&mut b, false, 1, body.len());
        for (at, data_bytes) in body.chunks(60_000).enumerate().collect::<Vec<_>>().into_iter().rev() {
            let offset = (at * 60_000) as u64;
            old.append_record(Header { offset, ..Header::new(Kind::Data, 1, tag, body.len()) }, data_bytes);
        }
        assert_eq!(old.received(&mut b, 1), (body, Ok(())));
    }
}

#[test]
fn peer_that_dies_before_data_frees_buffers() {
    for lib in libraries("peer_that_dies_before_data_frees_buffers") {
        let mut b = open_with_limit(&lib, Duration::from_secs(1));
        let (mut dying, from) = RawPeer::new(&lib, &mut b);
        for tag in [1, 2] {
            post(&mut b, from, tag, LONG_BYTES, tag);
            dying.rts(&mut b, true, tag, LONG_BYTES);
        }
        drop(dying);
        let over = |events: &[Event]| [1, 2].iter().all(|token| received(events, *token).is_some());
        let events = run(&mut [&mut b], |ends, events| over(&events[0]) && ends[0].state.rendezvous.is_empty());
        for token in [1, 2] {
            assert!(matches!(received(&events[0], token), Some((_, Err(ReceiveError::Failed(_))))), "{events:?}");
        }
        // Messages of other peers arrive.
        let (mut living, from) = RawPeer::new(&lib, &mut b);
        post(&mut b, from, 3, LONG_BYTES, 3);
        let number = living.rts(&mut b, true, 3, LONG_BYTES);
        let body = bytes(3, LONG_BYTES);
        living.send_long(number, &body);
        assert_eq!(living.received(&mut b, 3), (body, Ok(())));
    }
}

mod batching;
