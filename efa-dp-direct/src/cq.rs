//! Polling a completion queue, and the meaning of its entries.
//!
//! [`poll`] and [`pop`] follow the device convention: the card has written an entry when the entry's phase bit is that of its
//! lap, and the caller copies an entry before it reads it. [`Cqe`] is the meaning of an entry. [`reader`] reads an entry field by
//! field as the device API of each release and the host providers do, for code that must give the same results.

#![allow(unsafe_code)]

mod entry;
pub mod reader;

pub use entry::{Cqe, CqeError, RawCqe, RecvCqe, SendCqe, Sender, Status};

use crate::arch;
use crate::queue::CqV0;
use crate::shared::Shared;
use crate::sq;
use crate::wire::{CdescCommon, CdescFlags};
use core::mem::offset_of;

/// The phase word of the entry `ahead` places after the consumer cursor.
#[inline(always)]
fn phase_ahead(queue: Shared<CqV0>, ahead: u32) -> u32 {
    sq::ring_phase(
        queue.get(offset_of!(CqV0, phase)),
        queue.get(offset_of!(CqV0, cc)),
        queue.get(offset_of!(CqV0, queue_mask)),
        queue.get(offset_of!(CqV0, queue_size_shift)),
        ahead,
    )
}

/// The entry in a slot.
#[inline(always)]
fn entry(queue: Shared<CqV0>, slot: u32) -> *const u8 {
    let offset = slot as usize * queue.get(offset_of!(CqV0, entry_size)) as usize;
    queue.pointer::<u8>(offset_of!(CqV0, buf)).wrapping_add(offset)
}

/// The slot of the entry `position` places after the consumer cursor, if the card has written it.
///
/// # Safety
/// `cq` is a live completion queue whose ring is 8-byte aligned, on which no other thread pops meanwhile.
#[inline(always)]
pub unsafe fn poll(cq: *const CqV0, position: u32) -> Option<u32> {
    // SAFETY: the caller vouches that the queue is live; this function only reads it.
    let queue = unsafe { Shared::new(cq.cast_mut()) };
    let cc = queue.get(offset_of!(CqV0, cc));
    let slot = sq::slot(cc.wrapping_add(position), queue.get(offset_of!(CqV0, queue_mask)));
    // SAFETY: the slot is inside the ring, and the first word of an entry is readable and aligned.
    let first = unsafe { arch::load_u32(entry(queue, slot).cast()) };
    let flags = CdescFlags(first.to_le_bytes()[offset_of!(CdescCommon, flags)]);
    if u32::from(flags.phase()) != phase_ahead(queue, position) {
        return None;
    }
    arch::fence_acquire();
    Some(slot)
}

/// Copies the entry at `slot` out of the ring. An entry of 16 bytes leaves the second half zero.
///
/// # Safety
/// `cq` is a live completion queue whose ring is 8-byte aligned, and `slot` one of its slots ([`poll`] gave it).
#[inline(always)]
pub unsafe fn read(cq: *const CqV0, slot: u32) -> RawCqe {
    // SAFETY: the caller vouches that the queue is live; this function only reads it.
    let queue = unsafe { Shared::new(cq.cast_mut()) };
    let words = queue.get(offset_of!(CqV0, entry_size)) as usize / size_of::<u64>();
    let from = entry(queue, slot).cast::<u64>();
    let mut entry_words = [0; RawCqe::ZERO.0.len() / size_of::<u64>()];
    for (i, word) in entry_words.iter_mut().enumerate().filter(|(i, _)| *i < words) {
        // SAFETY: word `i` is inside the entry, readable and aligned, and only accessed atomically or by the card.
        *word = unsafe { arch::load_u64(from.wrapping_add(i)) };
    }
    RawCqe::from_words(entry_words)
}

/// Returns `amount` entries to the card. As in the reference, the caller must not return more than there are.
///
/// # Safety
/// `cq` is a live completion queue, on which no other thread polls or pops meanwhile.
#[inline(always)]
pub unsafe fn pop(cq: *mut CqV0, amount: u32) {
    // SAFETY: the caller vouches that the queue is live and that no other thread moves its cursor.
    let queue = unsafe { Shared::new(cq) };
    let phase = phase_ahead(queue, amount);
    queue.set(offset_of!(CqV0, phase), phase);
    queue.set(offset_of!(CqV0, cc), queue.get(offset_of!(CqV0, cc)).wrapping_add(amount));
}
