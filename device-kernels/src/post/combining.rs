//! The `combining` policy: reserve with one add, write and fence in parallel, mark ready; one poster rings for all
//! that is ready.
//!
//! # State
//!
//! * `cursor`, 64 bits: low half the reservation cursor (the queue struct's `pc`, which NCCL's code reserves from
//!   too), high half the flush barrier (the neighbouring `phase`, which nobody else reads).
//! * `state`, 64 bits: posters at work on the doorbell (6 bits), ready bitmap (32 bits, slot `idx & 31`), rung count
//!   `R` (26 bits, wraps out of the top). At most 16 posts are reserved-and-admitted beyond `R`, so a slot's bit is
//!   unambiguous and 6 bits of workers do not overflow.
//!
//! # Why nothing stays unrung
//!
//! A plain post adds its ready bit and one worker in one operation. If it was the first worker it drains: it rings the
//! contiguous ready run from `R`, then takes off, in one add, the workers that it has seen; if the word was not as it
//! expected, someone has come meanwhile and it goes round again. A later worker leaves at once, for that add will see
//! it. A ready post behind one that is not ready yet is rung by the latter: a plain one drains, an aggregated one
//! finds something ready behind itself and helps. Every wait helps too, so deferred posts are rung by whoever needs
//! room, and by a flush.
//!
//! # Orderings
//!
//! Reserving is relaxed: a reservation only hands out numbers. Marking and releasing are acquire-release on `state`,
//! so the drainer's doorbell comes after the fence that followed every work request it covers. The completion count
//! is read with acquire: what is written into a reclaimed slot comes after the card's last read of it. The fence
//! after the doorbell orders it before other threads' later work requests.

use super::{Queue, admitted, outstanding, pause};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wait::{Limits, Spin};
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;

const WORKER: u64 = 1;
const WORKERS: u64 = 0x3f;
const READY_SHIFT: u32 = 6;
const RUNG_SHIFT: u32 = STATE_RUNG_SHIFT;
const RUNG_MASK: u32 = (1 << 26) - 1;
/// Most work requests that may be written and not rung: half the bitmap.
const MAX_BATCH: u32 = 16;

/// The words that posters of one endpoint share.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    /// Reservation cursor (low half) and flush barrier (high half).
    pub cursor: &'a AtomicU64,
    /// Workers, ready bitmap, rung count.
    pub state: &'a AtomicU64,
    /// Not 0 once a reservation was given up.
    pub poison: &'a AtomicU32,
}

#[inline(always)]
fn ready_bit(idx: u32) -> u64 {
    1 << (READY_SHIFT + (idx & 31))
}

#[inline(always)]
fn rung(state: u64) -> u32 {
    (state >> RUNG_SHIFT) as u32
}

/// The 32-bit number whose low 26 bits are `low`, nearest to `near`.
#[inline(always)]
fn widen(low: u32, near: u32) -> u32 {
    let distance = (low.wrapping_sub(near) << 6) as i32 >> 6;
    near.wrapping_add(distance as u32)
}

/// Posts one work request: `write(idx)` puts it, and its value, in place.
#[inline(always)]
pub fn post<Q: Queue>(
    queue: &Q,
    words: Words<'_>,
    limits: Limits<'_>,
    aggregate: bool,
    write: impl FnOnce(u32),
) -> Result<(), Status> {
    if words.poison.load(Ordering::Relaxed) != 0 {
        return Err(Status::Poisoned);
    }
    let reserved = words.cursor.fetch_add(1, Ordering::Relaxed);
    let (idx, barrier) = (reserved as u32, (reserved >> 32) as u32);
    if !may_write(queue, words, idx, barrier) {
        wait_for_room(queue, words, limits, idx, barrier)?;
    }
    write(idx);
    queue.fence();
    if aggregate {
        let old = words.state.fetch_add(ready_bit(idx), Ordering::AcqRel);
        if old & ready_bit(idx.wrapping_add(1)) != 0 {
            help(queue, words, idx);
        }
    } else {
        let mark = ready_bit(idx) + WORKER;
        let old = words.state.fetch_add(mark, Ordering::AcqRel);
        if old & WORKERS == 0 {
            drain(queue, words, old + mark, idx);
        }
    }
    Ok(())
}

#[inline(always)]
fn may_write<Q: Queue>(queue: &Q, words: Words<'_>, idx: u32, barrier: u32) -> bool {
    let unrung = idx.wrapping_sub(rung(words.state.load(Ordering::Acquire))) & RUNG_MASK;
    unrung < queue.max_batch().min(MAX_BATCH) && outstanding(idx, queue.completed()) <= admitted(queue, idx, barrier)
}

/// A reservation that is given up leaves a hole for ever, hence the poison, which every wait reads.
#[cold]
#[inline(never)]
fn wait_for_room<Q: Queue>(
    queue: &Q,
    words: Words<'_>,
    limits: Limits<'_>,
    idx: u32,
    barrier: u32,
) -> Result<(), Status> {
    let mut spin = Spin::new(limits);
    loop {
        help(queue, words, idx);
        if may_write(queue, words, idx, barrier) {
            return Ok(());
        }
        let given_up = match words.poison.load(Ordering::Relaxed) {
            0 => pause(queue, &mut spin),
            _ => Err(Status::Poisoned),
        };
        if let Err(status) = given_up {
            words.poison.store(1, Ordering::Relaxed);
            return Err(status);
        }
    }
}

/// Rings what is ready, if nobody is at it. `near` is any number close to the cursor.
fn help<Q: Queue>(queue: &Q, words: Words<'_>, near: u32) {
    let state = words.state.load(Ordering::Acquire);
    if state & WORKERS != 0 {
        return;
    }
    let behind = queue.published().wrapping_sub(rung(state)) & RUNG_MASK;
    if state & ready_bit(rung(state)) == 0 && behind == 0 {
        return;
    }
    let taken = words.state.compare_exchange(state, state + WORKER, Ordering::AcqRel, Ordering::Relaxed);
    if taken.is_ok() {
        drain(queue, words, state + WORKER, near);
    }
}

/// Rings until nobody has come meanwhile. The caller is the only worker; `state` is the word as it left it.
#[inline]
fn drain<Q: Queue>(queue: &Q, words: Words<'_>, mut state: u64, near: u32) {
    loop {
        let from = rung(state);
        let bitmap = (state >> READY_SHIFT) as u32;
        let run = bitmap.rotate_right(from & 31).trailing_ones();
        let (moved, cleared) = if run != 0 {
            let target = widen(from.wrapping_add(run), near);
            queue.doorbell(target);
            queue.fence();
            queue.publish(target);
            let mask = (u32::MAX >> (32 - run)).rotate_left(from & 31);
            (run, u64::from(mask) << READY_SHIFT)
        } else {
            // NCCL's device code rang its own posts here: take over its cursor. It is ours while we are the worker.
            (queue.published().wrapping_sub(from) & RUNG_MASK, 0)
        };
        let seen = state & WORKERS;
        // A cursor that was taken over may uncover a ready run: stay at work and look again.
        let stay = if run == 0 && moved != 0 { WORKER } else { 0 };
        let change = (u64::from(moved) << RUNG_SHIFT).wrapping_sub(cleared).wrapping_sub(seen).wrapping_add(stay);
        let old = words.state.fetch_add(change, Ordering::AcqRel);
        let left = old.wrapping_add(change);
        if left & WORKERS == 0 {
            return;
        }
        state = left;
    }
}

/// Waits until every post made before this call has completed. Others may go on posting: the wait still ends.
pub fn flush<Q: Queue>(queue: &Q, words: Words<'_>, limits: Limits<'_>) -> Result<(), Status> {
    let target = words.cursor.load(Ordering::Relaxed) as u32;
    let mut raised: Option<u32> = None;
    let mut spin = Spin::new(limits);
    loop {
        // The count before the cursor: the other way round, later posts' completions would stand in for earlier ones.
        let completed = queue.completed();
        let now = words.cursor.load(Ordering::Acquire);
        let (cursor, barrier) = (now as u32, (now >> 32) as u32);
        let open = outstanding(cursor, completed);
        if open == 0 {
            return Ok(());
        }
        if raised.is_none() && barrier.wrapping_sub(target) <= cursor.wrapping_sub(target) {
            raised = Some(barrier);
        }
        match raised {
            Some(at) if open <= cursor.wrapping_sub(at) => return Ok(()),
            Some(_) => {}
            None => {
                let with_barrier = u64::from(cursor) << 32 | u64::from(cursor);
                // On failure somebody has reserved or raised meanwhile: look again.
                let _ = words.cursor.compare_exchange(now, with_barrier, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        help(queue, words, cursor);
        if words.poison.load(Ordering::Relaxed) != 0 {
            return Err(Status::Poisoned);
        }
        if raised.is_some() {
            pause(queue, &mut spin)?;
        }
    }
}
