//! Messages and immediate data from a process that knows the secret and breaks the protocol.

use super::*;
use crate::device::cpu::CpuDevice;
use crate::rma::departure::Message;
use crate::rma::memory::Memory;
use crate::rma::record::{ACKNOWLEDGEMENT, GOODBYE, SIGNAL, SIGNAL_OF_PUT};
use ferrogin_test_support::Random;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::FromBytes;

const RANKS: usize = 3;
const CONTEXTS: usize = 2;
const TOKEN: u64 = 0x1234_5678_9abc_def0;
const MEMORY: u32 = 5;
/// The same words, written by the card.
const BY_CARD: u32 = 6;
/// Registered words; as many unregistered ones lie before and after them.
const WORDS: usize = 8;

/// A receiver whose registrations are the middle of `memory`.
struct Receiver {
    memory: Box<[AtomicU64; 3 * WORDS]>,
    inbound: Inbound,
}

impl Receiver {
    fn new() -> Self {
        let memory = Box::new([const { AtomicU64::new(0) }; 3 * WORDS]);
        let registered = Arc::new(Registered::default());
        let (base, size) = (memory[WORDS].as_ptr() as u64, 8 * WORDS as u64);
        registered.add(Memory::of_rank_0(MEMORY, base, size, false));
        registered.add(Memory::of_rank_0(BY_CARD, base, size, true));
        let immediate = Immediate::new(RANKS, CONTEXTS).unwrap();
        Self { memory, inbound: Inbound::new(0, RANKS, CONTEXTS, immediate, TOKEN, registered, Arc::default()) }
    }

    fn take(&mut self, record: Record) -> Option<Notice> {
        let notice = self.inbound.record(&record);
        self.inbound.apply(&CpuDevice::new(false)).unwrap();
        notice
    }

    /// Returns the words that aren't 0, by index in the registration.
    fn words(&self) -> Vec<(usize, u64)> {
        let all = self.memory.iter().map(|word| word.load(Ordering::Relaxed)).enumerate();
        let (inside, outside): (Vec<_>, Vec<_>) =
            all.filter(|(_, word)| *word != 0).partition(|(at, _)| (WORDS..2 * WORDS).contains(at));
        assert_eq!(outside, [], "words that are not registered");
        inside.into_iter().map(|(at, word)| (at - WORDS, word)).collect()
    }
}

/// A weak signal from rank 1 in context 0.
fn signal(number: u32, offset: u64) -> Record {
    Record {
        token: TOKEN.into(),
        sender: 1.into(),
        number: number.into(),
        context: 0.into(),
        kind: SIGNAL,
        strong: 0,
        memory: MEMORY.into(),
        offset: offset.into(),
        value: 7.into(),
        entry: 0.into(),
    }
}

#[test]
fn forged_messages_are_refused_and_change_no_memory() {
    let mut receiver = Receiver::new();
    let end = 8 * WORDS as u64;
    let forged = [
        Record { token: (TOKEN ^ 1).into(), ..signal(0, 0) },
        Record { sender: (RANKS as u32).into(), ..signal(0, 0) },
        Record { sender: u32::MAX.into(), ..signal(0, 0) },
        Record { context: (CONTEXTS as u16).into(), ..signal(0, 0) },
        Record { kind: 0, ..signal(0, 0) },
        Record { kind: GOODBYE + 1, ..signal(0, 0) },
        signal(u32::MAX, 0),
        signal(256, 0),
        signal(1 << 31, 0),
        // The numbers below are due.
        Record { memory: 0.into(), ..signal(0, 0) },
        signal(1, end),
        signal(2, end - 4),
        signal(3, 4),
        signal(4, u64::MAX - 7),
        signal(5, 0u64.wrapping_sub(8)),
    ];
    for (refused, record) in (1..).zip(forged) {
        assert_eq!(receiver.take(record), None);
        assert_eq!((receiver.inbound.refused, receiver.words()), (refused, vec![]), "{record:?}");
    }
    let refused = receiver.inbound.refused;
    receiver.take(signal(6, 8));
    assert_eq!((receiver.inbound.refused, receiver.words()), (refused, vec![(1, 7)]), "a good one still counts");
    receiver.take(signal(6, 8));
    assert_eq!(
        (receiver.inbound.refused, receiver.words()),
        (refused + 1, vec![(1, 7)]),
        "a number that is used again"
    );
}

#[test]
fn strong_signal_behind_a_skipped_number_waits_for_it() {
    let mut receiver = Receiver::new();
    receiver.take(Record { strong: 1, ..signal(1, 0) });
    assert_eq!(receiver.words(), []);
    receiver.take(signal(0, 8));
    assert_eq!(receiver.words(), [(0, 7), (1, 7)]);
}

#[test]
fn signal_waits_for_the_cards_writes_of_those_before() {
    let mut receiver = Receiver::new();
    let by_card = |sender: u32, number, offset| {
        let strong = Record { strong: 1, ..signal(number, offset) };
        Record { sender: sender.into(), memory: BY_CARD.into(), ..strong }
    };
    let writes = |receiver: &mut Receiver| receiver.inbound.apply(&CpuDevice::new(false)).unwrap();
    let places = |writes: &[WordWrite]| writes.iter().map(|write| (write.offset, write.sum)).collect::<Vec<_>>();
    // One word per stream at a time; another rank adds to the same word.
    for record in [by_card(1, 0, 8), by_card(1, 1, 8), by_card(2, 0, 8), by_card(1, 2, 0), signal(3, 16)] {
        receiver.inbound.record(&record);
    }
    let mut first = writes(&mut receiver);
    assert_eq!(places(&first), [(8, 21)]);
    assert!(writes(&mut receiver).is_empty(), "the first is not complete");
    receiver.inbound.written(first.remove(0));
    let mut second = writes(&mut receiver);
    assert_eq!((places(&second), receiver.words()), (vec![(0, 7)], vec![]));
    receiver.inbound.written(second.remove(0));
    assert!(writes(&mut receiver).is_empty());
    assert_eq!(receiver.words(), [(2, 7)], "the CPU adds after the card has written");
    // The sum carries on, one write at a time.
    receiver.inbound.record(&by_card(2, 1, 8));
    let third = writes(&mut receiver);
    assert_eq!(places(&third), [(8, 28)]);
    assert!(WordWrite::begin(&third[0].memory, 8).is_none());
}

#[test]
fn signal_of_a_put_waits_for_its_own_immediate_data_only() {
    let mut receiver = Receiver::new();
    let immediate = receiver.inbound.immediate;
    receiver.take(Record { kind: SIGNAL_OF_PUT, ..signal(0, 0) });
    // Another context and another rank; no such rank; a number that isn't due.
    for data in [
        immediate.pack(1, 1, 0, 0),
        immediate.pack(2, 0, 0, 0),
        immediate.pack(3, 0, 0, 0),
        immediate.pack(1, 0, 0, 300),
    ] {
        receiver.inbound.landed(data);
        receiver.inbound.apply(&CpuDevice::new(false)).unwrap();
        assert_eq!(receiver.words(), [], "{data:#x}");
    }
    assert_eq!(receiver.inbound.refused, 2);
    receiver.inbound.landed(immediate.pack(1, 0, 0, 0));
    receiver.inbound.apply(&CpuDevice::new(false)).unwrap();
    assert_eq!(receiver.words(), [(0, 7)]);
}

#[test]
fn immediate_data_adds_1_to_a_word_that_a_message_of_its_stream_named() {
    let mut receiver = Receiver::new();
    let immediate = receiver.inbound.immediate;
    let land = |receiver: &mut Receiver, peer, entry, number| {
        receiver.inbound.landed(immediate.pack(peer, 0, entry, number));
        receiver.inbound.apply(&CpuDevice::new(false)).unwrap();
        (receiver.inbound.refused, receiver.words())
    };
    assert_eq!(land(&mut receiver, 1, 2, 0), (1, vec![]), "nothing is named");
    receiver.take(Record { entry: 2.into(), ..signal(0, 8) });
    assert_eq!(land(&mut receiver, 1, 2, 1), (1, vec![(1, 8)]));
    assert_eq!(land(&mut receiver, 2, 2, 0), (2, vec![(1, 8)]), "another stream");
    assert_eq!(land(&mut receiver, 1, 1, 2), (3, vec![(1, 8)]), "another entry");
    // The message that named the word used up this number.
    assert_eq!(land(&mut receiver, 1, 2, 0), (4, vec![(1, 8)]));
    receiver.take(Record { entry: 16.into(), ..signal(2, 0) });
    assert_eq!(receiver.inbound.refused, 5, "no such entry");
    // Strong ones wait for all earlier ones.
    receiver.take(Record { entry: 3.into(), strong: 1, ..signal(3, 16) });
    assert_eq!(land(&mut receiver, 1, 3, 5), (5, vec![(0, 7), (1, 8), (2, 7)]));
    assert_eq!(land(&mut receiver, 1, 2, 4), (5, vec![(0, 7), (1, 9), (2, 8)]));
}

#[test]
fn messages_for_the_sending_half_reach_it_after_the_same_checks() {
    let mut receiver = Receiver::new();
    let acknowledged = Notice::Acknowledged(StreamId { peer: 1, context: 1 }, 9);
    let departure = [Message::Leaving, Message::Finished, Message::Goodbye];
    let departure = departure.map(|message| (message.kind(), Notice::Departure(1, message)));
    for (refused, (kind, notice)) in (1..).zip([(ACKNOWLEDGEMENT, acknowledged)].into_iter().chain(departure)) {
        let record = Record { kind, context: 1.into(), ..signal(9, 0) };
        assert_eq!(receiver.take(record), Some(notice));
        assert_eq!(receiver.take(Record { token: 0.into(), ..record }), None);
        assert_eq!((receiver.inbound.refused, receiver.words()), (refused, vec![]));
    }
}

/// Some fields are valid, so that the bytes get past the first checks.
#[test]
fn random_messages_never_panic_and_only_change_registered_words() {
    for seed in 0..20 {
        let (mut random, mut receiver) = (Random::new(seed), Receiver::new());
        let mut number = 0;
        for _ in 0..5000 {
            let bytes: [u8; size_of::<Record>()] = std::array::from_fn(|_| random.next_u32() as u8);
            let mut record = Record::read_from_bytes(&bytes[..]).unwrap();
            if !random.one_in(8) {
                let word = 8 * u64::from(random.below(2 * WORDS as u32));
                record = Record {
                    sender: random.below(RANKS as u32 + 1).into(),
                    number: (number + random.below(300)).into(),
                    context: (random.below(CONTEXTS as u32 + 1) as u16).into(),
                    kind: random.below(8) as u8,
                    entry: random.below(20).into(),
                    offset: if random.one_in(8) { record.offset } else { word.into() },
                    ..signal(0, 0)
                };
                number += u32::from(random.one_in(50));
            }
            receiver.inbound.record(&record);
            receiver.inbound.landed(if random.one_in(2) { random.next_u32() } else { random.below(64) });
            receiver.inbound.apply(&CpuDevice::new(false)).unwrap();
            receiver.inbound.acknowledgements.clear();
        }
        assert!(receiver.inbound.refused > 0 && !receiver.words().is_empty(), "seed {seed}");
    }
}
