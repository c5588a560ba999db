//! Posting on a receive queue with the device convention.

#![allow(unsafe_code)]

use crate::arch;
use crate::queue::WqV0;
use crate::shared::Shared;
use crate::sq;
use crate::wire::RxDesc;
use core::mem::offset_of;

/// Returns a receive's length field under the device convention: the low 16 bits.
pub const fn device_length(length: u32) -> u16 {
    length as u16
}

/// Returns a receive's length field under the host providers' convention: at most 65535.
pub const fn host_length(length: u32) -> u16 {
    if length > u16::MAX as u32 { u16::MAX } else { length as u16 }
}

/// Writes a descriptor at the producer cursor, and rings once `max_batch` are pending.
///
/// # Safety
/// `wq` is that of a live receive queue on which no other thread posts or flushes meanwhile.
#[inline(always)]
pub unsafe fn post(wq: *mut WqV0, desc: &RxDesc) {
    // SAFETY: the caller vouches that the queue is live and that no other thread moves its cursors.
    let queue = unsafe { Shared::new(wq) };
    let (pc, mask) = (queue.get(offset_of!(WqV0, pc)), queue.get(offset_of!(WqV0, queue_mask)));
    let buf = queue.pointer(offset_of!(WqV0, buf));
    // SAFETY: the ring has `mask + 1` slots of a descriptor's size, and the caller vouches that no other thread posts
    // meanwhile.
    unsafe { sq::store(buf, sq::slot(pc, mask), &desc.to_words()) };
    let pc = pc.wrapping_add(1);
    queue.set(offset_of!(WqV0, pc), pc);
    if pc & mask == 0 {
        queue.set(offset_of!(WqV0, phase), queue.get(offset_of!(WqV0, phase)).wrapping_add(1));
    }
    let pending = queue.get(offset_of!(WqV0, wqes_pending)).wrapping_add(1);
    queue.set(offset_of!(WqV0, wqes_pending), pending);
    if pending == queue.get(offset_of!(WqV0, max_batch)) {
        // SAFETY: the caller vouches for what `flush` requires: a live queue on which no other thread posts or flushes.
        unsafe { flush(wq) };
    }
}

/// Rings the pending descriptors, if any.
///
/// # Safety
/// As [`post`].
#[inline(always)]
pub unsafe fn flush(wq: *mut WqV0) {
    // SAFETY: the caller vouches that the queue is live and that no other thread moves its cursors.
    let queue = unsafe { Shared::new(wq) };
    if queue.get(offset_of!(WqV0, wqes_pending)) == 0 {
        return;
    }
    let db = queue.pointer(offset_of!(WqV0, db));
    arch::fence_system();
    // SAFETY: the queue's doorbell; the caller vouches that no other thread rings it meanwhile.
    unsafe { arch::mmio_store_u32(db, queue.get(offset_of!(WqV0, pc))) };
    queue.set(offset_of!(WqV0, wqes_pending), 0);
}
