//! Stores and bulk copies in flight.

use crate::code::Order;
use crate::random::Random;

/// A store in flight.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    pub address: u64,
    pub value: u64,
    /// The block that sees the store, or [`ALL`].
    pub block: u32,
    pub width: u8,
    pub order: Order,
}

/// A bulk copy under way.
#[derive(Debug)]
pub struct BulkCopy {
    pub thread: u32,
    /// The thread's group.
    pub group: u32,
    /// The instruction's line.
    pub line: u32,
    pub shared: u32,
    pub global: u64,
    pub bytes: u32,
    /// The mbarrier of a copy to shared memory.
    pub mbarrier: Option<u32>,
    /// What a copy to global memory has read.
    pub read: Option<Vec<u8>>,
    /// The copy happens soon, rather than when a thread waits for it.
    pub soon: bool,
}

/// Every block of the GPU sees the store.
pub const ALL: u32 = u32::MAX;

impl Store {
    pub fn overlaps(&self, address: u64, bytes: u64) -> bool {
        self.address < address.saturating_add(bytes) && address < self.address.saturating_add(u64::from(self.width / 8))
    }

    pub fn bytes(&self) -> u64 {
        u64::from(self.width / 8)
    }

    pub fn seen_by(&self, block: u32) -> bool {
        self.block == ALL || self.block == block
    }
}

/// Stores, oldest first, and how many there are per hashed word.
#[derive(Debug)]
pub struct Stores {
    pub list: Vec<Store>,
    counts: [u16; 64],
}

impl Default for Stores {
    fn default() -> Self {
        Self { list: Vec::new(), counts: [0; 64] }
    }
}

/// Returns the index of a word's count. Accesses are aligned and at most a word long.
#[inline(always)]
fn word_of(address: u64) -> usize {
    ((address >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

impl Stores {
    #[inline(always)]
    pub fn has(&self, address: u64) -> bool {
        self.counts[word_of(address)] != 0
    }

    #[inline(always)]
    pub fn add(&mut self, store: Store) {
        self.counts[word_of(store.address)] += 1;
        self.list.push(store);
    }

    #[inline(always)]
    pub fn remove(&mut self, at: usize) -> Store {
        let store = self.list.remove(at);
        self.counts[word_of(store.address)] -= 1;
        store
    }

    /// Returns the store that has to go first for store `at` to go: one that no older store overlaps.
    #[inline(always)]
    pub fn oldest(&self, mut at: usize) -> usize {
        if self.counts[word_of(self.list[at].address)] > 1 {
            while let Some(older) = self.before(at) {
                at = older;
            }
        }
        at
    }

    #[inline(always)]
    fn before(&self, at: usize) -> Option<usize> {
        let store = &self.list[at];
        self.list[..at].iter().position(|older| older.overlaps(store.address, store.bytes()))
    }

    /// Returns the latest store to any of these bytes that the block sees.
    #[inline(always)]
    pub fn latest(&self, address: u64, bytes: u64, block: Option<u32>) -> Option<usize> {
        if !self.has(address) {
            return None;
        }
        let seen = |store: &Store| store.overlaps(address, bytes) && block.is_none_or(|block| store.seen_by(block));
        self.list.iter().rposition(seen)
    }
}

/// Stores that have left their threads, and the random numbers that order them.
#[derive(Debug)]
pub struct Weak {
    pub random: Random,
    pub stores: Stores,
}

impl Weak {
    pub fn new(seed: u64) -> Self {
        Self { random: Random::new(seed ^ 0x7765_616b), stores: Stores::default() }
    }

    /// Returns true once in `times`, a power of two.
    #[inline(always)]
    pub fn one_in(&mut self, times: u64) -> bool {
        self.random.next() & (times - 1) == 0
    }
}
