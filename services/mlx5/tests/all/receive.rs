//! Receive queues and shared receive queues: descriptors byte for byte, order, refusals.

use crate::common::{hex, unhex};
use ferrogin_test_support::mlx5_memory::{Memory, POISON};
use mlx5::device::Handle;
use mlx5::rq::{RecvError, RecvParts, RecvQueue};
use mlx5::sq::UnknownRequest;
use mlx5::srq::{SharedRecvQueue, SrqParts};
use mlx5::wqe::Sge;

const SGE: Sge = Sge { addr: 0x0000_1111_2222_3333, length: 0x44, lkey: 0x5555_6666 };
const SGE_BYTES: &str = "00000044555566660000111122223333";
/// The terminating segment of a descriptor: no bytes, the invalid key.
const END_BYTES: &str = "00000000000001000000000000000000";

fn own() -> (RecvQueue<u32>, Memory, Memory) {
    let (ring, record) = (Memory::new(4 * 32), Memory::new(8));
    let parts = RecvParts { ring: ring.ring(5), record: record.record(0), keep_alive: Handle::new(()) };
    (RecvQueue::new(parts).expect("legal sizes"), ring, record)
}

#[test]
fn descriptors_equal_those_of_rdma_core() {
    let (mut queue, ring, record) = own();
    queue.post(0, &[SGE]).expect("room");
    queue.post(1, &[SGE, SGE]).expect("room");
    queue.post(2, &[]).expect("room");
    queue.post(3, &[Sge { length: 0, ..SGE }, SGE]).expect("room");
    assert_eq!(record.read(0, 4), [POISON; 4], "the doorbell record is unchanged before the doorbell");
    assert_eq!(hex(&ring.read(0, 32)), [SGE_BYTES, END_BYTES].concat());
    assert_eq!(hex(&ring.read(32, 32)), [SGE_BYTES, SGE_BYTES].concat(), "a full list has no terminating segment");
    assert_eq!(hex(&ring.read(64, 16)), END_BYTES);
    assert_eq!(ring.read(80, 16), [POISON; 16], "bytes after the terminating segment are not written");
    assert_eq!(hex(&ring.read(96, 32)), [SGE_BYTES, END_BYTES].concat(), "an empty buffer is left out");
    queue.ring();
    assert_eq!(record.read(0, 4), unhex("00000004"));
    assert_eq!(record.read(4, 4), [POISON; 4], "the send queue's doorbell record is unchanged");
}

#[test]
fn full_queue_returns_token_and_stays_usable() {
    let (mut queue, _ring, record) = own();
    (0..4).for_each(|token| queue.post(token, &[SGE]).expect("room"));
    let rejected = queue.post(99, &[SGE]).unwrap_err();
    assert_eq!((rejected.token, rejected.error), (99, RecvError::Full { capacity: 4 }));
    let mut next = 4;
    for wqe_counter in 0..100_000_u32 {
        assert_eq!(queue.complete(wqe_counter as u16), Ok(wqe_counter), "receives complete in order");
        queue.post(next, &[SGE]).expect("room");
        next += 1;
    }
    queue.ring();
    assert_eq!(record.read(0, 4), ((next & 0xffff).to_be_bytes()), "16 bits of the index");
    let wrong = (100_001 % 65536) as u16;
    assert_eq!(queue.complete(wrong), Err(UnknownRequest { wqe_counter: wrong }), "not the oldest");
    assert_eq!(queue.take_outstanding().collect::<Vec<_>>(), [100_000, 100_001, 100_002, 100_003]);
    assert_eq!(queue.outstanding(), 0);
}

#[test]
fn invalid_buffer_lists_are_refused() {
    let (mut queue, ring, _record) = own();
    let three = queue.post(1, &[SGE; 3]).unwrap_err();
    assert_eq!(three.error, RecvError::TooManySges { count: 3, max: 2 });
    let long = queue.post(1, &[Sge { length: 1 << 31, ..SGE }]).unwrap_err();
    assert_eq!(long.error, RecvError::SgeTooLong { length: 1 << 31 });
    assert_eq!(ring.read(0, ring.size()), vec![POISON; ring.size()]);
    assert_eq!(queue.complete(0), Err(UnknownRequest { wqe_counter: 0 }));
}

fn shared() -> (SharedRecvQueue<u32>, Memory, Memory) {
    let (ring, record) = (Memory::new(8 * 64), Memory::new(8));
    let parts = SrqParts { ring: ring.ring(6), record: record.record(0), srqn: 7, keep_alive: Handle::new(()) };
    (SharedRecvQueue::new(parts).expect("legal sizes"), ring, record)
}

#[test]
fn free_list_stays_intact_in_any_order_of_completions() {
    let (mut queue, ring, record) = shared();
    assert_eq!((queue.capacity(), queue.max_sge()), (7, 3));
    let next = |at: u16| {
        let bytes = ring.read(at as usize * 64 + 2, 2);
        u16::from_be_bytes([bytes[0], bytes[1]])
    };
    // The card's position in the list, and the tokens of the descriptors ahead.
    let (mut walk, mut token, mut taken) = (0, 0, Vec::new());
    let mut random = ferrogin_test_support::Random::new(3);
    let mut waiting = std::collections::VecDeque::new();
    for _ in 0..10_000 {
        while queue.post(token, &[SGE]).is_ok() {
            waiting.push_back(token);
            token += 1;
        }
        let full = queue.post(u32::MAX, &[SGE]).unwrap_err();
        assert_eq!((full.token, full.error), (u32::MAX, RecvError::Full { capacity: 7 }));
        queue.ring();
        assert_eq!(record.read(0, 4), (token & 0xffff).to_be_bytes());
        for _ in 0..random.below(4) {
            if let Some(token) = waiting.pop_front() {
                assert_eq!(hex(&ring.read(walk as usize * 64 + 16, 16)), SGE_BYTES);
                taken.push((walk, token));
                walk = next(walk);
            }
        }
        if !taken.is_empty() {
            let (wqe_counter, token) = taken.swap_remove(random.below(taken.len() as u32) as usize);
            assert_eq!(queue.complete(wqe_counter), Ok(token));
            assert!(queue.complete(wqe_counter).is_err(), "a descriptor completes once");
        }
    }
    assert!(queue.complete(8).is_err());
}
