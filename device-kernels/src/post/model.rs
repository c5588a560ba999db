//! The posting code in plain memory: one queue and one card for every kind of test, over the atomics of
//! [`sync`](crate::sync).
//!
//! [`Model`] is the queue, and a [`Backend`] stands in for what's behind it. In the tests that's a poster's view of a
//! small card (`card`), which fetches late, completes in any order, reads values when it completes a request, and
//! checks every doorbell. They run it in four ways, each of which finds what the others can't:
//!
//! | module | threads | memory | what for |
//! |---|---|---|---|
//! | `interleavings` | a few, under loom | weak | all interleavings up to a number of preemptions: orderings |
//! | `schedules` | coroutines with a random scheduler | sequentially consistent | more posters and posts, at every wrap |
//! | `threads` | the machine's | the machine's | thousands of posts, errors, NCCL's device code beside ours |
//! | `cursors` | one | | random calls against numbers of 64 bits, which don't wrap |
//!
//! A bench has a backend that counts doorbells.

#[cfg(test)]
mod card;
#[cfg(all(test, not(loom)))]
mod cursors;
#[cfg(all(test, loom))]
mod interleavings;
#[cfg(test)]
mod ops;
#[cfg(all(test, not(loom)))]
mod schedules;
#[cfg(all(test, not(loom)))]
mod threads;

use super::combining::{self, CombiningQueue};
use super::locked::{self, LockedQueue};
use super::{COUNT_MASK, Queue};
use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};
use ferrogin_ffi::ext::{Losses, STATE_RUNG_SHIFT};

/// A word on its own cache line, because posters on several processors contend for it.
#[repr(align(128))]
struct Line<T>(T);

/// The words that the posters of one endpoint share.
pub struct Words {
    cursor: Line<AtomicU64>,
    state: Line<AtomicU64>,
    bound: AtomicU64,
    poison: AtomicU32,
    lock: Line<AtomicU32>,
    barrier: AtomicU32,
    in_set: AtomicU32,
    pending: AtomicU32,
    /// NCCL's cursor of rung requests.
    published: Line<AtomicU32>,
    /// NCCL's cursor of written requests. Not used under loom, where no code of NCCL's posts.
    released: Line<AtomicU32>,
}

impl Words {
    /// Returns the words of an endpoint whose first request has the number `start`.
    pub fn new(start: u32) -> Self {
        let both = u64::from(start) << 32 | u64::from(start);
        Words {
            cursor: Line(AtomicU64::new(both)),
            state: Line(AtomicU64::new(u64::from(start) << STATE_RUNG_SHIFT)),
            bound: AtomicU64::new(both.wrapping_sub(1 << 32)),
            poison: AtomicU32::new(0),
            lock: Line(AtomicU32::new(0)),
            barrier: AtomicU32::new(start),
            in_set: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            published: Line(AtomicU32::new(start)),
            released: Line(AtomicU32::new(start)),
        }
    }
}

/// An endpoint's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Work requests that may be outstanding.
    pub sq_size: u32,
    /// Work requests that may be written but not yet rung.
    pub max_batch: u32,
    /// Value slots: a power of two, or 0.
    pub slots: u32,
}

/// What a [`Model`] posts to. See [`Queue`] for the methods of the same name.
pub trait Backend {
    /// Returns the endpoint's words.
    fn words(&self) -> &Words;
    /// Returns the endpoint's limits.
    fn geometry(&self) -> Geometry;
    /// Returns the card's completion count.
    fn completed(&self) -> u32;
    /// Returns how many work requests the card has completed in error.
    fn failures(&self) -> u32 {
        0
    }
    /// Returns what the host says of those.
    fn losses(&self) -> Losses {
        Losses::default()
    }
    /// Orders the poster's earlier stores before its later ones.
    fn fence(&self);
    /// Tells the card that all work requests below `count` are written.
    fn doorbell(&self, count: u32);
    /// Inserts the endpoint into its context's set of used endpoints, if it has one.
    fn insert_used(&self) {}
    /// Called before an access to a word that posters share: another poster may run here.
    fn stop(&self) {}
}

/// A queue for every policy.
pub struct Model<'a, B>(pub &'a B);

impl<B> Clone for Model<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B> Copy for Model<'_, B> {}

impl<B: Backend> Queue for Model<'_, B> {
    fn completed(&self) -> u32 {
        self.0.stop();
        self.0.completed() & COUNT_MASK
    }
    fn failures(&self) -> u32 {
        self.0.stop();
        self.0.failures() & COUNT_MASK
    }
    fn acknowledged(&self) -> u32 {
        self.0.stop();
        self.0.losses().acknowledged
    }
    fn identified(&self) -> u32 {
        self.0.stop();
        self.0.losses().identified
    }
    fn sq_size(&self) -> u32 {
        self.0.geometry().sq_size
    }
    fn max_batch(&self) -> u32 {
        self.0.geometry().max_batch
    }
    fn value_slots(&self) -> u32 {
        self.0.geometry().slots
    }
    fn fence(&self) {
        self.0.fence();
    }
    fn doorbell(&self, count: u32) {
        self.0.stop();
        self.0.doorbell(count);
    }
    fn publish(&self, rung: u32) {
        self.0.stop();
        self.0.words().published.0.store(rung, Relaxed);
        if !cfg!(loom) {
            self.0.words().released.0.store(rung, Relaxed);
        }
    }
    fn published(&self) -> u32 {
        self.0.stop();
        self.0.words().published.0.load(Relaxed)
    }
    fn released(&self) -> u32 {
        if cfg!(loom) {
            return self.published();
        }
        self.0.stop();
        self.0.words().released.0.load(Relaxed)
    }
    fn insert_used(&self) {
        self.0.stop();
        self.0.insert_used();
        self.0.stop();
    }
}

impl<B: Backend> CombiningQueue for Model<'_, B> {
    fn words(&self) -> combining::Words<'_> {
        self.0.stop();
        let Words { cursor, state, bound, poison, .. } = self.0.words();
        combining::Words { cursor: &cursor.0, state: &state.0, bound, poison }
    }
}

impl<B: Backend> LockedQueue for Model<'_, B> {
    fn next(&self) -> u32 {
        self.0.stop();
        (self.0.words().cursor.0.load(Relaxed) as u32).wrapping_add(self.pending())
    }
    fn pending(&self) -> u32 {
        self.0.words().pending.load(Relaxed)
    }
    fn start(&self) {
        self.0.stop();
        self.0.words().pending.store(self.pending() + 1, Relaxed);
    }
    fn take_pending(&self) -> u32 {
        let next = self.next();
        self.0.stop();
        self.0.words().cursor.0.store(u64::from(next), Relaxed);
        self.0.words().pending.store(0, Relaxed);
        next
    }
    fn lock_words(&self) -> locked::Words<'_> {
        self.0.stop();
        let Words { lock, barrier, in_set, .. } = self.0.words();
        locked::Words { lock: &lock.0, barrier, used: in_set }
    }
}
