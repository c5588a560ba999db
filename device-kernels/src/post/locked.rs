//! The `locked` policy: the whole post under the endpoint's `sq_lock`, through start, place and flush of the direct data path.
//! An aggregated post leaves its work request pending. This policy is the simple reference, and the baseline of the benches.
//!
//! NCCL's cursors do not cover pending requests. Before NCCL's device code posts on an endpoint, a plain post or a flush must
//! have rung them.

use super::{EncodeWqe, MAX_BATCH, Queue, max_outstanding, outstanding, pause};
use crate::status::Status;
use crate::sync::{AtomicU32, Ordering};
use crate::wait::{Limit, Spin};

/// A queue whose cursors the lock guards. Any thread may call `next` and `pending`; only the thread that has the lock calls the
/// others.
pub trait LockedQueue: Queue {
    /// The number that the next post gets: `pc` and what is pending beyond it.
    fn next(&self) -> u32;
    /// Work requests that are placed and not yet rung.
    fn pending(&self) -> u32;
    /// Makes room for one more request in the batch; rings first when the batch is full.
    fn start(&self);
    /// Rings pending requests, or those that NCCL's device code has deferred, and updates NCCL's cursors.
    fn ring(&self);
    /// Counts pending requests as posted, without a doorbell. Returns the number that the next post gets.
    fn take_pending(&self) -> u32;
    /// The words that posters share.
    fn lock_words(&self) -> Words<'_>;
}

/// The words that posters of one endpoint share.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    /// 0 while no thread has the lock.
    pub lock: &'a AtomicU32,
    /// Flush barrier.
    pub barrier: &'a AtomicU32,
    /// Not 0 while the endpoint is in the set of used endpoints.
    pub used: &'a AtomicU32,
}

impl Words<'_> {
    /// Takes the lock, if no other thread has it.
    #[inline(always)]
    pub(super) fn try_lock(self) -> bool {
        self.lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline(always)]
    pub(super) fn unlock(self) {
        self.lock.store(0, Ordering::Release);
    }
}

/// Releases the lock on drop; `None` in the exclusive mode, which takes no lock.
struct LockGuard<'a>(Option<Words<'a>>);

impl Drop for LockGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(words) = self.0 {
            words.unlock();
        }
    }
}

/// Takes the lock, unless the mode is exclusive.
#[inline(always)]
fn lock<'a, Q: Queue>(
    queue: Q,
    words: Words<'a>,
    limits: impl Limit,
    exclusive: bool,
) -> Result<LockGuard<'a>, Status> {
    if exclusive {
        return Ok(LockGuard(None));
    }
    let mut spin = Spin::new(limits);
    while !words.try_lock() {
        pause(queue, &mut spin)?;
    }
    Ok(LockGuard(Some(words)))
}

/// Posts one work request, which `wqe` encodes into its slot. Nothing is reserved before the request is admitted, so an error
/// leaves no hole.
///
/// # Errors
/// What ended a wait for the lock or for room.
#[inline(always)]
pub fn post<Q: LockedQueue>(
    queue: Q,
    limits: impl Limit,
    exclusive: bool,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), Status> {
    let words = queue.lock_words();
    let _lock = lock(queue, words, limits, exclusive)?;
    let idx = queue.next();
    // Without this check a ring that never fills would take posts for ever after an error.
    if idx.is_multiple_of(MAX_BATCH) && queue.failed() {
        return Err(Status::CardError);
    }
    let limit = max_outstanding(queue, idx, words.barrier.load(Ordering::Relaxed));
    if outstanding(idx, queue.completed()) > limit {
        // The requests that this wait depends on may be pending.
        queue.ring();
        let mut spin = Spin::new(limits);
        while outstanding(idx, queue.completed()) > limit {
            pause(queue, &mut spin)?;
        }
    }
    if words.used.load(Ordering::Relaxed) == 0 {
        words.used.store(1, Ordering::Relaxed);
        queue.insert_used();
    }
    queue.start();
    wqe.encode(idx);
    if aggregate {
        // The poster that rings for this request later fences only its own stores.
        queue.fence();
    } else {
        queue.ring();
    }
    Ok(())
}

/// Rings pending requests, for a wait that depends on them.
///
/// # Errors
/// What ended a wait for the lock.
pub fn ring_ready<Q: LockedQueue>(queue: Q, limits: impl Limit) -> Result<(), Status> {
    if queue.pending() != 0 {
        let _lock = lock(queue, queue.lock_words(), limits, false)?;
        queue.ring();
    }
    Ok(())
}
