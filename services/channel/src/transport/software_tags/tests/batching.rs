//! Records that share datagrams, and peers that send malformed records or die meanwhile.

use super::*;
use crate::proto::transport::PAYLOAD_WINDOW;

const MIB: usize = 1 << 20;

/// Datagrams in flight.
fn datagrams(end: &mut SoftwareTags) -> usize {
    64 - end.endpoint.free_slots()
}

/// Bytes of records that are not sent.
fn unsent_records(end: &SoftwareTags) -> usize {
    end.state.peers[0].records.len()
}

/// Tags and bytes of the received messages, in order.
fn in_order(events: &[Event]) -> Vec<(u64, &[u8])> {
    let received = |event| match event {
        &Event::Received { tag, ref bytes, result: Ok(()), .. } => Some((tag, &bytes[..])),
        _ => None,
    };
    events.iter().filter_map(received).collect()
}

#[test]
fn short_messages_share_a_datagram() {
    for lib in libraries("short_messages_share_a_datagram") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        let body = |tag: u64| bytes(tag as usize, tag as usize % 20);
        for tag in 0..200 {
            assert!(matches!(a.send(to, tag, body(tag).into(), tag, false), SendResult::Done(_)));
        }
        assert_eq!(datagrams(&mut a), 0, "they wait for others");
        a.flush();
        assert_eq!((datagrams(&mut a), unsent_records(&a)), (1, 0));
        // A borrowed send takes the records before it along.
        for tag in 200..210 {
            assert!(matches!(a.send(to, tag, body(tag).into(), tag, false), SendResult::Done(_)));
        }
        assert!(matches!(a.send(to, 210, bytes(210, 5000).into(), 210, false), SendResult::Posted));
        assert_eq!((datagrams(&mut a), unsent_records(&a)), (2, 0));
        // A poll sends the batch, too.
        assert!(matches!(a.send(to, 211, body(211).into(), 211, true), SendResult::Done(_)));
        for token in 0..212 {
            post_any(&mut b, Some(from), 5000, token);
        }
        let events = run(&mut [&mut a, &mut b], |_, events| events[1].len() == 212 && events[0].len() == 1);
        for (tag, (got, bytes_got)) in (0..212).zip(in_order(&events[1])) {
            let expected = if tag == 210 { bytes(210, 5000) } else { body(tag) };
            assert_eq!((got, bytes_got), (tag, &expected[..]));
        }
        assert_idle(&a);
        assert_idle(&b);
    }
}

#[test]
fn flood_keeps_every_message_in_order() {
    for lib in libraries("flood_keeps_every_message_in_order") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        // Without a poll, the sends take all slots, and a batch remains.
        let body = |tag: usize| bytes(tag, [0, 900, MAX_INLINE, 30, MAX_INLINE + 1, 7, 4000][tag % 7]);
        let (mut sent, mut posted) = (0, 0);
        let refused = loop {
            match a.send(to, sent as u64, body(sent).into(), sent as u64, false) {
                SendResult::Done(_) => sent += 1,
                SendResult::Posted => (sent, posted) = (sent + 1, posted + 1),
                SendResult::Retry(refused) => break refused,
                other => panic!("{other:?}"),
            }
        };
        let flood = sent;
        // Short messages still fit into the batch.
        let word = loop {
            let word = Payload::word(sent as u64);
            match a.send(to, sent as u64, word, 0, false) {
                SendResult::Done(_) => sent += 1,
                SendResult::Retry(word) => break word,
                other => panic!("{other:?}"),
            }
        };
        let words = sent;
        assert_eq!((datagrams(&mut a), word.len(), refused.len() > MAX_INLINE), (64, 8, true));
        a.flush();
        assert!(unsent_records(&a) > 0 && a.wait_fd().is_none(), "records without a slot keep the reactor awake");
        let count = sent + 100;
        for token in 0..count as u64 {
            post_any(&mut b, Some(from), 5000, token);
        }
        let mut events = [Vec::new(), Vec::new()];
        poll_until("every message", || {
            if sent < count {
                let next = if sent == words { refused.clone() } else { body(sent).into() };
                match a.send(to, sent as u64, next, sent as u64, false) {
                    SendResult::Done(_) => sent += 1,
                    SendResult::Posted => (sent, posted) = (sent + 1, posted + 1),
                    SendResult::Retry(_) => {}
                    other => panic!("{other:?}"),
                }
            }
            a.poll(&mut events[0]).unwrap();
            b.poll(&mut events[1]).unwrap();
            sent == count && events[1].len() == count && events[0].len() == posted
        });
        for (at, (tag, bytes)) in in_order(&events[1]).into_iter().enumerate() {
            assert_eq!(tag, at as u64, "in order");
            if at < flood || at > words {
                assert_eq!(bytes, body(at));
            }
        }
        assert_idle(&a);
        assert!(a.wait_fd().is_some());
    }
}

/// A borrowed send needs a slot for the batch before it: both are sent or neither, and no later message comes between.
#[test]
fn borrowed_send_leaves_a_slot_for_records() {
    for lib in libraries("borrowed_send_leaves_a_slot_for_records") {
        let ((mut a, to), _b) = two(&lib);
        for _ in 0..63 {
            assert!(matches!(a.send(to, 1, bytes(1, 5000).into(), 1, false), SendResult::Posted));
        }
        assert!(matches!(a.send(to, 1, bytes(1, 5000).into(), 1, false), SendResult::Retry(_)));
        assert!(matches!(a.send(to, 1, bytes(1, 50).into(), 1, false), SendResult::Done(_)));
        a.flush();
        assert_eq!((datagrams(&mut a), unsent_records(&a)), (64, 0));
    }
}

#[test]
fn every_length_arrives_by_its_protocol() {
    for lib in libraries("every_length_arrives_by_its_protocol") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        let data_bytes = a.state.data_bytes;
        let lengths = [
            0,
            1,
            8,
            MAX_INLINE,
            MAX_INLINE + 1,
            RECORDS,
            data_bytes,
            data_bytes + 1,
            2 * data_bytes,
            2 * data_bytes + 1,
        ];
        // Receives posted before the sends, and after them.
        for round in [0, 100] {
            let post = |b: &mut SoftwareTags| {
                for (tag, len) in (round..).zip(lengths) {
                    post(b, from, tag, len, tag);
                }
            };
            let sends = |a: &mut SoftwareTags| {
                for (tag, len) in (round..).zip(lengths) {
                    match a.send(to, tag, bytes(tag as usize, len).into(), tag, false) {
                        SendResult::Done(body) => assert!(body.len() == len && len <= MAX_INLINE),
                        SendResult::Posted => assert!(len > MAX_INLINE),
                        other => panic!("{other:?}"),
                    }
                }
            };
            let waiting =
                |ends: &[&mut SoftwareTags], _: &[Vec<Event>]| ends[1].state.peers[0].unmatched.len() == lengths.len();
            if round == 0 {
                post(&mut b);
                sends(&mut a);
            } else {
                sends(&mut a);
                run(&mut [&mut a, &mut b], waiting);
                post(&mut b);
            }
            let events = run(&mut [&mut a, &mut b], |ends, events| {
                events[1].len() == lengths.len() && ends[0].state.sends.is_empty()
            });
            for (tag, len) in (round..).zip(lengths) {
                let (got, result) = received(&events[1], tag).unwrap();
                assert!(result.is_ok() && got == bytes(tag as usize, len), "{len} bytes");
            }
            assert_idle(&a);
            assert_idle(&b);
        }
    }
}

/// Sends long messages with these tags.
fn send_long(end: &mut SoftwareTags, to: Addr, tags: std::ops::Range<u64>) {
    for tag in tags {
        assert!(matches!(end.send(to, tag, bytes(tag as usize, MIB).into(), tag, false), SendResult::Posted));
    }
}

#[test]
fn cts_window_is_respected() {
    for lib in libraries("cts_window_is_respected") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        let len = |tag: u64| [MIB, 3 * MIB, 100_000, 5 * MIB][tag as usize % 4];
        let count = 24;
        for tag in 0..count {
            post(&mut b, from, tag, len(tag), tag);
            assert!(matches!(a.send(to, tag, bytes(tag as usize, len(tag)).into(), tag, false), SendResult::Posted));
        }
        let mut waited = 0;
        let events = run(&mut [&mut a, &mut b], |ends, events| {
            let state = &ends[1].state.peers[0];
            waited = waited.max(state.matched_rts.len());
            let rendezvous: Vec<_> = ends[1].state.rendezvous.values().map(|rendezvous| rendezvous.total).collect();
            let bytes = rendezvous.iter().sum::<usize>();
            assert!(rendezvous.len() <= 2 || bytes <= PAYLOAD_WINDOW, "{rendezvous:?} come at a time");
            assert_eq!(state.inbound.bytes(), bytes);
            events[1].len() == count as usize && ends[0].state.sends.is_empty()
        });
        assert!(waited > count as usize / 2, "{waited} waited");
        for tag in 0..count {
            assert_eq!(received(&events[1], tag).unwrap().0, bytes(tag as usize, len(tag)));
        }
        assert_idle(&a);
        assert_idle(&b);
    }
}

#[test]
fn peer_that_grants_every_rts_leaves_slots_to_others() {
    for lib in libraries("peer_that_grants_every_rts_leaves_slots_to_others") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        let (mut stuck, to_stuck) = RawPeer::new(&lib, &mut a);
        send_long(&mut a, to_stuck, 0..60);
        stuck.drive(&mut a, |replies, _| replies.len() == 60);
        // CTS without receives, and two that a decline follows.
        let cts = |rts: &Header| Header::new(Kind::Cts, rts.number, rts.tag + 1000, MIB).direct(true).emit();
        let decline = |rts: &Header| Header::new(Kind::Decline, rts.number, 0, 0).emit();
        let grants = stuck.replies.iter().map(cts).chain(stuck.replies[58..].iter().map(decline));
        stuck.endpoint.send(stuck.to, &grants.collect::<Vec<_>>().concat(), &[]).unwrap();
        stuck.until(&mut a, |_, a| a.state.sends.len() == 58);
        let PeerState { outbound, cleared, .. } = &a.state.peers[to_stuck.0 as usize];
        assert_eq!((outbound.bytes(), cleared.len()), (PAYLOAD_WINDOW, 58 - PAYLOAD_WINDOW / MIB));
        assert!(datagrams(&mut a) <= PAYLOAD_WINDOW / MIB + 1, "{} slots", datagrams(&mut a));
        post(&mut b, from, 70, MIB, 70);
        send_long(&mut a, to, 70..71);
        let events = run(&mut [&mut a, &mut b], |_, events| received(&events[1], 70).is_some());
        assert_eq!(received(&events[1], 70).unwrap().0, bytes(70, MIB));
        // The other end of the stuck payloads is gone: all sends end.
        drop(stuck);
        run(&mut [&mut a, &mut b], |ends, _| ends[0].state.sends.is_empty());
        assert_idle(&a);
    }
}

impl RawPeer {
    /// Sends an RTS for a direct payload, under `number`.
    fn offer(&mut self, number: u32, tag: u64, total: u64) {
        self.append_record(Header { total, ..Header::new(Kind::Rts, number, tag, 0).direct(true) }, &[]);
    }
}

#[test]
fn waiting_long_message_is_not_overtaken() {
    for lib in libraries("waiting_long_message_is_not_overtaken") {
        let mut b = open(&lib);
        let (mut peer, from) = RawPeer::new(&lib, &mut b);
        let totals = [MIB, MIB, MIB, 2 * MIB, 100_000];
        let body = bytes(1, 2 * MIB);
        for (tag, total) in (1..).zip(totals) {
            post(&mut b, from, tag, total, tag);
            peer.offer(tag as u32, tag, total as u64);
        }
        peer.until(&mut b, |_, b| b.state.peers[from.0 as usize].matched_rts.len() == 2);
        let tags: Vec<_> = (1..4).map(|number| peer.reply(&mut b, number).tag).collect();
        for (at, number) in tags.iter().enumerate() {
            assert_eq!(b.state.peers[from.0 as usize].matched_rts.len(), [2, 1, 0][at.min(2)], "after {at}");
            peer.send_long(*number, &body[..MIB]);
            peer.drive(&mut b, |_, events| received(events, at as u64 + 1).is_some());
        }
        peer.drive(&mut b, |replies, _| replies.len() == 2);
        assert_eq!(peer.replies.iter().map(|replies| replies.number).collect::<Vec<_>>(), [4, 5]);
    }
}

#[test]
fn cancelled_receive_leaves_message_to_next() {
    for lib in libraries("cancelled_receive_leaves_message_to_next") {
        let mut b = open(&lib);
        let (mut peer, from) = RawPeer::new(&lib, &mut b);
        let body = bytes(1, 3 * MIB);
        // Two have their CTS; the third has a receive and waits, and so does the fourth, of the same tag.
        for (number, tag) in [(1, 1), (2, 2), (3, 7), (4, 7), (5, 7)] {
            peer.offer(number, tag, 3 * MIB as u64);
        }
        for (tag, token) in [(1, 1), (2, 2), (7, 3)] {
            post(&mut b, from, tag, 3 * MIB, token);
        }
        let [first, second] = [1, 2].map(|number| peer.reply(&mut b, number).tag);
        let of = |b: &SoftwareTags| {
            let state = &b.state.peers[from.0 as usize];
            let matched_rts: Vec<_> =
                state.matched_rts.iter().map(|(posted, header, _)| (posted.token, header.number)).collect();
            (matched_rts, state.unmatched.len(), state.posted.len())
        };
        // One poll may not receive all five.
        peer.until(&mut b, |_, b| of(b) == (vec![(3, 3)], 2, 0));
        b.cancel(&|token| token == 3);
        assert_eq!(of(&b), (Vec::new(), 3, 0));
        // It precedes the later messages.
        post(&mut b, from, 7, 3 * MIB, 33);
        assert_eq!(of(&b), (vec![(33, 3)], 2, 0));
        post(&mut b, from, 7, 3 * MIB, 34);
        post(&mut b, from, 7, 3 * MIB, 35);
        post(&mut b, from, 7, 3 * MIB, 36);
        assert_eq!(of(&b), (vec![(33, 3), (34, 4), (35, 5)], 0, 1));
        // A waiting receive gets it at once.
        b.cancel(&|token| token == 33);
        assert_eq!(of(&b), (vec![(34, 4), (35, 5), (36, 3)], 0, 0));
        for number in [first, second] {
            peer.send_long(number, &body);
        }
        for number in [4, 5, 3] {
            let clear = peer.reply(&mut b, number);
            peer.send_long(clear.tag, &body);
        }
        peer.drive(&mut b, |_, events| [34, 35, 36].iter().all(|token| received(events, *token).is_some()));
        assert!(in_order(&peer.ended).iter().all(|(_, got)| *got == body));
        assert_idle(&b);
    }
}

#[test]
fn records_before_a_malformed_one_are_used() {
    for lib in libraries("records_before_a_malformed_one_are_used") {
        let mut b = open(&lib);
        let (mut peer, from) = RawPeer::new(&lib, &mut b);
        let eager = |tag: u64, bytes: &[u8]| {
            let header = Header { flags: INLINE, ..Header::new(Kind::Eager, 0, tag, bytes.len()) };
            [&header.emit()[..], bytes].concat()
        };
        for token in 1..=4 {
            post(&mut b, from, token, 100, token);
        }
        // Answers without an RTS are dropped.
        let answers = [Kind::Cts, Kind::Decline].map(|kind| Header::new(kind, 0, 5, 5).emit()).concat();
        let senseless = [0xee; HEADER];
        let records = [&eager(1, b"one")[..], &answers, &eager(2, b""), &senseless, &eager(3, b"three")].concat();
        peer.endpoint.send(peer.to, &records, b"and a payload").unwrap();
        let records = [&eager(4, b"four")[..], &eager(9, b"dropped")].concat();
        peer.endpoint.send(peer.to, &records, &[]).unwrap();
        let mut seen = Vec::new();
        peer.drive(&mut b, |_, events| {
            seen = in_order(events).iter().map(|(tag, bytes)| (*tag, bytes.to_vec())).collect();
            received(events, 4).is_some()
        });
        assert_eq!(seen, [(1, b"one".to_vec()), (2, Vec::new()), (4, b"four".to_vec())]);
        assert_eq!(b.state.peers[from.0 as usize].posted.len(), 1, "the third was dropped");
    }
}

#[test]
fn impossible_rts_harms_no_other_peer() {
    for lib in libraries("impossible_rts_harms_no_other_peer") {
        let body = bytes(3, LONG_BYTES);
        let mut b = open(&lib);
        let (mut peer, from) = RawPeer::new(&lib, &mut b);
        // Longer than any buffer, for a directed receive and for a receive from any peer.
        for (token, total) in [(1, 1 << 63), (2, u64::MAX), (3, 101)] {
            post(&mut b, from, token, 100, token);
            peer.offer(token as u32, token, total);
            assert_eq!(peer.reply(&mut b, token as u32).kind, Kind::Decline);
        }
        // An RTS without its payload does not occupy a receive from any peer.
        for (number, total) in [(4, 0), (5, 100), (6, 1 << 20)] {
            post_any(&mut b, None, 4096, number);
            peer.offer(number as u32, 1 << 34, total);
            assert_eq!(peer.reply(&mut b, number as u32).kind, Kind::Decline);
        }
        let mut events = Vec::new();
        b.poll(&mut events).unwrap();
        assert!(b.state.any_source.is_empty() && b.state.rendezvous.is_empty());
        // A repeated number, and an RTS without a payload: each receive has its own tag.
        post(&mut b, from, 7, LONG_BYTES, 7);
        post(&mut b, from, 7, LONG_BYTES, 8);
        peer.offer(7, 7, LONG_BYTES as u64);
        let first = peer.reply(&mut b, 7).tag;
        peer.offer(7, 7, LONG_BYTES as u64);
        let second = peer.reply(&mut b, 7).tag;
        assert_ne!(first, second);
        // Another peer cannot write or end these receives, and its own messages arrive.
        let (mut other_peer, other) = RawPeer::new(&lib, &mut b);
        for header in [Header::new(Kind::Data, 7, first, LONG_BYTES), Header::new(Kind::Decline, 7, first, 0)] {
            other_peer.append_record(header, &[]);
        }
        post(&mut b, other, 9, LONG_BYTES, 9);
        let number = other_peer.rts(&mut b, true, 9, LONG_BYTES);
        other_peer.send_long(number, &body);
        assert_eq!(other_peer.received(&mut b, 9), (body.clone(), Ok(())));
        for (tag, token) in [(second, 8), (first, 7)] {
            peer.send_long(tag, &body);
            assert_eq!(peer.received(&mut b, token).0, body);
        }
        assert_idle(&b);
    }
}

#[test]
fn lost_peer_ends_its_operations() {
    for lib in libraries("lost_peer_ends_its_operations") {
        let mut b = open_with_limit(&lib, Duration::from_secs(1));
        let (mut peer, to) = RawPeer::new(&lib, &mut b);
        // From the peer: an RTS with CTS, an RTS without CTS, an unmatched RTS, an unmatched eager message.
        for tag in 1..=4 {
            peer.offer(tag as u32, tag, 3 * MIB as u64);
        }
        peer.append_record(Header::new(Kind::Eager, 0, 5, 4), b"five");
        for tag in [1, 2, 3, 6] {
            post(&mut b, to, tag, 3 * MIB, tag);
        }
        // To the peer: long messages, one with CTS; then batched RTS and a short message.
        send_long(&mut b, to, 20..26);
        peer.reply(&mut b, 2);
        let is_rts = |reply: &&Header| reply.kind == Kind::Rts;
        peer.drive(&mut b, |replies, _| replies.iter().filter(is_rts).count() == 6);
        let number = peer.replies.iter().find(is_rts).unwrap().number;
        peer.append_record(Header::new(Kind::Cts, number, 77, MIB).direct(true), &[]);
        peer.until(&mut b, |_, b| b.state.sends[&number].in_flight > 0);
        send_long(&mut b, to, 26..30);
        assert_eq!(b.state.peers[to.0 as usize].records.len(), 4 * HEADER);
        assert!(matches!(b.send(to, 30, b"short".to_vec().into(), 30, true), SendResult::Done(_)));
        drop(peer);
        let events = run(&mut [&mut b], |ends, events| {
            let of = |event: &&Event| matches!(event, Event::Sent { .. } | Event::Received { .. });
            events[0].iter().filter(of).count() == 10 + 4 && ends[0].state.rendezvous.is_empty()
        });
        for event in &events[0] {
            match event {
                // The payload in flight may have reached the host.
                Event::Sent { token, result, .. } => assert!(result.is_err() || *token == 20),
                Event::Received { result, .. } => assert!(matches!(result, Err(ReceiveError::Failed(_)))),
                Event::Lost { peer, .. } => assert_eq!(*peer, to),
                other => panic!("{other:?}"),
            }
        }
        assert!(events[0].iter().any(|event| matches!(event, Event::Lost { .. })));
        b.flush();
        assert_idle(&b);
        // An eager message can still be received, a long one cannot, and no message can be sent.
        post(&mut b, to, 5, 100, 5);
        let receive = Receive { from: Some(to), pattern: exact(4), buffer: Vec::new(), len: 3 * MIB, token: 4 };
        assert!(matches!(b.receive(receive), ReceiveResult::Failed(..)));
        assert!(matches!(b.send(to, 31, b"short".to_vec().into(), 31, false), SendResult::Failed(..)));
        let events = run(&mut [&mut b], |_, events| !events[0].is_empty());
        assert_eq!(in_order(&events[0]), [(5, &b"five"[..])]);
    }
}

#[test]
fn transport_with_unreported_events_must_not_sleep() {
    for lib in libraries("transport_with_unreported_events_must_not_sleep") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        assert!(matches!(a.send(to, 1, b"one".to_vec().into(), 1, false), SendResult::Done(_)));
        run(&mut [&mut a, &mut b], |ends, _| !ends[1].state.peers[0].unmatched.is_empty());
        poll_until("a descriptor that may be waited for", || {
            b.poll(&mut Vec::new()).unwrap();
            b.may_wait()
        });
        post(&mut b, from, 1, 100, 1);
        assert!(!b.may_wait(), "no descriptor announces the end of the receive");
        let mut events = Vec::new();
        b.poll(&mut events).unwrap();
        assert_eq!(in_order(&events), [(1, &b"one"[..])]);
    }
}

#[test]
fn send_numbers_in_use_are_not_reused() {
    for lib in libraries("send_numbers_in_use_are_not_reused") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        a.state.next_number = u32::MAX;
        send_long(&mut a, to, 1..3);
        a.state.next_number = u32::MAX;
        send_long(&mut a, to, 3..4);
        assert_eq!(a.state.sends.len(), 3);
        for tag in 1..4 {
            post(&mut b, from, tag, MIB, tag);
        }
        let events = run(&mut [&mut a, &mut b], |_, events| events[1].len() == 3 && events[0].len() == 3);
        for tag in 1..4 {
            assert_eq!(received(&events[1], tag).unwrap().0, bytes(tag as usize, MIB));
        }
        assert_idle(&a);
    }
}

#[test]
fn unsent_records_are_flushed_before_close() {
    for lib in libraries("unsent_records_are_flushed_before_close") {
        let ((mut a, to), (mut b, from)) = two(&lib);
        assert!(matches!(a.send(to, 1, b"one".to_vec().into(), 1, false), SendResult::Done(_)));
        post(&mut b, from, 1, 100, 1);
        run(&mut [&mut a, &mut b], |_, events| events[1].len() == 1);
        post(&mut b, from, 2, 100, 2);
        assert!(matches!(a.send(to, 2, b"last".to_vec().into(), 2, false), SendResult::Done(_)));
        drop(a);
        let events = run(&mut [&mut b], |_, events| events[0].len() == 1);
        assert_eq!(in_order(&events[0]), [(2, &b"last"[..])]);
    }
}
