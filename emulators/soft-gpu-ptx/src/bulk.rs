//! A block's shared memory, and its bulk copies.
//!
//! Bulk copies belong to the async proxy. Under weak memory they happen late and in any order, most of them when a
//! thread waits for them or for their mbarrier: a copy to global memory first reads, and later writes. They read and
//! write memory itself, not what is on its way there. Stores to shared memory reach them after a proxy fence, and
//! without one only maybe.

use crate::core::{Core, Fault};
use crate::error::TrapKind;
use crate::mbarrier::Mbarriers;
use crate::stores::BulkCopy;
use std::collections::VecDeque;

/// The most stores that bulk copies don't see yet.
const MAX: usize = 256;

/// One copy in `SOON` happens soon: with a chance of one in `SOON` per turn of its block, and the others one in `LAZY`,
/// or `IDLE` when all threads wait. Powers of two.
const SOON: u64 = 4;
const IDLE: u64 = 64;
pub const LAZY: u64 = 2048;

/// A store to shared memory that bulk copies don't see yet.
#[derive(Clone, Copy, Debug)]
struct Unseen {
    at: u32,
    /// The bytes before the store.
    old: [u8; 8],
    size: u8,
    warp: u32,
    epoch: u32,
}

/// Adds a copy's line to a fault that comes later.
fn named(copy: &BulkCopy, fault: Fault) -> Fault {
    Fault::new(fault.kind, format!("the bulk copy of line {}: {}", copy.line, fault.cause))
}

/// A block's shared memory.
#[derive(Debug, Default)]
pub struct Shared {
    pub bytes: Vec<u8>,
    pub mbarriers: Mbarriers,
    pub copies: Vec<BulkCopy>,
    /// Memory is weak, and the kernel has bulk copies.
    pub tracks: bool,
    /// Stores that bulk copies don't see yet, oldest first.
    unseen: VecDeque<Unseen>,
    /// Counts what orders threads of the block, such as barriers: a fence of any thread covers what came before.
    epoch: u32,
}

impl Shared {
    pub fn new(size: u32, tracks: bool) -> Self {
        Self { bytes: vec![0xa5; size as usize], tracks, ..Self::default() }
    }

    /// Records that threads of the block have been ordered.
    pub fn order(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// Keeps a store that follows from bulk copies, until a fence.
    #[inline(always)]
    pub fn hide(&mut self, at: u64, size: u64, thread: u32) {
        if self.tracks {
            self.hidden(at, size, thread);
        }
    }

    #[cold]
    fn hidden(&mut self, at: u64, size: u64, thread: u32) {
        let Some(bytes) = usize::try_from(at).ok().and_then(|at| self.bytes.get(at..at.checked_add(size as usize)?))
        else {
            return;
        };
        let mut old = [0; 8];
        old[..bytes.len()].copy_from_slice(bytes);
        if self.unseen.len() == MAX {
            self.unseen.pop_front();
        }
        self.unseen.push_back(Unseen { at: at as u32, old, size: size as u8, warp: thread / 32, epoch: self.epoch });
    }

    /// Makes stores visible to bulk copies: those of the thread's warp, and those that the thread may have seen.
    pub fn fence(&mut self, thread: u32) {
        let epoch = self.epoch;
        self.unseen.retain(|store| store.warp != thread / 32 && store.epoch == epoch);
    }

    /// Starts a copy; unless memory is weak, it happens at once.
    pub fn start(&mut self, core: &mut Core<'_>, mut copy: BulkCopy) -> Result<(), Fault> {
        copy.soon = core.weak.as_mut().is_none_or(|weak| weak.one_in(SOON));
        self.copies.push(copy);
        if core.weak.is_none() {
            while !self.copies.is_empty() {
                self.step(core, 0)?;
            }
        }
        Ok(())
    }

    /// Performs the next step of copy `at`.
    fn step(&mut self, core: &mut Core<'_>, at: usize) -> Result<(), Fault> {
        core.quiet = 0;
        if self.copies[at].mbarrier.is_some() {
            let copy = self.copies.swap_remove(at);
            self.copy_in(core, &copy).map_err(|fault| named(&copy, fault))
        } else if self.copies[at].read.is_none() {
            let bytes = self.source(core, at);
            self.copies[at].read = Some(bytes);
            Ok(())
        } else {
            let copy = self.copies.swap_remove(at);
            core.copy_out(&copy)
        }
    }

    fn copy_in(&mut self, core: &mut Core<'_>, copy: &BulkCopy) -> Result<(), Fault> {
        let start = copy.shared as usize;
        for at in (0..copy.bytes as usize).step_by(8) {
            let address = copy.global + at as u64;
            let word = core.view.load(address, 64).map_err(|refusal| core.refused(refusal, "load", address, 8))?;
            self.bytes[start + at..start + at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let end = copy.shared + copy.bytes;
        self.unseen.retain(|store| store.at >= end || store.at + u32::from(store.size) <= copy.shared);
        let Some(mbarrier) = copy.mbarrier else { return Ok(()) };
        if self.mbarriers.change(mbarrier, &mut self.bytes, |one| one.expect(-i64::from(copy.bytes)))? {
            self.order();
        }
        Ok(())
    }

    /// Returns what a copy to global memory reads now.
    fn source(&mut self, core: &mut Core<'_>, at: usize) -> Vec<u8> {
        let BulkCopy { shared, bytes, .. } = self.copies[at];
        // The stores without a fence may have arrived.
        if core.weak.as_mut().is_some_and(|weak| weak.one_in(2)) {
            self.unseen.clear();
        }
        let mut found = self.bytes[shared as usize..(shared + bytes) as usize].to_vec();
        for store in self.unseen.iter().rev() {
            for (byte, old) in store.old.iter().enumerate().take(usize::from(store.size)) {
                let place = (store.at as usize + byte).checked_sub(shared as usize);
                if let Some(found) = place.and_then(|place| found.get_mut(place)) {
                    *found = *old;
                }
            }
        }
        found
    }

    /// Lets a copy happen, as time passes; more often if all threads wait for memory to change (`idle`).
    pub fn drift(&mut self, core: &mut Core<'_>, idle: bool) -> Result<(), Fault> {
        let Some(weak) = &mut core.weak else { return Ok(()) };
        let at = weak.random.below(self.copies.len());
        let chance = match (self.copies[at].soon, idle) {
            (true, _) => SOON,
            (false, true) => IDLE,
            (false, false) => LAZY,
        };
        if weak.one_in(chance) { self.step(core, at) } else { Ok(()) }
    }

    /// Lets a copy happen that a thread waits for at the mbarrier.
    pub fn hurry(&mut self, core: &mut Core<'_>, mbarrier: u32) -> Result<(), Fault> {
        let Some(weak) = &mut core.weak else { return Ok(()) };
        let waits = |copy: &&BulkCopy| copy.mbarrier == Some(mbarrier);
        let count = self.copies.iter().filter(waits).count();
        if count == 0 || !weak.one_in(2) {
            return Ok(());
        }
        let chosen = weak.random.below(count);
        let at = self.copies.iter().enumerate().filter(|(_, copy)| waits(copy)).nth(chosen).map(|(at, _)| at);
        at.map_or(Ok(()), |at| self.step(core, at))
    }

    /// Completes a thread's copies to global memory of groups before `group`; with `read`, they have at least read.
    pub fn wait(&mut self, core: &mut Core<'_>, thread: u32, group: u32, read: bool) -> Result<(), Fault> {
        let waits = |copy: &BulkCopy| {
            copy.thread == thread && copy.mbarrier.is_none() && copy.group < group && !(read && copy.read.is_some())
        };
        while let Some(at) = self.copies.iter().position(waits) {
            self.step(core, at)?;
        }
        Ok(())
    }

    /// Ends a block whose threads have exited: its copies to global memory read, as the block's memory is kept for
    /// them, and write later.
    pub fn end(&mut self, core: &mut Core<'_>) -> Result<(), Fault> {
        while let Some(at) = self.copies.iter().position(|copy| copy.read.is_none()) {
            let BulkCopy { line, thread, mbarrier, .. } = self.copies[at];
            if let Some(mbarrier) = mbarrier {
                return Err(Fault::new(
                    TrapKind::Mbarrier,
                    format!(
                        "the block's threads exit while the bulk copy of line {line} by thread {thread} writes to its shared memory; \
                         wait for its mbarrier at {mbarrier:#x}"
                    ),
                ));
            }
            self.step(core, at)?;
        }
        core.copies.append(&mut self.copies);
        Ok(())
    }
}

impl Core<'_> {
    /// Writes what a copy has read to global memory.
    pub fn copy_out(&mut self, copy: &BulkCopy) -> Result<(), Fault> {
        self.quiet = 0;
        for (at, word) in copy.read.as_deref().unwrap_or_default().chunks_exact(8).enumerate() {
            let address = copy.global + 8 * at as u64;
            let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
            let done = self.view.store(address, 64, word);
            done.map_err(|refusal| named(copy, self.refused(refusal, "store", address, 8)))?;
        }
        Ok(())
    }
}
