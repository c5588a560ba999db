//! Posting: the policies `combining`, with its single-thread form [`exclusive`], and `locked`, over one trait.
//!
//! A policy takes a work request from reservation to doorbell. It answers three questions: when a ring slot or a value
//! slot may be written again, when every post before a flush has completed, and which poster rings. They are hard
//! because the card completes requests in any order and only counts completions.
//!
//! Both policies rely on admission. Let `idx` be a post's number on its endpoint, and `C` the card's count of requests
//! that have ended: its completion count and, in a context that isolates peers, its error count, as a failed request
//! has ended too. Two counts that are read one after the other add up to no more than the requests that have ended by
//! the second read. A post is *admitted* when `idx - C`, the number of earlier posts that haven't completed, is at most
//!
//! * `sq_size - 1`, so that the ring doesn't overflow. The card fetches in order, so a count is enough;
//! * `idx mod V`, where the endpoint has `V` value slots. Then every post of earlier laps has completed, whichever
//!   posts of this lap finished early, and the card no longer reads the slot. Every post on such an endpoint obeys this
//!   bound, because an early plain put would be counted in place of a value;
//! * `idx - B`, where a flush has raised a barrier at `B`. Then no post from `B` on is admitted, and counted, before
//!   every post below `B` has completed, so the flush can trust the count.

pub mod combining;
pub mod exclusive;
pub mod flush;
pub mod locked;
#[cfg(any(test, feature = "model"))]
pub mod model;
pub mod outcome;
#[allow(unsafe_code)]
pub mod used;

use crate::status::Status;
use crate::wait::{Limit, Spin};
use ferrogin_ffi::ext::Losses;

/// Completion counters wrap at 2^31.
pub const COUNT_MASK: u32 = 0x7fff_ffff;
/// Most work requests that the `combining` policy leaves unrung, whatever the card allows.
const MAX_BATCH: u32 = 16;

/// What a policy needs from an endpoint. Every method is cheap and may be called from any thread.
pub trait Queue: Copy {
    /// Returns the card's completion count since the first post: low 31 bits, with acquire ordering.
    fn completed(&self) -> u32;
    /// Returns how many work requests the card has completed in error since the first post: low 31 bits, with acquire
    /// ordering.
    fn failures(&self) -> u32;
    /// Returns whether there are failures, without an order.
    #[inline(always)]
    fn has_failures(&self) -> bool {
        self.failures() != 0
    }
    /// Returns [`Losses::acknowledged`]. Read only if there are failures.
    fn acknowledged(&self) -> u32;
    /// Returns [`Losses::identified`]. Read only if there are failures, or when a time limit has passed.
    fn identified(&self) -> u32;
    /// Returns whether the context isolates peers.
    #[inline(always)]
    fn isolates(&self) -> bool {
        self.identified() & Losses::ISOLATES != 0
    }
    /// Returns whether the host has identified the peers of all `failures`, so that their completions need no more
    /// room.
    #[inline(always)]
    fn has_identified(&self, failures: u32) -> bool {
        failures == 0 || self.identified() == Losses::ISOLATES | failures
    }
    /// Returns whether a failed work request ends the posts and waits of this endpoint.
    #[inline(always)]
    fn has_failed(&self) -> bool {
        self.failures() != 0 && !self.isolates()
    }
    /// Returns how many work requests may be outstanding at once.
    fn sq_size(&self) -> u32;
    /// Returns how many work requests may be written but not yet rung.
    fn max_batch(&self) -> u32;
    /// Returns the number of value slots: a power of two, or 0.
    fn value_slots(&self) -> u32;
    /// Orders this thread's earlier stores before its later ones, as the card sees them.
    fn fence(&self);
    /// Tells the card that all work requests below `count` are written.
    fn doorbell(&self, count: u32);
    /// Sets NCCL's cursors: every request below `rung` has been written and rung. Called by the poster that rang,
    /// before it ends its pass or releases the lock.
    fn publish(&self, rung: u32);
    /// Returns NCCL's cursor of rung requests. It's ahead of ours if NCCL's device code has posted on this endpoint
    /// meanwhile.
    fn published(&self) -> u32;
    /// Returns NCCL's cursor of written requests. It's ahead of `published` if NCCL's device code has deferred posts.
    fn released(&self) -> u32 {
        self.published()
    }
    /// Inserts the endpoint into its context's set of used endpoints, if it has one: see [`used`].
    fn insert_used(&self) {}
}

/// Encodes a work request whose number the policy chooses. Closures implement it; the fast path uses structs instead,
/// because only their `encode` is certain to be inlined.
pub trait EncodeWqe: Copy {
    /// Writes request `idx` into its ring slot, and its value, if any, into its value slot.
    fn encode(self, idx: u32);
}

impl<F: Fn(u32) + Copy> EncodeWqe for F {
    #[inline(always)]
    fn encode(self, idx: u32) {
        self(idx);
    }
}

/// A post that is left unfinished, because what it still needs is rare. The usual case is straight-line code that keeps
/// no registers for what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Unfinished {
    /// The next step.
    pub step: Step,
    /// The word that the step needs.
    pub word: u64,
}

/// See [`Unfinished`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Step {
    /// The post may have made a request ringable: make a pass unless a combiner is active.
    MakePass = 1,
    /// The poster is the active combiner, or stopped being it with a request left to ring. The word is the state as it
    /// left it.
    ContinuePass = 2,
    /// There's no room yet: wait for it, then post. The word is the cursor before the reservation.
    WaitForRoom = 3,
}

#[cfg(not(loom))]
impl Step {
    /// Returns the step with that number.
    pub(crate) fn from_number(number: u32) -> Option<Step> {
        match number {
            1 => Some(Step::MakePass),
            2 => Some(Step::ContinuePass),
            3 => Some(Step::WaitForRoom),
            _ => None,
        }
    }
}

/// Returns the most incomplete earlier posts with which `idx` is admitted.
#[inline(always)]
fn max_outstanding<Q: Queue>(queue: Q, idx: u32, barrier: u32) -> u32 {
    let mut limit = queue.sq_size() - 1;
    let slots = queue.value_slots();
    if slots != 0 {
        limit = limit.min(idx & (slots - 1));
    }
    limit.min(idx.wrapping_sub(barrier))
}

/// Returns the number of posts before `idx` that haven't completed.
#[inline(always)]
fn outstanding(idx: u32, completed: u32) -> u32 {
    idx.wrapping_sub(completed) & COUNT_MASK
}

/// Waits one more round for a post on `queue`.
#[inline(always)]
pub(crate) fn pause<Q: Queue, L: Limit>(queue: Q, spin: &mut Spin<L>) -> Result<(), Status> {
    if queue.has_failed() {
        return Err(Status::CardError);
    }
    spin.pause_post(|| queue.isolates())
}
