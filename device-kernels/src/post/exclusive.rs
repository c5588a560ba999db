//! The exclusive form of `combining`, for sharing mode THREAD: no other thread uses the endpoint during the call, so no
//! read-modify-write is needed, and every reserved request is ready.
//!
//! It leaves the words of [`combining`](super::combining) in the same state, so calls in this mode and in others may
//! follow one another. Nothing is reserved before there's room, so an error leaves no hole.

use super::combining::pass::{all_rung, ready_bit, ring, rung};
use super::combining::room::{check_room, has_room, insert_used};
use super::combining::{CombiningQueue, halves};
use super::{EncodeWqe, pause};
use crate::status::Status;
use crate::sync::Ordering;
use crate::wait::{Limit, Spin};

/// Posts one work request, which `wqe` encodes into its slot.
///
/// # Errors
/// The reason a wait for room ended.
#[inline(always)]
pub fn post<Q: CombiningQueue>(
    queue: Q,
    limits: impl Limit,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), Status> {
    let words = queue.words();
    let mut now = words.cursor.load(Ordering::Relaxed);
    if !has_room(queue, now) {
        wait_for_room(queue, limits, now)?;
        // The wait may have raised the barrier.
        now = words.cursor.load(Ordering::Relaxed);
    }
    let (idx, _) = halves(now);
    words.cursor.store(now.wrapping_add(1), Ordering::Relaxed);
    wqe.encode(idx);
    queue.fence();
    if aggregate {
        words.state.store(words.state.load(Ordering::Relaxed) | ready_bit(idx), Ordering::Relaxed);
    } else {
        ring_below(queue, idx.wrapping_add(1));
    }
    Ok(())
}

/// Waits until there's room for the number that the cursor word `next` reserves.
#[cold]
#[inline(never)]
fn wait_for_room<Q: CombiningQueue>(queue: Q, limits: impl Limit, next: u64) -> Result<(), Status> {
    let words = queue.words();
    let (idx, _) = halves(next);
    let mut spin = Spin::new(limits);
    insert_used(queue, next);
    while !check_room(queue, next, 1) {
        if words.poison.load(Ordering::Relaxed) != 0 {
            return Err(Status::Poisoned);
        }
        if queue.published() != idx {
            ring_below(queue, idx);
        } else if rung(words.state.load(Ordering::Relaxed)) != idx {
            // NCCL's device code posted and rang on this endpoint.
            words.state.store(all_rung(idx), Ordering::Relaxed);
        } else {
            pause(queue, &mut spin)?;
        }
    }
    Ok(())
}

/// Rings for every request below `target`.
#[inline(always)]
fn ring_below<Q: CombiningQueue>(queue: Q, target: u32) {
    ring(queue, target);
    queue.words().state.store(all_rung(target), Ordering::Relaxed);
}
