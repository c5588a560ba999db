//! A thread's loads, stores and atomics, in each space; under weak memory some of them are late.

use super::{Late, Thread};
use crate::alu::changed;
use crate::bulk::Shared;
use crate::code::{Atomic, Instruction, Op, Order, Scope, Space, low, signed};
use crate::core::{Core, Fault};
use crate::error::TrapKind;
use crate::memory::Refusal;

/// Generic addresses of shared memory, local memory and parameters, which lie above all addresses in a process.
const SHARED: u64 = 1 << 60;
const LOCAL: u64 = 2 << 60;
const PARAM: u64 = 3 << 60;
pub(super) const WINDOW: u64 = 0xf << 60;

/// One in this many loads and atomics is late, and each turn completes late ones with a chance of one in this many: a
/// power of two.
pub(super) const LATE: u64 = 4;

pub(super) fn bit(slot: usize) -> u64 {
    1 << (slot & 63)
}

/// Reads from a space that lives in a byte array.
pub fn peek(bytes: &[u8], at: u64, width: u8) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let found = bytes.get(at..at.checked_add(usize::from(width / 8))?)?;
    let mut value = [0; 8];
    value[..found.len()].copy_from_slice(found);
    Some(u64::from_le_bytes(value))
}

pub(super) fn poke(bytes: &mut [u8], at: u64, width: u8, value: u64) -> Option<()> {
    let at = usize::try_from(at).ok()?;
    let size = usize::from(width / 8);
    bytes.get_mut(at..at.checked_add(size)?)?.copy_from_slice(&value.to_le_bytes()[..size]);
    Some(())
}

pub(super) fn outside(space: &str, address: u64, bytes: u64, size: usize) -> Fault {
    Fault::new(
        TrapKind::Address,
        format!("{bytes} bytes at {address:#x} of {space} memory are outside its {size} bytes"),
    )
}

pub(super) fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED,
        Space::Local | Space::LocalFrame => LOCAL,
        Space::Param | Space::ParamFrame => PARAM,
        Space::Generic | Space::Global | Space::Constant => 0,
    }
}

impl Thread {
    /// Performs the late accesses that `which` chooses.
    #[cold]
    pub(super) fn happen(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        which: impl Fn(&Late) -> bool,
    ) -> Result<(), Fault> {
        while let Some(at) = self.late.iter().position(&which) {
            let Late { i, address, operands, slot } = self.late.swap_remove(at);
            self.late_slots = self.late.iter().fold(0, |bits, late| bits | bit(late.slot));
            self.slots[slot] = match i.op {
                Op::Load { order, scope, signed, .. } => {
                    self.load_global::<true>(core, address, i.width, order, scope, signed, i.extra)?
                }
                Op::Atomic { op, scope, signed, .. } => {
                    self.update::<true>(core, shared, &i, op, Space::Global, scope, signed, address, operands)?
                }
                _ => self.slots[slot],
            };
        }
        Ok(())
    }

    /// Decides whether an access is late. Earlier late ones to the same words happen first.
    #[inline(always)]
    pub(super) fn is_late(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        space: Space,
        address: u64,
        operands: Option<(u64, u64)>,
    ) -> Result<bool, Fault> {
        let (space, address) = self.locate(space, address);
        if space != Space::Global {
            return Ok(false);
        }
        if !self.late.is_empty() {
            // A vector has at most two words.
            let word = address & !7;
            self.happen(core, shared, |late| (word..word + 16).contains(&(late.address & !7)))?;
        }
        let (Some(operands), Some(weak)) = (operands, &mut core.weak) else { return Ok(false) };
        let bytes = u64::from(i.width / 8);
        if !weak.one_in(LATE) || address & (bytes - 1) != 0 {
            return Ok(false);
        }
        let writes = matches!(i.op, Op::Atomic { .. });
        if core.view.allows(address, bytes, writes).is_err() {
            return Ok(false);
        }
        let slot = self.at.base as usize + usize::from(i.d);
        self.late_slots |= bit(slot);
        self.late.push(Late { i: *i, address, operands, slot });
        Ok(true)
    }

    /// Decides whether an atomic is late; if it isn't, the buffer has done its release and acquire.
    #[inline(always)]
    pub(super) fn is_late_atomic(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        (space, order, scope): (Space, Order, Scope),
        address: u64,
        operands: (u64, u64),
    ) -> Result<bool, Fault> {
        if core.weak.is_none() {
            return Ok(false);
        }
        if order.releases() {
            self.buffer().release(core, scope)?;
        }
        let free = matches!(order, Order::Relaxed | Order::Release);
        if self.is_late(core, shared, i, space, address, free.then_some(operands))? {
            return Ok(true);
        }
        if order.acquires() {
            self.buffer().acquire(scope);
        }
        Ok(false)
    }

    /// Completes the late accesses whose results the instruction reads or replaces; all of them before a fence,
    /// release, return or wait for other threads.
    #[cold]
    pub(super) fn needs(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        base: usize,
    ) -> Result<(), Fault> {
        let all = match i.op {
            Op::Fence { .. } | Op::ProxyFence { .. } | Op::Return | Op::Exit => true,
            Op::Store { order, .. } | Op::Atomic { order, .. } | Op::Mbarrier { order, .. } => order.releases(),
            op => op.meets(),
        };
        let slots = [i.d, i.a, i.b, i.c, i.x].map(|slot| base + usize::from(slot));
        self.happen(core, shared, |late| all || slots.contains(&late.slot))
    }

    /// Returns an address's space, and the address within it.
    #[inline(always)]
    pub fn locate(&self, space: Space, address: u64) -> (Space, u64) {
        match space {
            Space::Generic => match address & WINDOW {
                SHARED => (Space::Shared, address - SHARED),
                LOCAL => (Space::Local, address - LOCAL),
                PARAM => (Space::Param, address - PARAM),
                _ => (Space::Global, address),
            },
            Space::Constant => (Space::Global, address),
            Space::LocalFrame => (Space::Local, address.wrapping_add(u64::from(self.at.local))),
            Space::ParamFrame => (Space::Param, address.wrapping_add(u64::from(self.at.params))),
            other => (other, address),
        }
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub(super) fn load<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &Shared,
        i: &Instruction,
        space: Space,
        order: Order,
        scope: Scope,
        sign: bool,
        count: u8,
        address: u64,
    ) -> Result<(), Fault> {
        let width = i.width;
        let bytes = u64::from(width / 8);
        let (space, address) = self.locate(space, address);
        let whole = bytes * u64::from(count);
        if address & (whole - 1) != 0 {
            return Err(core.refused(Refusal::Misaligned, "load", address, whole));
        }
        for (number, slot) in [i.d, i.b, i.c, i.x].into_iter().enumerate().take(usize::from(count)) {
            let at = address.wrapping_add(number as u64 * bytes);
            let value = match space {
                Space::Shared => {
                    let value = peek(&shared.bytes, at, width)
                        .ok_or_else(|| outside("shared", at, bytes, shared.bytes.len()))?;
                    self.spin.load(at, value);
                    value
                }
                Space::Local => {
                    peek(&self.local, at, width).ok_or_else(|| outside("local", at, bytes, self.local.len()))?
                }
                Space::Param => {
                    peek(&self.params, at, width).ok_or_else(|| outside("parameter", at, bytes, self.params.len()))?
                }
                _ => {
                    let value = self.load_global::<WEAK>(core, at, width, order, scope, sign, i.extra)?;
                    self.slots[self.at.base as usize + usize::from(slot)] = value;
                    continue;
                }
            };
            let value = if sign { low(signed(value, width) as u64, i.extra) } else { value };
            self.slots[self.at.base as usize + usize::from(slot)] = value;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn load_global<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        at: u64,
        width: u8,
        order: Order,
        scope: Scope,
        sign: bool,
        extra: u8,
    ) -> Result<u64, Fault> {
        core.statistics.loads += 1;
        let value = if WEAK && core.weak.is_some() {
            self.buffer().load(core, at, width, order, scope)
        } else {
            core.view.load(at, width)
        };
        let value = value.map_err(|refusal| core.refused(refusal, "load", at, u64::from(width / 8)))?;
        self.spin.load(at, value);
        Ok(if sign { low(signed(value, width) as u64, extra) } else { value })
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    pub(super) fn store<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        space: Space,
        order: Order,
        count: u8,
        address: u64,
    ) -> Result<(), Fault> {
        let width = i.width;
        let bytes = u64::from(width / 8);
        let (space, address) = self.locate(space, address);
        let whole = bytes * u64::from(count);
        if address & (whole - 1) != 0 {
            return Err(core.refused(Refusal::Misaligned, "store", address, whole));
        }
        for (number, slot) in [i.d, i.b, i.c, i.x].into_iter().enumerate().take(usize::from(count)) {
            let at = address.wrapping_add(number as u64 * bytes);
            let value = low(self.slots[self.at.base as usize + usize::from(slot)], width);
            match space {
                Space::Shared => {
                    let size = shared.bytes.len();
                    if WEAK {
                        shared.hide(at, bytes, self.index);
                    }
                    poke(&mut shared.bytes, at, width, value).ok_or_else(|| outside("shared", at, bytes, size))?;
                    core.quiet = 0;
                    self.spin.wrote = true;
                }
                Space::Local => {
                    let size = self.local.len();
                    poke(&mut self.local, at, width, value).ok_or_else(|| outside("local", at, bytes, size))?;
                }
                Space::Param => {
                    let size = self.params.len();
                    poke(&mut self.params, at, width, value).ok_or_else(|| outside("parameter", at, bytes, size))?;
                }
                _ => {
                    core.statistics.stores += 1;
                    if order == Order::Mmio
                        && let Some(posts) = &mut core.posts
                    {
                        posts.store(at, width, value).map_err(|cause| Fault::new(TrapKind::Trap, cause))?;
                    }
                    let done = if WEAK && core.weak.is_some() {
                        self.buffer().store(core, at, width, value, order)
                    } else {
                        core.view.store(at, width, value)
                    };
                    done.map_err(|refusal| core.refused(refusal, "store", at, bytes))?;
                    if (!WEAK || core.weak.is_none()) && order == Order::Mmio {
                        core.view.stored_mmio(at);
                    }
                    core.quiet = 0;
                    self.spin.wrote = true;
                }
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn update<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        i: &Instruction,
        op: Atomic,
        space: Space,
        scope: Scope,
        sign: bool,
        address: u64,
        (b, c): (u64, u64),
    ) -> Result<u64, Fault> {
        let width = i.width;
        let bytes = u64::from(width / 8);
        let change = |old: u64| low(changed(op, old, b, c, width, sign), width);
        let (space, at) = self.locate(space, address);
        let old = match space {
            Space::Shared => {
                if at % bytes != 0 {
                    return Err(core.refused(Refusal::Misaligned, "atomic", at, bytes));
                }
                let old =
                    peek(&shared.bytes, at, width).ok_or_else(|| outside("shared", at, bytes, shared.bytes.len()))?;
                if WEAK {
                    shared.hide(at, bytes, self.index);
                }
                poke(&mut shared.bytes, at, width, change(old));
                old
            }
            Space::Local | Space::Param => {
                return Err(Fault::new(
                    TrapKind::AddressSpace,
                    "an atomic on local memory or a parameter; atomics work on global and shared memory",
                ));
            }
            _ => {
                core.statistics.atomics += 1;
                let old = if WEAK && core.weak.is_some() {
                    self.buffer().update(core, at, width, scope, change)
                } else {
                    core.view.update(at, width, change)
                };
                old.map_err(|refusal| core.refused(refusal, "atomic", at, bytes))?
            }
        };
        if change(old) == old {
            self.spin.load(at, old);
        } else {
            core.quiet = 0;
            self.spin.wrote = true;
        }
        Ok(old)
    }
}
