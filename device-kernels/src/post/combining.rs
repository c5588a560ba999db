//! The `combining` policy: a post reserves a slot with one add, writes and fences its work request in parallel with
//! other posts, and marks it ready. One poster, the combiner, then rings the doorbell for every request that is ready.
//!
//! # State
//!
//! * `cursor`, 64 bits. The low half is the reservation cursor: the queue struct's `pc`, which NCCL's code also
//!   reserves from. The high half is the flush barrier: the neighbouring `phase`, which no other code reads.
//! * `state`, 64 bits: the ready bitmap (16 bits, slot `idx & 15`), the number of combiners (16 bits), and the rung
//!   count `R` (32 bits, which wrap out of the top). At most 16 posts are reserved and admitted beyond `R`, so a slot's
//!   bit is unambiguous and the number of combiners can't overflow.
//! * `bound`, 64 bits: a `cursor` value up to which posts are admitted without looking at the counts (see
//!   `combining/room.rs`).
//!
//! When the cursor wraps at 2^32 it carries one into the barrier. A barrier that is one higher holds back no less, and
//! no `bound` reaches across the wrap. A flush doesn't assume that a barrier at its own snapshot was raised there.
//!
//! # Why no request stays unrung
//!
//! A plain post adds its ready bit and one combiner in one operation. The first combiner makes passes over the bitmap
//! (`combining/pass.rs`): a pass rings the contiguous ready run from `R`, then subtracts, in one add, the combiners it
//! has seen; another pass follows while any are left. An aggregated post adds no combiner. If it makes a request behind
//! it ringable, it makes a pass or leaves the request to the active combiner. So the poster that subtracts the last
//! combiner makes another pass if `R` is ready. Every wait makes passes too, so a flush, or a post that needs room,
//! rings deferred posts.
//!
//! # Orderings
//!
//! A reservation is relaxed: it only hands out a number. One system fence after a work request orders the request, its
//! value, and everything its poster had seen, before the mark, for the card, the host and every thread; it is the
//! mark's release. The mark is an acquire: a pass's doorbell comes after the fences of all work requests it covers. The
//! fence after the doorbell orders the doorbell before later work requests, as the card's batch limit requires, and
//! before the next pass's doorbell; it is the release of the add that ends the pass. The completion count is read with
//! acquire, and so is `bound`, which passes the count on: a write into a reclaimed slot comes after the card's last
//! read of it.
//!
//! # Why three atomics
//!
//! A post makes three: the reservation, the mark (this request is written) and the end of the pass at the doorbell. A
//! mark has to find out whether another thread is at the doorbell, and the end of a pass whether a thread has marked
//! meanwhile. If either were a plain store, both threads could leave and nobody would ring. A store with a fence and a
//! load behind it would find out too, for a third fence and a round trip more. The doorbell waits for the first two
//! only.

pub(in crate::post) mod pass;
pub(in crate::post) mod room;
pub mod run;

pub use pass::ring_ready;

use super::outcome::Outcome;
use super::{EncodeWqe, Queue, Step, Unfinished, outstanding};
use crate::platform::thread_value;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wait::Limit;
use pass::{COMBINER, all_rung, continue_pass, end_pass_by, has_combiner, is_idle, make_passes, ready_bit, ring};

/// A queue whose posters share [`Words`].
pub trait CombiningQueue: Queue {
    /// Returns the shared words.
    fn words(&self) -> Words<'_>;
}

/// The words that posters of one endpoint share.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    /// Reservation cursor (low half) and flush barrier (high half).
    pub cursor: &'a AtomicU64,
    /// Ready bitmap, combiners, rung count.
    pub state: &'a AtomicU64,
    /// The reservation up to which posts are admitted without a check.
    pub bound: &'a AtomicU64,
    /// Non-zero once a poster has given up a reservation.
    pub poison: &'a AtomicU32,
}

/// Splits a cursor word into the reservation cursor and the flush barrier.
#[inline(always)]
pub(super) fn halves(cursor: u64) -> (u32, u32) {
    (cursor as u32, (cursor >> 32) as u32)
}

/// Posts one work request, which `wqe` encodes into its slot.
///
/// # Errors
/// The reason a wait for room ended. The endpoint is then poisoned.
#[inline(always)]
pub fn post<Q: CombiningQueue>(
    queue: Q,
    limits: impl Limit,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), Status> {
    match try_post(queue, aggregate, wqe) {
        None => Ok(()),
        Some(unfinished) => finish(queue, limits, unfinished, aggregate, wqe),
    }
}

/// Handles the usual case of [`post`] in straight-line code: there's room at once, and no other poster is active. Any
/// other is left to [`finish`].
#[inline(always)]
pub fn try_post<Q: CombiningQueue>(queue: Q, aggregate: bool, wqe: impl EncodeWqe) -> Option<Unfinished> {
    let reserved = queue.words().cursor.fetch_add(thread_value(1).into(), Ordering::Relaxed);
    if !room::has_room(queue, reserved) {
        return Some(Unfinished { step: Step::WaitForRoom, word: reserved });
    }
    encode_and_mark(queue, reserved, aggregate, wqe)
}

/// Finishes what [`try_post`] has begun.
///
/// # Errors
/// As for [`post`].
#[inline(always)]
pub fn finish<Q: CombiningQueue>(
    queue: Q,
    limits: impl Limit,
    unfinished: Unfinished,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), Status> {
    let mut unfinished = Some(unfinished);
    if let Some(Unfinished { step: Step::WaitForRoom, word: reserved }) = unfinished {
        room::wait_for_room(queue, limits, reserved, 1, || true)?;
        unfinished = encode_and_mark(queue, reserved, aggregate, wqe);
    }
    match unfinished {
        Some(Unfinished { step: Step::MakePass, .. }) => make_passes(queue),
        Some(Unfinished { step: Step::ContinuePass, word: state }) => continue_pass(queue, state),
        _ => {}
    }
    Ok(())
}

/// Begins a flush: raises the barrier to the cursor. `now` is the cursor word, read after the count.
#[inline(always)]
pub(super) fn begin_flush<Q: CombiningQueue>(queue: Q, completed: u32, now: u64, at: &mut Option<u32>) -> Outcome {
    let (cursor, barrier) = halves(now);
    // Snapshot and barrier take one compare-and-swap, because a post in between would be counted in place of an earlier
    // one.
    *at = room::raise_barrier(queue.words(), now).then_some(cursor);
    if outstanding(cursor, completed) != 0 {
        return Outcome::WAITS;
    }
    if barrier == cursor { Outcome::UNUSED } else { Outcome::COMPLETED }
}

/// Encodes, fences and marks the request, and rings it if no other poster is active.
#[inline(always)]
fn encode_and_mark<Q: CombiningQueue>(
    queue: Q,
    reserved: u64,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Option<Unfinished> {
    let (idx, _) = halves(reserved);
    let state = queue.words().state;
    wqe.encode(idx);
    queue.fence();
    if aggregate {
        let old = state.fetch_add(ready_bit(idx), Ordering::Acquire);
        return (old & ready_bit(idx.wrapping_add(1)) != 0).then_some(Unfinished { step: Step::MakePass, word: old });
    }
    let mark = ready_bit(idx) + COMBINER;
    let old = state.fetch_add(mark, Ordering::Acquire);
    if old != all_rung(idx) {
        return (!has_combiner(old)).then_some(Unfinished { step: Step::ContinuePass, word: old + mark });
    }
    // No other poster is active, so the pass rings this post alone. One more is rung, less the mark: the difference has
    // no upper half.
    ring(queue, idx.wrapping_add(1));
    let state = end_pass_by(queue, u64::from((mark as u32).wrapping_neg()));
    (!is_idle(state)).then_some(Unfinished { step: Step::ContinuePass, word: state })
}
