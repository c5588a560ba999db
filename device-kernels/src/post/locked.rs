//! The `locked` policy: the whole post runs under the endpoint's `sq_lock`. An aggregated post leaves its work request
//! pending. This policy is the simple reference, and the benchmarks' baseline.
//!
//! NCCL's cursors don't cover pending requests. Before NCCL's device code posts on an endpoint, a plain post or a flush
//! must have rung them.

use super::outcome::Outcome;
use super::{EncodeWqe, MAX_BATCH, Queue, max_outstanding, outstanding, pause};
use crate::status::Status;
use crate::sync::{AtomicU32, Ordering};
use crate::wait::{Limit, Spin};

/// A queue whose cursors the lock guards. Any thread may call `next` and `pending`; only the thread that holds the lock
/// calls the others.
pub trait LockedQueue: Queue {
    /// Returns the next post's number: `pc` plus what is pending beyond it.
    fn next(&self) -> u32;
    /// Returns the number of work requests that are placed but not yet rung.
    fn pending(&self) -> u32;
    /// Counts one more request as pending.
    fn start(&self);
    /// Counts pending requests as posted. Returns the next post's number.
    fn take_pending(&self) -> u32;
    /// Returns the words that posters share.
    fn lock_words(&self) -> Words<'_>;
}

/// The words that posters of one endpoint share.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    /// 0 while no thread holds the lock.
    pub lock: &'a AtomicU32,
    /// Flush barrier.
    pub barrier: &'a AtomicU32,
    /// Non-zero while the endpoint is in the set of used endpoints.
    pub used: &'a AtomicU32,
}

/// Releases the lock on drop. The fence orders requests and doorbell before those of the next thread to take the lock,
/// for the card too: a poster that rings a deferred request fences only its own stores.
struct LockGuard<'a, Q: Queue>(Q, &'a AtomicU32);

impl<Q: Queue> Drop for LockGuard<'_, Q> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.fence();
        self.1.store(0, Ordering::Relaxed);
    }
}

/// Takes the lock if no other thread holds it.
#[inline(always)]
fn try_lock<Q: Queue>(queue: Q, words: Words<'_>) -> Option<LockGuard<'_, Q>> {
    let taken = words.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
    taken.ok().map(|_| LockGuard(queue, words.lock))
}

/// Takes the lock.
#[inline(always)]
fn lock<'a, Q: Queue>(queue: Q, words: Words<'a>, limits: impl Limit) -> Result<LockGuard<'a, Q>, Status> {
    let mut spin = Spin::new(limits);
    loop {
        if let Some(guard) = try_lock(queue, words) {
            return Ok(guard);
        }
        pause(queue, &mut spin)?;
    }
}

/// Posts one work request, which `wqe` encodes into its slot. Nothing is reserved before the request is admitted, so an
/// error leaves no hole.
///
/// # Errors
/// The reason a wait for the lock or for room ended.
#[inline(always)]
pub fn post<Q: LockedQueue>(queue: Q, limits: impl Limit, aggregate: bool, wqe: impl EncodeWqe) -> Result<(), Status> {
    let words = queue.lock_words();
    let _lock = lock(queue, words, limits)?;
    let idx = queue.next();
    let takes_failures = || queue.has_identified(queue.failures());
    let limit = max_outstanding(queue, idx, words.barrier.load(Ordering::Relaxed));
    let has_room = || {
        outstanding(idx, queue.completed()) <= limit
            || takes_failures() && outstanding(idx, queue.completed().wrapping_add(queue.failures())) <= limit
    };
    let is_batch_full = idx.wrapping_sub(queue.published()) >= queue.max_batch();
    // Without this check, a ring that never fills would take posts forever after an error, and the error's completion
    // would be overwritten.
    let must_check = idx.is_multiple_of(MAX_BATCH.min(queue.sq_size())) && !takes_failures();
    if is_batch_full || must_check || !has_room() {
        ring(queue);
        // The doorbell must come before later requests.
        queue.fence();
        let mut spin = Spin::new(limits);
        while !(has_room() && takes_failures()) {
            pause(queue, &mut spin)?;
        }
    }
    if words.used.load(Ordering::Relaxed) == 0 {
        words.used.store(1, Ordering::Relaxed);
        queue.insert_used();
    }
    queue.start();
    wqe.encode(idx);
    if !aggregate {
        queue.fence();
        ring(queue);
    }
    Ok(())
}

/// Rings pending requests, and those that NCCL's device code has deferred. Returns the next post's number.
#[inline(always)]
fn ring<Q: LockedQueue>(queue: Q) -> u32 {
    let next = queue.take_pending();
    if queue.published() != next {
        queue.doorbell(next);
        queue.publish(next);
    }
    next
}

/// Rings pending requests, for a wait that depends on them.
///
/// # Errors
/// The reason a wait for the lock ended.
pub fn ring_ready<Q: LockedQueue>(queue: Q, limits: impl Limit) -> Result<(), Status> {
    if queue.pending() != 0 {
        let _lock = lock(queue, queue.lock_words(), limits)?;
        ring(queue);
    }
    Ok(())
}

/// Begins a flush unless another thread holds the lock: rings what is pending, and raises the barrier to the next
/// post's number.
#[inline(always)]
pub(super) fn begin_flush<Q: LockedQueue>(queue: Q, completed: u32, at: &mut Option<u32>) -> Outcome {
    let words = queue.lock_words();
    let Some(_lock) = try_lock(queue, words) else { return Outcome::WAITS };
    let next = ring(queue);
    *at = Some(next);
    let open = outstanding(next, completed);
    words.barrier.store(next, Ordering::Relaxed);
    if open == 0 {
        words.used.store(0, Ordering::Relaxed);
    }
    if open == 0 { Outcome::UNUSED } else { Outcome::WAITS }
}
