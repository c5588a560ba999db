//! A model of one sender and one receiver over a network that delays, reorders and duplicates packets, with an oracle
//! that knows which bytes have landed.

use super::*;
use crate::rma::words::{Name, Word, Words};
use ferrogin_test_support::Random;
use std::collections::BTreeSet;

/// An operation that the sender issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Issued {
    Put,
    Signal { has_put: bool, strong: bool, word: u64 },
}

/// Entries in the word table.
const ENTRIES: usize = 3;

/// A packet on its way, or a completion on its way to the sender. Operations are named by their place in the order of
/// issue.
#[derive(Debug, Clone, Copy)]
enum Packet {
    /// A write without immediate data: its bytes.
    Bytes(usize),
    /// A write with immediate data.
    Write {
        issued: usize,
        number: u32,
        entry: u32,
    },
    /// A signal's message.
    Message {
        issued: usize,
        number: u32,
        entry: u32,
    },
    Acknowledgement(u32),
}

fn named(offset: u64, strong: bool) -> Word {
    Word { memory: 0, offset, strong }
}

struct Model {
    bits: u32,
    issued: Vec<Issued>,
    /// By place: a put's group in the stream.
    groups: Vec<Option<u32>>,
    sender: Outgoing<(usize, u32)>,
    /// The sender's word table, and the receiver's.
    words: (Words, [Option<Word>; ENTRIES]),
    receiver: Incoming<usize>,
    /// Number of signals without a message.
    short: usize,
    network: Vec<Packet>,
    landed: BTreeSet<usize>,
    applied: Vec<usize>,
}

impl Model {
    fn new(first: u32, bits: u32) -> Self {
        Self {
            bits,
            issued: Vec::new(),
            groups: Vec::new(),
            sender: Outgoing::new(first, window(bits)),
            words: Default::default(),
            short: 0,
            receiver: Incoming::new(first, bits),
            network: Vec::new(),
            landed: BTreeSet::new(),
            applied: Vec::new(),
        }
    }

    /// Issues an operation; returns false if the window is full.
    fn issue(&mut self, operation: Issued) -> bool {
        let place = self.issued.len();
        match operation {
            Issued::Put => {
                self.groups.push(Some(self.sender.put(false)));
                self.network.push(Packet::Bytes(place));
            }
            Issued::Signal { has_put, strong, word } => {
                let Some(number) = self.sender.number() else { return false };
                self.groups.push(None);
                let name = if has_put && !(strong && self.sender.has_puts()) {
                    self.words.0.name(named(word, strong), ENTRIES, number, self.sender.acknowledged())
                } else {
                    Name::InMessage(0)
                };
                match name {
                    Name::Known(entry) => {
                        self.network.push(Packet::Write { issued: place, number, entry });
                        self.short += 1;
                    }
                    Name::InMessage(entry) => {
                        if has_put {
                            self.network.push(Packet::Write { issued: place, number, entry: 0 });
                        }
                        let signal = (place, number);
                        let free = if strong { self.sender.hold(signal) } else { Some(signal) };
                        self.network.extend(free.map(|(issued, number)| Packet::Message { issued, number, entry }));
                    }
                }
            }
        }
        self.issued.push(operation);
        true
    }

    /// Delivers a packet, and checks the guarantees of each signal that it makes visible.
    fn deliver(&mut self, packet: Packet) {
        let mut visible = Vec::new();
        match packet {
            Packet::Bytes(place) => {
                self.landed.insert(place);
                self.sender.put_done(self.groups[place].expect("a put"));
                while let Some((issued, number)) = self.sender.release() {
                    self.network.push(Packet::Message { issued, number, entry: 0 });
                }
            }
            Packet::Write { issued, number, entry } => {
                self.landed.insert(issued);
                let low = number & (u32::MAX >> (32 - self.bits));
                let Issued::Signal { strong, word, .. } = self.issued[issued] else { panic!("a signal") };
                let arrived = (entry > 0).then_some(Arrived { has_put: true, strong, signal: issued });
                if self.receiver.land(low, arrived, |place| visible.push(place)).is_ok() && entry > 0 {
                    assert_eq!(self.words.1[entry as usize - 1], Some(named(word, strong)), "signal {issued}");
                }
            }
            Packet::Message { issued, number, entry } => {
                let Issued::Signal { has_put, strong, word } = self.issued[issued] else { panic!("a signal") };
                let arrived = Arrived { has_put, strong, signal: issued };
                let taken = self.receiver.arrive(number, arrived, |place| visible.push(place));
                if taken.is_ok() && entry > 0 {
                    self.words.1[entry as usize - 1] = Some(named(word, strong));
                }
            }
            // A late one is ignored: an earlier one covered more.
            Packet::Acknowledgement(number) => {
                self.sender.acknowledge(number);
            }
        }
        for place in visible {
            self.check(place);
            self.applied.push(place);
        }
        self.network.extend(self.receiver.acknowledgement().map(Packet::Acknowledgement));
    }

    fn check(&self, place: usize) {
        assert!(!self.applied.contains(&place), "signal {place} is applied twice");
        let Issued::Signal { has_put, strong, .. } = self.issued[place] else { panic!("a signal") };
        assert!(!has_put || self.landed.contains(&place), "signal {place} is visible before its put");
        let earlier = self.issued[..place].iter().enumerate().filter(|_| strong);
        for (before, operation) in earlier {
            let is_visible = match operation {
                Issued::Put => self.landed.contains(&before),
                Issued::Signal { .. } => self.applied.contains(&before),
            };
            assert!(is_visible, "strong signal {place} is visible before operation {before}, {operation:?}");
        }
    }
}

/// Issues `operations` at random times and delivers packets in random order, some of those to the receiver twice. With
/// `lost_after`, the sender ends after that many operations, and half of what is in flight is lost. Returns the number
/// of signals without a message.
fn run(seed: u64, first: u32, bits: u32, mut operations: usize, lost_after: Option<usize>) -> usize {
    let mut random = Random::new(seed);
    let mut model = Model::new(first, bits);
    let mut blocked = None;
    while model.issued.len() < operations || !model.network.is_empty() {
        if model.issued.len() < operations && (model.network.is_empty() || random.below(3) > 0) {
            let kind = random.below(8);
            let next = blocked.take().unwrap_or(match kind {
                0..3 => Issued::Put,
                _ => Issued::Signal { has_put: kind.is_multiple_of(2), strong: kind < 6, word: random.below(4).into() },
            });
            if model.issue(next) {
                continue;
            }
            blocked = Some(next);
        }
        if lost_after.is_some_and(|after| model.issued.len() >= after) && operations > model.issued.len() {
            operations = model.issued.len();
            model.network.retain(|_| random.one_in(2));
            continue;
        }
        assert!(!model.network.is_empty(), "the sender waits for room, and nothing is under way");
        // Duplicates stay within the window, like those from a card's retransmissions.
        let at = random.below(model.network.len() as u32) as usize;
        let packet = model.network.swap_remove(at);
        model.deliver(packet);
        if let Packet::Write { .. } | Packet::Message { .. } = packet
            && random.below(4) == 0
        {
            model.deliver(packet);
        }
    }
    let signals = model.issued.iter().filter(|operation| **operation != Issued::Put).count();
    if lost_after.is_none() {
        assert_eq!(model.applied.len(), signals, "every signal is applied");
    }
    model.short
}

#[test]
fn strong_signals_follow_all_earlier_operations_in_any_order_of_delivery() {
    for seed in 0..400 {
        run(seed, 0, 16, 60, None);
    }
}

#[test]
fn numbers_wrap_in_immediate_data_and_in_messages() {
    for seed in 0..200 {
        run(seed, u32::MAX - 30, NUMBER_BITS_MIN, 300, None);
    }
    let short = run(7, u32::MAX - 500, 12, 5000, None);
    assert!(short > 300, "{short} signals had no message");
}

/// Each delivery checks the guarantees of the signals it makes visible.
#[test]
fn loss_of_the_sender_makes_no_signal_visible_too_early() {
    for seed in 0..400 {
        run(seed, u32::MAX - 20, 16, 80, Some(seed as usize % 80));
    }
}

#[test]
fn duplicates_and_numbers_beyond_the_window_are_refused() {
    let mut stream = Incoming::new(10, 8);
    let mut applied = Vec::new();
    let weak = |signal| Arrived { has_put: false, strong: false, signal };
    assert_eq!(stream.arrive(9, weak('a'), |signal| applied.push(signal)), Err(OutOfWindow));
    assert_eq!(stream.arrive(10 + 128, weak('b'), |signal| applied.push(signal)), Err(OutOfWindow));
    assert_eq!(stream.land(10 + 128, None, |signal| applied.push(signal)), Err(OutOfWindow));
    assert_eq!(stream.arrive(12, weak('c'), |signal| applied.push(signal)), Ok(()));
    assert_eq!(stream.arrive(12, weak('d'), |signal| applied.push(signal)), Err(OutOfWindow));
    assert_eq!(stream.land(12, None, |signal| applied.push(signal)), Err(OutOfWindow));
    assert_eq!(stream.land(10, None, |signal| applied.push(signal)), Ok(()));
    assert_eq!(stream.land(10, None, |signal| applied.push(signal)), Err(OutOfWindow));
    assert_eq!(applied, ['c']);
}

#[test]
fn sender_stops_at_the_window_until_the_acknowledgement() {
    let mut sender = Outgoing::<()>::new(u32::MAX, 4);
    let numbers: Vec<_> = (0..5).map(|_| sender.number()).collect();
    assert_eq!(numbers, [Some(u32::MAX), Some(0), Some(1), Some(2), None]);
    assert!(!sender.acknowledge(4), "not issued yet");
    assert!(!sender.acknowledge(u32::MAX - 1), "before the first one");
    assert!(sender.acknowledge(1));
    assert_eq!([sender.number(), sender.number(), sender.number()], [Some(3), Some(4), None]);
}

#[test]
fn signal_waits_for_the_puts_before_it_only() {
    let mut sender = Outgoing::new(0, 8);
    assert_eq!(sender.hold('a'), Some('a'));
    let (first, second) = (sender.put(false), sender.put(false));
    assert_eq!(sender.hold('b'), None);
    let later = sender.put(false);
    assert_eq!(sender.hold('c'), None);
    sender.put_done(second);
    assert_eq!(sender.release(), None);
    sender.put_done(first);
    assert_eq!([sender.release(), sender.release()], [Some('b'), None]);
    sender.put_done(later);
    sender.put_done(later);
    assert_eq!([sender.release(), sender.release()], [Some('c'), None]);
}

#[test]
fn weak_signal_without_a_write_follows_the_put_before_it() {
    let mut sender = Outgoing::new(0, 8);
    let put = sender.put(false);
    assert!(sender.follows_puts(false, false) && sender.follows_puts(true, true));
    assert!(!sender.follows_puts(false, true), "it follows its own write");
    assert_eq!(sender.hold('a'), None);
    sender.put_done(put);
    assert_eq!(sender.release(), Some('a'));
}

#[test]
fn signal_of_the_last_part_follows_the_parts_before_it() {
    let mut sender = Outgoing::<()>::new(0, 8);
    sender.put(true);
    assert!(sender.follows_puts(false, true));
    assert!(!sender.follows_puts(false, true), "the next one belongs to no part");
    sender.put(true);
    sender.put(false);
    assert!(!sender.follows_puts(false, true), "the last put was whole");
}
