//! The `combining` policy: reserve with one add, write and fence in parallel, mark ready; one poster rings for all
//! that is ready.
//!
//! # State
//!
//! * `cursor`, 64 bits: low half the reservation cursor (the queue struct's `pc`, which NCCL's code reserves from
//!   too), high half the flush barrier (the neighbouring `phase`, which nobody else reads).
//! * `state`, 64 bits: ready bitmap (16 bits, slot `idx & 15`), posters at work on the doorbell (16 bits), rung count
//!   `R` (32 bits, wraps out of the top). At most 16 posts are reserved-and-admitted beyond `R`, so a slot's bit is
//!   unambiguous and the workers do not overflow.
//! * `bound`, 64 bits: a value of `cursor`. Posts whose reservation is it, or lies less than 16 below it, are admitted
//!   without another look: completion count and `R` only grow, so what had room once has room for good; and the flush barrier is
//!   part of the comparison, so a barrier that was raised since is noticed. Every 16th post at the latest looks again.
//!
//! When the cursor wraps at 2^32 it carries one into the barrier. Moved up by one it holds back no less, and no `bound`
//! reaches across; nor does a flush take a barrier at its own snapshot for one that was raised there.
//!
//! # Why nothing stays unrung
//!
//! A plain post adds its ready bit and one worker in one operation. If it was the first worker it takes a turn: it rings
//! the contiguous ready run from `R`, then takes off, in one add, the workers that it has seen. Workers that came
//! meanwhile left at once, so if some are left it takes another turn. An aggregated post brings no worker: if it makes
//! something behind it ringable, it helps, that is takes a turn if nobody is at one, and leaves it to the worker
//! otherwise; hence who takes the last worker off looks whether `R` is ready, and helps again. Every wait helps too, so
//! deferred posts are rung by whoever needs room, and by a flush.
//!
//! # Orderings
//!
//! Reserving is relaxed: a reservation only hands out numbers. The one system fence after a work request orders it (and
//! its value, and all that its poster had seen before) before the mark, for the card, the host and every thread: it is
//! the release of the mark, at the widest scope, so no narrower release that a caller asks for is missing. The mark is
//! an acquire: a turn's doorbell comes after the fences of all the work requests that it covers. The fence after the
//! doorbell orders it before other threads' later work requests, and is the release of the add that ends the turn. The
//! completion count is read with acquire, and so is `bound`, which passes it on: what is written into a reclaimed slot
//! comes after the card's last read of it.

use super::{MAX_BATCH, Queue, Share, Thread, Write, admitted, outstanding, pause, reached};
use crate::platform::one;
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wait::{Limit, Spin};
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;

const WORKER: u64 = 1 << 16;
const WORKERS: u64 = 0xffff << 16;
const RUNG_SHIFT: u32 = STATE_RUNG_SHIFT;
/// The bitmap.
const READY: u32 = (1 << MAX_BATCH) - 1;
/// A barrier this far behind is raised, so that the cursor never laps it.
const OLD_BARRIER: u32 = 1 << 30;

/// A queue with the words that its posters share.
pub trait Ring: Queue {
    /// Where they are.
    fn words(&self) -> Words<'_>;
}

impl<Q: Ring> Ring for &Q {
    #[inline(always)]
    fn words(&self) -> Words<'_> {
        (**self).words()
    }
}

/// The words that posters of one endpoint share.
#[derive(Clone, Copy)]
pub struct Words<'a> {
    /// Reservation cursor (low half) and flush barrier (high half).
    pub cursor: &'a AtomicU64,
    /// Workers, ready bitmap, rung count.
    pub state: &'a AtomicU64,
    /// Admitted without another look.
    pub bound: &'a AtomicU64,
    /// Not 0 once a reservation was given up.
    pub poison: &'a AtomicU32,
}

#[inline(always)]
fn ready_bit(idx: u32) -> u64 {
    // Shifted as 32 bits: on a GPU 64 are two shifts.
    u64::from(1_u32 << (idx % MAX_BATCH))
}

#[inline(always)]
fn rung(state: u64) -> u32 {
    (state >> RUNG_SHIFT) as u32
}

/// The state with everything below `idx` rung, and nothing else.
#[inline(always)]
fn all_rung(idx: u32) -> u64 {
    u64::from(idx) << RUNG_SHIFT
}

/// The mark of a plain post. On a CPU a look-up is shorter than the shift.
#[inline(always)]
fn ready_and_worker(idx: u32) -> u64 {
    if cfg!(target_arch = "nvptx64") { ready_bit(idx) + WORKER } else { MARKS[(idx % MAX_BATCH) as usize] }
}

const MARKS: [u64; MAX_BATCH as usize] = {
    let mut marks = [0; MAX_BATCH as usize];
    let mut slot = 0;
    while slot < marks.len() {
        marks[slot] = (1 << slot) + WORKER;
        slot += 1;
    }
    marks
};

/// Half a cursor word each.
#[inline(always)]
fn halves(cursor: u64) -> (u32, u32) {
    (cursor as u32, (cursor >> 32) as u32)
}

/// Takes the next number: the cursor word as it was.
#[inline(always)]
fn reserve<S: Share>(words: Words<'_>) -> u64 {
    S::add(words.cursor, one(), Ordering::Relaxed)
}

/// Posts one work request: `write` puts it, and its value, in place.
///
/// # Errors
/// What ended a wait for room; the endpoint is poisoned then, unless the call had it alone.
#[inline(always)]
pub fn post<S: Share, Q: Ring + Copy>(
    queue: Q,
    limits: impl Limit,
    aggregate: bool,
    write: impl Write,
) -> Result<(), Status> {
    if S::ALONE {
        return post_alone(queue, limits, aggregate, write);
    }
    if cfg!(target_arch = "nvptx64") {
        return post_in_a_loop::<S, Q>(queue, limits, aggregate, write);
    }
    match post_at_once::<S, Q>(queue, aggregate, write) {
        Ok(()) => Ok(()),
        Err(NoRoom { reserved }) => post_late::<S, Q>(queue, limits, reserved, aggregate, write),
    }
}

/// A post that has a number, and nothing more: [`post_late`] goes on with it, and must be called.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct NoRoom {
    /// The cursor word as the reservation found it.
    pub reserved: u64,
}

/// As [`post`], if there is room at once: what usually happens, in a straight line. What is left to do is called, last, so
/// that nothing is kept for its return. Few instructions are executed.
#[inline(always)]
pub fn post_at_once<S: Share, Q: Ring + Copy>(queue: Q, aggregate: bool, write: impl Write) -> Result<(), NoRoom> {
    let reserved = reserve::<S>(queue.words());
    if !has_room(queue, reserved) {
        return Err(NoRoom { reserved });
    }
    write_and_mark::<S, Q>(queue, reserved, aggregate, write);
    Ok(())
}

/// What a poster has to do after its mark.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct After {
    /// What.
    pub next: Next,
    /// The state word as the poster left it: what [`Next::Work`] goes on from.
    pub state: u64,
}

/// See [`After`].
#[derive(Debug, Clone, Copy)]
#[repr(u32)]
pub enum Next {
    /// Nothing: it is rung, or will be.
    Nothing,
    /// Something may have become ringable: it helps.
    Help,
    /// It is the one at the doorbell, or was and has left something to ring.
    Work,
}

/// As [`post_at_once`], with what is left to do as the result, for [`finish`]: nothing is called.
///
/// # Errors
/// There is no room at once.
#[inline(always)]
pub fn post_without_calls<S: Share, Q: Ring + Copy>(
    queue: Q,
    aggregate: bool,
    write: impl Write,
) -> Result<After, NoRoom> {
    let reserved = reserve::<S>(queue.words());
    if has_room(queue, reserved) {
        Ok(mark::<S, Q>(queue, reserved, aggregate, write))
    } else {
        Err(NoRoom { reserved })
    }
}

/// Does what a mark has left to do.
#[inline(always)]
pub fn finish<S: Share, Q: Ring + Copy>(queue: Q, after: After) {
    match after.next {
        Next::Nothing => {}
        Next::Help => help::<S, Q>(queue),
        Next::Work => work::<S, Q>(queue, after.state),
    }
}

#[inline(always)]
fn write_and_mark<S: Share, Q: Ring + Copy>(queue: Q, reserved: u64, aggregate: bool, write: impl Write) {
    let after = mark::<S, Q>(queue, reserved, aggregate, write);
    finish::<S, Q>(queue, after);
}

/// Writes, fences, marks, and if nobody is near rings.
#[inline(always)]
fn mark<S: Share, Q: Ring + Copy>(queue: Q, reserved: u64, aggregate: bool, write: impl Write) -> After {
    let (idx, _) = halves(reserved);
    write.write(idx);
    queue.fence();
    if aggregate {
        let old = S::add(queue.words().state, ready_bit(idx), Ordering::Acquire);
        let next = if old & ready_bit(idx.wrapping_add(1)) != 0 { Next::Help } else { Next::Nothing };
        return After { next, state: old };
    }
    let mark = ready_and_worker(idx);
    let old = S::add(queue.words().state, mark, Ordering::Acquire);
    if old != all_rung(idx) {
        let next = if old & WORKERS != 0 { Next::Nothing } else { Next::Work };
        return After { next, state: old + mark };
    }
    // Nobody is near: the turn is this post alone.
    let target = idx.wrapping_add(1);
    ring(queue, target);
    // A CPU tries the shortest: that nobody has come meanwhile.
    let short = !cfg!(target_arch = "nvptx64");
    if short && S::replace(queue.words().state, old + mark, all_rung(target), Ordering::Acquire) {
        return After { next: Next::Nothing, state: all_rung(target) };
    }
    let state = if short { end_turn_apart::<S, Q>(queue, idx) } else { end_turn::<S, Q>(queue, idx) };
    let next = if is_quiet(state) { Next::Nothing } else { Next::Work };
    After { next, state }
}

/// Ends the turn that rang for `idx` alone.
#[inline(always)]
fn end_turn<S: Share, Q: Ring + Copy>(queue: Q, idx: u32) -> u64 {
    let change = all_rung(1) - ready_bit(idx) - WORKER;
    S::add(queue.words().state, change, Ordering::Acquire).wrapping_add(change)
}

#[cold]
#[inline(never)]
fn end_turn_apart<S: Share, Q: Ring + Copy>(queue: Q, idx: u32) -> u64 {
    end_turn::<S, Q>(queue, idx)
}

/// Posts what has the number `reserved` already: waits for room first.
///
/// # Errors
/// As for [`post`].
#[inline(always)]
pub fn post_late<S: Share, Q: Ring + Copy>(
    queue: Q,
    limits: impl Limit,
    reserved: u64,
    aggregate: bool,
    write: impl Write,
) -> Result<(), Status> {
    if !look_for_room::<S, Q>(queue, reserved) {
        let mut spin = Spin::new(limits);
        loop {
            help::<S, Q>(queue);
            if look_for_room::<S, Q>(queue, reserved) {
                break;
            }
            give_up_or_wait(queue, &mut spin)?;
        }
    }
    write_and_mark::<S, Q>(queue, reserved, aggregate, write);
    Ok(())
}

/// The same in one loop, so that the doorbell's code is there but once: few instructions are there.
#[inline(always)]
pub(super) fn post_in_a_loop<S: Share, Q: Ring + Copy>(
    queue: Q,
    limits: impl Limit,
    aggregate: bool,
    write: impl Write,
) -> Result<(), Status> {
    let words = queue.words();
    let reserved = reserve::<S>(words);
    let (idx, _) = halves(reserved);
    let mut spin = Spin::new(limits);
    let mut marked = false;
    loop {
        let now = !marked && (has_room(queue, reserved) || look_for_room::<S, Q>(queue, reserved));
        let mut state;
        if now {
            write.write(idx);
            queue.fence();
            marked = true;
            let mark = if aggregate { ready_bit(idx) } else { ready_bit(idx) + WORKER };
            let old = S::add(words.state, mark, Ordering::Acquire);
            if aggregate {
                if old & ready_bit(idx.wrapping_add(1)) == 0 {
                    return Ok(());
                }
                continue;
            }
            if old & WORKERS != 0 {
                return Ok(());
            }
            state = old + mark;
        } else {
            state = words.state.load(Ordering::Acquire);
            if !wants_turn(queue, state) {
                if marked {
                    return Ok(());
                }
                give_up_or_wait(queue, &mut spin)?;
                continue;
            }
            if !S::replace(words.state, state, state + WORKER, Ordering::Acquire) {
                continue;
            }
            state += WORKER;
        }
        while state & WORKERS != 0 {
            state = turn::<S, Q>(queue, state);
        }
        if marked && is_quiet(state) {
            return Ok(());
        }
    }
}

/// As [`post`], when nobody else uses the endpoint: all that was reserved is ready.
#[inline(always)]
fn post_alone<Q: Ring + Copy>(queue: Q, limits: impl Limit, aggregate: bool, write: impl Write) -> Result<(), Status> {
    let mut reserved = queue.words().cursor.load(Ordering::Relaxed);
    while !has_room(queue, reserved) {
        reserved = wait_alone(queue, limits, reserved)?;
    }
    let (idx, _) = halves(reserved);
    queue.words().cursor.store(reserved.wrapping_add(1), Ordering::Relaxed);
    write.write(idx);
    queue.fence();
    if aggregate {
        let state = queue.words().state;
        state.store(state.load(Ordering::Relaxed) | ready_bit(idx), Ordering::Relaxed);
    } else {
        ring_alone(queue, idx.wrapping_add(1));
    }
    Ok(())
}

#[inline(always)]
fn ring_alone<Q: Ring + Copy>(queue: Q, target: u32) {
    ring(queue, target);
    queue.words().state.store(all_rung(target), Ordering::Relaxed);
}

/// Returns the cursor word, in which the barrier may be another. Nothing is reserved yet, so giving up leaves no hole.
#[cold]
#[inline(never)]
fn wait_alone<Q: Ring + Copy>(queue: Q, limits: impl Limit, reserved: u64) -> Result<u64, Status> {
    let words = queue.words();
    let (idx, _) = halves(reserved);
    let mut spin = Spin::new(limits);
    while !look_for_room::<Thread, Q>(queue, reserved) {
        if words.poison.load(Ordering::Relaxed) != 0 {
            return Err(Status::Poisoned);
        }
        if queue.published() != idx {
            ring_alone(queue, idx);
        } else if rung(words.state.load(Ordering::Relaxed)) != idx {
            // NCCL's device code posted and rang here.
            words.state.store(all_rung(idx), Ordering::Relaxed);
        } else {
            pause(queue, &mut spin)?;
        }
    }
    Ok(words.cursor.load(Ordering::Relaxed))
}

/// `bound` lies less than 16 ahead, with the same barrier beside it. Acquire: it stands for the completion count that
/// another poster has read.
#[inline(always)]
fn has_room<Q: Ring + Copy>(queue: Q, reserved: u64) -> bool {
    queue.words().bound.load(Ordering::Acquire).wrapping_sub(reserved) < u64::from(MAX_BATCH)
}

/// Looks at counts and barrier; says whether `reserved` is admitted, and tells others how far they would be.
///
/// Nothing is admitted after an error, or a ring that never fills would take posts for ever: at most what `bound` had
/// admitted before goes out behind it, and its completion entry stays in the queue for the host to read.
#[inline(always)]
fn look_for_room<S: Share, Q: Ring + Copy>(queue: Q, reserved: u64) -> bool {
    let words = queue.words();
    let known = words.bound.load(Ordering::Acquire);
    if words.poison.load(Ordering::Relaxed) != 0 || queue.failed() {
        return false;
    }
    let (idx, barrier) = halves(reserved);
    let batch = queue.max_batch().min(MAX_BATCH);
    let unrung = idx.wrapping_sub(rung(words.state.load(Ordering::Acquire)));
    let open = outstanding(idx, queue.completed());
    if unrung >= batch || open > admitted(queue, idx, barrier) {
        return false;
    }
    // Not past the wrap of the cursor, which carries into the barrier: that one has not been looked at yet.
    let to_wrap = (u32::MAX - idx).saturating_add(1);
    let mut room = (batch - unrung).min(queue.sq_size() - open).min(to_wrap);
    let slots = queue.value_slots();
    if slots != 0 {
        room = room.min(slots - (idx & (slots - 1)));
    }
    // Who gives up takes `bound` away after its poison: against that, a plain store could bring it back.
    S::replace(words.bound, known, reserved.wrapping_add(u64::from(room - 1)), Ordering::AcqRel);
    if idx.wrapping_sub(barrier) >= OLD_BARRIER {
        raise::<S>(words, words.cursor.load(Ordering::Relaxed));
    }
    true
}

/// Raises the barrier to the cursor, if the word is still as it was.
#[inline(always)]
fn raise<S: Share>(words: Words<'_>, seen: u64) -> bool {
    let (cursor, _) = halves(seen);
    S::replace(words.cursor, seen, u64::from(cursor) << 32 | u64::from(cursor), Ordering::Relaxed)
}

/// A reservation that is given up leaves a hole for ever, hence the poison, which every wait reads.
#[cfg_attr(not(target_arch = "nvptx64"), cold, inline(never))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn give_up_or_wait<Q: Ring + Copy, L: Limit>(queue: Q, spin: &mut Spin<L>) -> Result<(), Status> {
    let words = queue.words();
    let ended = match words.poison.load(Ordering::Relaxed) {
        0 => pause(queue, spin),
        _ => Err(Status::Poisoned),
    };
    if ended.is_err() {
        words.poison.store(1, Ordering::Relaxed);
        // Far behind every reservation: nobody is admitted without a look any more.
        let behind = words.cursor.load(Ordering::Relaxed).wrapping_sub(1 << 31);
        words.bound.store(behind, Ordering::Release);
    }
    ended
}

/// Nobody is at the doorbell, and there is something to ring or to take over.
#[inline(always)]
fn wants_turn<Q: Ring>(queue: Q, state: u64) -> bool {
    state & WORKERS == 0 && (is_ready(state) || queue.released().wrapping_sub(rung(state)) != 0)
}

/// The first work request that is not rung is ready.
#[inline(always)]
fn is_ready(state: u64) -> bool {
    state & ready_bit(rung(state)) != 0
}

/// No worker, nothing ready.
#[inline(always)]
fn is_quiet(state: u64) -> bool {
    state as u32 == 0
}

/// Goes on as the one at the doorbell, who left `state`, or looks whether one is wanted.
#[cold]
#[inline(never)]
fn work<S: Share, Q: Ring + Copy>(queue: Q, mut state: u64) {
    while state & WORKERS != 0 {
        state = turn::<S, Q>(queue, state);
    }
    if !is_quiet(state) {
        help::<S, Q>(queue);
    }
}

/// Takes turns as long as one is wanted.
#[cold]
#[inline(never)]
fn help<S: Share, Q: Ring + Copy>(queue: Q) {
    loop {
        let state = queue.words().state;
        let mut seen = state.load(Ordering::Acquire);
        if !wants_turn(queue, seen) {
            return;
        }
        if S::replace(state, seen, seen + WORKER, Ordering::Acquire) {
            seen += WORKER;
            while seen & WORKERS != 0 {
                seen = turn::<S, Q>(queue, seen);
            }
        }
    }
}

/// The fence is the release of what ends the turn: of the cursors as well.
#[inline(always)]
fn ring<Q: Queue>(queue: Q, target: u32) {
    queue.doorbell(target);
    queue.publish(target);
    queue.fence();
}

/// One turn at the doorbell. The caller is the only one at it, `state` the word as it left it. Returns the word as this
/// turn leaves it: while it shows a worker, the caller is still the one.
#[inline(always)]
fn turn<S: Share, Q: Ring + Copy>(queue: Q, state: u64) -> u64 {
    let from = rung(state);
    // The bitmap twice, one above the other, is the bitmap turned by any number of bits.
    let ready = state as u32 & READY;
    let run = ((ready | ready << MAX_BATCH) >> (from % MAX_BATCH)).trailing_ones().min(MAX_BATCH);
    let (moved, cleared, target, unrung) = if run != 0 {
        let mask = ((1 << run) - 1) << (from % MAX_BATCH);
        (run, (mask | mask >> MAX_BATCH) & READY, from.wrapping_add(run), true)
    } else {
        // NCCL's device code posted here meanwhile: take over its cursor, and ring what it has deferred. The cursors
        // are ours while we are at the doorbell.
        let released = queue.released();
        (released.wrapping_sub(from), 0, released, queue.published() != released)
    };
    if unrung {
        ring(queue, target);
    }
    let change = all_rung(moved).wrapping_sub(cleared.into()).wrapping_sub(state & WORKERS);
    S::add(queue.words().state, change, Ordering::Acquire).wrapping_add(change)
}

/// Waits until every post made before this call has completed. Others may go on posting: the wait still ends.
///
/// # Errors
/// What ended the wait.
pub fn flush<S: Share, Q: Ring + Copy>(queue: Q, limits: impl Limit) -> Result<(), Status> {
    let Some(at) = begin_flush::<S, Q>(queue) else {
        return Ok(());
    };
    let mut spin = Spin::new(limits);
    while !is_flushed::<S, Q>(queue, at)? {
        pause(queue, &mut spin)?;
    }
    Ok(())
}

/// Makes what was posted before this call countable: the number to wait for with [`is_flushed`], or nothing if all has
/// completed.
///
/// Snapshot and barrier are one compare-and-swap: a post in between would be counted in place of an earlier one.
pub fn begin_flush<S: Share, Q: Ring + Copy>(queue: Q) -> Option<u32> {
    let words = queue.words();
    let (target, _) = halves(words.cursor.load(Ordering::Relaxed));
    loop {
        // The count before the cursor: the other way round, later posts' completions would stand in for earlier ones.
        let completed = queue.completed();
        let now = words.cursor.load(Ordering::Acquire);
        let (cursor, barrier) = halves(now);
        if outstanding(cursor, completed) == 0 {
            return None;
        }
        // Raised by somebody since, or standing where we would raise it. Not at the target itself: the cursor's wrap may
        // have carried it there from below.
        let raised = barrier.wrapping_sub(target).wrapping_sub(1) < cursor.wrapping_sub(target);
        if raised || barrier == cursor {
            return Some(barrier);
        }
        if raise::<S>(words, now) {
            return Some(cursor);
        }
    }
}

/// Whether everything below `at`, which [`begin_flush`] gave, has completed. If not, rings what is ready.
///
/// # Errors
/// [`Status::Poisoned`]: it never will.
pub fn is_flushed<S: Share, Q: Ring + Copy>(queue: Q, at: u32) -> Result<bool, Status> {
    let completed = queue.completed();
    let (cursor, _) = halves(queue.words().cursor.load(Ordering::Acquire));
    if reached(cursor, completed, at) {
        return Ok(true);
    }
    ring_ready::<S, Q>(queue)?;
    Ok(false)
}

/// Rings what is ready: for waits that depend on it.
///
/// # Errors
/// [`Status::Poisoned`]: something will never be.
pub fn ring_ready<S: Share, Q: Ring + Copy>(queue: Q) -> Result<(), Status> {
    help::<S, Q>(queue);
    match queue.words().poison.load(Ordering::Relaxed) {
        0 => Ok(()),
        _ => Err(Status::Poisoned),
    }
}
