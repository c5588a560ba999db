//! Posting on a send queue with the device convention: start a batch, place its requests, flush.
//!
//! Other threads and NCCL's device code share the queue struct, and the card reads the ring and the doorbell. All three
//! are raw pointers, and every access is one atomic word. Nothing here takes a lock: one thread at a time may call
//! [`start_batch`] and [`flush`] on a queue, and the threads of one batch may call [`place`] together.
//!
//! As in the reference, nothing here checks whether the ring has room: a poster knows that from its completions.

#![allow(unsafe_code)]

use crate::arch;
use crate::queue::WqV0;
use crate::shared::Shared;
use crate::wqe::words;
use core::mem::offset_of;

/// Returns the slot of request `idx` in a ring with this mask.
#[inline(always)]
pub const fn slot(idx: u32, queue_mask: u32) -> u32 {
    idx & queue_mask
}

/// Returns the phase word `ahead` slots after the slot at `cursor`, whose phase word is `phase`. It flips with each lap
/// in between, and its lowest bit is what is written. More than a lap ahead it grows past 1, as in the reference.
#[inline(always)]
pub const fn ring_phase(phase: u32, cursor: u32, queue_mask: u32, queue_size_shift: u32, ahead: u32) -> u32 {
    phase ^ ((cursor & queue_mask).wrapping_add(ahead) >> queue_size_shift)
}

/// Stores a request of `N` words into a ring slot, in one MMIO store per word.
///
/// # Safety
/// `ring` is the start of a ring of `N`-word slots, 8-byte aligned and valid for writes, that includes `slot`; nothing
/// else writes that slot meanwhile.
#[inline(always)]
pub unsafe fn store<const N: usize>(ring: *mut u8, slot: u32, wqe: &[u64; N]) {
    let offset = slot as usize * size_of::<[u64; N]>();
    // SAFETY: the caller vouches that the ring has this slot.
    let at = unsafe { ring.add(offset) }.cast::<u64>();
    for (i, &word) in wqe.iter().enumerate() {
        // SAFETY: word `i` is inside the slot.
        let to = unsafe { at.add(i) };
        // SAFETY: the ring is valid for writes and aligned, and the slot is this caller's.
        unsafe { arch::mmio_store_u64(to, word) };
    }
}

/// Rings the doorbell with the producer count, after everything before it and before everything after it.
///
/// # Safety
/// `db` is the queue's doorbell, 4-byte aligned and valid for writes; one thread at a time rings it.
#[inline(always)]
pub unsafe fn ring(db: *mut u32, pc: u32) {
    arch::fence_system();
    // SAFETY: the caller vouches that the doorbell is valid, aligned, and not rung by another thread meanwhile.
    unsafe { arch::mmio_store_u32(db, pc) };
    arch::fence_system();
}

/// Makes room for `n` requests in the batch. If they would exceed `max_batch`, rings pending requests first. As in the
/// reference, a batch may itself be larger than `max_batch`.
///
/// The requests go to the batch's indexes `wqes_pending - n ..` ([`place`]).
///
/// # Safety
/// `wq` is that of a live send queue on which no other thread starts or flushes meanwhile.
#[inline(always)]
pub unsafe fn start_batch(wq: *mut WqV0, n: u32) {
    // SAFETY: the caller vouches that the queue is live and that no other thread moves its cursors.
    let queue = unsafe { Shared::new(wq) };
    if queue.get(offset_of!(WqV0, wqes_pending)).wrapping_add(n) > queue.get(offset_of!(WqV0, max_batch)) {
        // SAFETY: the caller vouches for what `flush` requires: a live queue on which no other thread starts, places or
        // flushes.
        unsafe { flush(wq) };
    }
    queue.set(offset_of!(WqV0, wqes_pending), queue.get(offset_of!(WqV0, wqes_pending)).wrapping_add(n));
}

/// Places a request of `N` words (8 or 16: the queue's request size) at an index of the open batch, with its lap's
/// phase.
///
/// # Safety
/// `wq` is that of a live send queue whose requests have `N` words; this thread started the index, and no thread
/// flushes meanwhile.
#[inline(always)]
pub unsafe fn place<const N: usize>(wq: *const WqV0, index_in_batch: u32, mut wqe: [u64; N]) {
    // SAFETY: the caller vouches that the queue is live; this function only reads it.
    let queue = unsafe { Shared::new(wq.cast_mut()) };
    let (pc, mask) = (queue.get(offset_of!(WqV0, pc)), queue.get(offset_of!(WqV0, queue_mask)));
    wqe[0] = words::with_phase(wqe[0], phase_ahead(queue, index_in_batch) & 1 != 0);
    let buf = queue.pointer(offset_of!(WqV0, buf));
    // SAFETY: the ring has `mask + 1` slots of this size, and the caller vouches that no other thread writes this one.
    unsafe { store(buf, slot(pc.wrapping_add(index_in_batch), mask), &wqe) };
}

/// Rings the pending requests, if any.
///
/// # Safety
/// `wq` is that of a live send queue on which no other thread starts, places or flushes meanwhile.
#[inline(always)]
pub unsafe fn flush(wq: *mut WqV0) {
    // SAFETY: the caller vouches that the queue is live and that no other thread moves its cursors.
    let queue = unsafe { Shared::new(wq) };
    let pending = queue.get(offset_of!(WqV0, wqes_pending));
    if pending == 0 {
        return;
    }
    let pc = queue.get(offset_of!(WqV0, pc)).wrapping_add(pending);
    queue.set(offset_of!(WqV0, phase), phase_ahead(queue, pending));
    queue.set(offset_of!(WqV0, pc), pc);
    queue.set(offset_of!(WqV0, wqes_pending), 0);
    let db = queue.pointer(offset_of!(WqV0, db));
    // SAFETY: the queue's doorbell; the caller vouches that no other thread rings it meanwhile.
    unsafe { ring(db, pc) };
}

/// Returns the phase word `ahead` slots after the producer cursor.
#[inline(always)]
fn phase_ahead(queue: Shared<WqV0>, ahead: u32) -> u32 {
    ring_phase(
        queue.get(offset_of!(WqV0, phase)),
        queue.get(offset_of!(WqV0, pc)),
        queue.get(offset_of!(WqV0, queue_mask)),
        queue.get(offset_of!(WqV0, queue_size_shift)),
        ahead,
    )
}
