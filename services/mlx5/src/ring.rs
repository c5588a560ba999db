//! Memory from which the card reads work requests. The driver writes it, and reads it back only to copy a work request
//! into the doorbell register.

use crate::wire::{BLOCK, SEGMENT};
use crate::wqe::SegmentWriter;
use std::marker::PhantomData;
use std::ptr::NonNull;
use zerocopy::{Immutable, IntoBytes};

/// A ring of equal entries; their number is a power of two.
#[derive(Debug)]
pub struct Ring {
    base: NonNull<u8>,
    /// Size of the ring in bytes, less one.
    mask: usize,
    /// Number of entries, less one.
    last: usize,
    log_entry: u32,
}

// SAFETY: the caller of `new` gives the ring to one queue only, so moving the queue moves this process's only access to
// it.
unsafe impl Send for Ring {}

impl Ring {
    /// Returns a ring of `1 << log_entries` entries of `1 << log_entry` bytes.
    ///
    /// # Safety
    /// `base` is aligned to 16 bytes, and the ring stays mapped, readable and writable, while the value lives. No other
    /// value writes to it.
    pub const unsafe fn new(base: NonNull<u8>, log_entries: u32, log_entry: u32) -> Self {
        Self { base, mask: (1 << (log_entries + log_entry)) - 1, last: (1 << log_entries) - 1, log_entry }
    }

    /// Returns the number of entries.
    pub const fn entries(&self) -> usize {
        self.last + 1
    }

    /// Returns the size of an entry in bytes.
    pub const fn entry_size(&self) -> usize {
        1 << self.log_entry
    }

    /// Returns the position of the work request that starts at entry `index`. Indices do not wrap at the end of the
    /// ring.
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

    /// Returns the same ring, with entries of one block, as values that stay in registers.
    #[inline(always)]
    pub(crate) fn block_ring(&self) -> BlockRing<'_> {
        BlockRing { base: self.base, blocks: self.last, ring: PhantomData }
    }
}

/// A ring whose entries are blocks, as values that stay in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRing<'r> {
    base: NonNull<u8>,
    /// Number of blocks, less one.
    blocks: usize,
    ring: PhantomData<&'r Ring>,
}

impl<'r> BlockRing<'r> {
    /// Returns the block of an index. Indices do not wrap at the end of the ring.
    #[inline(always)]
    pub fn block(&self, index: u32) -> usize {
        index as usize & self.blocks
    }

    /// Returns the position of the work request that starts at block `index`.
    #[inline(always)]
    pub fn at(&self, index: u32) -> RingPosition<'r> {
        let start = self.block(index) * BLOCK;
        let mask = self.blocks * BLOCK + BLOCK - 1;
        RingPosition { first: self.base.as_ptr().wrapping_add(start), base: self.base, start, mask, ring: PhantomData }
    }
}

/// The position of one work request in a ring.
#[derive(Debug)]
pub struct RingPosition<'r> {
    first: *mut u8,
    base: NonNull<u8>,
    start: usize,
    mask: usize,
    ring: PhantomData<&'r Ring>,
}

impl RingPosition<'_> {
    /// Returns the address of byte `offset`, and the number of bytes from there to the end of the ring.
    #[inline(always)]
    fn address(&self, offset: usize) -> (*mut u8, usize) {
        let position = (self.start + offset) & self.mask;
        (self.base.as_ptr().wrapping_add(position), self.mask + 1 - position)
    }

    /// Returns the words of `blocks` blocks from here on, for the doorbell register.
    #[inline(always)]
    pub fn blocks(&self, blocks: u32) -> impl Iterator<Item = [u64; 8]> {
        (0..blocks as usize).map(|block| {
            let (from, _) = self.address(block * BLOCK);
            // SAFETY: blocks do not cross the end of the ring, which the caller of `Ring::new` keeps mapped, aligned
            // and free of other writers.
            unsafe { from.cast::<[u64; 8]>().read() }
        })
    }
}

impl SegmentWriter for RingPosition<'_> {
    #[inline(always)]
    fn put<T: IntoBytes + Immutable>(&mut self, index: usize, value: T) {
        const { assert!(size_of::<T>() <= BLOCK && align_of::<T>() <= SEGMENT) };
        let offset = index * SEGMENT;
        // The first block never wraps, so with a constant index this is one addition.
        let to =
            if offset + size_of::<T>() <= BLOCK { self.first.wrapping_add(offset) } else { self.address(offset).0 };
        // SAFETY: callers of the trait let no value cross the end of a block, so the value is inside the ring, which
        // the caller of `Ring::new` keeps mapped.
        unsafe { to.cast::<T>().write_unaligned(value) };
    }

    #[inline(always)]
    fn put_bytes(&mut self, offset: usize, bytes: &[u8]) {
        let (to, room) = self.address(offset);
        let (before, after) = bytes.split_at(bytes.len().min(room));
        // SAFETY: `before` is at most `room` bytes long, so it ends inside the ring; no reference into the ring exists,
        // so the caller's slice does not overlap it.
        unsafe { to.copy_from_nonoverlapping(before.as_ptr(), before.len()) };
        if !after.is_empty() {
            // SAFETY: `SendQueue::new` accepts only rings that hold the largest work request, so the rest fits at the
            // start of the ring.
            unsafe { self.base.as_ptr().copy_from_nonoverlapping(after.as_ptr(), after.len()) };
        }
    }
}
