//! The order of sends: lengths at once, long payloads a few at a time.

use super::fake_network::{Fake, Net};
use crate::Payload;
use crate::proto::callback::Callback;
use crate::proto::operation::Operation;
use crate::proto::outgoing::Outgoing;
use crate::proto::transport::{Addr, PAYLOAD_WINDOW};

/// `count` queued messages of `len` bytes, and an endpoint that copies short messages and has a payload window.
fn writer(count: usize, len: usize) -> (Outgoing, Fake, Vec<Callback>) {
    let mut outgoing = Outgoing::new(0, 0, 16);
    for ticket in 0..count {
        outgoing.push(ticket as u64, vec![0; len].into(), Box::new(|_| ()));
    }
    let mut fake = Net::new(1, false).endpoint();
    (fake.copied, fake.properties.payload_window) = (64, PAYLOAD_WINDOW);
    (outgoing, fake, Vec::new())
}

/// The order of the sends: `l0p0` and so on.
fn order(fake: &mut Fake) -> String {
    fake.sent.drain(..).map(|tag| format!("{}{}", if tag >> 32 == 1 { 'l' } else { 'p' }, tag as u32)).collect()
}

#[test]
fn short_messages_are_sent_at_once() {
    let (mut outgoing, mut fake, mut callbacks) = writer(3, 8);
    assert!(!outgoing.pump(&mut fake, Addr(0), &mut callbacks).unwrap());
    assert_eq!(order(&mut fake), "l0p0l1p1l2p2");
    assert_eq!(callbacks.len(), 3);
}

#[test]
fn short_messages_beyond_the_depth_are_sent_at_once() {
    let (mut outgoing, mut fake, mut callbacks) = writer(40, 8);
    assert!(!outgoing.pump(&mut fake, Addr(0), &mut callbacks).unwrap());
    assert_eq!((fake.sent.len(), callbacks.len(), outgoing.is_idle()), (80, 40, true));
}

#[test]
fn lengths_are_sent_before_long_payloads() {
    let (mut outgoing, mut fake, mut callbacks) = writer(6, 3 << 20);
    assert!(!outgoing.pump(&mut fake, Addr(0), &mut callbacks).unwrap());
    assert_eq!(order(&mut fake), "l0p0l1p1l2l3l4l5");
    assert_eq!(outgoing.bytes_in_flight(), 6 << 20);
    // The second ends before the first: another payload starts, but no callback is due.
    outgoing.sent(Operation::SendPayload, 1, Payload::word(0), &mut callbacks);
    outgoing.pump(&mut fake, Addr(0), &mut callbacks).unwrap();
    assert_eq!((order(&mut fake).as_str(), callbacks.len()), ("p2", 0));
    for (id, next) in [(0, "p3"), (2, "p4"), (3, "p5"), (4, ""), (5, "")] {
        outgoing.sent(Operation::SendPayload, id, Payload::word(0), &mut callbacks);
        outgoing.pump(&mut fake, Addr(0), &mut callbacks).unwrap();
        assert_eq!(order(&mut fake), next, "after {id}");
    }
    assert_eq!((callbacks.len(), outgoing.bytes_in_flight(), outgoing.is_idle()), (6, 0, true));
}

#[test]
fn payload_window_holds_four_mebibytes() {
    let (mut outgoing, mut fake, mut callbacks) = writer(6, 1 << 20);
    outgoing.pump(&mut fake, Addr(0), &mut callbacks).unwrap();
    assert_eq!(order(&mut fake), "l0p0l1p1l2p2l3p3l4l5");
}
