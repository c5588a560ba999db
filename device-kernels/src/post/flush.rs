//! A flush of one endpoint, by either policy, in rounds.
//!
//! The flush raises the barrier to the reservation cursor, and ends when the count has reached that place. Each round rings what
//! is ready. A round waits for no other thread, so the caller's loop between the rounds decides how long a flush waits.
//!
//! Both policies are one function with one place that rings, because a kernel has a whole flush inline.

use super::combining::pass::{begin_pass, end_pass_by, has_combiner, next_pass};
use super::combining::room::raise_barrier;
use super::combining::{CombiningQueue, halves};
use super::locked::LockedQueue;
use super::outstanding;
use crate::platform::in_one_place;
use crate::status::Status;
use crate::sync::Ordering;
use crate::wait::{Limit, Spin};

/// What a flush of an endpoint has come to: one number, because a kernel that has the flush inline needs instructions for every other
/// form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Outcome(u32);

impl Outcome {
    /// Every earlier post has completed.
    pub const COMPLETED: Outcome = Outcome(0);
    /// The same, and there was no post since the last flush: the endpoint can leave the set of used endpoints.
    pub const UNUSED: Outcome = Outcome(u32::MAX);
    /// The flush goes on.
    pub const WAITS: Outcome = Outcome(u32::MAX - 1);

    /// The flush has failed.
    #[inline(always)]
    pub const fn failed(status: Status) -> Self {
        Outcome(status as u32)
    }

    /// Whether a flush that has ended has failed.
    #[inline(always)]
    pub const fn has_failed(self) -> bool {
        self.0.wrapping_add(1) > 1
    }

    /// The bits, if a flush that has not failed found its endpoint unused, or 0.
    #[inline(always)]
    pub const fn if_unused(self, bits: u32) -> u32 {
        bits & self.0
    }

    /// The number of the status of a flush that has failed, or 0.
    #[inline(always)]
    pub const fn failure(self) -> u32 {
        if self.0 >= Self::WAITS.0 { 0 } else { self.0 }
    }
}

impl From<Outcome> for Result<bool, Status> {
    /// Whether the endpoint can leave the set of used endpoints, or why the flush has failed.
    #[inline(always)]
    fn from(outcome: Outcome) -> Self {
        match Status::from_number(outcome.failure()) {
            None => Ok(outcome == Outcome::UNUSED),
            Some(status) => Err(status),
        }
    }
}

/// A queue of one of the policies.
pub trait FlushQueue: CombiningQueue + LockedQueue {}
impl<Q: CombiningQueue + LockedQueue> FlushQueue for Q {}

/// A flush of one endpoint.
#[derive(Debug, Clone, Copy, Default)]
pub struct Flush {
    /// The number that the count has to reach, at which a barrier stands or stood.
    at: u32,
    /// There is such a number.
    has_begun: bool,
}

impl Flush {
    /// A flush that began earlier, and has to reach `at`.
    pub fn from_number(at: u32) -> Self {
        Flush { at, has_begun: true }
    }

    /// The number to reach. None: the flush has not begun.
    pub fn number(self) -> Option<u32> {
        self.has_begun.then_some(self.at)
    }

    /// One round of the flush. Another one may follow as long as the flush [waits](Outcome::WAITS).
    #[inline(always)]
    pub fn round<Q: FlushQueue>(&mut self, queue: Q, by_lock: bool) -> Outcome {
        self.rounds(queue, by_lock, &mut Once)
    }

    /// Rounds until the flush has ended, or the pause after a round ends them.
    ///
    /// Snapshot and barrier are one compare-and-swap, or are under the lock, because a post in between would be counted in place of
    /// an earlier one.
    #[inline(always)]
    fn rounds<Q: FlushQueue>(&mut self, queue: Q, by_lock: bool, pause: &mut impl Pause) -> Outcome {
        let words = queue.words();
        loop {
            // The count is read before the cursor. In the other order, completions of later posts would count as earlier ones.
            let completed = queue.completed();
            let has_failed = queue.failed();
            let now = words.cursor.load(Ordering::Relaxed);
            let (pc, barrier) = halves(now);
            // `pc` is never behind the count, so it is read before the pending requests.
            let cursor = pc.wrapping_add(queue.pending() * u32::from(by_lock));
            let is_first = !self.has_begun;
            if is_first & !by_lock {
                *self = Flush { at: pc, has_begun: raise_barrier(words, now) };
            }
            // No post from the barrier on is admitted before the count has reached the barrier, so the count proves that every
            // earlier post has completed.
            let is_below = outstanding(cursor, completed) <= cursor.wrapping_sub(self.at);
            if has_failed | (is_below & !(is_first & by_lock)) {
                let is_unused = is_first & (barrier == cursor);
                let ended = if is_unused { Outcome::UNUSED } else { Outcome::COMPLETED };
                return if has_failed { Outcome::failed(Status::CardError) } else { ended };
            }
            let mut is_combiner = false;
            loop {
                let (target, change);
                if by_lock {
                    // Under the lock the flush rang all that it waits for when it began.
                    if self.has_begun || !queue.lock_words().try_lock() {
                        break;
                    }
                    (target, change) = (queue.take_pending(), 0);
                } else {
                    let state = words.state.load(Ordering::Acquire);
                    let released = queue.released();
                    let pass = next_pass(state, |_| released);
                    if !is_combiner {
                        if has_combiner(state) | pass.is_empty() {
                            break;
                        }
                        // The next round of this loop acquires the state.
                        is_combiner = begin_pass(queue, state, Ordering::Relaxed);
                        continue;
                    }
                    (target, change) = (pass.target(), pass.change());
                }
                if queue.published() != target {
                    queue.doorbell(target);
                    queue.publish(target);
                }
                let open = outstanding(target, completed);
                if in_one_place(by_lock) {
                    queue.lock_words().barrier.store(target, Ordering::Relaxed);
                    if open == 0 {
                        queue.lock_words().used.store(0, Ordering::Relaxed);
                    }
                }
                // The release of the doorbell, the cursors, and the lock or the pass.
                queue.fence();
                if in_one_place(by_lock) {
                    queue.lock_words().lock.store(0, Ordering::Relaxed);
                    if open == 0 {
                        return Outcome::UNUSED;
                    }
                    *self = Flush::from_number(target);
                    break;
                }
                is_combiner = has_combiner(end_pass_by(queue, change));
            }
            let is_poisoned = words.poison.load(Ordering::Relaxed) != 0;
            let (ends, outcome) = pause.check();
            if is_poisoned | ends {
                return if is_poisoned { Outcome::failed(Status::Poisoned) } else { outcome };
            }
            pause.relax();
        }
    }
}

/// Waits until every post made before this call has completed. The wait ends while other threads go on posting.
#[inline(always)]
pub fn flush<Q: FlushQueue>(queue: Q, by_lock: bool, limits: impl Limit) -> Outcome {
    wait(queue, by_lock, Flush::default(), limits)
}

/// Waits until the flush has ended.
#[inline(always)]
pub fn wait<Q: FlushQueue>(queue: Q, by_lock: bool, mut flush: Flush, limits: impl Limit) -> Outcome {
    flush.rounds(queue, by_lock, &mut Spin::new(limits))
}

/// What stands between two rounds of a flush.
trait Pause {
    /// Whether the rounds end here, and the outcome if they do.
    fn check(&mut self) -> (bool, Outcome);
    fn relax(&mut self);
}

impl<L: Limit> Pause for Spin<L> {
    #[inline(always)]
    fn check(&mut self) -> (bool, Outcome) {
        let (ends, status) = Spin::check(self);
        (ends, Outcome::failed(status))
    }

    #[inline(always)]
    fn relax(&mut self) {
        Spin::relax(self);
    }
}

/// There is one round.
struct Once;

impl Pause for Once {
    #[inline(always)]
    fn check(&mut self) -> (bool, Outcome) {
        (true, Outcome::WAITS)
    }

    fn relax(&mut self) {}
}
