//! Windows: what may be unread at the peer; and over tags lengths at once, long payloads a few at a time.

use super::fake_network::{Fake, Net};
use crate::carrier::Closed;
use crate::carrier::tags::endpoint::{Addr, SessionId};
use crate::carrier::tags::outgoing::{Outgoing, PAYLOAD_WINDOW};
use crate::proto::carrier::Peer;
use crate::proto::incoming::{Incoming, ReadReport};
use crate::proto::outgoing;
use crate::proto::{Callback, ReadId};
use crate::{ChannelError, Payload};

/// `count` messages of `len` bytes, and an endpoint that copies short messages and has a payload window.
fn writer(count: usize, len: usize) -> (Outgoing, Fake) {
    let mut outgoing = Outgoing::new(SessionId { peer: Peer(0), number: 0 }, Addr(0), 0);
    (0..count).for_each(|_| outgoing.push(vec![0; len].into()));
    let mut fake = Net::new(1, false).endpoint();
    (fake.copied, fake.abilities.payload_window) = (64, PAYLOAD_WINDOW);
    (outgoing, fake)
}

/// Returns the order of the sends: `l0p0` and so on.
fn order(fake: &mut Fake) -> String {
    fake.sent.drain(..).map(|tag| format!("{}{}", if tag >> 32 == 1 { 'l' } else { 'p' }, tag as u32)).collect()
}

/// Ids of the messages that have been sent.
fn sent(outgoing: &mut Outgoing) -> Vec<u32> {
    std::iter::from_fn(|| outgoing.take_sent()).map(|(id, _)| id).collect()
}

#[test]
fn short_messages_are_sent_at_once() {
    let (mut outgoing, mut fake) = writer(3, 8);
    assert!(!outgoing.pump(&mut fake).unwrap());
    assert_eq!(order(&mut fake), "l0p0l1p1l2p2");
    assert_eq!((sent(&mut outgoing), outgoing.next_id()), (vec![0, 1, 2], 3));
}

#[test]
fn lengths_are_sent_before_long_payloads() {
    let (mut outgoing, mut fake) = writer(6, 3 << 20);
    assert!(!outgoing.pump(&mut fake).unwrap());
    assert_eq!(order(&mut fake), "l0p0l1p1l2l3l4l5");
    assert_eq!(outgoing.bytes_in_flight(), 6 << 20);
    // The second ends before the first: another payload starts, but no message is the next one sent.
    outgoing.payload_sent(1, Payload::word(0));
    outgoing.pump(&mut fake).unwrap();
    assert_eq!((order(&mut fake).as_str(), sent(&mut outgoing)), ("p2", vec![]));
    for (id, next, done) in [(0, "p3", 2), (2, "p4", 1), (3, "p5", 1), (4, "", 1), (5, "", 1)] {
        outgoing.payload_sent(id, Payload::word(0));
        outgoing.pump(&mut fake).unwrap();
        assert_eq!((order(&mut fake).as_str(), sent(&mut outgoing).len()), (next, done), "after {id}");
    }
    assert_eq!(outgoing.bytes_in_flight(), 0);
}

#[test]
fn payload_window_holds_four_mebibytes() {
    let (mut outgoing, mut fake) = writer(6, 1 << 20);
    outgoing.pump(&mut fake).unwrap();
    assert_eq!(order(&mut fake), "l0p0l1p1l2p2l3p3l4l5");
}

#[test]
fn stopped_writer_starts_no_payload() {
    let (mut outgoing, mut fake) = writer(6, 3 << 20);
    outgoing.pump(&mut fake).unwrap();
    fake.sent.clear();
    outgoing.stop();
    outgoing.payload_sent(0, Payload::word(0));
    assert!(!outgoing.pump(&mut fake).unwrap());
    assert_eq!((order(&mut fake).as_str(), sent(&mut outgoing)), ("", vec![0]));
}

/// Returns a channel's writer with messages of these lengths, to a peer that holds 400 bytes unread.
fn writer_to_reader(lens: &[usize]) -> outgoing::Outgoing {
    let mut writer = outgoing::Outgoing::new(1000, 400);
    for len in lens {
        writer.push(0, vec![0; *len].into(), Box::new(|_| ()));
    }
    writer
}

/// Id of the first message that hasn't been sent, and of the one to offer to the peer.
fn pump(writer: &mut outgoing::Outgoing) -> (u32, Option<u32>) {
    writer.pump(&mut Closed::new(), Peer(0), &mut Vec::new());
    (writer.next_id(), writer.offer())
}

#[test]
fn at_most_256_messages_are_unread() {
    let mut writer = writer_to_reader(&[0; 600]);
    assert_eq!(pump(&mut writer), (256, None));
    writer.peer_read_to(257, false);
    assert_eq!(pump(&mut writer), (256, None), "an impossible report");
    writer.peer_read_to(64, false);
    assert_eq!(pump(&mut writer), (320, None));
    writer.peer_read_to(63, false);
    assert_eq!(pump(&mut writer), (320, None), "an old report");
}

#[test]
fn unread_bytes_are_limited() {
    let mut writer = writer_to_reader(&[100; 7]);
    // A report of the peer makes room for messages of up to a quarter.
    assert_eq!(pump(&mut writer), (4, None));
    writer.peer_read_to(2, false);
    assert_eq!(pump(&mut writer), (6, None));
}

#[test]
fn longer_message_is_offered_and_sent_for_a_waiting_read() {
    let mut writer = writer_to_reader(&[300, 101, 401]);
    assert_eq!(pump(&mut writer), (1, Some(1)));
    assert_eq!(pump(&mut writer), (1, None), "an offer is made once");
    writer.peer_read_to(1, false);
    assert_eq!(pump(&mut writer), (2, Some(2)));
    writer.peer_read_to(2, false);
    assert_eq!(pump(&mut writer), (2, None), "it has room for a shorter one");
    writer.peer_read_to(2, true);
    assert_eq!(pump(&mut writer), (3, None));
}

#[test]
fn messages_that_a_closing_peer_has_read_count_as_written() {
    let (mut writer, mut callbacks) = (writer_to_reader(&[1; 3]), Vec::new());
    pump(&mut writer);
    writer.end_at(2, ChannelError::Closed { peer: "a peer".into() }, &mut callbacks);
    for (id, results) in [(1, &[][..]), (0, &[true, true, false])] {
        writer.sent(id, Payload::word(0), &mut callbacks);
        let got = callbacks.drain(..).map(|callback| matches!(callback, Callback::Write(_, Ok(_))));
        assert_eq!(got.collect::<Vec<_>>(), results, "after {id}");
    }
}

#[test]
fn reports_follow_messages_bytes_and_offers() {
    const READ: ReadId = ReadId { channel: 0, ticket: 0 };
    let mut callbacks = Vec::new();
    let mut reader = Incoming::new(400);
    reader.start_at(u32::MAX);
    let mut report_after = |reader: &mut Incoming, count: usize, len: usize| {
        for _ in 0..count {
            assert_eq!(reader.report(), None);
            reader.push(READ, Box::new(|_| ()));
            reader.message(vec![0; len], &mut callbacks);
        }
        reader.report()
    };
    assert_eq!(report_after(&mut reader, 64, 0), Some(ReadReport { id: 63, is_awaited: false }));
    assert_eq!(report_after(&mut reader, 2, 51), Some(ReadReport { id: 65, is_awaited: false }));
    reader.offer(66);
    assert!(reader.push(READ, Box::new(|_| ())));
    assert_eq!(reader.report(), None, "the read waits for an earlier message");
    reader.message(Vec::new(), &mut callbacks);
    assert_eq!(reader.report(), None, "no read waits");
    reader.push(READ, Box::new(|_| ()));
    assert_eq!(reader.report(), Some(ReadReport { id: 66, is_awaited: true }));
    assert_eq!(reader.report(), None, "an offer is answered once");
}
