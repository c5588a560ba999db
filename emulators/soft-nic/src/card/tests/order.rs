//! The order in which a card reports what it hears from another. Each test polls both cards itself.

use std::time::{Duration, Instant};

use ferrogin_test_support::wait::wait_until;

use super::super::announce;
use super::*;

/// A completion of a send or a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    Send,
    Receive,
}
use Done::{Receive, Send};

pub(super) const NO_FAULTS: &str = "seed=1";

/// A card with a queue pair for messages.
pub(super) struct Card {
    pub core: Core,
    pub qpn: u16,
    cq: u32,
    to: Destination,
    sent: u32,
    received: u32,
    /// A clock that each poll advances.
    pub now: Instant,
}

impl Card {
    pub(super) fn open(wire: WireChoice, faults: &str) -> Self {
        let faults = Faults::parse(faults).unwrap();
        let config = Config { wire, faults, ifaddr: Some(Ipv4Addr::LOCALHOST), ..Config::default() };
        let (gid, listeners) = announce(&config).unwrap();
        let mut core = Core::new(0, gid, config, listeners).unwrap();
        core.mute_log();
        let qpn = core.open_qp(PD, 64, 16, 16).unwrap();
        let cq = core.cqs.insert(CompletionRing::new(64).unwrap());
        core.enable_qp(qpn, cq, Some(cq), Default::default()).unwrap();
        Self { core, qpn, cq, to: Destination::default(), sent: 0, received: 0, now: Instant::now() }
    }

    pub(super) fn connect(&mut self, other: &mut Self) {
        let (ah, qp) = (self.core.open_handle(PD, other.core.gid).unwrap(), other.core.qp(other.qpn).unwrap());
        self.to = Destination { ah, qpn: qp.qpn, qkey: qp.qkey };
    }

    pub(super) fn poll(&mut self) {
        self.now += Duration::from_micros(1);
        self.core.poll(self.now, true);
    }

    /// Sends an empty message, for which the other card posts a receive.
    pub(super) fn send(&mut self, other: &mut Self) {
        other.post_receive();
        self.send_unexpected();
    }

    pub(super) fn post_receive(&mut self) {
        let qp = self.core.qp(self.qpn).unwrap();
        let slot = qp.rq.buffer().cast::<[u64; 2]>().wrapping_add(qp.rq.slot_of(self.received) as usize);
        // SAFETY: the slot lies in the ring and has that many bytes.
        unsafe { slot.write(RxDesc::single(0, 0, 0, 0).to_words()) };
        self.received += 1;
        qp.rq.preset(self.received);
    }

    pub(super) fn send_unexpected(&mut self) {
        let mut wqe = SendWqe::new(0, self.to, Operation::Send { data: SendData::Empty, imm: None });
        let qp = self.core.qp(self.qpn).unwrap();
        wqe.phase = qp.sq.phase_of(self.sent) == 1;
        let mut bytes = [0; 64];
        wqe.emit(&Geometry::NARROW, &mut bytes).unwrap();
        let slot = qp.sq.buffer().wrapping_add((qp.sq.slot_of(self.sent) * 64) as usize);
        // SAFETY: the slot lies in the ring and has that many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot, bytes.len()) };
        self.sent += 1;
        qp.sq.preset(self.sent);
    }

    /// Returns all completions so far, which must be successful.
    pub(super) fn done(&mut self) -> Vec<Done> {
        self.done_with_errors().into_iter().map(|(done, good)| good.then_some(done).expect("success")).collect()
    }

    /// Returns all completions so far, and whether they were successful.
    pub(super) fn done_with_errors(&mut self) -> Vec<(Done, bool)> {
        let ring = self.core.cqs.get_mut(self.cq).unwrap();
        // SAFETY: the ring has 64 entries of 32 bytes.
        let entries = unsafe { ring.buffer().cast::<[[u8; 32]; 64]>().read() };
        let entries = entries.into_iter().map(RawCqe).filter(|entry| entry.phase());
        let done = entries.map(|entry| match Cqe::parse(&entry, RequestIds::Bits16).expect("a completion") {
            Cqe::Send(cqe) => (Send, cqe.status),
            Cqe::Recv(cqe) => (Receive, cqe.status),
        });
        done.map(|(done, status)| (done, status == Status::Known(CompStatus::Ok))).collect()
    }

    /// Returns the connection that the other card opened.
    fn accepted(&mut self) -> &mut Connection {
        let found = self.core.connections.iter().find_map(|(at, connection)| connection.accepted.then_some(at));
        self.core.connections.get_mut(found.expect("the other card connected")).unwrap()
    }
}

/// Polls both cards until the first has this many completions.
pub(super) fn until(a: &mut Card, b: &mut Card, completions: usize) {
    wait_until("completions", || {
        a.poll();
        b.poll();
        a.done().len() >= completions
    });
}

/// Opens two cards connected through shared memory, in both directions. The first polls the connection that the other
/// made before its own.
fn connected(faults: &str) -> (Card, Card) {
    connected_by(WireChoice::Shm, faults)
}

pub(super) fn connected_by(wire: WireChoice, faults: &str) -> (Card, Card) {
    let (mut a, mut b) = (Card::open(wire.clone(), faults), Card::open(wire, NO_FAULTS));
    a.connect(&mut b);
    b.connect(&mut a);
    b.send(&mut a);
    until(&mut b, &mut a, 1);
    a.send(&mut b);
    until(&mut a, &mut b, 2);
    (a, b)
}

#[test]
fn reply_completes_after_the_send_that_it_answers() {
    let (mut a, mut b) = connected(NO_FAULTS);
    for exchange in 0..4 {
        a.send(&mut b);
        a.poll();
        b.poll();
        assert_eq!(b.done().len(), 3 + 2 * exchange, "the message is there");
        b.send(&mut a);
        b.poll();
        assert_eq!(a.done().len(), 2 + 2 * exchange, "the first card has seen neither");
        a.poll();
        assert_eq!(a.done()[2 + 2 * exchange..], [Send, Receive]);
        b.poll();
    }
}

#[test]
fn reply_waits_for_room_for_the_acknowledgement_before_it() {
    let (mut a, mut b) = connected(NO_FAULTS);
    let Transport::Shm(rings) = &mut b.accepted().transport else { panic!("shared memory") };
    // SAFETY: no payload.
    while unsafe { rings.tx.push(&Header::new(Kind::Ack, 0), std::ptr::null()) }.unwrap() {}
    a.send(&mut b);
    let own = a.core.remote_cards[&b.core.gid].connection.unwrap();
    a.core.poll_doorbells();
    a.core.pump(own);
    b.poll();
    assert_eq!(
        (b.done().len(), b.accepted().answers.len()),
        (3, 1),
        "the message is there, and its answer has no room"
    );
    b.send(&mut a);
    b.poll();
    until(&mut a, &mut b, 4);
    assert_eq!(a.done()[2..], [Send, Receive]);
}

#[test]
fn reply_completes_after_the_send_whose_completion_faults_hold_back() {
    let (mut a, mut b) = connected("seed=1,reorder=64");
    a.send(&mut b);
    // The other card has no receive for the second message, so another completion is still to come.
    a.send_unexpected();
    let poll_often = |a: &mut Card, b: &mut Card| {
        for _ in 0..300 {
            a.poll();
            b.poll();
        }
    };
    poll_often(&mut a, &mut b);
    assert_eq!((a.done().len(), b.done().len()), (2, 3), "the message is there, and its completion is held back");
    b.send(&mut a);
    poll_often(&mut a, &mut b);
    assert_eq!(a.done()[2..], [Send, Receive]);
}

#[test]
fn delivery_and_completion_wait_for_their_delays() {
    let (mut a, mut b) = connected("delay_us=50..50");
    a.send(&mut b);
    let (mut delivered, mut completed) = (None, None);
    // Each poll advances the clock by 1 us.
    for us in 1..200 {
        a.poll();
        b.poll();
        delivered = delivered.or((b.done().len() == 3).then_some(us));
        completed = completed.or((a.done().len() == 3).then_some(us));
    }
    let (delivered, completed) = (delivered.expect("a delivery"), completed.expect("a completion"));
    assert!(delivered > 50 && completed > delivered + 50, "{delivered} us, {completed} us");
}

#[test]
fn silent_card_is_lost_after_5_s() {
    for wire in [WireChoice::Shm, WireChoice::Tcp] {
        silent_card_is_lost(connected_by(wire, NO_FAULTS));
    }
}

fn silent_card_is_lost((mut a, mut b): (Card, Card)) {
    a.send(&mut b);
    a.poll();
    // The other card is no longer polled. A poll advances the card's clock by at most 50 ms.
    let mut polls_until = |lost: Option<CompStatus>| {
        (1..).find(|_| {
            a.now += Duration::from_millis(50);
            a.core.poll(a.now, true);
            a.core.remote_cards[&b.core.gid].dead == lost
        })
    };
    assert_eq!(polls_until(None), Some(1));
    assert_eq!(polls_until(Some(CompStatus::LocalUnresponsiveRemote)), Some(100));
}
