//! A flush of one endpoint, under either policy, in rounds.
//!
//! A flush raises the policy's barrier to the next post's number, and ends when the count has reached that number. A
//! round never waits for another thread, so the caller's loop over the rounds decides how long a flush waits.
//!
//! In a context that isolates peers, failed requests count too. A flush that reports losses then waits for the host,
//! which either ends all waits with [`STOP_LOST`](ferrogin_ffi::ext::STOP_LOST), once it knows the lost rank, or says
//! that the program has acknowledged the failures.

use super::combining::{self, CombiningQueue};
use super::locked::{self, LockedQueue};
use super::outcome::Outcome;
use super::outstanding;
use crate::status::Status;
use crate::sync::Ordering;
use crate::wait::{Limit, Spin};
use ferrogin_ffi::ext::Losses;

/// A queue for both policies.
pub trait FlushQueue: CombiningQueue + LockedQueue {}
impl<Q: CombiningQueue + LockedQueue> FlushQueue for Q {}

/// Runs one round of a flush, which rings what is ready. `at` is the number that the count has to reach, or `None` if
/// the flush hasn't begun. Another round may follow as long as the flush [waits](Outcome::WAITS).
#[inline(always)]
pub fn round<Q: FlushQueue>(queue: Q, by_lock: bool, reports_losses: bool, at: &mut Option<u32>) -> Outcome {
    // The counts are read before the cursor. In the other order, completions of later posts would count as earlier
    // ones.
    let (has_failures, mut completed) = (queue.has_failures(), queue.completed());
    // In a context that isolates peers, the top bit is set, and the others are 0 once all failures are acknowledged.
    let mut failed = 0;
    if has_failures {
        let failures = queue.failures();
        completed = completed.wrapping_add(failures);
        failed = queue.acknowledged() ^ failures;
    }
    let words = queue.words();
    let is_poisoned = words.poison.load(Ordering::Relaxed) != 0;
    let has_failed = failed.cast_signed() > 0;
    if has_failed | is_poisoned {
        return Outcome::failed(if has_failed { Status::CardError } else { Status::Poisoned });
    }
    let now = words.cursor.load(Ordering::Relaxed);
    let outcome = match *at {
        None if by_lock => locked::begin_flush(queue, completed, at),
        None => combining::begin_flush(queue, completed, now, at),
        Some(at) => {
            // No post from the barrier at `at` on is admitted before the count has reached it, so the count proves that
            // every earlier post has completed. The cursor isn't behind either of them.
            let (cursor, _) = combining::halves(now);
            let has_reached = outstanding(cursor, completed) <= cursor.wrapping_sub(at);
            if has_reached { Outcome::COMPLETED } else { Outcome::WAITS }
        }
    };
    if outcome == Outcome::WAITS && !by_lock {
        combining::pass::passes(queue);
    }
    // Not by counting only acknowledged failures: later posts, which the others admit, would be counted in their place.
    if reports_losses && failed > Losses::ISOLATES { Outcome::WAITS } else { outcome }
}

/// Runs rounds until the flush has ended: every post made before its first round has completed. The wait ends even if
/// other threads keep posting.
#[inline(always)]
pub fn flush<Q: FlushQueue>(queue: Q, by_lock: bool, mut at: Option<u32>, limits: impl Limit) -> Outcome {
    let mut spin = Spin::new(limits);
    loop {
        let outcome = round(queue, by_lock, limits.reports_losses(), &mut at);
        if outcome != Outcome::WAITS {
            return outcome;
        }
        if let Some(status) = spin.check() {
            return Outcome::failed(status);
        }
        spin.relax();
    }
}
