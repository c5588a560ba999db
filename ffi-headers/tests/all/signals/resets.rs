//! Which ways of adding to a word preserve a reset by the owner's plain store, over all interleavings.

use std::collections::BTreeSet;

/// A step on the word, taken by the signal proxy or the owner.
#[derive(Clone, Copy)]
enum Step {
    /// An atomic add, by a processor that shares the coherent memory, or by the GPU on the driver's behalf.
    Add(u64),
    /// First half of an add through a mapping: the signal proxy reads the word.
    Read,
    /// Second half: the signal proxy writes what it read, plus this.
    Write(u64),
    /// The owner stores 0.
    Reset,
}

/// Returns the word's value after each interleaving of the two threads; the word starts at 5.
fn outcomes(proxy: &[Step], owner: &[Step]) -> BTreeSet<u64> {
    fn go(proxy: &[Step], owner: &[Step], word: u64, read: u64, all: &mut BTreeSet<u64>) {
        if proxy.is_empty() && owner.is_empty() {
            all.insert(word);
        }
        for (thread, first) in [(proxy, true), (owner, false)] {
            let Some((step, rest)) = thread.split_first() else { continue };
            let (word, read) = match *step {
                Step::Add(n) => (word + n, read),
                Step::Read => (word, word),
                Step::Write(n) => (read + n, read),
                Step::Reset => (0, read),
            };
            if first { go(rest, owner, word, read, all) } else { go(proxy, rest, word, read, all) }
        }
    }
    let mut all = BTreeSet::new();
    go(proxy, owner, 5, 0, &mut all);
    all
}

/// The reset comes before, between or after the adds 1 and 2.
const LEGAL: [u64; 3] = [0, 2, 3];

#[test]
fn atomic_add_keeps_every_reset() {
    let seen = outcomes(&[Step::Add(1), Step::Add(2)], &[Step::Reset]);
    assert_eq!(seen, BTreeSet::from(LEGAL));
}

#[test]
fn read_and_write_apart_undo_a_reset() {
    let seen = outcomes(&[Step::Read, Step::Write(1), Step::Read, Step::Write(2)], &[Step::Reset]);
    let illegal: Vec<u64> = seen.into_iter().filter(|value| !LEGAL.contains(value)).collect();
    assert_eq!(illegal, [6 + 2], "the word is never reset when the store falls between the second read and its write");
}
