//! Weak memory: stores that leave a thread late, and loads that are early.
//!
//! A store goes from its thread to the block, to the GPU, and to memory, where the card, the host and other GPUs see it. It moves in
//! seeded order, after older stores to the same bytes. A fence or a release of a scope moves all that the thread has seen to that
//! scope. An early load returns a value that memory had since the thread's last acquire.

use crate::code::{Order, Scope, low};
use crate::memory::Refusal;
use crate::thread::{Core, Fault};

/// A store on its way.
#[derive(Clone, Copy, Debug)]
struct Store {
    address: u64,
    width: u8,
    value: u64,
    order: Order,
    /// The block that sees it, if only one does.
    block: Option<u32>,
}

impl Store {
    fn overlaps(&self, address: u64, bytes: u64) -> bool {
        self.address < address.saturating_add(bytes) && address < self.address.saturating_add(u64::from(self.width / 8))
    }
}

/// Stores that have left their threads, and the order of all.
#[derive(Debug)]
pub struct Weak {
    random: Random,
    /// Stores that a block or the GPU sees, from the oldest.
    stores: Vec<Store>,
    words: Words,
}

/// Which words some stores may be to: no bit, no store.
#[derive(Clone, Copy, Debug, Default)]
struct Words(u64);

impl Words {
    fn bit(address: u64) -> u64 {
        1 << ((address >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58)
    }

    /// No access is longer than a word, and all are aligned.
    fn add(&mut self, address: u64) {
        self.0 |= Self::bit(address);
    }

    fn has(self, address: u64) -> bool {
        self.0 & Self::bit(address) != 0
    }

    fn of(stores: &[Store]) -> Self {
        Self(stores.iter().fold(0, |all, store| all | Self::bit(store.address)))
    }
}

/// A value that a load may return early.
#[derive(Clone, Copy, Debug)]
struct Early {
    address: u64,
    width: u8,
    value: u64,
    loads: u32,
}

/// A thread's stores and early loads.
#[derive(Debug, Default)]
pub struct Buffer {
    pub block: u32,
    stores: Vec<Store>,
    early: Vec<Early>,
    recent: [(u64, u8); 4],
    next: usize,
    words: Words,
}

/// Stores that a thread keeps at most, and stores that blocks and the GPU keep at most.
const MOST: usize = 16;
const MOST_SHARED: usize = 48;

/// A seeded sequence.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// splitmix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Less than `end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}

impl Weak {
    pub fn new(seed: u64) -> Self {
        Self { random: Random::new(seed ^ 0x7765_616b), stores: Vec::new(), words: Words::default() }
    }
}

/// The index of the store that goes first if the store `at` is to go: no older store overlaps it.
fn oldest(stores: &[Store], mut at: usize) -> usize {
    while let Some(older) =
        stores[..at].iter().position(|store| store.overlaps(stores[at].address, u64::from(stores[at].width / 8)))
    {
        at = older;
    }
    at
}

impl Core<'_> {
    fn write(&mut self, store: Store) -> Result<(), Fault> {
        self.quiet = 0;
        // A range may have changed since the store.
        self.view
            .store(store.address, store.width, store.value)
            .map_err(|refusal| self.refused(refusal, "store", store.address, u64::from(store.width / 8)))?;
        if store.order == Order::Mmio {
            self.view.stored_mmio(store.address);
        }
        Ok(())
    }

    /// Moves the store `at` of those of blocks and the GPU on to the GPU, or to memory.
    fn advance(&mut self, at: usize, to_memory: bool) -> Result<(), Fault> {
        let Some(weak) = &mut self.weak else { return Ok(()) };
        let at = oldest(&weak.stores, at);
        if to_memory || weak.stores[at].block.is_none() {
            let store = weak.stores.remove(at);
            weak.words = Words::of(&weak.stores);
            return self.write(store);
        }
        weak.stores[at].block = None;
        Ok(())
    }

    /// Moves some stores on, as time goes by.
    pub fn drift(&mut self) -> Result<(), Fault> {
        while let Some(weak) = &mut self.weak
            && !weak.stores.is_empty()
            && (weak.random.next().is_multiple_of(4) || weak.stores.len() > MOST_SHARED)
        {
            let at = weak.random.below(weak.stores.len());
            self.advance(at, false)?;
        }
        Ok(())
    }

    /// Moves all stores of blocks and the GPU to memory.
    pub fn settle_all(&mut self) -> Result<(), Fault> {
        while self.weak.as_ref().is_some_and(|weak| !weak.stores.is_empty()) {
            self.advance(0, true)?;
        }
        Ok(())
    }
}

impl Buffer {
    /// Moves the thread's store `at` on.
    fn advance(&mut self, core: &mut Core<'_>, at: usize, scope: Scope) -> Result<(), Fault> {
        let at = oldest(&self.stores, at);
        let mut store = self.stores.remove(at);
        self.words = Words::of(&self.stores);
        let bytes = u64::from(store.width / 8);
        let Some(weak) = &mut core.weak else { return core.write(store) };
        if store.order == Order::Mmio || scope == Scope::System {
            // Older stores to the same bytes are before it.
            while let Some(weak) = &core.weak
                && let Some(older) = weak.stores.iter().position(|other| other.overlaps(store.address, bytes))
            {
                core.advance(older, true)?;
            }
            return core.write(store);
        }
        store.block = (scope == Scope::Block).then_some(self.block);
        weak.words.add(store.address);
        weak.stores.push(store);
        Ok(())
    }

    /// Moves some of the thread's stores on, as time goes by.
    pub fn drift(&mut self, core: &mut Core<'_>) -> Result<(), Fault> {
        while !self.stores.is_empty()
            && let Some(weak) = &mut core.weak
        {
            if self.stores.len() <= MOST && weak.random.next().is_multiple_of(2) {
                break;
            }
            let at = weak.random.below(self.stores.len());
            let scope = [Scope::Block, Scope::Gpu, Scope::System][weak.random.below(3)];
            self.advance(core, at, scope)?;
        }
        Ok(())
    }

    /// A release of a scope: all that the thread has seen is there before what follows.
    pub fn release(&mut self, core: &mut Core<'_>, scope: Scope) -> Result<(), Fault> {
        while !self.stores.is_empty() {
            self.advance(core, 0, scope)?;
        }
        let mut at = 0;
        while let Some(weak) = &mut core.weak
            && at < weak.stores.len()
        {
            let seen = weak.stores[at].block.is_none_or(|block| block == self.block);
            match scope {
                Scope::System if seen => {
                    core.advance(at, true)?;
                    // An older store may have gone first.
                    at = 0;
                }
                Scope::Gpu if seen => {
                    weak.stores[at].block = None;
                    at += 1;
                }
                _ => at += 1,
            }
        }
        Ok(())
    }

    /// An acquire: no load that follows is from before it.
    pub fn acquire(&mut self) {
        self.early.clear();
    }

    /// Moves all stores to these bytes that the thread sees to memory.
    pub fn settle(&mut self, core: &mut Core<'_>, address: u64, bytes: u64) -> Result<(), Refusal> {
        let outside = |_| Refusal::Outside;
        let shared = core.weak.as_ref().is_some_and(|weak| weak.words.has(address));
        if !shared && !self.words.has(address) {
            self.forget(address, bytes);
            return Ok(());
        }
        while let Some(at) = self.stores.iter().position(|store| store.overlaps(address, bytes)) {
            self.advance(core, at, Scope::System).map_err(outside)?;
        }
        let block = self.block;
        while let Some(weak) = &core.weak
            && let Some(at) = weak
                .stores
                .iter()
                .position(|store| store.overlaps(address, bytes) && store.block.is_none_or(|own| own == block))
        {
            core.advance(at, true).map_err(outside)?;
        }
        self.forget(address, bytes);
        Ok(())
    }

    fn forget(&mut self, address: u64, bytes: u64) {
        self.early.retain(|early| {
            early.address >= address.saturating_add(bytes)
                || address >= early.address.saturating_add(u64::from(early.width / 8))
        });
    }

    pub fn store(
        &mut self,
        core: &mut Core<'_>,
        address: u64,
        width: u8,
        value: u64,
        order: Order,
    ) -> Result<(), Refusal> {
        // The store is an error where it stands, not where it leaves.
        core.view.allows(address, u64::from(width / 8), true)?;
        self.forget(address, u64::from(width / 8));
        self.words.add(address);
        self.stores.push(Store { address, width, value, order, block: Some(self.block) });
        Ok(())
    }

    pub fn load(&mut self, core: &mut Core<'_>, address: u64, width: u8, order: Order) -> Result<u64, Refusal> {
        let bytes = u64::from(width / 8);
        core.view.allows(address, bytes, false)?;
        if order.acquires() {
            self.acquire();
        }
        if let Some(value) = self.own(core, address, width)? {
            return Ok(value);
        }
        let free = matches!(order, Order::Weak | Order::Relaxed);
        self.early.retain_mut(|early| {
            early.loads = early.loads.saturating_sub(1);
            early.loads > 0
        });
        if free && let Some(early) = self.early.iter().find(|early| (early.address, early.width) == (address, width)) {
            return Ok(early.value);
        }
        let value = self.seen(core, address, width)?;
        // A later load of the same bytes sees no older value.
        self.forget(address, bytes);
        if free {
            self.prefetch(core);
            self.recent[self.next] = (address, width);
            self.next = (self.next + 1) % self.recent.len();
        }
        Ok(value)
    }

    /// Keeps what the addresses of the last loads hold now, for loads that are early.
    fn prefetch(&mut self, core: &mut Core<'_>) {
        let Some(weak) = &mut core.weak else { return };
        let chance = weak.random.next();
        if !chance.is_multiple_of(16) {
            return;
        }
        for (address, width) in self.recent {
            let known = self.early.iter().any(|early| early.address == address);
            if width == 0 || known || !matches!(self.own(core, address, width), Ok(None)) {
                continue;
            }
            if let Ok(value) = self.seen(core, address, width) {
                self.early.push(Early { address, width, value, loads: 2 + (chance >> 8) as u32 % 30 });
            }
        }
    }

    /// The value of the thread's own store.
    fn own(&mut self, core: &mut Core<'_>, address: u64, width: u8) -> Result<Option<u64>, Refusal> {
        let bytes = u64::from(width / 8);
        if !self.words.has(address) {
            return Ok(None);
        }
        let Some(store) = self.stores.iter().rev().find(|store| store.overlaps(address, bytes)) else {
            return Ok(None);
        };
        if store.address == address && store.width >= width {
            return Ok(Some(low(store.value, width)));
        }
        self.settle(core, address, bytes)?;
        Ok(None)
    }

    /// The value that the thread sees outside its own stores.
    fn seen(&mut self, core: &mut Core<'_>, address: u64, width: u8) -> Result<u64, Refusal> {
        let bytes = u64::from(width / 8);
        let found = core.weak.as_ref().filter(|weak| weak.words.has(address)).and_then(|weak| {
            let visible =
                |store: &&Store| store.overlaps(address, bytes) && store.block.is_none_or(|block| block == self.block);
            weak.stores.iter().rev().find(visible).copied()
        });
        match found {
            Some(store) if store.address == address && store.width >= width => return Ok(low(store.value, width)),
            Some(_) => self.settle(core, address, bytes)?,
            None => {}
        }
        core.view.load(address, width)
    }
}
