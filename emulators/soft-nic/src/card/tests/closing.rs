//! What a card has taken, answered or sent when it closes still counts. Each test polls its cards itself.

use std::sync::Mutex;
use std::sync::atomic::AtomicU32;

use ferrogin_test_support::wait::wait_until;

use super::order::Done::{Receive, Send};
use super::order::{self, NO_FAULTS, connected_by, until};
use super::*;
use crate::card::{Card, Shared};

const WIRES: [WireChoice; 2] = [WireChoice::Shm, WireChoice::Tcp];

/// Returns the card as front ends have it, without an engine.
fn card_of(core: Core) -> Card {
    Card { shared: Shared::new(core), engine: Mutex::new(None), domains: AtomicU32::new(1) }
}

/// Hands a message to the wire, which the other card has not read.
fn sent_unread(wire: WireChoice) -> (order::Card, order::Card) {
    let (mut a, mut b) = connected_by(wire, NO_FAULTS);
    wait_until("idle cards", || {
        a.poll();
        b.poll();
        [&a, &b].iter().all(|card| card.core.connections.iter().all(|(_, connection)| !connection.owes()))
    });
    a.send(&mut b);
    a.poll();
    (a, b)
}

#[test]
fn answered_requests_succeed_though_their_card_is_gone() {
    for wire in WIRES {
        let (mut a, mut b) = connected_by(wire, "seed=1,reorder=64");
        let (before, messages) = (a.done().len(), 8);
        (0..messages).for_each(|_| a.send(&mut b));
        // The other card has no receive for this one, so that completions are still to come.
        a.send_unexpected();
        wait_until("messages", || {
            a.poll();
            b.poll();
            b.done().iter().filter(|done| **done == Receive).count() == 1 + messages
        });
        b.core.drain();
        drop(b);
        wait_until("completions", || {
            a.poll();
            a.done_with_errors().len() == before + messages + 1
        });
        let failed = a.done_with_errors().into_iter().filter(|(_, good)| !good).count();
        assert_eq!(failed, 1, "only the message without a receive");
    }
}

#[test]
fn message_of_card_that_is_gone_arrives() {
    for wire in WIRES {
        let (a, mut b) = sent_unread(wire);
        drop(a);
        wait_until("the message", || {
            b.poll();
            b.core.connections.len() == 1
        });
        assert_eq!(b.done()[2..], [Receive]);
    }
}

#[test]
fn closing_queue_pair_answers_what_has_arrived() {
    for wire in WIRES {
        let (mut a, b) = sent_unread(wire);
        let (qpn, mut now) = (b.qpn, b.now);
        let closing = card_of(b.core);
        closing.close_qp(qpn);
        wait_until("the answer", || {
            now += std::time::Duration::from_micros(1);
            closing.lock().poll(now, true);
            a.poll();
            a.done().len() == 3
        });
        assert_eq!(a.done()[2..], [Send]);
    }
}

#[test]
fn card_answers_what_has_arrived_when_its_process_ends() {
    for wire in WIRES {
        let (mut a, mut b) = sent_unread(wire);
        b.core.answer_arrived();
        drop(b);
        wait_until("the answer", || {
            a.poll();
            a.done().len() == 3
        });
        assert_eq!(a.done()[2..], [Send]);
    }
}

#[test]
fn closing_queue_pair_answers_reads_in_full() {
    for close_drops in [false, true] {
        let mut world = World::with(Faults { close_drops, ..Faults::default() });
        let qkey = world.core.qp(world.qpn).unwrap().qkey;
        let (rkey, addr) = (world.keys.rkey, world.bytes.as_ptr() as u64);
        let read = Header { dst_qpn: world.qpn, qkey, rkey, addr, total: 8, ..Header::new(Kind::Read, 7) };
        world.arrives(LOOPBACK, read);
        assert_eq!(world.counts()[4], (0, 0));
        let card = card_of(world.core);
        card.close_qp(world.qpn);
        let core = card.lock();
        assert_eq!(core.statistics.rdma_read_resp_bytes, 8, "close_drops={close_drops}");
    }
}

#[test]
fn both_cards_may_close_at_once() {
    for wire in WIRES {
        let (mut a, mut b) = connected_by(wire, NO_FAULTS);
        a.send(&mut b);
        until(&mut a, &mut b, 3);
        std::thread::scope(|scope| {
            scope.spawn(|| b.core.drain());
            a.core.drain();
        });
    }
}
