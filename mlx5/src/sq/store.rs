//! A send queue's memory: the ring that the card reads, and beside it what the driver remembers of each block.

use super::RequestKind;
use crate::ring::{BlockRing, Ring, RingPosition};
use crate::wire::BLOCK;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The outstanding request that begins in a block.
#[derive(Debug, Clone, Copy)]
struct Outstanding {
    /// Its blocks; 0 when there is none.
    blocks: u8,
    kind: RequestKind,
}

impl Outstanding {
    const NOTHING: Self = Self { blocks: 0, kind: RequestKind::Plain };
}

/// Ring and what is remembered of each block, equally many of all.
#[derive(Debug)]
pub(super) struct Store<T> {
    ring: Ring,
    requests: Box<[Outstanding]>,
    /// Initialised where `requests` has blocks.
    tokens: Box<[MaybeUninit<T>]>,
}

impl<T> Store<T> {
    /// `None` if the ring's entries are not blocks.
    pub fn new(ring: Ring) -> Option<Self> {
        let blocks = ring.entries();
        let requests = vec![Outstanding::NOTHING; blocks].into();
        let tokens = (0..blocks).map(|_| MaybeUninit::uninit()).collect();
        (ring.entry_size() == BLOCK).then_some(Self { ring, requests, tokens })
    }

    /// Blocks of the ring, a power of two.
    pub fn blocks(&self) -> u32 {
        self.requests.len() as u32
    }

    /// Blocks and kind of the outstanding request that begins in block `index`, which counts on past the end.
    #[inline]
    pub fn outstanding(&self, index: u32) -> Option<(u32, RequestKind)> {
        let requests = self.requests[index as usize & (self.requests.len() - 1)];
        (requests.blocks != 0).then_some((requests.blocks as u32, requests.kind))
    }

    /// Forgets the request that begins in block `index`.
    #[inline]
    pub fn take(&mut self, index: u32) -> Option<T> {
        let at = index as usize & (self.requests.len() - 1);
        if std::mem::replace(&mut self.requests[at], Outstanding::NOTHING).blocks == 0 {
            return None;
        }
        // SAFETY: there were blocks, so the token is there; there are none now, so nobody reads it again.
        Some(unsafe { self.tokens[at].assume_init_read() })
    }

    /// The same as values that stay in registers.
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
    /// A copy to lend, so that this one need not lie in memory.
    #[inline(always)]
    pub fn reborrow(&mut self) -> StoreWriter<'_, T> {
        StoreWriter { ring: self.ring, requests: self.requests, tokens: self.tokens, store: PhantomData }
    }

    /// Where the request that begins at block `index` goes.
    #[inline(always)]
    pub fn at(&self, index: u32) -> RingPosition<'_> {
        self.ring.at(index)
    }

    /// Remembers the request at `index`, of more than 0 blocks. Nothing outstanding begins there.
    #[inline(always)]
    pub fn record_outstanding(&mut self, index: u32, token: T, blocks: u8, kind: RequestKind) {
        let at = self.ring.block(index);
        // SAFETY: there are as many tokens as blocks (`Store::new`); what is not outstanding is not initialised.
        unsafe { self.tokens.wrapping_add(at).write(MaybeUninit::new(token)) };
        // SAFETY: the same for what has begun.
        unsafe { self.requests.wrapping_add(at).write(Outstanding { blocks, kind }) };
    }

    /// Forgets `blocks` blocks from `first` on.
    #[cold]
    pub fn discard(self, first: u32, blocks: u32) {
        for index in 0..blocks {
            let at = self.ring.block(first.wrapping_add(index));
            // SAFETY: as in `record_outstanding`; the pen is the only way to the store while it lives.
            let requests = unsafe { self.requests.wrapping_add(at).replace(Outstanding::NOTHING) };
            if requests.blocks != 0 {
                // SAFETY: in range as above.
                let token = unsafe { self.tokens.wrapping_add(at).read() };
                // SAFETY: it is there, as blocks were; nobody reads it again.
                drop(unsafe { token.assume_init() });
            }
        }
    }
}
