//! Runs: posts by a group of threads that share one reservation, one fence, one mark and one doorbell.
//!
//! One thread of the group, its leader, reserves consecutive numbers and waits for room; then every thread writes its
//! request; then the leader fences and rings for all. The group synchronises between these steps, so the leader's fence
//! orders all threads' requests before its doorbell: causality is transitive over a barrier and a fence, whatever their
//! scopes.
//!
//! A run is admitted in parts, each with one fence and one doorbell: a part is no longer than the card's batch or ring,
//! has value slots of one lap, and doesn't reach across the cursor's wrap. A short part, of at most 16 posts, is
//! admitted and marked like single posts, with all its ready bits and one combiner in one add. A long part doesn't fit
//! in the bitmap: it's admitted once everything before it is rung, and its leader, the active combiner from then on,
//! rings for it without marks. No post behind it is rung meanwhile, because the rung count stands at the part's first
//! number, whose ready bit isn't set.

use super::pass::{
    COMBINER, all_rung, continue_pass, has_combiner, is_idle, make_passes, ready_bit, ready_bits, ring, rung,
};
use super::room::{has_room, wait_for_room};
use super::{CombiningQueue, halves, pass};
use crate::post::MAX_BATCH;
use crate::status::Status;
use crate::sync::Ordering;
use crate::wait::Limit;

/// The longest part that uses ready bits; shorter in the model, which has few posts.
const SHORT: u32 = if cfg!(loom) { 2 } else { MAX_BATCH };

/// Posts with consecutive numbers.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// The cursor word before the first post's reservation.
    pub reserved: u64,
    /// The number of posts, at least 1.
    pub posts: u32,
}

impl Run {
    /// Returns the first post's number.
    #[inline(always)]
    pub fn first(self) -> u32 {
        halves(self.reserved).0
    }

    /// Returns the first `posts` of the run.
    #[inline(always)]
    pub fn part(self, posts: u32) -> Run {
        Run { posts, ..self }
    }

    /// Returns the run without its first `posts`.
    #[inline(always)]
    pub fn rest(self, posts: u32) -> Run {
        Run { reserved: self.reserved.wrapping_add(posts.into()), posts: self.posts - posts }
    }

    fn is_short(self) -> bool {
        self.posts <= SHORT
    }
}

/// Reserves `posts` consecutive numbers.
#[inline(always)]
pub fn reserve_run<Q: CombiningQueue>(queue: Q, posts: u32) -> Run {
    Run { reserved: queue.words().cursor.fetch_add(posts.into(), Ordering::Relaxed), posts }
}

/// Waits until a first part of `run` has room, and returns how many posts it has. The caller must write these requests,
/// call [`ring_run`] for them, and then go on with the rest of the run.
///
/// # Errors
/// The reason the wait ended. The endpoint is then poisoned, and the rest of the run is given up.
pub fn admit_run<Q: CombiningQueue>(queue: Q, limits: impl Limit, run: Run) -> Result<u32, Status> {
    let part = run.part(first_part(queue, run));
    let last = part.reserved.wrapping_add(u64::from(part.posts - 1));
    // If `bound` admits the last post, it also admits the 15 numbers before it.
    if part.is_short() && has_room(queue, last) {
        return Ok(part.posts);
    }
    wait_for_room(queue, limits, part.reserved, part.posts, || part.is_short() || begin_pass(queue, part.first()))?;
    Ok(part.posts)
}

/// Returns the length of the first part.
fn first_part<Q: CombiningQueue>(queue: Q, run: Run) -> u32 {
    let first = run.first();
    let to_wrap = (u32::MAX - first).saturating_add(1);
    let part = run.posts.min(queue.max_batch()).min(queue.sq_size()).min(to_wrap);
    match queue.value_slots() {
        0 => part,
        slots => part.min(slots - (first & (slots - 1))),
    }
}

/// Makes the caller the active combiner, if everything below `first` is rung and no combiner is active.
fn begin_pass<Q: CombiningQueue>(queue: Q, first: u32) -> bool {
    let seen = queue.words().state.load(Ordering::Relaxed);
    rung(seen) == first && !has_combiner(seen) && pass::begin_pass(queue, seen)
}

/// Rings for a part that [`admit_run`] admitted and whose requests are written, unless `aggregate` leaves that to a
/// later post. A long part is rung in any case, as it's a full batch.
#[inline(never)]
pub fn ring_run<Q: CombiningQueue>(queue: Q, part: Run, aggregate: bool) {
    let (first, state) = (part.first(), queue.words().state);
    let end = first.wrapping_add(part.posts);
    queue.fence();
    if !part.is_short() {
        ring(queue, end);
        let change = all_rung(part.posts).wrapping_sub(COMBINER);
        let left = state.fetch_add(change, Ordering::Acquire).wrapping_add(change);
        if !is_idle(left) {
            continue_pass(queue, left);
        }
        return;
    }
    let ready = ready_bits(first, part.posts);
    if aggregate {
        let old = state.fetch_add(ready, Ordering::Acquire);
        if old & ready_bit(end) != 0 {
            make_passes(queue);
        }
        return;
    }
    let mark = ready + COMBINER;
    let old = state.fetch_add(mark, Ordering::Acquire);
    if !has_combiner(old) {
        continue_pass(queue, old + mark);
    }
}
