//! Mbarriers, bulk copies and proxy fences.

use super::Thread;
use super::access::outside;
use crate::bulk::Shared;
use crate::code::{Instruction, Mbarrier, Order, Scope, Space};
use crate::core::{Core, Fault};
use crate::error::TrapKind;
use crate::memory::Refusal;
use crate::stores::BulkCopy;

impl Thread {
    /// Returns the offset of an address in shared memory, which `what` needs.
    fn in_shared(
        &self,
        core: &Core<'_>,
        shared: &Shared,
        (space, address): (Space, u64),
        (bytes, align): (u64, u64),
        what: &str,
    ) -> Result<u32, Fault> {
        let (space, at) = self.locate(space, address);
        if space != Space::Shared {
            return Err(Fault::new(
                TrapKind::AddressSpace,
                format!("{what} at {address:#x}, which is not shared memory"),
            ));
        }
        if !at.is_multiple_of(align) {
            return Err(core.refused(Refusal::Misaligned, what, at, align));
        }
        let size = shared.bytes.len();
        if at.checked_add(bytes).is_none_or(|end| end > size as u64) {
            return Err(outside("shared", at, bytes, size));
        }
        Ok(at as u32)
    }

    /// Executes an operation on an mbarrier. Returns whether the thread has to wait, and ends its turn.
    pub(super) fn mbarrier(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        (op, order, scope): (Mbarrier, Order, Scope),
        place: (Space, u64),
    ) -> Result<bool, Fault> {
        let at = self.in_shared(core, shared, place, (8, 8), "an mbarrier")?;
        let given = self.slot(i.b);
        if core.weak.is_some() && order.releases() {
            self.buffer().release(core, scope)?;
        }
        if !matches!(op, Mbarrier::Wait { .. }) {
            core.quiet = 0;
            self.spin.wrote = true;
        }
        let Shared { bytes, mbarriers, .. } = &mut *shared;
        let complete = match op {
            Mbarrier::Init => {
                mbarriers.add(crate::mbarrier::Mbarrier::new(at, given)?, bytes)?;
                false
            }
            Mbarrier::Invalidate => {
                mbarriers.get(at, bytes)?.end()?;
                mbarriers.remove(at);
                false
            }
            Mbarrier::Expect => mbarriers.change(at, bytes, |one| one.expect(given as i64))?,
            Mbarrier::Arrive { expects } => {
                let state = mbarriers.get(at, bytes)?.word();
                self.set_slot(i.d, state);
                mbarriers.change(at, bytes, |one| {
                    if expects {
                        one.expect(given as i64)?;
                    }
                    one.arrive(if expects { 1 } else { given })
                })?
            }
            Mbarrier::Wait { parity, tries } => {
                let one = mbarriers.get(at, bytes)?;
                let done = if parity { one.parity_done(given)? } else { one.state_done(given)? };
                let word = one.word();
                self.set_slot(i.d, u64::from(done));
                if done {
                    self.spin.wrote = true;
                    if order.acquires()
                        && let Some(buffer) = &mut self.buffer
                    {
                        buffer.acquire(scope);
                    }
                } else {
                    self.spin.load(place.1, word);
                    shared.hurry(core, at)?;
                }
                return Ok(tries && !done);
            }
        };
        if complete {
            shared.order();
        }
        Ok(false)
    }

    /// Starts a bulk copy.
    pub(super) fn bulk(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        to_shared: bool,
    ) -> Result<(), Fault> {
        let (target, source, bytes) = (self.slot(i.a), self.slot(i.b), self.slot(i.c));
        if !bytes.is_multiple_of(16) || bytes == 0 {
            let cause = format!("a bulk copy of {bytes} bytes; it copies a multiple of 16 bytes");
            return Err(Fault::new(TrapKind::Misaligned, cause));
        }
        let (inside, global) = if to_shared { (target, source) } else { (source, target) };
        let at = self.in_shared(core, shared, (Space::Shared, inside), (bytes, 16), "a bulk copy")?;
        for address in [global, global.wrapping_add(bytes - 8)] {
            core.view
                .allows(address, 8, !to_shared)
                .map_err(|refusal| core.refused(refusal, "bulk copy", address, 8))?;
        }
        if !global.is_multiple_of(16) {
            return Err(core.refused(Refusal::Misaligned, "bulk copy", global, 16));
        }
        let mut mbarrier = None;
        if to_shared {
            let at = self.in_shared(core, shared, (Space::Shared, self.slot(i.x)), (8, 8), "an mbarrier")?;
            if !shared.mbarriers.get(at, &shared.bytes)?.fenced && core.weak.is_some() {
                return Err(Fault::new(
                    TrapKind::Mbarrier,
                    format!(
                        "the mbarrier at {at:#x} of shared memory may not be initialized yet for a bulk copy; \
                         execute fence.mbarrier_init or fence.proxy.async after mbarrier.init"
                    ),
                ));
            }
            mbarrier = Some(at);
        }
        self.spin.wrote = true;
        let line = core.program.line(self.position());
        let (thread, group, bytes) = (self.index, self.group, bytes as u32);
        shared
            .start(core, BulkCopy { thread, group, line, shared: at, global, bytes, mbarrier, read: None, soon: false })
    }

    /// Waits until at most `most` of the thread's last groups of bulk copies are under way.
    pub(super) fn bulk_wait(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        most: u32,
        read: bool,
    ) -> Result<(), Fault> {
        shared.wait(core, self.index, self.group.saturating_sub(most), read)?;
        if let Some(buffer) = &mut self.buffer
            && !read
        {
            buffer.acquire(Scope::Gpu);
        }
        Ok(())
    }

    /// Makes what the thread has stored and seen visible to bulk copies.
    pub(super) fn proxy_fence(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        of_shared: bool,
        global: bool,
    ) -> Result<(), Fault> {
        if of_shared {
            shared.fence(self.index);
        }
        if global { self.buffer().release(core, Scope::System) } else { Ok(()) }
    }
}
