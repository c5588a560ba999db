//! Posting: two policies over one trait.
//!
//! A policy takes a work request from reservation to doorbell and answers three questions that an unordered card makes
//! hard, for it only counts completions: when may a ring slot or a value slot be written again, when has everything
//! before a flush completed, and who rings.
//!
//! What both rely on, with `idx` a post's number on its endpoint and `C` the card's completion count: a post is
//! *admitted* when the posts before it that are not complete, `idx - C`, are at most
//!
//! * `sq_size - 1`, so that the ring does not overflow (the card fetches in order, a count is enough);
//! * `idx mod V` where the endpoint has `V` value slots: then every post of earlier laps has completed, whichever of
//!   this lap finished early, and the slot is no longer read. Every post on such an endpoint obeys it, or an early
//!   plain put would satisfy the count in place of a value;
//! * `idx - B` where a flush has raised a barrier at `B`: then nothing from `B` on is admitted, and counted, before
//!   everything below `B` has completed, and the flush can trust the count.

pub mod combining;
pub mod locked;
#[cfg(all(test, loom))]
mod model;
pub mod sharing;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::status::Status;
use crate::wait::{Limit, Spin};
pub use sharing::{Cta, Gpu, Share, Sharing, Thread};

/// Completion counters wrap at 2^31.
pub const COUNT_MASK: u32 = 0x7fff_ffff;
/// Most work requests that the `combining` policy leaves unrung, whatever the card takes.
const MAX_BATCH: u32 = 16;

/// What a policy needs of an endpoint. All of it is cheap, and safe to call from any thread.
pub trait Queue {
    /// The card's completion count, counted from the first post: low 31 bits, acquire.
    fn completed(&self) -> u32;
    /// The card has completed a work request of this endpoint in error.
    fn failed(&self) -> bool;
    /// Work requests that may be outstanding at once.
    fn sq_size(&self) -> u32;
    /// Work requests that may be written and not yet rung.
    fn max_batch(&self) -> u32;
    /// Value slots: a power of two, or 0.
    fn value_slots(&self) -> u32;
    /// Orders this thread's earlier stores before its later ones, for the card.
    fn fence(&self);
    /// Tells the card that all work requests below `count` are written.
    fn doorbell(&self, count: u32);
    /// Shows NCCL's cursors that everything below `rung` was written and rung. Called by the one who rang, before it
    /// lets go.
    fn publish(&self, rung: u32);
    /// NCCL's cursor of what was rung: ahead of ours when NCCL's device code posted here meanwhile.
    fn published(&self) -> u32;
    /// NCCL's cursor of what was written: ahead of `published` when NCCL's device code has deferred posts.
    fn released(&self) -> u32 {
        self.published()
    }
}

/// A work request that gets its number from the policy. A closure will do; what is inlined for certain is no closure.
pub trait Write: Copy {
    /// Puts request `idx`, and its value, in place.
    fn write(self, idx: u32);
}

impl<F: Fn(u32) + Copy> Write for F {
    #[inline(always)]
    fn write(self, idx: u32) {
        self(idx);
    }
}

impl<Q: Queue> Queue for &Q {
    #[inline(always)]
    fn completed(&self) -> u32 {
        (**self).completed()
    }
    #[inline(always)]
    fn failed(&self) -> bool {
        (**self).failed()
    }
    #[inline(always)]
    fn sq_size(&self) -> u32 {
        (**self).sq_size()
    }
    #[inline(always)]
    fn max_batch(&self) -> u32 {
        (**self).max_batch()
    }
    #[inline(always)]
    fn value_slots(&self) -> u32 {
        (**self).value_slots()
    }
    #[inline(always)]
    fn fence(&self) {
        (**self).fence();
    }
    #[inline(always)]
    fn doorbell(&self, count: u32) {
        (**self).doorbell(count);
    }
    #[inline(always)]
    fn publish(&self, rung: u32) {
        (**self).publish(rung);
    }
    #[inline(always)]
    fn published(&self) -> u32 {
        (**self).published()
    }
    #[inline(always)]
    fn released(&self) -> u32 {
        (**self).released()
    }
}

/// Posts that are not complete may number this many when `idx` is admitted.
#[inline(always)]
fn admitted<Q: Queue>(queue: Q, idx: u32, barrier: u32) -> u32 {
    let mut limit = queue.sq_size() - 1;
    let slots = queue.value_slots();
    if slots != 0 {
        limit = limit.min(idx & (slots - 1));
    }
    limit.min(idx.wrapping_sub(barrier))
}

/// Posts before `idx` that are not complete.
#[inline(always)]
fn outstanding(idx: u32, completed: u32) -> u32 {
    idx.wrapping_sub(completed) & COUNT_MASK
}

/// The count has reached `at`, at which a barrier stands or stood. `cursor` was read after `completed`.
///
/// From the barrier on nothing is admitted before the count has reached it, so the count cannot run past unproven.
#[inline(always)]
fn reached(cursor: u32, completed: u32, at: u32) -> bool {
    outstanding(cursor, completed) <= cursor.wrapping_sub(at)
}

/// One more round of a wait on `queue`.
#[inline(always)]
pub(crate) fn pause<Q: Queue, L: Limit>(queue: Q, spin: &mut Spin<L>) -> Result<(), Status> {
    if queue.failed() {
        return Err(Status::CardError);
    }
    spin.pause()
}
