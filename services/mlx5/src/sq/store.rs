//! The memory of a send queue: the ring that the card reads, and the driver's record of the outstanding work requests.

use super::RequestKind;
use crate::ring::{BlockRing, Ring, RingPosition};
use crate::wire::BLOCK;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The outstanding work request that starts in a block.
#[derive(Debug, Clone, Copy)]
struct Outstanding {
    /// The number of its blocks; 0 if no work request starts in the block.
    blocks: u8,
    kind: RequestKind,
}

impl Outstanding {
    const NOTHING: Self = Self { blocks: 0, kind: RequestKind::Plain };
}

/// The ring, and an entry in `requests` and in `tokens` for each of its blocks.
#[derive(Debug)]
pub(super) struct Store<T> {
    ring: Ring,
    requests: Box<[Outstanding]>,
    /// Initialised where `requests` has a nonzero number of blocks.
    tokens: Box<[MaybeUninit<T>]>,
}

impl<T> Store<T> {
    /// Returns `None` if the ring's entries are not blocks.
    pub fn new(ring: Ring) -> Option<Self> {
        let blocks = ring.entries();
        let requests = vec![Outstanding::NOTHING; blocks].into();
        let tokens = (0..blocks).map(|_| MaybeUninit::uninit()).collect();
        (ring.entry_size() == BLOCK).then_some(Self { ring, requests, tokens })
    }

    /// Returns the number of blocks, a power of two.
    pub fn blocks(&self) -> u32 {
        self.requests.len() as u32
    }

    /// Blocks and kind of the outstanding work request that starts in block `index`. Indices do not wrap at the end of
    /// the ring.
    #[inline]
    pub fn outstanding(&self, index: u32) -> Option<(u32, RequestKind)> {
        let requests = self.requests[index as usize & (self.requests.len() - 1)];
        (requests.blocks != 0).then_some((requests.blocks as u32, requests.kind))
    }

    /// Removes the work request that starts in block `index` and returns its token.
    #[inline]
    pub fn take(&mut self, index: u32) -> Option<T> {
        let at = index as usize & (self.requests.len() - 1);
        if std::mem::replace(&mut self.requests[at], Outstanding::NOTHING).blocks == 0 {
            return None;
        }
        // SAFETY: `requests` had blocks here, so the token is initialised; the entry has none now, so the token is read
        // once.
        Some(unsafe { self.tokens[at].assume_init_read() })
    }

    /// Returns the same memory as values that stay in registers.
    #[inline(always)]
    pub fn writer(&mut self) -> StoreWriter<'_, T> {
        let (requests, tokens) = (self.requests.as_mut_ptr(), self.tokens.as_mut_ptr());
        StoreWriter { ring: self.ring.block_ring(), requests, tokens, store: PhantomData }
    }
}

impl<T> Drop for Store<T> {
    fn drop(&mut self) {
        for index in 0..self.blocks() {
            drop(self.take(index));
        }
    }
}

/// [`Store`] as values that stay in registers.
#[derive(Debug)]
pub(super) struct StoreWriter<'s, T> {
    ring: BlockRing<'s>,
    requests: *mut Outstanding,
    tokens: *mut MaybeUninit<T>,
    store: PhantomData<&'s mut Store<T>>,
}

impl<T> StoreWriter<'_, T> {
    /// Returns a copy for a call that is not inlined, so that this value need not be in memory.
    #[inline(always)]
    pub fn reborrow(&mut self) -> StoreWriter<'_, T> {
        StoreWriter { ring: self.ring, requests: self.requests, tokens: self.tokens, store: PhantomData }
    }

    /// Returns the position of the work request that starts at block `index`.
    #[inline(always)]
    pub fn at(&self, index: u32) -> RingPosition<'_> {
        self.ring.at(index)
    }

    /// Records an outstanding work request of at least one block at `index`. No other one may start there.
    #[inline(always)]
    pub fn record_outstanding(&mut self, index: u32, token: T, blocks: u8, kind: RequestKind) {
        let at = self.ring.block(index);
        // SAFETY: `block` masks the index and `Store::new` allocates a token for each block; the caller keeps
        // outstanding work requests apart, so no initialised token is overwritten.
        unsafe { self.tokens.wrapping_add(at).write(MaybeUninit::new(token)) };
        // SAFETY: `block` masks the index, and `Store::new` allocates an entry of `requests` for each block.
        unsafe { self.requests.wrapping_add(at).write(Outstanding { blocks, kind }) };
    }

    /// Removes the work requests that start in the `blocks` blocks from `first` on.
    #[cold]
    pub fn discard(self, first: u32, blocks: u32) {
        for index in 0..blocks {
            let at = self.ring.block(first.wrapping_add(index));
            // SAFETY: `block` masks the index, `Store::new` allocates an entry for each block, and the writer borrows
            // the store mutably.
            let requests = unsafe { self.requests.wrapping_add(at).replace(Outstanding::NOTHING) };
            if requests.blocks != 0 {
                // SAFETY: `block` masks the index, and `Store::new` allocates a token for each block.
                let token = unsafe { self.tokens.wrapping_add(at).read() };
                // SAFETY: the entry had blocks, so the token is initialised; the entry has none now, so the token is
                // read once.
                drop(unsafe { token.assume_init() });
            }
        }
    }
}
