//! The endpoints of a context that may have incomplete posts, so that a flush looks at no others.
//!
//! # State
//!
//! A bit for each endpoint in the leaf words, and a bit for each leaf word in the summary words. A word has 32 bits in its low
//! half, and counts insertions in its high half.
//!
//! # Why no flush misses a post
//!
//! An insertion first adds to the count of the leaf word and then sets the bit if it was clear; then it does the same in the
//! summary word. A flush reads a word before it looks at what the word's bits stand for: the endpoint's cursors, or the leaf
//! word. It clears a bit by a compare-and-swap from the word that it read, so that an insertion since makes it fail. A flush
//! that reads the word after an insertion has begun sees the reservation that the insertion follows, or the leaf bit.
//!
//! A poster inserts its endpoint after its reservation and before its request is admitted. It need not insert an endpoint
//! that was inserted since the last flush barrier: `combining` reads this from the barrier beside `bound`, `locked` from a
//! word under the lock. A flush removes an endpoint only when every post has completed and the barrier stands at the cursor
//! (`locked`: under the lock), so later posts have a later barrier, and insert the endpoint again.

use crate::status::Status;
use crate::sync::{AtomicU64, Ordering};
use ferrogin_ffi::ext::{USED_BITS, used_words};

/// One insertion, in the count of a word.
const INSERTED: u64 = 1 << USED_BITS;

/// The words of one context.
#[derive(Clone, Copy)]
pub struct UsedSet<'a> {
    summaries: &'a [AtomicU64],
    leaves: &'a [AtomicU64],
}

fn bit(i: u32) -> u64 {
    // Shifted as 32 bits: on a GPU 64 are two shifts.
    u64::from(1_u32 << (i % USED_BITS))
}

#[inline(always)]
fn insert(words: &[AtomicU64], i: u32) {
    if let Some(word) = words.get((i / USED_BITS) as usize)
        && word.fetch_add(INSERTED, Ordering::AcqRel) & bit(i) == 0
    {
        word.fetch_or(bit(i), Ordering::Release);
    }
}

/// Clears bit `i` of the word, unless there was an insertion since the word was `seen`. Success changes `seen` to the word
/// as this call leaves it.
fn remove(word: &AtomicU64, seen: &mut u64, i: u32) {
    let mut now = *seen;
    while now >> USED_BITS == *seen >> USED_BITS {
        match word.compare_exchange(now, now & !bit(i), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                *seen = now & !bit(i);
                return;
            }
            Err(other) => now = other,
        }
    }
}

/// The bits of a word that are set, as numbers from `first` on.
fn numbers(first: usize, word: u64) -> impl Iterator<Item = u32> {
    let mut rest = word as u32;
    core::iter::from_fn(move || {
        let next = (rest != 0).then(|| first as u32 + rest.trailing_zeros());
        rest &= rest.wrapping_sub(1);
        next
    })
}

impl<'a> UsedSet<'a> {
    /// The set in `words`, which has the summary words of `n_endpoints` and then their leaf words.
    #[inline(always)]
    pub fn new(words: &'a [AtomicU64], n_endpoints: u32) -> Self {
        let (summaries, leaves) = words.split_at_checked(used_words(n_endpoints).0).unwrap_or((&[], words));
        UsedSet { summaries, leaves }
    }

    /// Returns whether no endpoint was used, or every one was removed.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.summaries.iter().all(|word| word.load(Ordering::Acquire) as u32 == 0)
    }

    /// Adds an endpoint.
    #[inline(always)]
    pub fn insert(self, endpoint: u32) {
        insert(self.leaves, endpoint);
        insert(self.summaries, endpoint / USED_BITS);
    }

    /// Calls `look` for each endpoint in the set, in order, and removes those for which it returns true: every post has
    /// completed, and the next post inserts the endpoint.
    ///
    /// # Errors
    /// The first error of `look`, which ends the visit.
    pub fn visit(self, mut look: impl FnMut(u32) -> Result<bool, Status>) -> Result<(), Status> {
        for (i, summary) in self.summaries.iter().enumerate() {
            let mut seen_summary = summary.load(Ordering::Acquire);
            for leaf in numbers(i * USED_BITS as usize, seen_summary) {
                let Some(word) = self.leaves.get(leaf as usize) else { break };
                let mut seen = word.load(Ordering::Acquire);
                for endpoint in numbers((leaf * USED_BITS) as usize, seen) {
                    if look(endpoint)? {
                        remove(word, &mut seen, endpoint);
                    }
                }
                if seen as u32 == 0 {
                    remove(summary, &mut seen_summary, leaf);
                }
            }
        }
        Ok(())
    }
}
