//! Which sends a writer posts, and when: lengths at once, long payloads a few at a time.

use std::os::fd::RawFd;

use super::super::Payload;
use super::super::engine::{Call, Operation};
use super::super::outgoing::Outgoing;
use super::super::transport::{Addr, Event, PAYLOADS, Pattern, Receiving, Sending, Transport};
use ferrogin_libfabric::Error;

/// Takes everything, words as providers inject them, and writes down what it got.
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

    fn max_message(&self) -> usize {
        usize::MAX
    }

    fn payloads_at_a_time(&self) -> usize {
        PAYLOADS
    }

    fn insert(&mut self, _: &[u8]) -> Result<Addr, Error> {
        Ok(Addr(0))
    }

    fn send(&mut self, _: Addr, tag: u64, body: Payload, _: u64, _: bool) -> Sending {
        let kind = if tag >> 32 == 1 { 'l' } else { 'p' };
        self.sent.push((kind, tag as u32));
        if body.len() <= 64 {
            return Sending::Done(body);
        }
        self.held.push(body);
        Sending::Posted
    }

    fn receive(&mut self, _: Option<Addr>, _: Pattern, room: Vec<u8>, _: usize, _: u64) -> Receiving {
        Receiving::Again(room)
    }

    fn look(&mut self, _: Option<Addr>, _: Pattern, _: u64) -> bool {
        false
    }

    fn cancel(&mut self, _: &dyn Fn(u64) -> bool) {}

    fn poll(&mut self, _: &mut Vec<Event>) -> Result<(), Error> {
        Ok(())
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }

    fn may_wait(&self) -> bool {
        true
    }
}

fn writer(count: usize, len: usize) -> (Outgoing, Recorder, Vec<Call>) {
    let mut out = Outgoing::new(0, 0, 16);
    for ticket in 0..count {
        out.push(ticket as u64, vec![0; len].into(), Box::new(|_| ()));
    }
    (out, Recorder::default(), Vec::new())
}

/// `l0p0` and so on.
fn order(recorder: &mut Recorder) -> String {
    recorder.sent.drain(..).map(|(kind, id)| format!("{kind}{id}")).collect()
}

#[test]
fn short_messages_go_out_whole_at_once() {
    let (mut out, mut recorder, mut calls) = writer(3, 8);
    assert!(!out.pump(&mut recorder, Addr(0), &mut calls).unwrap());
    assert_eq!(order(&mut recorder), "l0p0l1p1l2p2");
    assert_eq!(calls.len(), 3);
}

#[test]
fn lengths_run_ahead_of_long_payloads() {
    let (mut out, mut recorder, mut calls) = writer(6, 3 << 20);
    assert!(!out.pump(&mut recorder, Addr(0), &mut calls).unwrap());
    assert_eq!(order(&mut recorder), "l0p0l1p1l2l3l4l5");
    assert_eq!(out.bytes_under_way(), 6 << 20);
    // The second ends before the first: another may go, and no callback is due.
    out.sent(Operation::SendPayload, 1, recorder.held.pop().unwrap(), &mut calls);
    out.pump(&mut recorder, Addr(0), &mut calls).unwrap();
    assert_eq!((order(&mut recorder).as_str(), calls.len()), ("p2", 0));
    for (id, next) in [(0, "p3"), (2, "p4"), (3, "p5"), (4, ""), (5, "")] {
        out.sent(Operation::SendPayload, id, recorder.held.pop().unwrap(), &mut calls);
        out.pump(&mut recorder, Addr(0), &mut calls).unwrap();
        assert_eq!(order(&mut recorder), next, "after {id}");
    }
    assert_eq!((calls.len(), out.bytes_under_way(), out.is_idle()), (6, 0, true));
}

#[test]
fn a_megabyte_is_sent_four_at_a_time() {
    let (mut out, mut recorder, mut calls) = writer(6, 1 << 20);
    out.pump(&mut recorder, Addr(0), &mut calls).unwrap();
    assert_eq!(order(&mut recorder), "l0p0l1p1l2p2l3p3l4l5");
}
