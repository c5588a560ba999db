//! Polling a completion queue, and what its entries mean.
//!
//! [`poll`] and [`pop`] follow the device convention: the card has written an entry once the entry's phase bit is that
//! of its lap, and the caller copies an entry before reading it. [`Cqe`] is what an entry means. [`reader`] reads
//! entries field by field like each release's device API and the host providers, for code that must produce the same
//! results.

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

/// Returns the phase word of the entry `ahead` places after the consumer cursor.
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

/// Returns the address of the entry in a slot.
#[inline(always)]
fn entry(queue: Shared<CqV0>, slot: u32) -> *const u8 {
    let offset = slot as usize * queue.get(offset_of!(CqV0, entry_size)) as usize;
    queue.pointer::<u8>(offset_of!(CqV0, buf)).wrapping_add(offset)
}

/// Returns the slot of the entry `position` places after the consumer cursor, if the card has written it.
///
/// # Safety
/// `cq` is a live completion queue with an 8-byte aligned ring, on which no other thread pops meanwhile.
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

/// Copies the entry at `slot` out of the ring. For a 16-byte entry, the second half is zero.
///
/// # Safety
/// `cq` is a live completion queue with an 8-byte aligned ring, and `slot` is one of its slots ([`poll`] returned it).
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
