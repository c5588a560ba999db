//! Connections to cards on other hosts, which here are on this one. Each test polls its cards itself.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use ferrogin_test_support::wait::wait_until;

use super::order::Done::{Receive, Send};
use super::order::{Card, NO_FAULTS, connected_by, until};
use super::*;
use crate::wire::handshake;

fn open() -> Card {
    Card::open(WireChoice::Tcp, NO_FAULTS)
}

/// Counts a card's connections except the one to itself, and those whose other end is not proven.
fn connections(card: &Card) -> (usize, usize) {
    let others = || card.core.connections.iter().filter(|(at, _)| *at != LOOPBACK);
    (others().count(), others().filter(|(_, connection)| connection.is_unproven()).count())
}

/// Connects to the card as a process that sends `bytes`.
fn process(card: &Card, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(card.core.gid.address.unwrap()).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

fn hello(from: &Card, to: &Card) -> Vec<u8> {
    handshake::initiate(&from.core.gid, &to.core.gid).unwrap().hello().to_vec()
}

/// Whether the card closed a process's connection, after the process read everything.
fn is_closed(process: &mut TcpStream) -> bool {
    process.set_nonblocking(true).unwrap();
    match process.read_to_end(&mut Vec::new()) {
        Ok(_) => true,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Opens a new card, which exchanges messages with `a`.
fn exchange(a: &mut Card) -> Card {
    let mut b = open();
    a.connect(&mut b);
    b.connect(a);
    let before = a.done().len();
    b.send(a);
    a.send(&mut b);
    until(a, &mut b, before + 2);
    b
}

#[test]
fn requests_of_both_cards_share_a_stream() {
    let (mut a, mut b) = connected_by(WireChoice::Tcp, NO_FAULTS);
    for exchange in 0..4 {
        a.send(&mut b);
        until(&mut b, &mut a, 3 + 2 * exchange);
        b.send(&mut a);
        until(&mut a, &mut b, 4 + 2 * exchange);
        assert_eq!(a.done()[2 + 2 * exchange..], [Send, Receive], "the reply comes second");
    }
    assert_eq!((connections(&a), connections(&b)), ((1, 0), (1, 0)));
}

#[test]
fn acknowledgement_waits_a_few_polls_for_a_request() {
    let (mut a, mut b) = connected_by(WireChoice::Tcp, NO_FAULTS);
    let waits = |card: &Card| card.core.connections.iter().any(|(_, connection)| connection.owes());
    wait_until("an idle card", || {
        b.poll();
        !waits(&b)
    });
    a.send(&mut b);
    a.poll();
    wait_until("message", || {
        b.poll();
        b.done().len() == 3
    });
    assert!(waits(&b));
    let polls = (1..).take_while(|_| {
        b.poll();
        waits(&b)
    });
    assert!((1..16).contains(&polls.count()));
    until(&mut a, &mut b, 3);
}

#[test]
fn calls_that_cross_leave_one_stream() {
    let mut random = Random::seeded(11);
    for _ in 0..40 {
        let (mut a, mut b) = (open(), open());
        a.connect(&mut b);
        b.connect(&mut a);
        a.send(&mut b);
        b.send(&mut a);
        wait_until("completions", || {
            for _ in 0..random.below(4) {
                a.poll();
            }
            for _ in 0..random.below(4) {
                b.poll();
            }
            a.done().len() == 2 && b.done().len() == 2
        });
        // The stream that lost is closed without a trace.
        wait_until("one stream", || {
            a.poll();
            b.poll();
            (connections(&a), connections(&b)) == ((1, 0), (1, 0))
        });
        assert!(a.core.remote_cards.values().chain(b.core.remote_cards.values()).all(|card| card.dead.is_none()));
    }
}

/// A caller with a valid hello is not silent, so its stream is never one too many.
#[test]
fn cards_that_call_at_the_same_time_are_all_kept() {
    let mut a = open();
    let caller = |n: u8| crate::address::Gid { secret: [n; 8], ..a.core.gid };
    let hello = |n: u8| handshake::initiate(&caller(n), &a.core.gid).unwrap().hello();
    let held: Vec<_> = (1..=100).map(|n| process(&a, &hello(n))).collect();
    wait_until("hellos", || {
        a.poll();
        connections(&a) == (held.len(), held.len())
    });
    assert!(a.core.connections.iter().all(|(_, connection)| !connection.is_silent()));
}

#[test]
fn silent_connections_do_not_block_peers() {
    let mut a = open();
    let mut held: Vec<_> = (0..300).map(|_| process(&a, b"")).collect();
    let mut b = exchange(&mut a);
    assert!(connections(&a).1 <= 64, "{:?}", connections(&a));
    held.extend((0..300).map(|_| process(&a, &hello(&b, &a)[..70])));
    exchange(&mut a);
    // The remaining ones are closed after 5 s.
    for _ in 0..120 {
        (a.now, b.now) = (a.now + Duration::from_millis(50), b.now + Duration::from_millis(50));
        a.core.poll(a.now, true);
        b.core.poll(b.now, true);
    }
    assert_eq!(connections(&a).1, 0);
    assert!(held.iter_mut().all(is_closed));
    b.send(&mut a);
    let before = a.done().len();
    until(&mut a, &mut b, before + 1);
}

#[test]
fn attackers_change_nothing() {
    let mut a = open();
    let mut b = exchange(&mut a);
    let outsider = open();
    let mut random = Random::seeded(5);
    for round in 0..200 {
        let mut forged = hello(&b, &a);
        forged[round % 72] ^= 1 << (round % 8);
        let noise: Vec<u8> = (0..random.below(600)).map(|_| random.next_u32() as u8).collect();
        let of_another = hello(&b, &outsider);
        let mut refused = [process(&a, &forged), process(&a, &noise), process(&a, &of_another)];
        drop(process(&a, &hello(&b, &a)[..round % 72]));
        a.poll();
        if round % 50 == 0 {
            wait_until("refusals", || {
                a.poll();
                is_closed(&mut refused[0])
                    && (noise.len() < 72 || is_closed(&mut refused[1]))
                    && is_closed(&mut refused[2])
            });
        }
    }
    let before = a.done().len();
    b.send(&mut a);
    until(&mut a, &mut b, before + 1);
}

#[test]
fn claim_of_another_cards_gid_is_refused() {
    let (mut a, mut victim) = (open(), open());
    // It knows both GIDs, but has another address than the card it claims to be.
    victim.core.gid.address.as_mut().unwrap().set_ip(Ipv4Addr::new(127, 0, 0, 2));
    let mut claim = process(&a, &hello(&victim, &a));
    wait_until("refusal", || {
        a.poll();
        is_closed(&mut claim)
    });
    assert_eq!(connections(&a), (0, 0));
    assert!(
        a.core.remote_cards.get(&victim.core.gid).is_none_or(|card| card.connection.is_none() && card.dead.is_none())
    );
}

#[test]
fn repeated_hello_takes_no_slot() {
    let mut a = open();
    let mut b = open();
    // A process replays the hello of a card that has not connected yet, and never confirms it.
    let mut repeated = process(&a, &hello(&b, &a));
    wait_until("welcome", || {
        a.poll();
        connections(&a) == (1, 1)
    });
    a.connect(&mut b);
    b.connect(&mut a);
    b.send(&mut a);
    until(&mut a, &mut b, 1);
    // Another process replays one while the card is connected.
    let mut later = process(&a, &hello(&b, &a));
    wait_until("end", || {
        a.poll();
        is_closed(&mut later)
    });
    a.send(&mut b);
    until(&mut a, &mut b, 2);
    assert!(!is_closed(&mut repeated), "it has its 5 s");
}

#[test]
fn absent_card_fails_requests() {
    let (mut a, mut b) = (open(), open());
    a.connect(&mut b);
    let gone = b.core.gid;
    drop(b);
    a.send_unexpected();
    wait_until("failure", || {
        a.poll();
        a.core.remote_cards[&gone].dead == Some(CompStatus::LocalUnreachableRemote)
    });
}

#[test]
fn card_that_closes_answers_first_and_is_lost_then() {
    let (mut a, mut b) = connected_by(WireChoice::Tcp, NO_FAULTS);
    a.send(&mut b);
    a.poll();
    wait_until("message", || {
        b.poll();
        b.done().len() == 3
    });
    a.send_unexpected();
    a.poll();
    b.core.drain();
    let gone = b.core.gid;
    drop(b);
    wait_until("loss", || {
        a.poll();
        a.core.remote_cards[&gone].dead == Some(CompStatus::LocalUnresponsiveRemote)
    });
    assert_eq!(a.done_with_errors()[2..], [(Send, true), (Send, false)]);
}
