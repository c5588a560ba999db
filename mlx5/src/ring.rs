//! Memory that the card reads requests from: written here, never read back except into the doorbell register.

use crate::wire::{BLOCK, SEGMENT};
use crate::wqe::SegmentWriter;
use std::marker::PhantomData;
use std::ptr::NonNull;
use zerocopy::{Immutable, IntoBytes};

/// A ring of equal entries, a power of two of them.
#[derive(Debug)]
pub struct Ring {
    base: NonNull<u8>,
    /// Bytes of the ring, less one.
    mask: usize,
    /// Entries, less one.
    last: usize,
    log_entry: u32,
}

// SAFETY: the ring belongs to one queue, as `new` was promised; the card is no thread.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring of `1 << log_entries` entries of `1 << log_entry` bytes.
    ///
    /// # Safety
    /// `base` is aligned to 16 bytes, and the ring stays mapped, readable and writable, while the value lives; nothing else
    /// writes to it.
    pub const unsafe fn new(base: NonNull<u8>, log_entries: u32, log_entry: u32) -> Self {
        Self { base, mask: (1 << (log_entries + log_entry)) - 1, last: (1 << log_entries) - 1, log_entry }
    }

    /// Entries.
    pub const fn entries(&self) -> usize {
        self.last + 1
    }

    /// Bytes of an entry.
    pub const fn entry_size(&self) -> usize {
        1 << self.log_entry
    }

    /// Where the request that begins at entry `index` goes; indices count on past the end.
    #[inline(always)]
    pub fn at(&self, index: u32) -> RingPosition<'_> {
        self.position(((index as usize) << self.log_entry) & self.mask)
    }

    #[inline(always)]
    fn position(&self, start: usize) -> RingPosition<'_> {
        RingPosition {
            first: self.base.as_ptr().wrapping_add(start),
            base: self.base,
            start,
            mask: self.mask,
            ring: PhantomData,
        }
    }

    /// A ring whose entries are blocks, as values that stay in registers.
    #[inline(always)]
    pub(crate) fn block_ring(&self) -> BlockRing<'_> {
        BlockRing { base: self.base, blocks: self.last, ring: PhantomData }
    }
}

/// A ring whose entries are blocks, as values that stay in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRing<'r> {
    base: NonNull<u8>,
    /// Blocks, less one.
    blocks: usize,
    ring: PhantomData<&'r Ring>,
}

impl<'r> BlockRing<'r> {
    /// The block of an index, which counts on past the end.
    #[inline(always)]
    pub fn block(&self, index: u32) -> usize {
        index as usize & self.blocks
    }

    /// Where the request that begins at block `index` goes.
    #[inline(always)]
    pub fn at(&self, index: u32) -> RingPosition<'r> {
        let start = self.block(index) * BLOCK;
        let mask = self.blocks * BLOCK + BLOCK - 1;
        RingPosition { first: self.base.as_ptr().wrapping_add(start), base: self.base, start, mask, ring: PhantomData }
    }
}

/// One request's place in a ring.
#[derive(Debug)]
pub struct RingPosition<'r> {
    first: *mut u8,
    base: NonNull<u8>,
    start: usize,
    mask: usize,
    ring: PhantomData<&'r Ring>,
}

impl RingPosition<'_> {
    /// The address of byte `offset`, and how many bytes follow before the ring's end.
    #[inline(always)]
    fn address(&self, offset: usize) -> (*mut u8, usize) {
        let position = (self.start + offset) & self.mask;
        (self.base.as_ptr().wrapping_add(position), self.mask + 1 - position)
    }

    /// The words of `blocks` blocks from here on, read back for the doorbell register.
    #[inline(always)]
    pub fn blocks(&self, blocks: u32) -> impl Iterator<Item = [u64; 8]> {
        (0..blocks as usize).map(|block| {
            let (from, _) = self.address(block * BLOCK);
            // SAFETY: a block lies whole in the ring, is aligned, and only this queue writes to it.
            unsafe { from.cast::<[u64; 8]>().read() }
        })
    }
}

impl SegmentWriter for RingPosition<'_> {
    #[inline(always)]
    fn put<T: IntoBytes + Immutable>(&mut self, index: usize, value: T) {
        const { assert!(size_of::<T>() <= BLOCK && align_of::<T>() <= SEGMENT) };
        let offset = index * SEGMENT;
        // The first block never wraps: with a constant index this is one addition.
        let to =
            if offset + size_of::<T>() <= BLOCK { self.first.wrapping_add(offset) } else { self.address(offset).0 };
        // SAFETY: no value crosses the end of a block (the trait's rule), so it lies whole in the ring.
        unsafe { to.cast::<T>().write_unaligned(value) };
    }

    #[inline(always)]
    fn put_bytes(&mut self, offset: usize, bytes: &[u8]) {
        let (to, room) = self.address(offset);
        let (before, after) = bytes.split_at(bytes.len().min(room));
        // SAFETY: `before` fits in what is left of the ring; the caller's slice is not in it.
        unsafe { to.copy_from_nonoverlapping(before.as_ptr(), before.len()) };
        if !after.is_empty() {
            // SAFETY: a request is shorter than its ring, so the rest fits at the start.
            unsafe { self.base.as_ptr().copy_from_nonoverlapping(after.as_ptr(), after.len()) };
        }
    }
}
