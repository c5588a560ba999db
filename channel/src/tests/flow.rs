//! The order of sends: lengths at once, long payloads a few at a time.

use crate::proto::callback::Callback;
use crate::proto::operation::Operation;
use crate::proto::outgoing::Outgoing;
use crate::proto::tags::Pattern;
use crate::proto::transport::{Addr, Event, PAYLOAD_WINDOW, ReceiveResult, SendResult, Transport};
use crate::{Matching, Payload};
use ferrogin_libfabric::Error;

/// Takes every send, injects words, and records the sends.
#[derive(Default)]
struct Recorder {
    sent: Vec<(char, u32)>,
    held: Vec<Payload>,
}

impl Transport for Recorder {
    fn name(&self) -> &[u8] {
        &[]
    }

    fn provider(&self) -> &str {
        "recorder"
    }

    fn matching(&self) -> Matching {
        Matching::Provider
    }

    fn max_message(&self) -> usize {
        usize::MAX
    }

    fn payload_window(&self) -> usize {
        PAYLOAD_WINDOW
    }

    fn insert(&mut self, _: &[u8]) -> Result<Addr, Error> {
        Ok(Addr(0))
    }

    fn send(&mut self, _: Addr, tag: u64, body: Payload, _: u64, _: bool) -> SendResult {
        let kind = if tag >> 32 == 1 { 'l' } else { 'p' };
        self.sent.push((kind, tag as u32));
        if body.len() <= 64 {
            return SendResult::Done(body);
        }
        self.held.push(body);
        SendResult::Posted
    }

    fn receive(&mut self, _: Option<Addr>, _: Pattern, room: Vec<u8>, _: usize, _: u64) -> ReceiveResult {
        ReceiveResult::Retry(room)
    }

    fn cancel(&mut self, _: &dyn Fn(u64) -> bool) {}

    fn poll(&mut self, _: &mut Vec<Event>) -> Result<(), Error> {
        Ok(())
    }
}

fn writer(count: usize, len: usize) -> (Outgoing, Recorder, Vec<Callback>) {
    let mut outgoing = Outgoing::new(0, 0, 16);
    for ticket in 0..count {
        outgoing.push(ticket as u64, vec![0; len].into(), Box::new(|_| ()));
    }
    (outgoing, Recorder::default(), Vec::new())
}

/// `l0p0` and so on.
fn order(recorder: &mut Recorder) -> String {
    recorder.sent.drain(..).map(|(kind, id)| format!("{kind}{id}")).collect()
}

#[test]
fn short_messages_are_sent_at_once() {
    let (mut outgoing, mut recorder, mut callbacks) = writer(3, 8);
    assert!(!outgoing.pump(&mut recorder, Addr(0), &mut callbacks).unwrap());
    assert_eq!(order(&mut recorder), "l0p0l1p1l2p2");
    assert_eq!(callbacks.len(), 3);
}

#[test]
fn lengths_are_sent_before_long_payloads() {
    let (mut outgoing, mut recorder, mut callbacks) = writer(6, 3 << 20);
    assert!(!outgoing.pump(&mut recorder, Addr(0), &mut callbacks).unwrap());
    assert_eq!(order(&mut recorder), "l0p0l1p1l2l3l4l5");
    assert_eq!(outgoing.bytes_in_flight(), 6 << 20);
    // The second ends before the first: another payload starts, and no callback is due.
    outgoing.sent(Operation::SendPayload, 1, recorder.held.pop().unwrap(), &mut callbacks);
    outgoing.pump(&mut recorder, Addr(0), &mut callbacks).unwrap();
    assert_eq!((order(&mut recorder).as_str(), callbacks.len()), ("p2", 0));
    for (id, next) in [(0, "p3"), (2, "p4"), (3, "p5"), (4, ""), (5, "")] {
        outgoing.sent(Operation::SendPayload, id, recorder.held.pop().unwrap(), &mut callbacks);
        outgoing.pump(&mut recorder, Addr(0), &mut callbacks).unwrap();
        assert_eq!(order(&mut recorder), next, "after {id}");
    }
    assert_eq!((callbacks.len(), outgoing.bytes_in_flight(), outgoing.is_idle()), (6, 0, true));
}

#[test]
fn payload_window_holds_four_mebibytes() {
    let (mut outgoing, mut recorder, mut callbacks) = writer(6, 1 << 20);
    outgoing.pump(&mut recorder, Addr(0), &mut callbacks).unwrap();
    assert_eq!(order(&mut recorder), "l0p0l1p1l2p2l3p3l4l5");
}
