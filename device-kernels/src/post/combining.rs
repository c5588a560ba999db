//! The `combining` policy: a post reserves a slot with one add, writes and fences its work request in parallel with other
//! posts, and marks it ready. One poster then rings the doorbell for every request that is ready.
//!
//! # State
//!
//! * `cursor`, 64 bits. The low half is the reservation cursor: the queue struct's `pc`, from which NCCL's code reserves too.
//!   The high half is the flush barrier: the neighbouring `phase`, which no other code reads.
//! * `state`, 64 bits: the ready bitmap (16 bits, slot `idx & 15`), the number of ringers (16 bits), and the rung count `R`
//!   (32 bits, which wrap out of the top). At most 16 posts are reserved and admitted beyond `R`, so a slot's bit is
//!   unambiguous and the number of ringers does not overflow.
//! * `bound`, 64 bits: a value of `cursor`. A post whose reservation equals it, or lies less than 16 below it, is admitted
//!   without a check of the counts. The completion count and `R` only grow, so room that was there once stays. The flush
//!   barrier is part of the comparison, so a barrier that was raised since makes the post check. At least every 16th post
//!   checks. The post that publishes a `bound` has inserted the endpoint into the set of used endpoints since the barrier
//!   beside it, or has acquired a `bound` with the same barrier. It begins with another barrier than the first.
//!
//! When the cursor wraps at 2^32 it carries one into the barrier. A barrier that moved up by one holds back no less, and no
//! `bound` reaches across the wrap. A flush does not take a barrier at its own snapshot for one that was raised there.
//!
//! # Why no request stays unrung
//!
//! A plain post adds its ready bit and one ringer in one operation. The first ringer takes a turn at the doorbell: it rings
//! the contiguous ready run from `R`, then subtracts in one add the ringers that it has seen. A poster that adds itself
//! meanwhile leaves at once, so the first ringer takes another turn while any ringer is left. An aggregated post adds no
//! ringer. If it makes a request behind it ringable, it takes a turn when no ringer is active, and leaves the request to
//! the active ringer otherwise. So the poster that subtracts the last ringer checks whether `R` is ready, and takes
//! another turn if it is. Every wait takes turns too, so a flush, or a post that needs room, rings deferred posts.
//!
//! # Orderings
//!
//! A reservation is relaxed: it only hands out a number. One system fence after a work request orders the request, its value,
//! and everything that its poster had seen, before the mark, for the card, the host and every thread. The fence is the
//! release of the mark, at the widest scope, so it covers any narrower release that a caller asks for. The mark is an
//! acquire: a turn's doorbell comes after the fences of all work requests that it covers. The fence after the doorbell
//! orders the doorbell before later work requests, as the card's limit of a batch demands in every mode, and before the doorbell
//! of the next turn, and is the release of the add that ends the turn. The completion count is read with acquire, and so is
//! `bound`, which passes the count on: a write into a reclaimed slot
//! comes after the card's last read of it.

pub mod run;

use super::{EncodeWqe, MAX_BATCH, Queue, Share, Thread, max_outstanding, outstanding, pause};
use crate::platform::{in_register, number_of_thread};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wait::{Limit, Spin};
use ferrogin_ffi::ext::STATE_RUNG_SHIFT;

const RINGER: u64 = 1 << 16;
const RINGERS: u64 = 0xffff << 16;
const RUNG_SHIFT: u32 = STATE_RUNG_SHIFT;
/// The ready bitmap.
const READY: u32 = (1 << MAX_BATCH) - 1;
/// A barrier that lies this far behind is raised, so that the cursor never laps it.
const OLD_BARRIER: u32 = 1 << 30;

/// A queue whose posters share [`Words`].
pub trait CombiningQueue: Queue {
    /// The shared words.
    fn words(&self) -> Words<'_>;
}

impl<Q: CombiningQueue> CombiningQueue for &Q {
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
    /// Ready bitmap, ringers, rung count.
    pub state: &'a AtomicU64,
    /// The reservation up to which posts are admitted without a check.
    pub bound: &'a AtomicU64,
    /// Not 0 once a poster gave up a reservation.
    pub poison: &'a AtomicU32,
}

#[inline(always)]
fn ready_bit(idx: u32) -> u64 {
    // Shifted as 32 bits: on a GPU 64 are two shifts.
    u64::from(1_u32 << (idx % MAX_BATCH))
}

/// The ready bits of `posts` numbers from `first` on, at most as many as the bitmap has.
#[inline(always)]
fn ready_bits(first: u32, posts: u32) -> u32 {
    let mask = ((1 << posts) - 1) << (first % MAX_BATCH);
    (mask | mask >> MAX_BATCH) & READY
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

/// The reservation cursor and the flush barrier of a cursor word.
#[inline(always)]
pub(super) fn halves(cursor: u64) -> (u32, u32) {
    (cursor as u32, (cursor >> 32) as u32)
}

/// Reserves the next number, and returns the cursor word from before.
#[inline(always)]
fn reserve<S: Share>(words: Words<'_>) -> u64 {
    S::add(words.cursor, number_of_thread(1).into(), Ordering::Relaxed)
}

/// Posts one work request, which `wqe` encodes into its slot.
///
/// # Errors
/// What ended a wait for room. The endpoint is poisoned then, unless the mode is exclusive.
#[inline(always)]
pub fn post<S: Share, Q: CombiningQueue + Copy>(
    queue: Q,
    limits: impl Limit,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), Status> {
    if S::EXCLUSIVE {
        while let Err(NoRoom { reserved }) = try_post_exclusive(queue, aggregate, wqe) {
            wait_exclusive(queue, limits, reserved)?;
        }
        return Ok(());
    }
    match try_post::<S, Q>(queue, aggregate, wqe) {
        Ok(after) => {
            finish::<S, Q>(queue, after);
            Ok(())
        }
        Err(NoRoom { reserved }) => post_reserved::<S, Q>(queue, limits, reserved, aggregate, wqe),
    }
}

/// A reservation without room in the ring. The caller must continue with [`post_reserved`].
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct NoRoom {
    /// The cursor word from before the reservation.
    pub reserved: u64,
}

/// What a poster has to do after its mark.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct AfterMark {
    /// The next step.
    pub next: Next,
    /// The state word as the poster left it, from which [`Next::ContinueTurn`] continues.
    pub state: u64,
}

/// See [`AfterMark`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(u32)]
pub enum Next {
    /// Nothing: the request is rung, or another poster rings it.
    Nothing,
    /// A request may have become ringable: the poster takes a turn if no ringer is active.
    TakeTurn,
    /// The poster is the active ringer, or was it and left a request to ring.
    ContinueTurn,
    /// The poster is the active ringer, and has rung for its own post alone, which it has not marked. On a CPU only.
    EndTurn,
    /// The request is written and not yet marked; the state has its number as the rung count. On a CPU only.
    Mark,
}

impl Next {
    /// The step of that number; [`Next::Nothing`] for an unknown one, and for [`Next::EndTurn`] on a GPU, which has no such step.
    pub fn from_number(number: u32) -> Next {
        [Next::TakeTurn, Next::ContinueTurn, Next::EndTurn, Next::Mark]
            .into_iter()
            .find(|next| *next as u32 == number && !(cfg!(target_arch = "nvptx64") && *next == Next::EndTurn))
            .unwrap_or(Next::Nothing)
    }
}

/// As [`post`], if there is room at once, and up to the mark: the rare step after it is left to [`finish`], and the result names
/// it. The usual case is a straight line of code, and rare cases are calls at its end, so that the usual case keeps no registers
/// for their return.
///
/// # Errors
/// There is no room at once.
#[inline(always)]
pub fn try_post<S: Share, Q: CombiningQueue + Copy>(
    queue: Q,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<AfterMark, NoRoom> {
    let reserved = reserve::<S>(queue.words());
    if has_room(queue, reserved) {
        Ok(encode_and_mark::<S, Q>(queue, reserved, aggregate, wqe))
    } else {
        Err(NoRoom { reserved })
    }
}

/// Carries out the step that follows a mark.
#[inline(always)]
pub fn finish<S: Share, Q: CombiningQueue + Copy>(queue: Q, mut after: AfterMark) {
    if matches!(after.next, Next::Mark) {
        after = mark::<S, Q>(queue, rung(after.state));
    }
    match after.next {
        Next::Nothing | Next::Mark => {}
        Next::TakeTurn => take_turns::<S, Q>(queue),
        Next::ContinueTurn => continue_turn::<S, Q>(queue, after.state),
        Next::EndTurn => continue_turn::<S, Q>(queue, end_turn::<S, Q>(queue, RINGER)),
    }
}

/// Encodes the request, fences and marks it, and rings it if no other poster is active.
#[inline(always)]
fn encode_and_mark<S: Share, Q: CombiningQueue + Copy>(
    queue: Q,
    reserved: u64,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> AfterMark {
    let (idx, _) = halves(reserved);
    wqe.encode(idx);
    queue.fence();
    if aggregate {
        let old = S::add(queue.words().state, ready_bit(idx), Ordering::Acquire);
        let next = if old & ready_bit(idx.wrapping_add(1)) != 0 { Next::TakeTurn } else { Next::Nothing };
        return AfterMark { next, state: old };
    }
    // A CPU tries the shortest way first, in which no other poster comes until the turn ends: it takes the turn without a ready bit.
    if !cfg!(target_arch = "nvptx64") {
        // Computed again from the reservation, so that the encoding has a register more.
        let (idx, _) = halves(in_register(reserved));
        let (idle, rung) = (all_rung(idx), all_rung(idx.wrapping_add(1)));
        if !S::replace(queue.words().state, idle, idle + RINGER, Ordering::Acquire) {
            return AfterMark { next: Next::Mark, state: idle };
        }
        ring(queue, idx.wrapping_add(1));
        let alone = S::replace(queue.words().state, idle + RINGER, rung, Ordering::Acquire);
        return AfterMark { next: if alone { Next::Nothing } else { Next::EndTurn }, state: idle + RINGER };
    }
    mark::<S, Q>(queue, idx)
}

/// Marks request `idx`, and rings it if no other poster is active.
#[inline(always)]
fn mark<S: Share, Q: CombiningQueue + Copy>(queue: Q, idx: u32) -> AfterMark {
    let mark = ready_bit(idx) + RINGER;
    let old = S::add(queue.words().state, mark, Ordering::Acquire);
    if old != all_rung(idx) {
        let next = if old & RINGERS != 0 { Next::Nothing } else { Next::ContinueTurn };
        return AfterMark { next, state: old + mark };
    }
    // No other poster is active: the turn rings this post alone.
    ring(queue, idx.wrapping_add(1));
    let state = end_turn::<S, Q>(queue, mark);
    AfterMark { next: if is_idle(state) { Next::Nothing } else { Next::ContinueTurn }, state }
}

/// Ends the turn that rang for one post alone, whose mark is part of the state: the ringer, and its ready bit if it has set it.
#[inline(always)]
fn end_turn<S: Share, Q: CombiningQueue + Copy>(queue: Q, mark: u64) -> u64 {
    // One more is rung, less the mark: the difference has no upper half.
    end_turn_by::<S, Q>(queue, u64::from((mark as u32).wrapping_neg()))
}

/// Posts under the reservation `reserved`, and waits for room first.
///
/// # Errors
/// As for [`post`].
#[inline(always)]
pub fn post_reserved<S: Share, Q: CombiningQueue + Copy>(
    queue: Q,
    limits: impl Limit,
    reserved: u64,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), Status> {
    insert_used(queue, reserved);
    if !check_room::<S, Q>(queue, reserved) {
        let mut spin = Spin::new(limits);
        loop {
            take_turns::<S, Q>(queue);
            if check_room::<S, Q>(queue, reserved) {
                break;
            }
            wait_or_poison(queue, &mut spin)?;
        }
    }
    finish::<S, Q>(queue, encode_and_mark::<S, Q>(queue, reserved, aggregate, wqe));
    Ok(())
}

/// As [`post`] for one attempt, when no other thread uses the endpoint. Every reserved request is ready then.
///
/// # Errors
/// There is no room at once. Nothing is reserved; the caller may wait with [`wait_exclusive`].
#[inline(always)]
pub fn try_post_exclusive<Q: CombiningQueue + Copy>(
    queue: Q,
    aggregate: bool,
    wqe: impl EncodeWqe,
) -> Result<(), NoRoom> {
    let reserved = queue.words().cursor.load(Ordering::Relaxed);
    if !has_room(queue, reserved) {
        return Err(NoRoom { reserved });
    }
    let (idx, _) = halves(reserved);
    queue.words().cursor.store(reserved.wrapping_add(1), Ordering::Relaxed);
    wqe.encode(idx);
    queue.fence();
    if aggregate {
        let state = queue.words().state;
        state.store(state.load(Ordering::Relaxed) | ready_bit(idx), Ordering::Relaxed);
    } else {
        ring_exclusive(queue, idx.wrapping_add(1));
    }
    Ok(())
}

#[inline(always)]
fn ring_exclusive<Q: CombiningQueue + Copy>(queue: Q, target: u32) {
    ring(queue, target);
    queue.words().state.store(all_rung(target), Ordering::Relaxed);
}

/// Waits for room for the number that [`try_post_exclusive`] found no room for. Nothing is reserved yet, so an error leaves no
/// hole.
///
/// # Errors
/// What ended the wait.
#[cold]
#[inline(never)]
pub fn wait_exclusive<Q: CombiningQueue + Copy>(queue: Q, limits: impl Limit, reserved: u64) -> Result<(), Status> {
    let words = queue.words();
    let (idx, _) = halves(reserved);
    let mut spin = Spin::new(limits);
    insert_used(queue, reserved);
    while !check_room::<Thread, Q>(queue, reserved) {
        if words.poison.load(Ordering::Relaxed) != 0 {
            return Err(Status::Poisoned);
        }
        if queue.published() != idx {
            ring_exclusive(queue, idx);
        } else if rung(words.state.load(Ordering::Relaxed)) != idx {
            // NCCL's device code posted and rang on this endpoint.
            words.state.store(all_rung(idx), Ordering::Relaxed);
        } else {
            pause(queue, &mut spin)?;
        }
    }
    Ok(())
}

/// `bound` lies less than 16 ahead of `reserved`, beside the same barrier. Acquire: `bound` stands for the completion count
/// that another poster has read.
#[inline(always)]
fn has_room<Q: CombiningQueue + Copy>(queue: Q, reserved: u64) -> bool {
    queue.words().bound.load(Ordering::Acquire).wrapping_sub(reserved) < u64::from(MAX_BATCH)
}

/// Inserts the endpoint into the set of used endpoints, unless a post under the same barrier has inserted it.
#[inline(always)]
fn insert_used<Q: CombiningQueue + Copy>(queue: Q, reserved: u64) {
    let (_, inserted_at) = halves(queue.words().bound.load(Ordering::Acquire));
    if inserted_at != halves(reserved).1 {
        queue.insert_used();
    }
}

/// Checks counts and barrier. Returns whether `reserved` is admitted, and publishes in `bound` how far other posts would be.
///
/// No post is admitted after an error, because a ring that never fills would take posts for ever. At most the posts that
/// `bound` admitted before the error follow it, and the error's completion stays in the queue for the host to read.
#[inline(always)]
fn check_room<S: Share, Q: CombiningQueue + Copy>(queue: Q, reserved: u64) -> bool {
    check_room_for::<S, Q>(queue, reserved, 1)
}

/// The same for `posts` numbers from `reserved` on, whose value slots are those of one lap.
#[inline(always)]
fn check_room_for<S: Share, Q: CombiningQueue + Copy>(queue: Q, reserved: u64, posts: u32) -> bool {
    let words = queue.words();
    let known = words.bound.load(Ordering::Acquire);
    if words.poison.load(Ordering::Relaxed) != 0 || queue.failed() {
        return false;
    }
    let (idx, barrier) = halves(reserved);
    // More posts than there are ready bits are admitted when all before them are rung.
    let batch = queue.max_batch().min(MAX_BATCH.max(posts));
    let unrung = idx.wrapping_sub(rung(words.state.load(Ordering::Acquire)));
    let open = outstanding(idx, queue.completed());
    if unrung.wrapping_add(posts - 1) >= batch || open > max_outstanding(queue, idx, barrier) {
        return false;
    }
    if posts != 1 && open + posts > queue.sq_size() {
        return false;
    }
    // The wrap of the cursor carries into the barrier, which this call has not checked: `bound` stops before it.
    let to_wrap = (u32::MAX - idx).saturating_add(1);
    let mut room = (batch - unrung).min(queue.sq_size() - open).min(to_wrap);
    let slots = queue.value_slots();
    if slots != 0 {
        room = room.min(slots - (idx & (slots - 1)));
    }
    // A poster that gives up resets `bound` after its poison. A plain store here could undo the reset.
    S::replace(words.bound, known, reserved.wrapping_add(u64::from(room - 1)), Ordering::AcqRel);
    if idx.wrapping_sub(barrier) >= OLD_BARRIER {
        raise_barrier::<S>(words, words.cursor.load(Ordering::Relaxed));
    }
    true
}

/// Raises the barrier to the cursor, unless the word has changed since it was `seen`.
#[inline(always)]
pub(super) fn raise_barrier<S: Share>(words: Words<'_>, seen: u64) -> bool {
    let (cursor, _) = halves(seen);
    S::replace(words.cursor, seen, u64::from(cursor) << 32 | u64::from(cursor), Ordering::Relaxed)
}

/// Waits once more, or gives the reservation up. A reservation that is given up leaves a hole for ever, so it poisons the
/// endpoint; every wait reads the poison.
#[cfg_attr(not(target_arch = "nvptx64"), cold, inline(never))]
#[cfg_attr(target_arch = "nvptx64", inline(always))]
fn wait_or_poison<Q: CombiningQueue + Copy, L: Limit>(queue: Q, spin: &mut Spin<L>) -> Result<(), Status> {
    let words = queue.words();
    let ended = match words.poison.load(Ordering::Relaxed) {
        0 => pause(queue, spin),
        _ => Err(Status::Poisoned),
    };
    if ended.is_err() {
        words.poison.store(1, Ordering::Relaxed);
        // Far behind every reservation: no post is admitted without a check any more.
        let behind = words.cursor.load(Ordering::Relaxed).wrapping_sub(1 << 31);
        words.bound.store(behind, Ordering::Release);
    }
    ended
}

/// No ringer is active, and there is a request to ring, or a cursor of NCCL's to take over.
#[inline(always)]
fn needs_turn<Q: CombiningQueue>(queue: Q, state: u64) -> bool {
    state & RINGERS == 0 && (is_ready(state) || queue.released().wrapping_sub(rung(state)) != 0)
}

/// The first work request that is not rung is ready.
#[inline(always)]
fn is_ready(state: u64) -> bool {
    state & ready_bit(rung(state)) != 0
}

/// No ringer is active, and no request is ready.
#[inline(always)]
fn is_idle(state: u64) -> bool {
    state as u32 == 0
}

/// Continues the turns of the active ringer, which left `state`; without an active ringer, takes turns if they are needed.
#[cold]
#[inline(never)]
fn continue_turn<S: Share, Q: CombiningQueue + Copy>(queue: Q, mut state: u64) {
    while state & RINGERS != 0 {
        state = turn::<S, Q>(queue, state);
    }
    if !is_idle(state) {
        take_turns::<S, Q>(queue);
    }
}

/// Takes turns at the doorbell as long as one is needed.
#[cold]
#[inline(never)]
fn take_turns<S: Share, Q: CombiningQueue + Copy>(queue: Q) {
    loop {
        let state = queue.words().state;
        // A hint: the replacement is the acquire.
        let mut seen = state.load(Ordering::Relaxed);
        if !needs_turn(queue, seen) {
            return;
        }
        if begin_turn::<S>(queue, seen, Ordering::Acquire) {
            seen += RINGER;
            while seen & RINGERS != 0 {
                seen = turn::<S, Q>(queue, seen);
            }
        }
    }
}

/// Rings the doorbell and publishes the cursors. The fence is the release of both, and of the add that ends the turn.
#[inline(always)]
fn ring<Q: Queue>(queue: Q, target: u32) {
    queue.doorbell(target);
    queue.publish(target);
    queue.fence();
}

/// One turn at the doorbell. The caller is the active ringer, and `state` is the word as it left it. Returns the word as this
/// turn leaves it: while that shows a ringer, the caller is still the active one.
#[inline(always)]
fn turn<S: Share, Q: CombiningQueue + Copy>(queue: Q, state: u64) -> u64 {
    let turn = next_turn(state, |is_ready| if is_ready { rung(state) } else { queue.released() });
    // Requests of ours are not rung. Those that the turn takes over from NCCL's device code may be.
    if turn.cleared != 0 || queue.published() != turn.target() {
        ring(queue, turn.target());
    }
    end_turn_by::<S, Q>(queue, turn.change())
}

/// Becomes the active ringer, unless the state has changed since it was `seen`.
#[inline(always)]
pub(super) fn begin_turn<S: Share>(queue: impl CombiningQueue, seen: u64, order: Ordering) -> bool {
    S::replace(queue.words().state, seen, seen + RINGER, order)
}

/// A turn of the active ringer.
pub(super) struct Turn {
    state: u64,
    /// Ready bits that it clears.
    cleared: u32,
    /// Requests that it takes over as rung.
    moved: u32,
}

impl Turn {
    /// Returns whether the turn changes nothing.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.moved == 0
    }

    /// The doorbell's count. Everything below it is rung already where it is NCCL's cursor of rung requests.
    #[inline(always)]
    pub fn target(&self) -> u32 {
        rung(self.state).wrapping_add(self.moved)
    }

    /// What the end of the turn adds to the state, in which there is a ringer.
    #[inline(always)]
    pub fn change(&self) -> u64 {
        // The ringers are not 0, so the lower half borrows from the upper.
        let low = (self.state & RINGERS) as u32 | self.cleared;
        all_rung(self.moved.wrapping_sub(1)) | u64::from(low.wrapping_neg())
    }
}

/// The turn that follows `state`. `released` returns NCCL's cursor of written requests. It stands at the rung count where a request of
/// ours is ready there, which is the argument.
#[inline(always)]
pub(super) fn next_turn(state: u64, released: impl FnOnce(bool) -> u32) -> Turn {
    let from = rung(state);
    // Two copies of the bitmap, one above the other, shifted by n bits, are the bitmap rotated by n.
    let ready = state as u32 & READY;
    let rotated = (ready | ready << MAX_BATCH) >> (from % MAX_BATCH);
    let run = rotated & !rotated.wrapping_add(1) & READY;
    let cleared = run << (from % MAX_BATCH);
    // Where NCCL's device code posted on this endpoint meanwhile, the turn takes over its cursor, and rings what it has deferred.
    // Only the active ringer changes the cursors.
    let moved = run.count_ones().wrapping_add(released(run != 0).wrapping_sub(from));
    Turn { state, cleared: (cleared | cleared >> MAX_BATCH) & READY, moved }
}

/// Ends a turn, and returns the state as the turn leaves it.
#[inline(always)]
pub(super) fn end_turn_by<S: Share, Q: CombiningQueue>(queue: Q, change: u64) -> u64 {
    S::add(queue.words().state, change, Ordering::Acquire).wrapping_add(change)
}

/// Returns whether there is an active ringer.
#[inline(always)]
pub(super) fn has_ringer(state: u64) -> bool {
    state & RINGERS != 0
}

/// Rings what is ready, for a wait that depends on it.
///
/// # Errors
/// [`Status::Poisoned`]: a post can never become ready.
pub fn ring_ready<S: Share, Q: CombiningQueue + Copy>(queue: Q) -> Result<(), Status> {
    take_turns::<S, Q>(queue);
    match queue.words().poison.load(Ordering::Relaxed) {
        0 => Ok(()),
        _ => Err(Status::Poisoned),
    }
}
