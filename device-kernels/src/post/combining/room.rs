//! Room: which reservations are admitted.
//!
//! A post whose reservation equals `bound`, or is less than 16 below it, is admitted without looking at the counts. The
//! completion count and the rung count only grow, so room that was there once stays. The flush barrier is part of the
//! comparison, so a barrier raised since then makes the post check. At least every 16th post checks, and publishes a
//! new `bound`. It has then inserted the endpoint into the set of used endpoints since the barrier beside that `bound`,
//! or has acquired a `bound` with the same barrier. `bound` starts out with a barrier other than the first.

use super::pass::{make_passes, rung};
use super::{CombiningQueue, Words, halves};
use crate::post::{MAX_BATCH, max_outstanding, outstanding, pause};
use crate::status::Status;
use crate::sync::Ordering;
use crate::wait::{Limit, Spin};

/// A barrier this far behind is raised, so that the cursor never laps it.
const OLD_BARRIER: u32 = 1 << 30;

/// Returns whether `bound` admits `reserved`. Acquire: `bound` stands for the completion count that another poster
/// read.
#[inline(always)]
pub fn has_room<Q: CombiningQueue>(queue: Q, reserved: u64) -> bool {
    queue.words().bound.load(Ordering::Acquire).wrapping_sub(reserved) < u64::from(MAX_BATCH)
}

/// Waits until `posts` numbers from `reserved` on have room, and then until `begin` returns true.
///
/// # Errors
/// The reason the wait ended. The endpoint is then poisoned.
#[inline(always)]
pub fn wait_for_room<Q: CombiningQueue>(
    queue: Q,
    limits: impl Limit,
    reserved: u64,
    posts: u32,
    begin: impl Fn() -> bool,
) -> Result<(), Status> {
    insert_used(queue, reserved);
    let mut spin = Spin::new(limits);
    while !(check_room(queue, reserved, posts) && begin()) {
        make_passes(queue);
        wait_or_poison(queue, &mut spin)?;
    }
    Ok(())
}

/// Inserts the endpoint into the set of used endpoints, unless a post under the same barrier already has.
#[inline(always)]
pub fn insert_used<Q: CombiningQueue>(queue: Q, reserved: u64) {
    let (_, inserted_at) = halves(queue.words().bound.load(Ordering::Acquire));
    if inserted_at != halves(reserved).1 {
        queue.insert_used();
    }
}

/// Checks counts and barrier. Returns whether `reserved` is admitted, and publishes in `bound` how far other posts
/// would be too.
///
/// No post is admitted after an error, because a ring that never fills would take posts forever. Only posts that
/// `bound` admitted before the error can follow it, and the error's completion stays in the queue for the host to read.
/// In a context that isolates peers, posts wait until the host has read the completions of all errors.
///
/// The `posts` numbers from `reserved` on are admitted together; their value slots belong to one lap.
#[inline(always)]
pub fn check_room<Q: CombiningQueue>(queue: Q, reserved: u64, posts: u32) -> bool {
    let words = queue.words();
    let known = words.bound.load(Ordering::Acquire);
    let failures = queue.failures();
    if words.poison.load(Ordering::Relaxed) != 0 || !queue.has_identified(failures) {
        return false;
    }
    let (idx, barrier) = halves(reserved);
    // More posts than there are ready bits are admitted once everything before them is rung.
    let batch = queue.max_batch().min(MAX_BATCH.max(posts));
    let unrung = idx.wrapping_sub(rung(words.state.load(Ordering::Acquire)));
    let open = outstanding(idx, queue.completed().wrapping_add(failures));
    if unrung.wrapping_add(posts - 1) >= batch || open > max_outstanding(queue, idx, barrier) {
        return false;
    }
    if posts != 1 && open + posts > queue.sq_size() {
        return false;
    }
    // The cursor's wrap carries into the barrier, which this call hasn't checked, so `bound` stops before it.
    let to_wrap = (u32::MAX - idx).saturating_add(1);
    let mut room = (batch - unrung).min(queue.sq_size() - open).min(to_wrap);
    let slots = queue.value_slots();
    if slots != 0 {
        room = room.min(slots - (idx & (slots - 1)));
    }
    // A poster that gives up resets `bound` after setting the poison. A plain store here could undo the reset.
    let bound = reserved.wrapping_add(u64::from(room - 1));
    let _ = words.bound.compare_exchange(known, bound, Ordering::AcqRel, Ordering::Relaxed);
    if idx.wrapping_sub(barrier) >= OLD_BARRIER {
        raise_barrier(words, words.cursor.load(Ordering::Relaxed));
    }
    true
}

/// Raises the barrier to the cursor, unless the word has changed since it was `seen`.
#[inline(always)]
pub fn raise_barrier(words: Words<'_>, seen: u64) -> bool {
    let (cursor, _) = halves(seen);
    let raised = u64::from(cursor) << 32 | u64::from(cursor);
    let (Ok(now) | Err(now)) = words.cursor.compare_exchange(seen, raised, Ordering::Relaxed, Ordering::Relaxed);
    // If only the barrier is another one, another thread has raised it to the same cursor.
    halves(now).0 == cursor
}

/// Waits once more, or gives up the reservation. That leaves a hole forever, so it poisons the endpoint; every wait
/// reads the poison.
#[inline(always)]
fn wait_or_poison<Q: CombiningQueue, L: Limit>(queue: Q, spin: &mut Spin<L>) -> Result<(), Status> {
    let words = queue.words();
    let ended = match words.poison.load(Ordering::Relaxed) {
        0 => pause(queue, spin),
        _ => Err(Status::Poisoned),
    };
    if ended.is_err() {
        words.poison.store(1, Ordering::Relaxed);
        // Far behind every reservation: no post is admitted without a check from now on.
        let behind = words.cursor.load(Ordering::Relaxed).wrapping_sub(1 << 31);
        words.bound.store(behind, Ordering::Release);
    }
    ended
}
