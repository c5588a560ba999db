//! The loop that executes a thread's instructions.

use super::access::{LATE, WINDOW, window};
use super::{Event, Place, Thread};
use crate::alu::{combined, compares, compute};
use crate::bulk::Shared;
use crate::code::{ALWAYS, Instruction, Op, Order, Special, low};
use crate::core::{Core, Fault};
use crate::cost::Places;
use crate::error::TrapKind;
use crate::launch::Time;
use std::time::SystemTime;

/// Returns the target of a branch table's entry.
fn entry(table: &[u32], index: u64) -> Result<u32, Fault> {
    table.get(index as usize).copied().ok_or_else(|| {
        let most = table.len();
        Fault::new(TrapKind::Trap, format!("the index {index} is outside a branch's table of {most} labels"))
    })
}

impl Thread {
    /// Executes up to `budget` instructions, until something else has to happen.
    pub fn execute(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        place: &Place,
        budget: u32,
    ) -> Result<Event, Fault> {
        let mut left = budget;
        self.spin.progress = false;
        // Results that no instruction needs aren't delayed forever.
        if !self.late.is_empty() && core.weak.as_mut().is_some_and(|weak| weak.one_in(LATE)) {
            self.happen(core, shared, |_| true)?;
        }
        let counts = core.places.is_some() || core.executed.is_some() || core.observer.is_some();
        let result = match (counts, core.weak.is_some()) {
            (false, false) => self.steps::<false, false>(core, shared, place, &mut left),
            (false, true) => self.steps::<false, true>(core, shared, place, &mut left),
            (true, _) => self.steps::<true, true>(core, shared, place, &mut left),
        };
        let done = u64::from(budget - left);
        core.statistics.instructions += done;
        core.quiet += done;
        result
    }

    fn account(&mut self, i: &Instruction, runs: bool, places: Places<'_>) {
        let place = match i.op {
            Op::Load { space, .. } | Op::Store { space, .. } | Op::Atomic { space, .. } => {
                Some(self.locate(space, self.slot(i.a).wrapping_add_signed(i64::from(i.imm))))
            }
            _ => None,
        };
        let base = self.at.base as usize;
        if let Some(depths) = &mut self.depths {
            depths.account(i, runs, base, place, places);
        }
    }

    /// Executes instructions. `COUNTS`: the launch measures costs or records what is executed. `WEAK`: memory may be
    /// weak.
    fn steps<const COUNTS: bool, const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut Shared,
        place: &Place,
        left: &mut u32,
    ) -> Result<Event, Fault> {
        let program = core.program;
        let mut body = &program.functions[self.at.function as usize].body;
        loop {
            if *left == 0 {
                return Ok(Event::Turn);
            }
            *left -= 1;
            let pc = self.at.pc;
            let i = &body.code[pc as usize];
            let base = self.at.base as usize;
            let runs = i.guard == ALWAYS || (self.slots[base + usize::from(i.guard)] != 0) != i.negate;
            if COUNTS && let Some(places) = core.places {
                self.account(i, runs, places);
            }
            if COUNTS && let Some(executed) = &mut core.executed {
                executed[self.at.function as usize][pc as usize] |= runs;
            }
            if !runs {
                self.at.pc = pc + 1;
                continue;
            }
            let watched = if COUNTS && core.observer.is_some() { self.observe(core, shared, place, i) } else { None };
            if WEAK && self.late_slots != 0 {
                self.needs(core, shared, i, base)?;
            }
            let slots = &mut self.slots[base..];
            let get = |slot: u16| slots[usize::from(slot)];
            match i.op {
                Op::Setp { compare, class, combine } => {
                    let found = compares(compare, class, i.width, get(i.a), get(i.b));
                    let other = (get(i.c) != 0) != (i.imm != 0);
                    let (yes, no) = (combined(combine, found, other), combined(combine, !found, other));
                    slots[usize::from(i.x)] = u64::from(no);
                    slots[usize::from(i.d)] = u64::from(yes);
                }
                Op::Branch | Op::BranchTable => {
                    let target =
                        if i.op == Op::Branch { i.imm as u32 } else { entry(&body.tables[i.imm as usize], get(i.a))? };
                    self.at.pc = target;
                    if target <= pc && self.spin.round(pc) {
                        return Ok(Event::Spin);
                    }
                    continue;
                }
                Op::Load { space, order, scope, signed, count } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    let free = count == 1 && matches!(order, Order::Weak | Order::Relaxed);
                    let weak = WEAK && core.weak.is_some();
                    if !weak || !self.is_late(core, shared, i, space, address, free.then_some((0, 0)))? {
                        self.load::<WEAK>(core, shared, i, space, order, scope, signed, count, address)?;
                    }
                }
                Op::Store { space, order, scope, count } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    if WEAK && core.weak.is_some() {
                        self.is_late(core, shared, i, space, address, None)?;
                        if order.releases() {
                            self.buffer().release(core, scope)?;
                            shared.order();
                        }
                    }
                    self.store::<WEAK>(core, shared, i, space, order, count, address)?;
                }
                Op::Atomic { op, space, order, scope, signed } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    let operands = (get(i.b), get(i.c));
                    if !WEAK || !self.is_late_atomic(core, shared, i, (space, order, scope), address, operands)? {
                        let old = self.update::<WEAK>(core, shared, i, op, space, scope, signed, address, operands)?;
                        self.slots[base + usize::from(i.d)] = old;
                    }
                }
                Op::Fence { order, scope } => {
                    core.statistics.fences += 1;
                    if WEAK && core.weak.is_some() {
                        self.buffer().fence(core, order, scope)?;
                        shared.order();
                    }
                    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                }
                Op::Call => {
                    self.enter(core, shared, i)?;
                    body = &program.functions[self.at.function as usize].body;
                    continue;
                }
                Op::Return => {
                    if !self.leave(program) {
                        return Ok(Event::Ended);
                    }
                    body = &program.functions[self.at.function as usize].body;
                    continue;
                }
                Op::Exit => return Ok(Event::Ended),
                Op::Trap => {
                    let cause = match i.width {
                        1 => "the kernel executed `brkpt`",
                        128 => "the kernel executed `multimem`, and the software GPU has no multicast memory",
                        _ => "the kernel executed `trap`",
                    };
                    return Err(Fault::new(TrapKind::Trap, cause));
                }
                Op::Nanosleep => {
                    self.at.pc = pc + 1;
                    return Ok(Event::Spin);
                }
                Op::Mbarrier { op, space, order, scope } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    if self.mbarrier(core, shared, i, (op, order, scope), (space, address))? {
                        self.at.pc = pc + 1;
                        return Ok(Event::Spin);
                    }
                }
                Op::Bulk { to_shared } => self.bulk(core, shared, i, to_shared)?,
                Op::BulkCommit => self.group += 1,
                Op::BulkWait { read } => self.bulk_wait(core, shared, i.imm as u32, read)?,
                Op::ProxyFence { shared: of_shared, global } => {
                    if of_shared {
                        shared.mbarriers.fence();
                    }
                    if WEAK && core.weak.is_some() {
                        self.proxy_fence(core, shared, of_shared, global)?;
                    }
                }
                Op::MbarrierFence => shared.mbarriers.fence(),
                Op::Nothing => {}
                Op::Barrier { .. }
                | Op::WarpBarrier
                | Op::Shuffle(_)
                | Op::Vote(_)
                | Op::Match { .. }
                | Op::Reduce { .. }
                | Op::Elect
                | Op::ActiveMask => return Ok(Event::Meets),
                Op::Special(special) => {
                    let value = self.special(core, special, place);
                    if matches!(special, Special::Timer | Special::TimerHigh | Special::Clock) {
                        // A loop that waits for a time is spinning.
                        self.spin.loaded = true;
                    }
                    self.slots[base + usize::from(i.d)] = low(value, i.width);
                }
                Op::MovPair => {
                    let (low, high) = (get(i.a), get(i.b));
                    slots[usize::from(i.d)] = low;
                    slots[usize::from(i.x)] = high;
                }
                Op::Unpack => {
                    let value = get(i.a);
                    slots[usize::from(i.d)] = low(value, i.width);
                    slots[usize::from(i.x)] = value >> i.width;
                }
                Op::LocalAddress => {
                    slots[usize::from(i.d)] = u64::from(self.at.local).wrapping_add_signed(i64::from(i.imm))
                }
                Op::ParamAddress => {
                    slots[usize::from(i.d)] = u64::from(self.at.params).wrapping_add_signed(i64::from(i.imm))
                }
                Op::ToGeneric(space) => {
                    slots[usize::from(i.d)] = low(get(i.a).wrapping_add(window(space)), i.width);
                }
                Op::FromGeneric(space) => {
                    slots[usize::from(i.d)] = low(get(i.a).wrapping_sub(window(space)), i.width);
                }
                Op::IsSpace(space) => slots[usize::from(i.d)] = u64::from(get(i.a) & WINDOW == window(space)),
                Op::AddCarry { take, give } => {
                    let sum = u128::from(get(i.a)) + u128::from(get(i.b)) + u128::from(take && self.carry);
                    slots[usize::from(i.d)] = low(sum as u64, i.width);
                    if give {
                        self.carry = sum >> i.width != 0;
                    }
                }
                // A subtraction with a borrow clears the carry, as the code of ptxas does: it matters before an
                // addition with carry.
                Op::SubBorrow { take, give } => {
                    let (a, b) = (i128::from(get(i.a)), i128::from(get(i.b)) + i128::from(take && !self.carry));
                    slots[usize::from(i.d)] = low((a - b) as u64, i.width);
                    if give {
                        self.carry = a >= b;
                    }
                }
                _ => slots[usize::from(i.d)] = compute(i, get),
            }
            if COUNTS && let Some(watched) = watched {
                self.observe_after(core, shared, place, i, &watched);
            }
            self.at.pc = pc + 1;
        }
    }

    fn special(&self, core: &Core<'_>, special: Special, place: &Place) -> u64 {
        let lane = self.lane();
        let threads: u32 = place.block.iter().product();
        let timer = || match core.time {
            Time::System => {
                SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
            }
            Time::Instructions => core.statistics.instructions,
        };
        let small = match special {
            Special::Tid(axis) => self.tid[usize::from(axis)],
            Special::Ntid(axis) => place.block[usize::from(axis)],
            Special::Ctaid(axis) => place.ctaid[usize::from(axis)],
            Special::Nctaid(axis) => place.grid[usize::from(axis)],
            Special::Lane => lane,
            Special::Warp => self.index / 32,
            Special::Warps => threads.div_ceil(32),
            Special::Sm => place.sm,
            Special::Sms => crate::launch::PROCESSORS,
            Special::Grid => 1,
            Special::MaskEq => 1 << lane,
            Special::MaskLt => (1 << lane) - 1,
            Special::MaskLe => (1 << lane) | ((1 << lane) - 1),
            Special::MaskGt => !((1 << lane) | ((1 << lane) - 1)),
            Special::MaskGe => !((1 << lane) - 1),
            Special::DynamicShared => place.dynamic,
            Special::TotalShared => place.shared,
            Special::ClusterCtaid(axis) => place.ctaid[usize::from(axis)] % place.cluster[usize::from(axis)],
            Special::ClusterNctaid(axis) => place.cluster[usize::from(axis)],
            Special::Clusterid(axis) => place.ctaid[usize::from(axis)] / place.cluster[usize::from(axis)],
            Special::Nclusterid(axis) => place.grid[usize::from(axis)] / place.cluster[usize::from(axis)],
            Special::ClusterRank => {
                let [x, y, z] = std::array::from_fn(|axis| place.ctaid[axis] % place.cluster[axis]);
                (z * place.cluster[1] + y) * place.cluster[0] + x
            }
            Special::ClusterSize => place.cluster.iter().product(),
            Special::IsExplicitCluster => u32::from(place.explicit_cluster),
            // The address of the words for the barriers of cooperative grids.
            Special::Environment(1) => (place.workspace >> 32) as u32,
            Special::Environment(2) => place.workspace as u32,
            Special::Environment(_) => 0,
            Special::Clock => return core.statistics.instructions,
            Special::Timer => return timer(),
            Special::TimerHigh => return timer() >> 32,
        };
        u64::from(small)
    }
}
