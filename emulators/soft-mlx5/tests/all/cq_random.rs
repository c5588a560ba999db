//! Seeded random completions against an oracle: the poller must return the completions that the card pushed, in order,
//! with any compression and across any wrap. `FERROGIN_ZIP_CQES=N` sets the total number of completions (default: 10
//! million).

use ferrogin_test_support::Random;
use ferrogin_test_support::mlx5_memory::Memory;
use mlx5::cq::{Completion, CompletionError, CompletionQueue, CqParts, Layout};
use mlx5::device::Handle;
use mlx5::wire::{Cqe, CqeOpcode, OpOwn};
use soft_mlx5::cq_writer::{Blocks, CompressedLayout, Compression, CqMemory, CqWriter};
use soft_nic::random::Random as CardRandom;
use std::collections::VecDeque;
use zerocopy::FromZeros;

/// Returns the card's view of the slots and the first word of `record`.
#[allow(unsafe_code)]
fn card_side(slots: &Memory, record: &Memory) -> CqMemory {
    let entries = slots.size() / size_of::<Cqe>();
    let base = slots.base().cast();
    // SAFETY: both are aligned, and each test keeps both mapped as long as the writer lives.
    unsafe { CqMemory::new(base, entries.trailing_zeros(), record.base().cast()) }
}

/// Produces completions: runs that can be compressed, with interruptions of every kind.
struct Source {
    random: Random,
    last: Cqe,
    run: u32,
}

impl Source {
    fn fresh(&mut self) -> Cqe {
        let mut cqe = Cqe::new_zeroed();
        let opcode = match self.random.below(16) {
            0..6 => CqeOpcode::Req,
            6..11 => CqeOpcode::RespSend,
            11 => CqeOpcode::RespSendImm,
            12 => CqeOpcode::RespWrImm,
            13 => CqeOpcode::RespSendInv,
            14 => CqeOpcode::ReqErr,
            _ => CqeOpcode::RespErr,
        };
        cqe.op_own = OpOwn::regular(opcode, false);
        cqe.sop_drop_qpn = self.random.next_u32().into();
        cqe.wqe_counter = (self.random.next_u32() as u16).into();
        cqe.byte_cnt = self.random.next_u32().into();
        cqe.imm_inval_pkey = self.random.next_u32().into();
        cqe.srqn_uidx = self.random.next_u32().into();
        cqe.timestamp = self.random.next_u64().into();
        cqe
    }

    fn next(&mut self) -> Cqe {
        let error = matches!(self.last.op_own.opcode(), CqeOpcode::ReqErr | CqeOpcode::RespErr);
        if self.run == 0 || error {
            self.run = self.random.below(40);
            self.last = self.fresh();
            return self.last;
        }
        self.run -= 1;
        self.last.byte_cnt = self.random.next_u32().into();
        if self.last.op_own.opcode() == CqeOpcode::Req {
            self.last.wqe_counter = (self.random.next_u32() as u16).into();
            let request = self.random.next_u32() & 0xff00_0000;
            self.last.sop_drop_qpn = (request | self.last.sop_drop_qpn.get() & 0x00ff_ffff).into();
        } else {
            self.last.wqe_counter = self.last.wqe_counter.get().wrapping_add(1).into();
        }
        self.last
    }
}

/// Returns the completion without the bytes that depend on compression.
fn meaning(mut cqe: Cqe) -> Cqe {
    cqe.signature = 0;
    cqe.op_own = OpOwn(cqe.op_own.0 & 0xf0);
    cqe
}

fn check(want: Option<Cqe>, got: Result<Completion<'_>, CompletionError>) {
    let want = want.expect("a completion that was pushed");
    let got = match got {
        Ok(entry) => entry.to_cqe(),
        Err(failure) => failure.cqe,
    };
    assert_eq!(meaning(got), meaning(want));
}

struct Tally {
    written: u64,
    polled: u64,
    minis: u64,
}

/// Passes `count` completions through a queue of `1 << log` slots that starts at index `start`.
fn run(log: u32, start: u32, count: u64, seed: u64, zip: Option<CompressedLayout>, across_laps: bool) -> Tally {
    let slots = Memory::new(64 << log);
    let (record, arm) = (Memory::new(8), Memory::new(8));
    let mut ring = slots.slots();
    ring.initialise();
    let parts = CqParts {
        slots: ring,
        record: record.record(0),
        arm_record: record.record(1),
        arm: arm.arm_register(),
        cqn: 1,
        layout: zip.map_or(Layout::Plain, Layout::from),
        start_index: start,
        keep_alive: Handle::new(()),
    };
    let mut queue = CompletionQueue::new(parts);
    queue.release();
    if zip != Some(CompressedLayout::Enhanced) && start >> log & 1 != 0 {
        // A queue that starts on an odd lap holds the previous lap's owner bits.
        for slot in 0..1_usize << log {
            slots.write(slot * 64 + 63, &[0xf0]);
        }
    }
    let mut random = Random::new(seed);
    let compression =
        zip.map(|layout| Compression { layout, blocks: Blocks::Random(CardRandom::seeded(seed ^ 1)), across_laps });
    let mut writer = CqWriter::new(card_side(&slots, &record), start, compression);
    let mut source = Source { random: Random::new(seed ^ 2), last: Cqe::new_zeroed(), run: 0 };
    let mut oracle = VecDeque::new();
    let mut tally = Tally { written: 0, polled: 0, minis: 0 };
    while tally.polled < count {
        // Bursts of every length, up to more than the queue holds.
        let burst = random.below(2 << log.min(7)) + 1;
        for _ in 0..burst {
            if tally.written < count && writer.pending() < 64 {
                let cqe = source.next();
                writer.push(cqe);
                oracle.push_back(cqe);
                tally.written += 1;
            }
        }
        // Overruns are expected here: the remaining completions follow once slots are free.
        let _ = writer.flush();
        tally.minis = writer.minis();
        // Poll sometimes more than there are, sometimes up to the middle of a block, sometimes none.
        let most = random.below(2 << log.min(7));
        let taken = if random.below(4) == 0 {
            let mut taken = 0;
            while taken < most {
                let polled = queue.poll().expect("a valid completion");
                match polled {
                    mlx5::cq::Polled::Empty => break,
                    mlx5::cq::Polled::Done(entry) => check(oracle.pop_front(), Ok(entry)),
                    mlx5::cq::Polled::Failed(failure) => check(oracle.pop_front(), Err(failure)),
                }
                taken += 1;
                if random.below(3) == 0 {
                    queue.release();
                }
            }
            queue.release();
            taken
        } else {
            queue.drain(most, |one| check(oracle.pop_front(), one)).expect("a valid completion")
        };
        tally.polled += taken as u64;
        // If the poller had room for more, it must have returned every written completion.
        if most > writer.producer().wrapping_sub(queue.consumer()) + taken {
            assert_eq!(queue.consumer(), writer.producer(), "the poller stalled");
        }
    }
    assert_eq!(tally.written, count);
    assert!(oracle.is_empty());
    tally
}

/// The slots covered by a block are marked with their own laps, even across the end of the queue.
#[test]
fn covered_slots_are_marked_with_their_own_lap() {
    let slots = Memory::new(64 << 3);
    let (record, arm) = (Memory::new(8), Memory::new(8));
    let mut ring = slots.slots();
    ring.initialise();
    let mut queue = CompletionQueue::new(CqParts {
        slots: ring,
        record: record.record(0),
        arm_record: record.record(1),
        arm: arm.arm_register(),
        cqn: 0x1234,
        layout: Layout::Enhanced,
        start_index: 5,
        keep_alive: Handle::new(()),
    });
    queue.release();
    let compression = Compression { layout: CompressedLayout::Enhanced, blocks: Blocks::Full, across_laps: true };
    let mut writer = CqWriter::new(card_side(&slots, &record), 5, Some(compression));
    let mut cqe = Cqe::new_zeroed();
    cqe.op_own = OpOwn::regular(CqeOpcode::Req, false);
    (0..6).for_each(|_| writer.push(cqe));
    writer.flush().expect("room");
    // A title at 5, then a block of five: 6 and 7 on lap 0, and 8, 9 and 10 on lap 1.
    assert_eq!(queue.drain(10, |_| ()), Ok(6));
    let mark = |slot: usize| slots.read(slot * 64 + 62, 1)[0];
    assert_eq!([5, 6, 7, 0, 1, 2].map(mark), [0, 0, 0, 1, 1, 1]);
    assert_eq!([3, 4].map(mark), [0xff, 0xff], "no other slot is touched");

    // The arming doorbell: sequence number, command and index, then the queue's number.
    queue.arm(mlx5::cq::Arm::Solicited);
    assert_eq!(record.read(4, 4), [0x01, 0, 0, 11]);
    assert_eq!(arm.read(0, 8), [0x01, 0, 0, 11, 0, 0, 0x12, 0x34]);
    queue.event_seen();
    queue.arm(mlx5::cq::Arm::Any);
    assert_eq!(record.read(4, 4), [0x10, 0, 0, 11]);
}

fn total() -> u64 {
    std::env::var("FERROGIN_ZIP_CQES").map_or(10_000_000, |n| n.parse().expect("FERROGIN_ZIP_CQES is a number"))
}

/// Returns the queues' first indices: 0, near the wrap of the 8-bit lap mark, and near the wrap of the index.
fn starts(log: u32) -> [u32; 3] {
    [0, (254_u32 << log).wrapping_add(1), 0_u32.wrapping_sub(3 << log)]
}

#[test]
fn compressed_queues_of_all_sizes() {
    for layout in [CompressedLayout::Enhanced, CompressedLayout::Basic] {
        let each = total().div_ceil(11 * 3 * 2 * 2);
        let (mut polled, mut minis) = (0, 0);
        for log in 2..=12 {
            for (place, start) in starts(log).into_iter().enumerate() {
                for across in [false, true] {
                    let seed = (log as u64) << 8 | (place as u64) << 1 | across as u64;
                    let tally = run(log, start, each, seed, Some(layout), across);
                    polled += tally.polled;
                    minis += tally.minis;
                }
            }
        }
        println!(
            "{layout:?}: {polled} completions, {minis} of them compressed, all in order and equal to the oracle's"
        );
        assert!(minis > polled / 2, "little was compressed");
    }
}

#[test]
fn plain_queues_of_all_sizes() {
    let each = total() / 10 / (11 * 3);
    for log in 2..=12 {
        for (place, start) in starts(log).into_iter().enumerate() {
            run(log, start, each, (log as u64) << 8 | place as u64, None, false);
        }
    }
}
