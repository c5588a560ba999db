//! The endpoints of a context that may have incomplete posts, so that a flush skips all others.
//!
//! # State
//!
//! There is a bit for each endpoint in the leaf words, and a bit for each leaf word in the summary words. A word has 32
//! bits in its low half, and counts insertions in its high half.
//!
//! # Why no flush misses a post
//!
//! An insertion first adds to the leaf word's count and then sets the bit if it was clear; then it does the same in the
//! summary word. A flush reads a word before it looks at what the word's bits stand for: the endpoint's cursors, or the
//! leaf word. It clears a bit with a compare-and-swap from the word it read, which fails if there was an insertion
//! since. A flush that reads the word after an insertion has begun sees the reservation that preceded the insertion, or
//! the leaf bit.
//!
//! A poster inserts its endpoint after its reservation and before its request is admitted. It needn't insert an
//! endpoint that was inserted since the last flush barrier: `combining` tells from the barrier beside `bound`, `locked`
//! from a word under the lock. A flush removes an endpoint only when every post has completed and the barrier stands at
//! the cursor (`locked`: under the lock), so later posts have a later barrier and insert the endpoint again.

use super::outcome::Outcome;
use crate::platform::kept;
use crate::status::Status;
use crate::sync::{AtomicU64, Ordering, fence};
use ferrogin_ffi::ext::USED_BITS;

/// One insertion, as a word counts it.
const INSERTED: u64 = 1 << USED_BITS;

/// The words of one context.
#[derive(Clone, Copy)]
pub struct UsedSet<'a> {
    /// The summary words, then the leaf words.
    words: &'a [AtomicU64],
    n_summaries: u32,
}

fn bit(i: u32) -> u64 {
    // Shifted as 32 bits: on a GPU, shifting 64 bits takes two shifts.
    u64::from(1_u32 << (i % USED_BITS))
}

#[inline(always)]
fn insert(words: &[AtomicU64], i: u32) {
    if let Some(word) = words.get((i / USED_BITS) as usize)
        && word.fetch_add(INSERTED, Ordering::Release) & bit(i) == 0
    {
        word.fetch_or(bit(i), Ordering::Relaxed);
    }
}

impl<'a> UsedSet<'a> {
    /// Creates the set from `words`: the summary words for `n_endpoints` endpoints, at least one, then their leaf
    /// words.
    ///
    /// # Safety
    ///
    /// `words` has that many words.
    #[inline(always)]
    #[allow(clippy::manual_div_ceil)]
    pub unsafe fn new(words: &'a [AtomicU64], n_endpoints: u32) -> Self {
        // As many summary words as in `used_words`, in fewer instructions. The sum can't overflow: there are fewer
        // endpoints than targets.
        UsedSet { words, n_summaries: (n_endpoints + (USED_BITS * USED_BITS - 1)) / (USED_BITS * USED_BITS) }
    }

    /// Adds an endpoint.
    #[inline(always)]
    pub fn insert(self, endpoint: u32) {
        let (summaries, leaves) = self.words.split_at_checked(self.n_summaries as usize).unwrap_or_default();
        insert(leaves, endpoint);
        insert(summaries, endpoint / USED_BITS);
    }

    #[inline(always)]
    fn word(self, i: u32) -> &'a AtomicU64 {
        // SAFETY: a summary word or a leaf word. The leaf word exists, because only `insert` sets bits in a summary
        // word.
        unsafe { self.words.get_unchecked(i as usize) }
    }

    /// Returns the number of the first summary word with a bit set, and the word.
    #[inline(always)]
    pub fn first(self) -> Option<(u32, u64)> {
        (0..self.n_summaries).map(|i| (i, self.word(i).load(Ordering::Acquire))).find(|(_, seen)| *seen as u32 != 0)
    }

    /// Calls `look` for each endpoint in the set, in order, and removes those that are [unused](Outcome::UNUSED). The
    /// first failed outcome ends the visit and is returned; with `rings_all`, a [`Status::PeerLost`] doesn't end it, as
    /// other peers may wait for deferred posts. `first` saves reading again the words that [`UsedSet::first`] has read.
    #[inline(always)]
    pub fn visit(self, first: Option<(u32, u64)>, rings_all: bool, mut look: impl FnMut(u32) -> Outcome) -> Outcome {
        let (mut i, mut known) = (first.map_or(0, |first| first.0), first.map(|first| first.1));
        let mut result = Outcome::COMPLETED;
        loop {
            let summary = self.word(i);
            let seen_summary = known.take().unwrap_or_else(|| summary.load(Ordering::Acquire));
            let mut leaves = seen_summary as u32;
            while leaves != 0 {
                let (number, leaf_bit) = take_lowest(&mut leaves);
                let leaf = kept(i * USED_BITS + number);
                let leaf_word = self.word(self.n_summaries + leaf);
                let seen = leaf_word.load(Ordering::Acquire);
                let (mut rest, mut unused) = (seen as u32, 0);
                while rest != 0 {
                    let (number, bit) = take_lowest(&mut rest);
                    let outcome = look(leaf * USED_BITS + number);
                    if !outcome.has_failed() {
                        unused |= outcome.if_unused(bit);
                    } else if rings_all && outcome == Outcome::failed(Status::PeerLost) {
                        result = outcome;
                    } else {
                        return outcome;
                    }
                }
                // An empty leaf word is removed from the summary word.
                let (word, seen, bits) =
                    if seen as u32 == 0 { (summary, seen_summary, leaf_bit) } else { (leaf_word, seen, unused) };
                remove(word, seen, bits);
            }
            i += 1;
            if i == self.n_summaries {
                return result;
            }
        }
    }
}

/// Takes the lowest bit out of a non-zero word. Returns its number and the bit.
#[inline(always)]
fn take_lowest(word: &mut u32) -> (u32, u32) {
    let (all, below) = (*word, kept(*word - 1));
    *word = kept(all & below);
    ((below & !all).count_ones(), all & !below)
}

/// Clears bits in a word, unless there was an insertion since the word was `seen`.
#[inline(always)]
fn remove(word: &AtomicU64, seen: u64, bits: u32) {
    if bits == 0 {
        return;
    }
    // Releases what this thread has seen of completions to a flush that finds the bits clear.
    fence(Ordering::Release);
    let mut now = seen;
    while let Err(other) = word.compare_exchange(now, now & !u64::from(bits), Ordering::Relaxed, Ordering::Relaxed)
        && insertions(other) == insertions(seen)
    {
        now = other;
    }
}

fn insertions(word: u64) -> u32 {
    kept((word >> USED_BITS) as u32)
}

#[cfg(test)]
mod tests {
    use super::take_lowest;

    #[test]
    fn lowest_bits_are_taken_in_turn() {
        for all in [1, 0x8000_0000, 0x8000_0005, 0xf0f0, u32::MAX] {
            let mut word = all;
            let mut taken = 0;
            while word != 0 {
                let (number, bit) = take_lowest(&mut word);
                assert_eq!((bit, number), (1 << number, (all & !taken).trailing_zeros()), "{all:#x}");
                taken |= bit;
                assert_eq!(word, all & !taken, "{all:#x}");
            }
        }
    }
}
