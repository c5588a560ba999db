//! The states of a completion queue: block titles, corruption, and the sequence number of arming.

use ferrogin_test_support::mlx5_memory::Memory;
use mlx5::cq::{Arm, CompletionQueue, CorruptQueue, CqParts, Layout, Polled};
use mlx5::device::Handle;
use mlx5::wire::{Cqe, CqeFormat, CqeOpcode, MiniCqe, OpOwn};
use zerocopy::IntoBytes;

const LOG: u32 = 3;
const QPN: u32 = 0x1234;

/// Queue pair and counter of a completion, or the counter of an error completion.
type Seen = Result<(u32, u16), u16>;

/// A queue of 8 slots and its memory.
struct Fixture {
    queue: CompletionQueue,
    slots: Memory,
    record: Memory,
    arm: Memory,
}

impl Fixture {
    fn new(layout: Layout, start_index: u32) -> Self {
        let (slots, record, arm) = (Memory::new(64 << LOG), Memory::new(8), Memory::new(8));
        let mut ring = slots.slots();
        ring.initialise();
        let queue = CompletionQueue::new(CqParts {
            slots: ring,
            record: record.record(0),
            arm_record: record.record(1),
            arm: arm.arm_register(),
            cqn: 0x56,
            layout,
            start_index,
            keep_alive: Handle::new(()),
        });
        Self { queue, slots, record, arm }
    }

    /// Writes a completion as the card does, for the lap of `index`.
    fn write(&self, index: u32, op_own: OpOwn, wqe_counter: u16) {
        let lap = index >> LOG;
        let compressed = op_own.0 & 0x0c == 0x0c;
        let cqe = Cqe {
            sop_drop_qpn: QPN.into(),
            wqe_counter: wqe_counter.into(),
            signature: lap as u8,
            op_own: if compressed { op_own } else { OpOwn(op_own.0 | (lap & 1) as u8) },
            ..Cqe::INITIAL
        };
        self.slots.write((index as usize & 7) * 64, cqe.as_bytes());
    }

    fn poll(&mut self) -> Result<Option<Seen>, CorruptQueue> {
        Ok(match self.queue.poll()? {
            Polled::Empty => None,
            Polled::Done(entry) => Some(Ok((entry.qpn(), entry.wqe_counter()))),
            Polled::Failed(failure) => Some(Err(failure.wqe_counter)),
        })
    }
}

const DONE: OpOwn = OpOwn::regular(CqeOpcode::Req, false);
const FAILED: OpOwn = OpOwn::regular(CqeOpcode::ReqErr, false);
const BLOCK: OpOwn = OpOwn::compressed(1);

/// An error completion drops the title, wherever it is: in its slot, released, or copied for a block.
#[test]
fn block_after_error_completion_has_no_title() {
    for release in [false, true] {
        for blocks in 0..2 {
            let mut cq = Fixture::new(Layout::Enhanced, 0);
            cq.write(0, DONE, 7);
            (0..blocks).for_each(|n| cq.write(1 + n, BLOCK, 0));
            cq.write(1 + blocks, FAILED, 8);
            cq.write(2 + blocks, BLOCK, 0);
            assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 7)))));
            (0..blocks).for_each(|_| assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 0))))));
            if release {
                cq.queue.release();
            }
            assert_eq!(cq.poll(), Ok(Some(Err(8))));
            if release {
                cq.queue.release();
            }
            let corrupt = CorruptQueue::NoTitle { index: 2 + blocks };
            assert_eq!(cq.poll(), Err(corrupt), "{blocks} blocks before, release: {release}");
            assert_eq!(cq.poll(), Err(corrupt));
        }
    }
    let mut cq = Fixture::new(Layout::Enhanced, 0);
    cq.write(0, DONE, 7);
    cq.write(1, FAILED, 8);
    cq.write(2, BLOCK, 0);
    assert_eq!(cq.queue.drain(8, |_| ()), Ok(2));
    assert_eq!(cq.queue.drain(8, |_| panic!("no title")), Err(CorruptQueue::NoTitle { index: 2 }));
}

#[test]
fn regular_completion_after_error_is_the_new_title() {
    for drain in [false, true] {
        let mut cq = Fixture::new(Layout::Enhanced, 0);
        cq.write(0, DONE, 7);
        cq.write(1, FAILED, 8);
        cq.write(2, OpOwn::regular(CqeOpcode::RespSend, false), 20);
        cq.write(3, OpOwn::compressed(2), 0);
        let mut seen = Vec::new();
        if drain {
            let taken = cq.queue.drain(8, |one| {
                seen.push(one.map(|entry| (entry.opcode(), entry.wqe_counter())).map_err(|error| error.wqe_counter));
            });
            assert_eq!(taken, Ok(5));
        } else {
            while let Some(one) = match cq.queue.poll().expect("a title") {
                Polled::Empty => None,
                Polled::Done(entry) => Some(Ok((entry.opcode(), entry.wqe_counter()))),
                Polled::Failed(failure) => Some(Err(failure.wqe_counter)),
            } {
                seen.push(one);
            }
        }
        // A receive's counter counts up from its title's.
        let receive = |counter| Ok((CqeOpcode::RespSend, counter));
        assert_eq!(seen, [Ok((CqeOpcode::Req, 7)), Err(8), receive(20), receive(21), receive(22)]);
    }
}

/// The card compresses, but the queue was created without compression: a block's bytes must not become a completion.
#[test]
fn block_in_plain_queue_is_corrupt() {
    for start in [0, 8] {
        for minis in [1, 7, 16] {
            for drain in [false, true] {
                let mut cq = Fixture::new(Layout::Plain, start);
                let owner = (start >> LOG & 1) as u8;
                let block = OpOwn(OpOwn::compressed(minis).0 | owner);
                cq.write(start, DONE, 7);
                cq.write(start + 1, block, 0);
                cq.write(start + 2, DONE, 9);
                let corrupt = CorruptQueue::NotCompressed { index: start + 1 };
                if drain {
                    assert_eq!(cq.queue.drain(8, |_| ()), Ok(1));
                    assert_eq!(cq.queue.drain(8, |_| panic!("a block")), Err(corrupt));
                } else {
                    assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 7)))));
                    assert_eq!(cq.poll(), Err(corrupt), "{minis} minis");
                }
                // The queue stays corrupt, whatever the card writes there.
                cq.write(start + 1, DONE, 8);
                assert_eq!(cq.poll(), Err(corrupt));
                assert_eq!(cq.queue.drain(8, |_| panic!("corrupt")), Err(corrupt));
                assert_eq!(cq.queue.consumer(), start + 1);
                assert!(corrupt.to_string().contains("without compression"));
            }
        }
    }
}

/// rdma-core's layout: the title has the number of completions. A ring in copyrpc's report on a ConnectX-7, with 32
/// requests instead of 8, has the same bytes: a title in slot 0, an array in slot 1, and nothing in slot 2.
#[test]
fn basic_block_has_its_own_title() {
    for opcode in [CqeOpcode::Req, CqeOpcode::RespSend] {
        let mut cq = Fixture::new(Layout::Basic, 5);
        // Eight completions from index 5 on, across the end of the queue.
        let minis = |from: u16| -> Vec<u8> {
            let mini = |at: u16| MiniCqe {
                wqe_counter: at.into(),
                s_wqe_opcode: 8,
                reserved: 0,
                byte_cnt: u32::from(at).into(),
            };
            (from..from + 8).flat_map(|at| mini(at).as_bytes().to_vec()).collect()
        };
        let title = Cqe {
            sop_drop_qpn: QPN.into(),
            wqe_counter: 100.into(),
            byte_cnt: 8.into(),
            op_own: OpOwn::title(opcode, false),
            ..Cqe::INITIAL
        };
        cq.slots.write(6 * 64, &minis(100));
        cq.slots.write(5 * 64, title.as_bytes());
        for at in 100..104 {
            assert_eq!(cq.poll(), Ok(Some(Ok((QPN, at)))), "{opcode:?}");
        }
        // The card may use the released slots at once, including the array's.
        cq.queue.release();
        cq.slots.write(6 * 64, &[0x5a; 64]);
        let mut seen = Vec::new();
        let taken = cq.queue.drain(9, |one| {
            let one = one.expect("no error");
            assert_eq!((one.opcode(), one.to_cqe().op_own.format()), (opcode, CqeFormat::Plain));
            seen.push((one.wqe_counter(), one.byte_cnt()));
        });
        assert_eq!(taken, Ok(4));
        assert_eq!(seen, [(104, 104), (105, 105), (106, 106), (107, 107)]);
        // A slot that the card didn't write is not new, neither in this lap nor in the next.
        assert_eq!(cq.poll(), Ok(None));
        assert_eq!(cq.queue.consumer(), 13);
        cq.write(13, DONE, 9);
        assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 9)))));
    }
}

#[test]
fn impossible_basic_block_is_corrupt() {
    let failed = OpOwn::title(CqeOpcode::ReqErr, false);
    for (minis, op_own, corrupt) in [
        (0, OpOwn::title(CqeOpcode::Req, false), CorruptQueue::Block { index: 0, minis: 0 }),
        (1, OpOwn::title(CqeOpcode::Req, false), CorruptQueue::Block { index: 0, minis: 1 }),
        (9, OpOwn::title(CqeOpcode::Req, false), CorruptQueue::Block { index: 0, minis: 9 }),
        (2, failed, CorruptQueue::BadTitle { index: 0 }),
    ] {
        let mut cq = Fixture::new(Layout::Basic, 0);
        let title = Cqe { byte_cnt: minis.into(), op_own, ..Cqe::INITIAL };
        cq.slots.write(0, title.as_bytes());
        assert_eq!(cq.poll(), Err(corrupt));
        cq.write(0, DONE, 9);
        assert_eq!(cq.queue.drain(8, |_| panic!("corrupt")), Err(corrupt));
    }
}

/// Inline data is a format too, but not compression.
#[test]
fn inline_formats_are_completions_of_plain_queues() {
    let mut cq = Fixture::new(Layout::Plain, 0);
    cq.write(0, OpOwn(DONE.0 | 0x04), 1);
    cq.write(1, OpOwn(DONE.0 | 0x08), 2);
    assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 1)))));
    assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 2)))));
    assert_eq!(cq.poll(), Ok(None));
}

/// The sequence number has two bits; each event changes it by one, and nothing else does.
#[test]
fn arm_number_counts_events() {
    let mut cq = Fixture::new(Layout::Plain, 0);
    cq.write(0, DONE, 1);
    let expect = |cq: &mut Fixture, arm: Arm, number: u8, index: u8| {
        cq.queue.arm(arm);
        let command = [number << 4 | u8::from(arm == Arm::Solicited), 0, 0, index];
        assert_eq!(cq.record.read(4, 4), command);
        assert_eq!(cq.arm.read(0, 8), [command, [0, 0, 0, 0x56]].concat());
    };
    expect(&mut cq, Arm::Any, 0, 0);
    expect(&mut cq, Arm::Solicited, 0, 0);
    assert_eq!(cq.poll(), Ok(Some(Ok((QPN, 1)))));
    cq.queue.release();
    expect(&mut cq, Arm::Any, 0, 1);
    for event in 1..=9 {
        cq.queue.event_seen();
        expect(&mut cq, Arm::Any, event & 3, 1);
        expect(&mut cq, Arm::Solicited, event & 3, 1);
    }
    cq.queue.event_seen();
    cq.queue.event_seen();
    expect(&mut cq, Arm::Any, 11 & 3, 1);
}

#[test]
fn queue_reports_its_number_slots_and_consumer() {
    let mut cq = Fixture::new(Layout::Plain, 0x0300_0005);
    assert_eq!((cq.queue.cqn(), cq.queue.capacity(), cq.queue.consumer()), (0x56, 1 << LOG, 0x0300_0005));
    // The card knows 24 bits of the consumer index.
    cq.queue.release();
    assert_eq!(cq.record.read(0, 4), [0, 0, 0, 5]);
}
