//! What a thread has seen of the others: vector clocks, compressed by block and warp.
//!
//! All threads of a block take their stamps from one counter, so one entry can stand for a whole warp or block after a
//! barrier: everything that its threads did up to that stamp.

use std::rc::Rc;

/// A thread, a warp, a block or a thread's bulk copies: the block's number, and 16 bits for which of them.
pub type Key = u64;

const WARPS: u64 = 1;
const THREADS: u64 = 64;
const READS: u64 = 0x800;
const WRITES: u64 = 0x1000;
const ARRIVALS: u64 = 0x2000;

/// Returns a block's key.
pub fn block(block: u32) -> Key {
    u64::from(block) << 16
}

/// Returns a warp's key.
pub fn warp(number: u32, warp: u32) -> Key {
    block(number) | (WARPS + u64::from(warp))
}

/// Returns a thread's key.
pub fn thread(number: u32, thread: u32) -> Key {
    block(number) | (THREADS + u64::from(thread))
}

/// Returns the key of what a thread's bulk copies to global memory read (or write).
pub fn copies(number: u32, thread: u32, writes: bool) -> Key {
    block(number) | ((if writes { WRITES } else { READS }) + u64::from(thread))
}

/// Returns the key of the bulk copies that arrive at an mbarrier.
pub fn arrivals(number: u32, mbarrier: u32) -> Key {
    block(number) | (ARRIVALS + u64::from(mbarrier / 8))
}

/// Returns the block of a key, and the thread if it is a thread's or that of a thread's copies.
pub fn place(key: Key) -> (u32, Option<u32>) {
    let (block, which) = ((key >> 16) as u32, key & 0xffff);
    let thread = match which {
        0..THREADS | ARRIVALS.. => None,
        THREADS..READS => Some(which - THREADS),
        READS..WRITES => Some(which - READS),
        _ => Some(which - WRITES),
    };
    (block, thread.map(|thread| thread as u32))
}

/// Returns the key of a thread's warp.
pub fn warp_of(key: Key) -> Option<Key> {
    let which = key & 0xffff;
    (THREADS..READS).contains(&which).then(|| key & !0xffff | (WARPS + (which - THREADS) / 32))
}

/// Returns the number of a warp in its block, if the key is a warp's.
pub fn warp_number(key: Key) -> Option<u32> {
    let which = key & 0xffff;
    (WARPS..THREADS).contains(&which).then(|| (which - WARPS) as u32)
}

/// Stamps by key, in order of the keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<(Key, u32)>);

impl Clock {
    /// Makes a clock of entries in order of their keys.
    pub fn new(entries: Vec<(Key, u32)>) -> Self {
        Self(entries)
    }

    /// Returns the entries.
    pub fn entries(&self) -> &[(Key, u32)] {
        &self.0
    }

    fn get(&self, key: Key) -> u32 {
        self.0.binary_search_by_key(&key, |entry| entry.0).map_or(0, |at| self.0[at].1)
    }

    /// Whether what `key` did at `stamp` has been seen.
    pub fn covers(&self, key: Key, stamp: u32) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let Some(warp) = warp_of(key) else { return self.get(key) >= stamp };
        self.get(key & !0xffff) >= stamp || self.get(warp) >= stamp || self.get(key) >= stamp
    }

    /// Returns the last stamp of `key` that has been seen.
    pub fn seen(&self, key: Key) -> u32 {
        let warp = warp_of(key).map_or(0, |warp| self.get(warp));
        let block = if key & 0xffff < READS { self.get(key & !0xffff) } else { 0 };
        self.get(key).max(warp).max(block)
    }

    /// Whether what all threads of a warp did at `stamp` has been seen, by an entry of the warp or its block.
    pub fn covers_warp(&self, warp: Key, stamp: u32) -> bool {
        self.get(warp & !0xffff) >= stamp || self.get(warp) >= stamp
    }

    /// Adds what `key` did up to `stamp`.
    pub fn raise(&mut self, key: Key, stamp: u32) {
        match self.0.binary_search_by_key(&key, |entry| entry.0) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(stamp),
            Err(at) => self.0.insert(at, (key, stamp)),
        }
        if key & 0xffff < THREADS {
            self.prune();
        }
    }

    /// Drops entries of threads and warps that one of the warp or block covers.
    fn prune(&mut self) {
        let (mut block, mut floor) = (u64::MAX, 0);
        let mut warps = [0u32; 32];
        self.0.retain(|&(key, stamp)| {
            let which = key & 0xffff;
            if key >> 16 != block {
                (block, floor, warps) = (key >> 16, 0, [0; 32]);
            }
            match which {
                0 => floor = stamp,
                WARPS..=32 => {
                    warps[(which - WARPS) as usize] = stamp;
                    return stamp > floor;
                }
                THREADS..READS => return stamp > floor.max(warps[(which - THREADS) as usize / 32]),
                _ => {}
            }
            true
        });
    }

    fn includes(&self, other: &Self) -> bool {
        other.0.iter().all(|&(key, stamp)| {
            let seen = self.get(key) >= stamp;
            seen || match key & 0xffff {
                WARPS..THREADS => self.get(key & !0xffff) >= stamp,
                _ => self.covers(key, stamp),
            }
        })
    }
}

/// Returns what either of two has seen.
pub fn joined(one: &Rc<Clock>, other: &Rc<Clock>) -> Rc<Clock> {
    if Rc::ptr_eq(one, other) || one.includes(other) {
        return one.clone();
    }
    if other.includes(one) {
        return other.clone();
    }
    let (mut left, mut right) = (one.0.as_slice(), other.0.as_slice());
    let mut all = Vec::with_capacity(left.len() + right.len());
    while let (Some(&first), Some(&second)) = (left.first(), right.first()) {
        let key = first.0.min(second.0);
        let mut stamp = 0;
        if first.0 == key {
            (stamp, left) = (first.1, &left[1..]);
        }
        if second.0 == key {
            (stamp, right) = (stamp.max(second.1), &right[1..]);
        }
        all.push((key, stamp));
    }
    all.extend_from_slice(left);
    all.extend_from_slice(right);
    let mut all = Clock(all);
    all.prune();
    Rc::new(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_a_block_stands_for_its_threads_and_not_for_their_copies() {
        let mut clock = Clock::default();
        clock.raise(thread(3, 40), 7);
        clock.raise(copies(3, 40, true), 2);
        clock.raise(block(3), 9);
        assert_eq!(clock.entries(), [(block(3), 9), (copies(3, 40, true), 2)]);
        assert!(
            clock.covers(thread(3, 1000), 9) && !clock.covers(thread(3, 1000), 10) && !clock.covers(thread(2, 0), 1)
        );
        assert!(!clock.covers(copies(3, 41, true), 1) && !clock.covers(copies(3, 40, true), 3));
    }

    #[test]
    fn a_join_has_what_either_has() {
        let with = |entries: &[(Key, u32)]| {
            let mut clock = Clock::default();
            entries.iter().for_each(|&(key, stamp)| clock.raise(key, stamp));
            Rc::new(clock)
        };
        let one = with(&[(thread(0, 1), 5), (warp(1, 0), 3)]);
        let other = with(&[(thread(0, 1), 4), (block(1), 2), (thread(1, 2), 4)]);
        let both = joined(&one, &other);
        assert_eq!(both.entries(), [(thread(0, 1), 5), (block(1), 2), (warp(1, 0), 3), (thread(1, 2), 4)]);
        assert!(Rc::ptr_eq(&joined(&both, &one), &both) && Rc::ptr_eq(&joined(&other, &both), &both));
    }
}
