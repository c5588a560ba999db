//! Passes at the doorbell: one poster rings for every request that is ready.

use super::CombiningQueue;
use crate::post::{MAX_BATCH, Queue};
use crate::status::Status;
use crate::sync::Ordering;
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;

/// One combiner, in the state word.
pub const COMBINER: u64 = 1 << 16;
const COMBINERS: u64 = 0xffff << 16;
/// The ready bitmap.
const READY: u32 = (1 << MAX_BATCH) - 1;

#[inline(always)]
pub fn ready_bit(idx: u32) -> u64 {
    // Shifted as 32 bits: on a GPU, shifting 64 bits takes two shifts.
    u64::from(1_u32 << (idx % MAX_BATCH))
}

/// Returns the ready bits of `posts` numbers from `first` on, at most as many as the bitmap has.
#[inline(always)]
pub fn ready_bits(first: u32, posts: u32) -> u64 {
    wrapped((1 << posts) - 1, first)
}

/// Rotates a bitmap from number 0 on so that it begins at `first`.
#[inline(always)]
fn wrapped(bits: u32, first: u32) -> u64 {
    let mask = bits << (first % MAX_BATCH);
    u64::from((mask | mask >> MAX_BATCH) & READY)
}

#[inline(always)]
pub fn rung(state: u64) -> u32 {
    (state >> STATE_RUNG_SHIFT) as u32
}

/// Returns the state with everything below `idx` rung, and nothing else.
#[inline(always)]
pub fn all_rung(idx: u32) -> u64 {
    u64::from(idx) << STATE_RUNG_SHIFT
}

/// Returns whether there is an active combiner.
#[inline(always)]
pub fn has_combiner(state: u64) -> bool {
    state & COMBINERS != 0
}

/// Returns whether no combiner is active and no request is ready.
#[inline(always)]
pub fn is_idle(state: u64) -> bool {
    state as u32 == 0
}

/// Returns whether no combiner is active, and there's a request to ring or a cursor of NCCL's to take over.
#[inline(always)]
fn needs_pass<Q: CombiningQueue>(queue: Q, state: u64) -> bool {
    !has_combiner(state) && (is_ready(state) | (queue.released() != rung(state)))
}

/// Returns whether the first unrung work request is ready.
#[inline(always)]
fn is_ready(state: u64) -> bool {
    state & ready_bit(rung(state)) != 0
}

/// Continues the passes of the active combiner, which left `state`. If no combiner is active, makes passes if they're
/// needed.
#[cold]
#[inline(never)]
pub fn continue_pass<Q: CombiningQueue>(queue: Q, mut state: u64) {
    while has_combiner(state) {
        state = pass(queue, state);
    }
    if !is_idle(state) {
        make_passes(queue);
    }
}

/// Makes passes as long as one is needed.
#[cold]
#[inline(never)]
pub fn make_passes<Q: CombiningQueue>(queue: Q) {
    passes(queue);
}

/// Does the same inline, because a flush in a kernel calls no function.
#[inline(always)]
pub fn passes<Q: CombiningQueue>(queue: Q) {
    loop {
        let state = queue.words().state;
        // Only a hint: the compare-and-swap is the acquire.
        let mut seen = state.load(Ordering::Relaxed);
        if !needs_pass(queue, seen) {
            return;
        }
        if begin_pass(queue, seen) {
            seen += COMBINER;
            while has_combiner(seen) {
                seen = pass(queue, seen);
            }
        }
    }
}

/// Rings the doorbell and publishes the cursors. The fence is the release of both, and of the add that ends the pass.
#[inline(always)]
pub fn ring<Q: Queue>(queue: Q, target: u32) {
    queue.doorbell(target);
    queue.publish(target);
    queue.fence();
}

/// Makes one pass. The caller is the active combiner, and `state` is the word as it left it. Returns the word as this
/// pass leaves it: while that shows a combiner, the caller is still the active one.
#[inline(always)]
fn pass<Q: CombiningQueue>(queue: Q, state: u64) -> u64 {
    let from = rung(state);
    // Two copies of the bitmap, one above the other, shifted by n bits, give the bitmap rotated by n. The run is its
    // ones below the lowest zero, at most all 16.
    let ready = state as u32 & READY;
    let stopped = !((ready | ready << MAX_BATCH) >> (from % MAX_BATCH)) | 1 << MAX_BATCH;
    let run = (stopped - 1) & !stopped;
    let posts = run.count_ones();
    // Our own requests aren't rung yet. The cursors stand at the rung count if one is ready there.
    let (mut target, mut published) = (from.wrapping_add(posts), from);
    if posts == 0 {
        // If NCCL's device code has posted on this endpoint meanwhile, the pass takes over its cursor and rings what it
        // has deferred. Only the active combiner changes the cursors.
        (target, published) = (queue.released(), queue.published());
    }
    if published != target {
        ring(queue, target);
    }
    // The combiners aren't 0, so the lower half borrows from the upper.
    let ended = (state & COMBINERS) as u32 | wrapped(run, from) as u32;
    end_pass_by(queue, all_rung(target.wrapping_sub(from).wrapping_sub(1)) | u64::from(ended.wrapping_neg()))
}

/// Becomes the active combiner, unless the state has changed since it was `seen`.
#[inline(always)]
pub fn begin_pass(queue: impl CombiningQueue, seen: u64) -> bool {
    queue.words().state.compare_exchange(seen, seen + COMBINER, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Ends a pass, and returns the state it leaves.
#[inline(always)]
pub fn end_pass_by<Q: CombiningQueue>(queue: Q, change: u64) -> u64 {
    queue.words().state.fetch_add(change, Ordering::Acquire).wrapping_add(change)
}

/// Rings what is ready, for a wait that depends on it.
///
/// # Errors
/// [`Status::Poisoned`]: a post can never become ready.
pub fn ring_ready<Q: CombiningQueue>(queue: Q) -> Result<(), Status> {
    make_passes(queue);
    match queue.words().poison.load(Ordering::Relaxed) {
        0 => Ok(()),
        _ => Err(Status::Poisoned),
    }
}
