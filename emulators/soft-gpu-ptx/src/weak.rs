//! Weak memory: stores that leave a thread late, and loads that happen early.
//!
//! A store goes from its thread to the block, then to the GPU, then to memory, where the card, the host and other GPUs
//! see it. It moves in seeded order, but after older stores to the same bytes. A fence or release pushes everything the
//! thread has seen out to its scope before the thread's next store or atomic. An atomic at block scope changes the word
//! for the block only; any other changes memory. An early load returns a value that memory has had since the thread's
//! last acquire. Late loads and atomics are up to the thread (`crate::thread`).

use crate::bulk::LAZY;
use crate::code::{Order, Scope, low};
use crate::core::{Core, Fault};
use crate::memory::Refusal;
use crate::stores::{ALL, Store, Stores};

/// The last load of a word, and the value that the next load may return if its batch is the buffer's current one.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    address: u64,
    value: u64,
    width: u8,
    batch: u32,
}

/// How many words' last loads a thread remembers.
const LOADS: usize = 32;

/// A thread's stores and early loads.
#[derive(Debug)]
pub struct Buffer {
    block: u32,
    /// The block has no other threads.
    alone: bool,
    stores: Stores,
    /// A fence of this scope is pending before the next store.
    fence: Option<Scope>,
    /// The last loads, and their words.
    loads: [Load; LOADS],
    words: [u64; LOADS],
    next: usize,
    /// A batch of early values is from one moment, and lasts for `left` more loads.
    batch: u32,
    left: u32,
}

impl Default for Buffer {
    fn default() -> Self {
        let loads = [Load::default(); LOADS];
        Self {
            block: 0,
            alone: false,
            stores: Stores::default(),
            fence: None,
            loads,
            words: [0; LOADS],
            next: 0,
            batch: 1,
            left: 0,
        }
    }
}

impl Buffer {
    /// Makes the buffer of a thread in this block; `alone` means it is the only one.
    pub fn new(block: u32, alone: bool) -> Self {
        Self { block, alone, ..Self::default() }
    }
}

/// The most stores that a thread holds, and that blocks and the GPU hold together.
const MAX: usize = 16;
const MAX_SHARED: usize = 48;
/// Early values are taken after one in this many of a thread's turns: a power of two.
const PREFETCH: u64 = 2;

impl Core<'_> {
    fn write(&mut self, store: Store) -> Result<(), Fault> {
        self.quiet = 0;
        // The range may have changed since the store was made.
        self.view
            .store(store.address, store.width, store.value)
            .map_err(|refusal| self.refused(refusal, "store", store.address, store.bytes()))?;
        if store.order == Order::Mmio {
            self.view.stored_mmio(store.address);
        }
        Ok(())
    }

    /// Moves store `at` of those held by blocks and the GPU on to the GPU, or to memory.
    fn advance(&mut self, at: usize, to_memory: bool) -> Result<(), Fault> {
        let Some(weak) = &mut self.weak else { return Ok(()) };
        let at = weak.stores.oldest(at);
        if to_memory || weak.stores.list[at].block == ALL {
            let store = weak.stores.remove(at);
            return self.write(store);
        }
        weak.stores.list[at].block = ALL;
        Ok(())
    }

    /// Moves some stores on, as time passes.
    pub fn drift(&mut self) -> Result<(), Fault> {
        while let Some(weak) = &mut self.weak
            && !weak.stores.list.is_empty()
            && weak.one_in(4)
        {
            let at = weak.random.below(weak.stores.list.len());
            self.advance(at, false)?;
        }
        if let Some(weak) = &mut self.weak
            && !self.copies.is_empty()
            && weak.one_in(LAZY)
        {
            let at = weak.random.below(self.copies.len());
            let copy = self.copies.swap_remove(at);
            self.copy_out(&copy)?;
        }
        Ok(())
    }

    /// Moves all stores held by blocks and the GPU to memory, and ends all copies.
    pub fn settle_all(&mut self) -> Result<(), Fault> {
        while let Some(copy) = self.copies.pop() {
            self.copy_out(&copy)?;
        }
        while self.weak.as_ref().is_some_and(|weak| !weak.stores.list.is_empty()) {
            self.advance(0, true)?;
        }
        Ok(())
    }

    /// Moves a store from its thread to the block, the GPU or memory.
    fn pass(&mut self, mut store: Store, scope: Scope, block: u32) -> Result<(), Fault> {
        if scope != Scope::System
            && let Some(weak) = &mut self.weak
        {
            store.block = if scope == Scope::Block { block } else { ALL };
            weak.stores.add(store);
            if weak.stores.list.len() > MAX_SHARED {
                let at = weak.random.below(MAX_SHARED);
                self.advance(at, true)?;
            }
            return Ok(());
        }
        // Older stores to the same bytes go first.
        while let Some(weak) = &self.weak
            && let Some(older) = weak.stores.latest(store.address, store.bytes(), None)
        {
            self.advance(older, true)?;
        }
        self.write(store)
    }
}

impl Buffer {
    /// Moves the thread's store `at` out to the scope.
    fn advance(&mut self, core: &mut Core<'_>, at: usize, scope: Scope) -> Result<(), Fault> {
        let at = self.stores.oldest(at);
        let store = self.stores.remove(at);
        core.pass(store, scope, self.block)
    }

    /// Moves one of the thread's stores out, to a random scope.
    fn advance_one(&mut self, core: &mut Core<'_>) -> Result<(), Fault> {
        let Some(weak) = &mut core.weak else { return Ok(()) };
        let chance = weak.random.next();
        let at = (((chance & 0xffff_ffff) * self.stores.list.len() as u64) >> 32) as usize;
        let scope = [Scope::Block, Scope::Gpu, Scope::System, Scope::System][(chance >> 62) as usize];
        self.advance(core, at, scope)
    }

    /// Ends a turn of the thread: some of its stores move on, and later loads may see memory as of now.
    pub fn drift(&mut self, core: &mut Core<'_>) -> Result<(), Fault> {
        while !self.stores.list.is_empty() && core.weak.as_mut().is_some_and(|weak| weak.one_in(2)) {
            self.advance_one(core)?;
        }
        if self.left == 0 && core.weak.as_mut().is_some_and(|weak| weak.one_in(PREFETCH)) {
            self.prefetch(core);
        }
        Ok(())
    }

    /// Handles the thread's exit: its stores leave, in any order.
    pub fn leave(&mut self, core: &mut Core<'_>) -> Result<(), Fault> {
        while !self.stores.list.is_empty() {
            self.advance_one(core)?;
        }
        Ok(())
    }

    /// Executes a fence: a sequential one takes effect at once, any other before the next store or atomic.
    pub fn fence(&mut self, core: &mut Core<'_>, order: Order, scope: Scope) -> Result<(), Fault> {
        if order.releases() {
            self.fence = self.fence.max(Some(scope));
        }
        self.acquire(scope);
        if order == Order::Sequential { self.release(core, scope) } else { Ok(()) }
    }

    /// Completes the pending fence before a store or atomic.
    #[inline(always)]
    fn end_fence(&mut self, core: &mut Core<'_>) -> Result<(), Fault> {
        match self.fence {
            Some(scope) => self.release(core, scope),
            None => Ok(()),
        }
    }

    /// Executes a release: all that the thread has seen reaches the scope before anything that follows.
    pub fn release(&mut self, core: &mut Core<'_>, scope: Scope) -> Result<(), Fault> {
        let scope = self.fence.take().map_or(scope, |fence| fence.max(scope));
        while !self.stores.list.is_empty() {
            self.advance(core, 0, scope)?;
        }
        let block = self.block;
        match scope {
            Scope::Block => {}
            Scope::Gpu => {
                let stores = core.weak.iter_mut().flat_map(|weak| &mut weak.stores.list);
                stores.filter(|store| store.block == block).for_each(|store| store.block = ALL);
            }
            Scope::System => {
                while let Some(weak) = &core.weak
                    && let Some(at) = weak.stores.list.iter().position(|store| store.seen_by(block))
                {
                    core.advance(at, true)?;
                }
            }
        }
        Ok(())
    }

    /// Executes an acquire: later loads return nothing from before it. At block scope, a thread alone in its block has
    /// nothing to acquire.
    #[inline(always)]
    pub fn acquire(&mut self, scope: Scope) {
        if !(self.alone && scope == Scope::Block) {
            self.end_batch();
        }
    }

    /// Discards the early values.
    #[inline(always)]
    fn end_batch(&mut self) {
        self.batch = self.batch.wrapping_add(1);
        self.left = 0;
    }

    /// Returns the index of the word's last load. It is the same on every run of a seed, wherever memory lies.
    #[inline(always)]
    fn last_load(&self, address: u64) -> Option<usize> {
        let word = address & !7;
        let same = |mask: u32, at: usize| mask | u32::from(self.words[at] == word) << at;
        let found = (0..LOADS).fold(0u32, same);
        (found != 0).then(|| found.trailing_zeros() as usize)
    }

    /// Keeps the next load of this word from being early.
    #[inline(always)]
    fn forget(&mut self, address: u64) {
        if let Some(at) = self.last_load(address) {
            self.loads[at].batch = self.batch.wrapping_sub(1);
        }
    }

    /// Moves all stores to these bytes that the thread sees out to memory.
    fn settle(&mut self, core: &mut Core<'_>, address: u64, bytes: u64) -> Result<(), Refusal> {
        let outside = |_| Refusal::Outside;
        while let Some(at) = self.stores.latest(address, bytes, None) {
            self.advance(core, at, Scope::System).map_err(outside)?;
        }
        while let Some(weak) = &core.weak
            && let Some(at) = weak.stores.latest(address, bytes, Some(self.block))
        {
            core.advance(at, true).map_err(outside)?;
        }
        Ok(())
    }

    pub fn store(
        &mut self,
        core: &mut Core<'_>,
        address: u64,
        width: u8,
        value: u64,
        order: Order,
    ) -> Result<(), Refusal> {
        // A bad store is an error where it is executed, not where it leaves the buffer.
        core.view.allows(address, u64::from(width / 8), true)?;
        self.end_fence(core).map_err(|_| Refusal::Outside)?;
        self.forget(address);
        let store = Store { address, value, block: self.block, width, order };
        if self.stores.list.len() >= MAX && !self.merge(&store, core) {
            self.advance_one(core).map_err(|_| Refusal::Outside)?;
        }
        self.stores.add(store);
        Ok(())
    }

    /// Merges two stores to the same bytes by dropping the earlier one. No fence is between them, or it would have
    /// moved that one out.
    #[inline(always)]
    fn merge(&mut self, store: &Store, core: &mut Core<'_>) -> bool {
        let plain = |store: &Store| matches!(store.order, Order::Weak | Order::Relaxed);
        if !plain(store) {
            return false;
        }
        match self.stores.latest(store.address, store.bytes(), None) {
            Some(at) if self.stores.list[at].address == store.address && self.stores.list[at].width == store.width => {
                let merges = plain(&self.stores.list[at]) && !core.weak.as_mut().is_none_or(|weak| weak.one_in(4));
                if merges {
                    self.stores.remove(at);
                }
                merges
            }
            _ => false,
        }
    }

    pub fn load(
        &mut self,
        core: &mut Core<'_>,
        address: u64,
        width: u8,
        order: Order,
        scope: Scope,
    ) -> Result<u64, Refusal> {
        core.view.allows(address, u64::from(width / 8), false)?;
        let acquires = order.acquires() && !(self.alone && scope == Scope::Block);
        if self.stores.has(address)
            && let Some(value) = self.own(core, address, width)?
        {
            if acquires {
                self.end_batch();
            }
            return Ok(value);
        }
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.end_batch();
        }
        let batch = self.batch;
        let known = self.last_load(address);
        if let Some(at) = known
            && let last = self.loads[at]
            && (last.batch, last.address, last.width) == (batch, address, width)
            && !matches!(order, Order::Volatile | Order::Mmio)
        {
            // An early acquire: the other early values are from the same moment, so they don't precede it.
            return Ok(last.value);
        }
        if acquires {
            self.end_batch();
        }
        let value = self.seen(core, address, width)?;
        // Later loads of the same bytes see no older value.
        let old = self.batch.wrapping_sub(1);
        let at = known.unwrap_or_else(|| {
            self.next = (self.next + 1) % LOADS;
            self.next
        });
        self.words[at] = address & !7;
        self.loads[at] = Load { address, value, width, batch: old };
        Ok(value)
    }

    /// Takes early values: what some of the recently loaded words hold now.
    fn prefetch(&mut self, core: &mut Core<'_>) {
        self.end_batch();
        let Some(weak) = &mut core.weak else { return };
        self.left = 2 << weak.random.below(6);
        let chosen = weak.random.next();
        for at in (0..LOADS).filter(|at| chosen >> at & 1 == 1) {
            let Load { address, width, .. } = self.loads[at];
            if width != 0
                && self.stores.latest(address & !7, 8, None).is_none()
                && let Ok(value) = self.seen(core, address, width)
            {
                self.loads[at] = Load { address, value, width, batch: self.batch };
            }
        }
    }

    /// Executes an atomic: at block scope for the block only, otherwise in memory. Returns the old value.
    pub fn update(
        &mut self,
        core: &mut Core<'_>,
        address: u64,
        width: u8,
        scope: Scope,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, Refusal> {
        core.view.allows(address, u64::from(width / 8), true)?;
        self.end_fence(core).map_err(|_| Refusal::Outside)?;
        self.forget(address);
        if scope != Scope::Block {
            self.settle(core, address, u64::from(width / 8))?;
            return core.view.update(address, width, change);
        }
        while let Some(at) = self.stores.latest(address, u64::from(width / 8), None) {
            self.advance(core, at, Scope::Block).map_err(|_| Refusal::Outside)?;
        }
        let old = self.seen(core, address, width)?;
        let store = Store { address, value: change(old), block: self.block, width, order: Order::Relaxed };
        core.pass(store, Scope::Block, self.block).map_err(|_| Refusal::Outside)?;
        Ok(old)
    }

    /// Returns the value of the thread's own store.
    fn own(&mut self, core: &mut Core<'_>, address: u64, width: u8) -> Result<Option<u64>, Refusal> {
        let bytes = u64::from(width / 8);
        let Some(at) = self.stores.latest(address, bytes, None) else {
            return Ok(None);
        };
        let store = self.stores.list[at];
        if store.address == address && store.width >= width {
            return Ok(Some(low(store.value, width)));
        }
        self.forget(address);
        self.settle(core, address, bytes)?;
        Ok(None)
    }

    /// Returns the value that the thread sees beyond its own stores.
    #[inline(always)]
    fn seen(&mut self, core: &mut Core<'_>, address: u64, width: u8) -> Result<u64, Refusal> {
        if let Some(weak) = core.weak.as_ref().filter(|weak| weak.stores.has(address)) {
            let bytes = u64::from(width / 8);
            if let Some(at) = weak.stores.latest(address, bytes, Some(self.block)) {
                let store = weak.stores.list[at];
                if store.address == address && store.width >= width {
                    return Ok(low(store.value, width));
                }
                self.settle(core, address, bytes)?;
            }
        }
        core.view.load(address, width)
    }
}
