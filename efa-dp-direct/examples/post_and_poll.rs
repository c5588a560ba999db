//! Posts one RDMA write and polls its completion, on rings in plain memory: `cargo run -p efa-dp-direct --example
//! post_and_poll`.
//!
//! On hardware the rings and the doorbell come from a provider (libfabric, rdma-core). Here they are arrays, and
//! [`card`] does what a card does when its doorbell is rung.
#![allow(unsafe_code)]

use efa_dp_direct::cq::{self, Cqe, SendCqe, Status};
use efa_dp_direct::queue::{CqAttrs, CqV0, QpAttrs, QpV1, WQ_CAPS_64_BIT_REQ_ID};
use efa_dp_direct::sq;
use efa_dp_direct::wqe::words::{NARROW, WqeTemplate};
use efa_dp_direct::wqe::{Destination, Geometry, Hints, RemoteMem, RequestIds, Sge, parse};
use std::array::from_fn;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Slots of each ring, a power of two.
const SLOTS: usize = 4;
/// 64-bit words of a completion.
const CQE_WORDS: usize = 4;

/// Reads the work request in slot 0 as a card does, and answers with a completion in slot 0.
fn card(send_ring: &[AtomicU64], completion_ring: &[AtomicU64]) -> Result<(), Box<dyn std::error::Error>> {
    let bytes: Vec<u8> = send_ring[..NARROW].iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
    let request = parse(&bytes, &Geometry::NARROW)?;
    println!("the card reads request {:#x}: {:?} to {:?}", request.wr_id, request.op, request.dest);
    let status = Status::from_raw(0);
    let completion = SendCqe { qp_num: 1, wr_id: request.wr_id, op: Ok(request.op.op()), status };
    // Completion rings start out zeroed, so the first lap has phase 1: that bit shows the poller the new entry.
    for (word, bytes) in completion_ring.iter().zip(completion.emit(true).0.chunks_exact(8)) {
        word.store(u64::from_le_bytes(bytes.try_into()?), Relaxed);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The memory that software and card share: two rings of words and a doorbell.
    let send_ring: [AtomicU64; SLOTS * NARROW] = from_fn(|_| AtomicU64::new(0));
    let completion_ring: [AtomicU64; SLOTS * CQE_WORDS] = from_fn(|_| AtomicU64::new(0));
    let doorbell = AtomicU32::new(0);

    // The queue structs hold the addresses and the cursors. They have the layout of NCCL's device code.
    let mut qp = QpV1::new(&QpAttrs {
        sq_buffer: send_ring.as_ptr().cast_mut().cast(),
        sq_doorbell: doorbell.as_ptr(),
        sq_num_entries: SLOTS as u32,
        sq_entry_size: 64,
        sq_max_batch: 2,
        rq_num_entries: 1,
        rq_entry_size: 16,
        sq_max_inline_data: 32,
        sq_max_rdma_sges: 1,
        sq_caps: WQ_CAPS_64_BIT_REQ_ID,
        ..QpAttrs::ZERO
    })
    .map_err(|error| format!("{error:?}"))?;
    let buffer = completion_ring.as_ptr().cast_mut().cast();
    let cq_attrs = CqAttrs { comp_mask: 0, flags: 0, buffer, num_entries: SLOTS as u32, entry_size: 32 };
    let mut cq = CqV0::new(&cq_attrs).map_err(|error| format!("{error:?}"))?;

    // The work request: writes 4096 bytes from a local buffer to a peer's memory.
    let destination = Destination { ah: 7, qpn: 42, qkey: 0x1234 };
    let remote = RemoteMem { addr: 0x10_0000, rkey: 0x55 };
    let local = Sge { addr: 0x20_0000, length: 4096, lkey: 0x66 };
    let request = WqeTemplate::new(0xabcd, destination, Hints::NONE).write(remote, local);

    // Post: reserve a slot, store the request with its lap's phase bit, ring the doorbell.
    let send_queue = &raw mut qp.sq.wq;
    // SAFETY: the queue, its ring and its doorbell are local to this function, and no other thread has them.
    unsafe { sq::start_batch(send_queue, 1) };
    // SAFETY: as above; the ring has slots of `NARROW` words, and index 0 was reserved.
    unsafe { sq::place(send_queue, 0, request) };
    // SAFETY: as above.
    unsafe { sq::flush(send_queue) };
    println!("posted 1 request; the doorbell holds the producer count {}", doorbell.load(Relaxed));

    // Poll: empty until the card has written an entry with its lap's phase bit.
    // SAFETY: the queue and its ring are local to this function, and no other thread has them.
    assert_eq!(unsafe { cq::poll(&cq, 0) }, None);
    card(&send_ring, &completion_ring)?;
    // SAFETY: as above.
    let slot = unsafe { cq::poll(&cq, 0) }.ok_or("the completion queue is empty")?;
    // SAFETY: as above; `poll` returned the slot.
    let entry = unsafe { cq::read(&cq, slot) };
    println!("completion in slot {slot}: {:?}", Cqe::parse(&entry, RequestIds::Bits64)?);
    // SAFETY: as above; one entry was read and goes back to the card.
    unsafe { cq::pop(&mut cq, 1) };
    Ok(())
}
