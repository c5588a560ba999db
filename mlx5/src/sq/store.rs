//! A send queue's memory: the ring that the card reads, and beside it what the driver remembers of each block.

use super::Kind;
use crate::ring::{Place, Places, Ring};
use crate::wire::BLOCK;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// The outstanding request that begins in a block.
#[derive(Debug, Clone, Copy)]
struct Begun {
    /// Its blocks; 0 when there is none.
    blocks: u8,
    kind: Kind,
}

impl Begun {
    const NOTHING: Self = Self { blocks: 0, kind: Kind::Plain };
}

/// Ring and what is remembered of each block, equally many of all.
#[derive(Debug)]
pub(super) struct Store<T> {
    ring: Ring,
    begun: Box<[Begun]>,
    /// Initialised where `begun` has blocks.
    tokens: Box<[MaybeUninit<T>]>,
}

impl<T> Store<T> {
    /// `None` if the ring's entries are not blocks.
    pub fn new(ring: Ring) -> Option<Self> {
        let blocks = ring.entries();
        let begun = vec![Begun::NOTHING; blocks].into();
        let tokens = (0..blocks).map(|_| MaybeUninit::uninit()).collect();
        (ring.entry_size() == BLOCK).then_some(Self { ring, begun, tokens })
    }

    /// Blocks of the ring, a power of two.
    pub fn blocks(&self) -> u32 {
        self.begun.len() as u32
    }

    /// Blocks and kind of the outstanding request that begins in block `index`, which counts on past the end.
    #[inline]
    pub fn outstanding(&self, index: u32) -> Option<(u32, Kind)> {
        let begun = self.begun[index as usize & (self.begun.len() - 1)];
        (begun.blocks != 0).then_some((begun.blocks as u32, begun.kind))
    }

    /// Forgets the request that begins in block `index`.
    #[inline]
    pub fn take(&mut self, index: u32) -> Option<T> {
        let at = index as usize & (self.begun.len() - 1);
        if std::mem::replace(&mut self.begun[at], Begun::NOTHING).blocks == 0 {
            return None;
        }
        // SAFETY: there were blocks, so the token is there; there are none now, so nobody reads it again.
        Some(unsafe { self.tokens[at].assume_init_read() })
    }

    /// The same as values that stay in registers.
    #[inline(always)]
    pub fn pen(&mut self) -> Pen<'_, T> {
        let (begun, tokens) = (self.begun.as_mut_ptr(), self.tokens.as_mut_ptr());
        Pen { ring: self.ring.places(), begun, tokens, store: PhantomData }
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
pub(super) struct Pen<'s, T> {
    ring: Places<'s>,
    begun: *mut Begun,
    tokens: *mut MaybeUninit<T>,
    store: PhantomData<&'s mut Store<T>>,
}

impl<T> Pen<'_, T> {
    /// A copy to lend, so that this one need not lie in memory.
    #[inline(always)]
    pub fn lend(&mut self) -> Pen<'_, T> {
        Pen { ring: self.ring, begun: self.begun, tokens: self.tokens, store: PhantomData }
    }

    /// Where the request that begins at block `index` goes.
    #[inline(always)]
    pub fn at(&self, index: u32) -> Place<'_> {
        self.ring.at(index)
    }

    /// Remembers the request at `index`, of more than 0 blocks. Nothing outstanding begins there.
    #[inline(always)]
    pub fn remember(&mut self, index: u32, token: T, blocks: u8, kind: Kind) {
        let at = self.ring.block(index);
        // SAFETY: there are as many tokens as blocks (`Store::new`); what is not outstanding is not initialised.
        unsafe { self.tokens.wrapping_add(at).write(MaybeUninit::new(token)) };
        // SAFETY: the same for what has begun.
        unsafe { self.begun.wrapping_add(at).write(Begun { blocks, kind }) };
    }

    /// Forgets `blocks` blocks from `first` on.
    #[cold]
    pub fn forget(self, first: u32, blocks: u32) {
        for index in 0..blocks {
            let at = self.ring.block(first.wrapping_add(index));
            // SAFETY: as in `remember`; the pen is the only way to the store while it lives.
            let begun = unsafe { self.begun.wrapping_add(at).replace(Begun::NOTHING) };
            if begun.blocks != 0 {
                // SAFETY: in range as above.
                let token = unsafe { self.tokens.wrapping_add(at).read() };
                // SAFETY: it is there, as blocks were; nobody reads it again.
                drop(unsafe { token.assume_init() });
            }
        }
    }
}
