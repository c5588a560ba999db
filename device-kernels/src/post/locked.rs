//! The `locked` policy: the whole post under the endpoint's `sq_lock`, through start / place / flush of the direct data
//! path; deferral leaves work requests pending. The simple reference, and the baseline of the benches.

use super::{Queue, admitted, outstanding, pause};
use crate::status::Status;
use crate::sync::{AtomicU32, Ordering};
use crate::wait::{Limits, Spin};

/// What the lock guards: the ring's own cursors. Called only by the holder.
pub trait Batch {
    /// The number that the next post gets: `pc` and what is pending beyond it.
    fn next(&self) -> u32;
    /// Work requests placed and not yet rung.
    fn pending(&self) -> u32;
    /// Makes room for one more in the batch, ringing first when it is full.
    fn start(&self);
    /// Rings what is pending and brings NCCL's cursors up to date.
    fn ring(&self);
}

/// The words that posters of one endpoint share.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    /// 0 is free.
    pub lock: &'a AtomicU32,
    /// Flush barrier.
    pub barrier: &'a AtomicU32,
}

struct Held<'a>(&'a AtomicU32);

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

#[inline(always)]
fn lock<'a, Q: Queue>(queue: &Q, words: Words<'a>, limits: Limits<'_>) -> Result<Held<'a>, Status> {
    let mut spin = Spin::new(limits);
    while words.lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        pause(queue, &mut spin)?;
    }
    Ok(Held(words.lock))
}

/// Posts one work request: `write(idx)` puts it, and its value, in place. Nothing is reserved before it is admitted, so
/// giving up leaves no hole.
#[inline(always)]
pub fn post<Q: Queue + Batch>(
    queue: &Q,
    words: Words<'_>,
    limits: Limits<'_>,
    aggregate: bool,
    write: impl FnOnce(u32),
) -> Result<(), Status> {
    let _held = lock(queue, words, limits)?;
    let idx = queue.next();
    let limit = admitted(queue, idx, words.barrier.load(Ordering::Relaxed));
    if outstanding(idx, queue.completed()) > limit {
        // What we wait for may be pending ourselves.
        queue.ring();
        let mut spin = Spin::new(limits);
        while outstanding(idx, queue.completed()) > limit {
            pause(queue, &mut spin)?;
        }
    }
    queue.start();
    write(idx);
    if aggregate {
        // Who rings for it later fences its own stores, not ours.
        queue.fence();
    } else {
        queue.ring();
    }
    Ok(())
}

/// Waits until every post made before this call has completed. Others may go on posting: the wait still ends.
pub fn flush<Q: Queue + Batch>(queue: &Q, words: Words<'_>, limits: Limits<'_>) -> Result<(), Status> {
    let target = {
        let _held = lock(queue, words, limits)?;
        if queue.pending() != 0 {
            queue.ring();
        }
        let target = queue.next();
        if outstanding(target, queue.completed()) == 0 {
            return Ok(());
        }
        words.barrier.store(target, Ordering::Relaxed);
        target
    };
    let mut spin = Spin::new(limits);
    // From the barrier on nothing is posted before the count has reached it, so the count cannot run past unproven: it
    // is behind the target (a small difference) or has reached it (the difference wraps to a large one).
    while matches!(outstanding(target, queue.completed()), 1..=0x3fff_ffff) {
        pause(queue, &mut spin)?;
    }
    Ok(())
}
