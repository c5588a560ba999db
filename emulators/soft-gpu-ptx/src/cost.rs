//! What a call costs: counts, and the longest chain of dependent memory round trips.
//!
//! Each register, and each byte of parameters and local memory, has a depth: the number of round trips its value took.
//! An access to global memory starts at the greatest depth of its operands and of the branches, fences and acquires
//! before it.

use crate::code::{ALWAYS, Instruction, Op, Order, Scope, Space};
use std::ops::Range;

/// What the last function called by the kernel cost one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Instructions.
    pub instructions: u64,
    /// Loads from global memory; a vector load counts once.
    pub loads: u64,
    /// Stores to global memory; a vector store counts once.
    pub stores: u64,
    /// Atomics on global memory.
    pub atomics: u64,
    /// Those loads and atomics that are not in the GPU's memory, so that they cross PCIe.
    pub host_reads: u64,
    /// Fences at block, GPU and system scope.
    pub fences: [u64; 3],
    /// Stores to doorbells.
    pub doorbells: u64,
    /// Round trips before the first atomic starts.
    pub reservation: Option<u32>,
    /// Round trips before the first store to a doorbell starts.
    pub doorbell: Option<u32>,
    /// Round trips before the function returns.
    pub end: u32,
}

/// What a launch's memory is.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// Addresses of doorbells.
    pub doorbells: &'a [u64],
    /// The GPU's memory. Everything else is the host's.
    pub gpu: &'a [Range<u64>],
}

impl Places<'_> {
    fn is_host(&self, address: u64) -> bool {
        !self.gpu.iter().any(|range| range.contains(&address))
    }
}

/// One thread's depths.
#[derive(Debug, Default)]
pub struct Depths {
    pub cost: Cost,
    /// A function called by the kernel is running.
    active: bool,
    slots: Vec<u32>,
    params: Vec<u32>,
    local: Vec<u32>,
    carry: u32,
    /// The depth of the branches so far.
    control: u32,
    /// The depth at which the last fence or acquire ended.
    order: u32,
    /// The greatest depth at which a load has returned or a store has begun.
    outstanding: u32,
    /// The depth at which the lane arrived at a warp instruction.
    pub arrival: u32,
}

/// The space and address of an access.
pub type Place = Option<(Space, u64)>;

fn deepest(depths: &[u32], bytes: Range<usize>) -> u32 {
    depths.get(bytes).unwrap_or_default().iter().copied().max().unwrap_or(0)
}

/// Sets the depth of bytes or slots, which may be new.
fn set(depths: &mut Vec<u32>, range: Range<usize>, depth: u32) {
    if depths.len() < range.end {
        depths.resize(range.end, 0);
    }
    depths[range].fill(depth);
}

impl Depths {
    /// Starts counting: the kernel calls a function.
    pub fn begin(&mut self) {
        *self = Self { active: true, ..Self::default() };
    }

    /// Stops counting: the function called by the kernel has returned, with a result of this depth.
    pub fn end(&mut self, result: u32) {
        self.cost.end = self.control.max(self.order).max(result);
        self.active = false;
    }

    /// Copies parameters for a call or return, and returns their depth.
    pub fn copy(&mut self, from: usize, to: usize, size: usize) -> u32 {
        for byte in 0..size {
            let depth = self.params.get(from + byte).copied().unwrap_or(0);
            set(&mut self.params, to + byte..to + byte + 1, depth);
        }
        deepest(&self.params, to..to + size)
    }

    /// Drops a frame.
    pub fn leave(&mut self, slots: usize, params: usize, local: usize) {
        self.slots.truncate(slots);
        self.params.truncate(params);
        self.local.truncate(local);
    }

    /// Records that the lanes of a warp instruction have met at this depth.
    pub fn meet(&mut self, base: usize, i: &Instruction, depth: u32) {
        self.control = self.control.max(depth);
        if matches!(i.op, Op::WarpBarrier) {
            return;
        }
        let predicate = match i.op {
            Op::Shuffle(_) => u16::try_from(i.imm).ok(),
            Op::Match { all: true } | Op::Elect => Some(i.x),
            _ => None,
        };
        for slot in predicate.into_iter().chain([i.d]) {
            let at = base + usize::from(slot);
            set(&mut self.slots, at..at + 1, depth);
        }
    }

    /// Returns the depth at which a release or fence is done: earlier loads have returned, and a round trip confirmed
    /// earlier stores.
    fn release(&self, start: u32, scope: Scope) -> u32 {
        start.max(self.outstanding) + u32::from(scope != Scope::Block)
    }

    /// Accounts for an instruction before it is executed. The frame's slots start at `base`; `place` is the space and
    /// address of its access; `runs` is false if the guard disables it.
    pub fn account(&mut self, i: &Instruction, runs: bool, base: usize, place: Place, places: Places<'_>) {
        if !self.active {
            return;
        }
        self.cost.instructions += 1;
        let at = |slot: u16| base + usize::from(slot);
        // A slot that the instruction doesn't have is 0: register %p0 or the like, which compilers don't use.
        let depth = |slot: u16| self.slots.get(at(slot)).copied().unwrap_or(0);
        if i.guard != ALWAYS {
            self.control = self.control.max(depth(i.guard));
        }
        if !runs {
            return;
        }
        let operands = depth(i.a).max(depth(i.b)).max(depth(i.c));
        let start = self.control.max(self.order);
        let (space, address) = place.unwrap_or((Space::Param, 0));
        let bytes = |count: u8| address as usize..address as usize + usize::from(i.width / 8) * usize::from(count);
        let result = match i.op {
            Op::Branch | Op::BranchTable => {
                self.control = self.control.max(if i.op == Op::Branch { 0 } else { depth(i.a) });
                return;
            }
            Op::Load { order, count, .. } => {
                let result = match space {
                    Space::Local => deepest(&self.local, bytes(count)).max(depth(i.a)),
                    Space::Param => deepest(&self.params, bytes(count)).max(depth(i.a)),
                    Space::Shared => start.max(depth(i.a)),
                    _ => {
                        self.cost.loads += 1;
                        self.cost.host_reads += u64::from(places.is_host(address));
                        start.max(depth(i.a)) + 1
                    }
                };
                if space == Space::Global {
                    self.returned(result, order);
                }
                for slot in [i.d, i.b, i.c, i.x].into_iter().take(usize::from(count)) {
                    set(&mut self.slots, at(slot)..at(slot) + 1, result);
                }
                return;
            }
            Op::Store { order, scope, count, .. } => {
                let values = [i.d, i.b, i.c, i.x].into_iter().take(usize::from(count)).map(depth).max().unwrap_or(0);
                let value = values.max(depth(i.a));
                match space {
                    Space::Local => set(&mut self.local, bytes(count), value),
                    Space::Param => set(&mut self.params, bytes(count), value),
                    Space::Shared => {}
                    _ => self.stored(start.max(value), order, scope, places.doorbells.contains(&address)),
                }
                return;
            }
            Op::Atomic { order, scope, .. } => {
                let mut start = start.max(operands);
                if space == Space::Shared {
                    start
                } else {
                    if order.releases() {
                        start = self.release(start, scope);
                    }
                    self.cost.atomics += 1;
                    self.cost.host_reads += u64::from(places.is_host(address));
                    self.cost.reservation.get_or_insert(start);
                    self.returned(start + 1, order);
                    start + 1
                }
            }
            Op::Fence { scope, .. } => {
                self.cost.fences[scope as usize] += 1;
                self.order = self.release(start, scope);
                return;
            }
            op if op.meets() => {
                self.arrival = operands.max(depth(i.x)).max(self.control);
                self.arrival
            }
            Op::AddCarry { take, give } | Op::SubBorrow { take, give } => {
                let result = if take { operands.max(self.carry) } else { operands };
                if give {
                    self.carry = result;
                }
                result
            }
            Op::Setp { .. } | Op::Unpack => {
                set(&mut self.slots, at(i.x)..at(i.x) + 1, operands);
                operands
            }
            Op::Bfi => operands.max(depth(i.x)),
            Op::Call | Op::Return | Op::Exit | Op::Trap | Op::Nanosleep | Op::Nothing => return,
            Op::Bulk { .. } | Op::BulkCommit | Op::BulkWait { .. } | Op::ProxyFence { .. } | Op::MbarrierFence => {
                return;
            }
            _ => operands,
        };
        set(&mut self.slots, at(i.d)..at(i.d) + 1, result);
    }

    fn stored(&mut self, mut start: u32, order: Order, scope: Scope, is_doorbell: bool) {
        self.cost.stores += 1;
        if order.releases() {
            start = self.release(start, scope);
        }
        self.outstanding = self.outstanding.max(start);
        if is_doorbell {
            self.cost.doorbells += 1;
            self.cost.doorbell.get_or_insert(start);
        }
    }

    fn returned(&mut self, depth: u32, order: Order) {
        self.outstanding = self.outstanding.max(depth);
        if order.acquires() {
            self.order = self.order.max(depth);
        }
    }
}
