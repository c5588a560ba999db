//! The `locked` policy: the whole post under the endpoint's `sq_lock`, through start / place / flush of the direct data
//! path; deferral leaves work requests pending. The simple reference, and the baseline of the benches.
//!
//! What is pending is not in NCCL's cursors: before NCCL's device code posts on an endpoint, a plain post or a flush must
//! have rung it.

use super::{MAX_BATCH, Queue, Write, admitted, outstanding, pause, reached};
use crate::status::Status;
use crate::sync::{AtomicU32, Ordering};
use crate::wait::{Limit, Spin};

/// What the lock guards: the ring's own cursors. Called only by the holder, but for `next` and `pending`.
pub trait Batch {
    /// The number that the next post gets: `pc` and what is pending beyond it.
    fn next(&self) -> u32;
    /// Work requests placed and not yet rung.
    fn pending(&self) -> u32;
    /// Makes room for one more in the batch, ringing first when it is full.
    fn start(&self);
    /// Rings what is pending, or what NCCL's device code has deferred, and brings NCCL's cursors up to date.
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

struct Held<'a>(Option<&'a AtomicU32>);

impl Drop for Held<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(lock) = self.0 {
            lock.store(0, Ordering::Release);
        }
    }
}

/// Where nobody else uses the endpoint meanwhile, there is nothing to hold.
#[inline(always)]
fn lock<'a, Q: Queue>(queue: &Q, words: Words<'a>, limits: impl Limit, alone: bool) -> Result<Held<'a>, Status> {
    if alone {
        return Ok(Held(None));
    }
    let mut spin = Spin::new(limits);
    while words.lock.compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        pause(queue, &mut spin)?;
    }
    Ok(Held(Some(words.lock)))
}

/// Posts one work request: `write` puts it, and its value, in place. Nothing is reserved before it is admitted, so
/// giving up leaves no hole.
///
/// # Errors
/// What ended a wait for the lock or for room.
#[inline(always)]
pub fn post<Q: Queue + Batch>(
    queue: &Q,
    words: Words<'_>,
    limits: impl Limit,
    alone: bool,
    aggregate: bool,
    write: impl Write,
) -> Result<(), Status> {
    let _held = lock(queue, words, limits, alone)?;
    let idx = queue.next();
    // Or a ring that never fills would take posts for ever after an error.
    if idx.is_multiple_of(MAX_BATCH) && queue.failed() {
        return Err(Status::CardError);
    }
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
    write.write(idx);
    if aggregate {
        // Who rings for it later fences its own stores, not ours.
        queue.fence();
    } else {
        queue.ring();
    }
    Ok(())
}

/// Waits until every post made before this call has completed. Others may go on posting: the wait still ends.
///
/// # Errors
/// What ended the wait.
pub fn flush<Q: Queue + Batch>(queue: &Q, words: Words<'_>, limits: impl Limit) -> Result<(), Status> {
    let Some(at) = begin_flush(queue, words, limits)? else {
        return Ok(());
    };
    let mut spin = Spin::new(limits);
    while !is_flushed(queue, at) {
        pause(queue, &mut spin)?;
    }
    Ok(())
}

/// Rings everything that was posted before this call, and makes it countable: the number to wait for with
/// [`is_flushed`], or nothing if all has completed.
///
/// # Errors
/// What ended a wait for the lock.
pub fn begin_flush<Q: Queue + Batch>(queue: &Q, words: Words<'_>, limits: impl Limit) -> Result<Option<u32>, Status> {
    let _held = lock(queue, words, limits, false)?;
    queue.ring();
    let target = queue.next();
    if outstanding(target, queue.completed()) == 0 {
        return Ok(None);
    }
    words.barrier.store(target, Ordering::Relaxed);
    Ok(Some(target))
}

/// Whether everything below `at`, which [`begin_flush`] gave, has completed.
pub fn is_flushed<Q: Queue + Batch>(queue: &Q, at: u32) -> bool {
    // The count before the cursor, and `pc`, which is never behind the count, before what is pending beyond it.
    let completed = queue.completed();
    reached(queue.next(), completed, at)
}

/// Rings what is pending: for waits that depend on it.
///
/// # Errors
/// What ended a wait for the lock.
pub fn ring_ready<Q: Queue + Batch>(queue: &Q, words: Words<'_>, limits: impl Limit) -> Result<(), Status> {
    if queue.pending() != 0 {
        let _held = lock(queue, words, limits, false)?;
        queue.ring();
    }
    Ok(())
}
