//! One GPU thread: a stack of frames, and the loop that executes its instructions.

use crate::alu::{Values, combined, compares, compute};
use crate::code::{ALWAYS, Atomic, Instruction, Op, Order, Scope, Space, Special, low, signed};
use crate::cost::Depths;
use crate::error::TrapKind;
use crate::launch::Statistics;
use crate::memory::{Refusal, View};
use crate::program::{BuiltIn, Program};
use crate::weak::{Buffer, Weak};
use std::time::SystemTime;

/// Generic addresses of shared memory, of local memory and of parameters. No address of a process is so high.
pub const SHARED: u64 = 1 << 60;
pub const LOCAL: u64 = 2 << 60;
pub const PARAM: u64 = 3 << 60;
const WINDOW: u64 = 0xf << 60;

/// Calls in calls.
pub const DEEPEST: usize = 128;
/// Bytes of local memory of a thread, as on a GPU.
const MOST_LOCAL: usize = 512 << 10;

/// The place of a thread in its grid.
pub struct Place {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub ctaid: [u32; 3],
    /// The processor on which the block would be.
    pub sm: u32,
    pub dynamic: u32,
    pub shared: u32,
}

/// What a call has to restore.
#[derive(Clone, Copy, Debug)]
struct Frame {
    function: u32,
    /// The instruction at which the thread is.
    pc: u32,
    base: u32,
    params: u32,
    local: u32,
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Running,
    /// A warp instruction with this mask.
    Warp(u32),
    /// A barrier of the block.
    Barrier(u32),
    /// `activemask`, for as many turns.
    Gather(u32),
    Ended,
}

/// One GPU thread.
pub struct Thread {
    pub index: u32,
    pub tid: [u32; 3],
    pub state: State,
    at: Frame,
    frames: Vec<Frame>,
    slots: Vec<u64>,
    params: Vec<u8>,
    local: Vec<u8>,
    carry: bool,
    spin: Spin,
    pub buffer: Box<Buffer>,
    /// Loads and atomics of weak memory that have not happened, and the slots that wait for them.
    late: Vec<Late>,
    late_slots: u64,
    /// There if the launch counts what a call costs.
    pub depths: Option<Box<Depths>>,
}

/// A load or an atomic that happens when its result is needed, or when an order or an access to the same word requires it.
#[derive(Clone, Copy, Debug)]
struct Late {
    i: Instruction,
    address: u64,
    operands: (u64, u64),
    /// The slot of the result, of all frames.
    slot: usize,
}

/// A load or an atomic in this many is late, and stays so until one turn in this many: a power of two.
const LATE: u64 = 4;

fn bit(slot: usize) -> u64 {
    1 << (slot & 63)
}

/// What a thread loaded since its last backward branch.
#[derive(Default)]
struct Spin {
    hash: u64,
    loaded: bool,
    wrote: bool,
    /// The last rounds; a loop may have several branches back.
    last: [(u32, u64); 4],
    /// The thread did more than wait since its turn began.
    progress: bool,
}

impl Spin {
    fn load(&mut self, address: u64, value: u64) {
        self.hash = (self.hash ^ address).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ value;
        self.loaded = true;
    }

    /// A backward branch: whether the thread loaded the same as in the last round, and changed nothing.
    fn round(&mut self, pc: u32) -> bool {
        let now = (pc, self.hash);
        let spins = self.loaded && !self.wrote && self.last.contains(&now);
        let progress = self.progress || self.wrote || !spins;
        let [a, b, c, _] = self.last;
        *self = Self { last: [now, a, b, c], progress, ..Self::default() };
        spins
    }
}

/// Why a thread stops for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Turn,
    Spin,
    Ended,
    /// At a warp instruction, a barrier or `activemask`, which the scheduler executes.
    Meets,
}

/// Why a thread cannot go on.
#[derive(Debug)]
pub struct Fault {
    pub kind: TrapKind,
    pub cause: String,
}

impl Fault {
    pub fn new(kind: TrapKind, cause: impl Into<String>) -> Self {
        Self { kind, cause: cause.into() }
    }
}

/// What all threads of a launch share.
pub struct Core<'a> {
    pub program: &'a Program,
    pub templates: Vec<Vec<u64>>,
    pub view: View<'a>,
    pub statistics: Statistics,
    /// Instructions since the last change of memory.
    pub quiet: u64,
    pub weak: Option<Weak>,
    /// The addresses of doorbells, if the launch counts what a call costs.
    pub doorbells: Option<&'a [u64]>,
}

/// Bytes of a space that is this process's own.
fn peek(bytes: &[u8], at: u64, width: u8) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let found = bytes.get(at..at.checked_add(usize::from(width / 8))?)?;
    let mut value = [0; 8];
    value[..found.len()].copy_from_slice(found);
    Some(u64::from_le_bytes(value))
}

fn poke(bytes: &mut [u8], at: u64, width: u8, value: u64) -> Option<()> {
    let at = usize::try_from(at).ok()?;
    let size = usize::from(width / 8);
    bytes.get_mut(at..at.checked_add(size)?)?.copy_from_slice(&value.to_le_bytes()[..size]);
    Some(())
}

fn outside(space: &str, address: u64, bytes: u64, size: usize) -> Fault {
    Fault::new(
        TrapKind::Address,
        format!("{bytes} bytes at {address:#x} of {space} memory are outside its {size} bytes"),
    )
}

impl Core<'_> {
    pub fn refused(&self, refusal: Refusal, what: &str, address: u64, bytes: u64) -> Fault {
        let cause = match refusal {
            Refusal::Misaligned => {
                format!("a {what} of {bytes} bytes at {address:#x}, which is no multiple of {bytes}")
            }
            Refusal::ReadOnly => format!("a {what} of {bytes} bytes at {address:#x}, which is only for reading"),
            Refusal::Outside => {
                format!("a {what} of {bytes} bytes at {address:#x}: {}", self.view.explain(address))
            }
        };
        Fault::new(refusal.kind(), cause)
    }
}

impl Thread {
    /// A thread at the first instruction of a kernel.
    pub fn new(core: &Core<'_>, kernel: usize, index: u32, tid: [u32; 3], parameters: &[u8], buffer: Buffer) -> Self {
        let body = &core.program.functions[kernel].body;
        let mut params = parameters.to_vec();
        params.resize((body.params as usize).max(parameters.len()), 0xa5);
        Self {
            index,
            tid,
            state: State::Running,
            at: Frame { function: kernel as u32, pc: 0, base: 0, params: 0, local: 0 },
            frames: Vec::new(),
            slots: core.templates[kernel].clone(),
            params,
            local: vec![0xa5; body.local as usize],
            carry: false,
            spin: Spin::default(),
            buffer: Box::new(buffer),
            late: Vec::new(),
            late_slots: 0,
            depths: core.doorbells.map(|_| Box::default()),
        }
    }

    pub fn lane(&self) -> u32 {
        self.index % 32
    }

    /// The function and the index of the instruction at which the thread is.
    pub fn position(&self) -> (u32, u32) {
        (self.at.function, self.at.pc)
    }

    pub fn instruction(&self, program: &Program) -> Instruction {
        program.functions[self.at.function as usize].body.code[self.at.pc as usize]
    }

    pub fn slot(&self, slot: u16) -> u64 {
        self.slots[self.at.base as usize + usize::from(slot)]
    }

    pub fn set_slot(&mut self, slot: u16, value: u64) {
        let at = self.at.base as usize + usize::from(slot);
        self.slots[at] = value;
    }

    /// The thread did more in its turn than look whether memory has changed.
    pub fn progressed(&self) -> bool {
        self.spin.progress || self.spin.wrote
    }

    /// Goes on behind the instruction that the scheduler executed.
    pub fn proceed(&mut self) {
        self.at.pc += 1;
        self.state = State::Running;
        self.spin.wrote = true;
    }

    fn enter(&mut self, core: &Core<'_>, call: u32) -> Result<(), Fault> {
        let caller = &core.program.functions[self.at.function as usize].body;
        let call = &caller.calls[call as usize];
        let callee = &core.program.functions[call.target];
        if let Some(built_in) = callee.built_in {
            let arguments: Vec<u64> = call
                .arguments
                .iter()
                .map(|&(at, size)| peek(&self.params, u64::from(self.at.params + at), (size * 8) as u8).unwrap_or(0))
                .collect();
            return Err(self.built_in(built_in, &arguments));
        }
        if self.frames.len() == DEEPEST {
            return Err(Fault::new(
                TrapKind::Recursion,
                format!(
                    "the call of {} is {DEEPEST} calls deep; a recursion without an end, or one too deep",
                    callee.name
                ),
            ));
        }
        let old = self.at;
        if self.frames.is_empty()
            && let Some(depths) = &mut self.depths
        {
            depths.begin();
        }
        self.frames.push(old);
        let params = self.params.len().next_multiple_of(16);
        self.params.resize(params + callee.body.params as usize, 0xa5);
        for copy in &call.copies_in {
            let from = (old.params + copy.from) as usize;
            self.params.copy_within(from..from + copy.size as usize, params + copy.to as usize);
            if let Some(depths) = &mut self.depths {
                depths.copy(from, params + copy.to as usize, copy.size as usize);
            }
        }
        let local = self.local.len().next_multiple_of(16);
        if local + callee.body.local as usize > MOST_LOCAL {
            return Err(Fault::new(
                TrapKind::Resources,
                format!("the call of {} needs more local memory than the {MOST_LOCAL} bytes of a thread", callee.name),
            ));
        }
        self.local.resize(local + callee.body.local as usize, 0xa5);
        self.at = Frame {
            function: call.target as u32,
            pc: 0,
            base: self.slots.len() as u32,
            params: params as u32,
            local: local as u32,
        };
        self.slots.extend_from_slice(&core.templates[call.target]);
        Ok(())
    }

    /// Returns to the caller. False if there is none.
    fn leave(&mut self, program: &Program) -> bool {
        let Some(caller) = self.frames.pop() else {
            return false;
        };
        let old = std::mem::replace(&mut self.at, caller);
        let body = &program.functions[caller.function as usize].body;
        let call = &body.calls[body.code[caller.pc as usize].imm as usize];
        let mut result = 0;
        for copy in &call.copies_out {
            // The callee's slot is `to`.
            let from = (old.params + copy.to) as usize;
            let to = (caller.params + copy.from) as usize;
            self.params.copy_within(from..from + copy.size as usize, to);
            if let Some(depths) = &mut self.depths {
                result = result.max(depths.copy(from, to, copy.size as usize));
            }
        }
        if let Some(depths) = &mut self.depths {
            if self.frames.is_empty() {
                depths.end(result);
            }
            depths.leave(old.base as usize, old.params as usize, old.local as usize);
        }
        self.slots.truncate(old.base as usize);
        self.params.truncate(old.params as usize);
        self.local.truncate(old.local as usize);
        self.at.pc += 1;
        true
    }

    fn built_in(&self, which: BuiltIn, arguments: &[u64]) -> Fault {
        match which {
            BuiltIn::Print => Fault::new(
                TrapKind::Trap,
                "the kernel calls vprintf, which the interpreter does not execute; store what it should print",
            ),
            BuiltIn::AssertFail => Fault::new(
                TrapKind::Trap,
                format!("an assertion failed in line {} of the kernel's source", arguments[2]),
            ),
        }
    }

    /// Executes until something else has to happen, at most `budget` instructions.
    pub fn execute(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut [u8],
        place: &Place,
        budget: u32,
    ) -> Result<Event, Fault> {
        let mut left = budget;
        self.spin.progress = false;
        let result = match (core.doorbells, &mut core.weak) {
            (None, None) => self.steps::<false, false>(core, shared, place, &mut left),
            (None, Some(weak)) => {
                // A result that no instruction needs is not late for ever.
                if !self.late.is_empty() && weak.one_in(LATE) {
                    self.happen(core, shared, |_| true)?;
                }
                self.steps::<false, true>(core, shared, place, &mut left)
            }
            (Some(_), _) => self.steps::<true, true>(core, shared, place, &mut left),
        };
        let done = u64::from(budget - left);
        core.statistics.instructions += done;
        core.quiet += done;
        result
    }

    fn account(&mut self, i: &Instruction, runs: bool, doorbells: &[u64]) {
        let place = match i.op {
            Op::Load { space, .. } | Op::Store { space, .. } | Op::Atomic { space, .. } => {
                Some(self.locate(space, self.slot(i.a).wrapping_add_signed(i64::from(i.imm))))
            }
            _ => None,
        };
        let base = self.at.base as usize;
        if let Some(depths) = &mut self.depths {
            depths.account(i, runs, base, place, doorbells);
        }
    }

    /// The lanes of a warp instruction have met at this depth.
    pub fn meet(&mut self, depth: u32, i: &Instruction) {
        let base = self.at.base as usize;
        if let Some(depths) = &mut self.depths {
            depths.meet(base, i, depth);
        }
    }

    /// The late accesses that `which` chooses happen.
    #[cold]
    fn happen(&mut self, core: &mut Core<'_>, shared: &mut [u8], which: impl Fn(&Late) -> bool) -> Result<(), Fault> {
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

    /// Whether the access is late. Earlier ones to the same words happen first.
    #[inline(always)]
    fn is_late(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut [u8],
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

    /// Late results that the instruction reads or replaces are there; all of them before a fence, a release, a return or a wait for
    /// other threads.
    #[cold]
    fn needs(&mut self, core: &mut Core<'_>, shared: &mut [u8], i: &Instruction, base: usize) -> Result<(), Fault> {
        let all = match i.op {
            Op::Fence { .. }
            | Op::Return
            | Op::Exit
            | Op::Barrier { .. }
            | Op::WarpBarrier
            | Op::Shuffle(_)
            | Op::Vote(_)
            | Op::Match { .. }
            | Op::Reduce { .. }
            | Op::ActiveMask => true,
            Op::Store { order, .. } | Op::Atomic { order, .. } => order.releases(),
            _ => false,
        };
        let slots = [i.d, i.a, i.b, i.c, i.x].map(|slot| base + usize::from(slot));
        self.happen(core, shared, |late| all || slots.contains(&late.slot))
    }

    /// `COST`: the launch counts what a call costs. `WEAK`: memory may be weak.
    fn steps<const COST: bool, const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut [u8],
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
            if COST && let Some(doorbells) = core.doorbells {
                self.account(i, runs, doorbells);
            }
            if !runs {
                self.at.pc = pc + 1;
                continue;
            }
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
                    let target = if i.op == Op::Branch {
                        i.imm as u32
                    } else {
                        let (table, index) = (&body.tables[i.imm as usize], get(i.a));
                        *table.get(index as usize).ok_or_else(|| {
                            let most = table.len();
                            Fault::new(
                                TrapKind::Trap,
                                format!("the index {index} is outside a branch's table of {most} labels"),
                            )
                        })?
                    };
                    self.at.pc = target;
                    if target <= pc && self.spin.round(pc) {
                        return Ok(Event::Spin);
                    }
                    continue;
                }
                Op::Load { space, order, scope, signed, count } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    if WEAK && core.weak.is_some() {
                        let free = count == 1 && matches!(order, Order::Weak | Order::Relaxed);
                        if self.is_late(core, shared, i, space, address, free.then_some((0, 0)))? {
                            self.at.pc = pc + 1;
                            continue;
                        }
                    }
                    self.load::<WEAK>(core, shared, i, space, order, scope, signed, count, address)?;
                }
                Op::Store { space, order, scope, count } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    if WEAK && core.weak.is_some() {
                        self.is_late(core, shared, i, space, address, None)?;
                        if order.releases() {
                            self.buffer.release(core, scope)?;
                        }
                    }
                    self.store::<WEAK>(core, shared, i, space, order, count, address)?;
                }
                Op::Atomic { op, space, order, scope, signed } => {
                    let address = get(i.a).wrapping_add_signed(i64::from(i.imm));
                    let (b, c) = (get(i.b), get(i.c));
                    if WEAK && core.weak.is_some() {
                        if order.releases() {
                            self.buffer.release(core, scope)?;
                        }
                        let free = matches!(order, Order::Relaxed | Order::Release);
                        if self.is_late(core, shared, i, space, address, free.then_some((b, c)))? {
                            self.at.pc = pc + 1;
                            continue;
                        }
                        if order.acquires() {
                            self.buffer.acquire(scope);
                        }
                    }
                    let old = self.update::<WEAK>(core, shared, i, op, space, scope, signed, address, (b, c))?;
                    self.slots[base + usize::from(i.d)] = old;
                }
                Op::Fence { order, scope } => {
                    core.statistics.fences += 1;
                    if WEAK && core.weak.is_some() {
                        self.buffer.fence(core, order, scope)?;
                    }
                    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                }
                Op::Call => {
                    self.enter(core, i.imm as u32)?;
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
                    let name = if i.width == 1 { "brkpt" } else { "trap" };
                    return Err(Fault::new(TrapKind::Trap, format!("the kernel executed `{name}`")));
                }
                Op::Nanosleep => {
                    self.at.pc = pc + 1;
                    return Ok(Event::Spin);
                }
                Op::Barrier { .. }
                | Op::WarpBarrier
                | Op::Shuffle(_)
                | Op::Vote(_)
                | Op::Match { .. }
                | Op::Reduce { .. }
                | Op::ActiveMask => return Ok(Event::Meets),
                Op::Special(special) => {
                    let value = self.special(core, special, place);
                    if matches!(special, Special::Timer | Special::TimerHigh | Special::Clock) {
                        // A loop until a time changes nothing.
                        self.spin.loaded = true;
                    }
                    self.slots[base + usize::from(i.d)] = low(value, i.width);
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
                    let value = get(i.a).wrapping_add(window(space));
                    slots[usize::from(i.d)] = low(value, i.width);
                }
                Op::FromGeneric(space) => {
                    let value = get(i.a).wrapping_sub(window(space));
                    slots[usize::from(i.d)] = low(value, i.width);
                }
                Op::IsSpace(space) => {
                    let value = get(i.a) & WINDOW == window(space);
                    slots[usize::from(i.d)] = u64::from(value);
                }
                Op::AddCarry { take, give } => {
                    let sum = u128::from(get(i.a)) + u128::from(get(i.b)) + u128::from(take && self.carry);
                    slots[usize::from(i.d)] = low(sum as u64, i.width);
                    if give {
                        self.carry = sum >> i.width != 0;
                    }
                }
                Op::SubBorrow { take, give } => {
                    let (a, b) = (i128::from(get(i.a)), i128::from(get(i.b)) + i128::from(take && self.carry));
                    slots[usize::from(i.d)] = low((a - b) as u64, i.width);
                    if give {
                        self.carry = a < b;
                    }
                }
                op => {
                    let values = Values { a: get(i.a), b: get(i.b), c: get(i.c), x: get(i.x) };
                    slots[usize::from(i.d)] = compute(op, i.width, &values, i);
                }
            }
            self.at.pc = pc + 1;
        }
    }

    /// The space of an address, and the address in it.
    #[inline(always)]
    fn locate(&self, space: Space, address: u64) -> (Space, u64) {
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
    fn load<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &[u8],
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
                    let value = peek(shared, at, width).ok_or_else(|| outside("shared", at, bytes, shared.len()))?;
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
            self.buffer.load(core, at, width, order, scope)
        } else {
            core.view.load(at, width)
        };
        let value = value.map_err(|refusal| core.refused(refusal, "load", at, u64::from(width / 8)))?;
        self.spin.load(at, value);
        Ok(if sign { low(signed(value, width) as u64, extra) } else { value })
    }

    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn store<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut [u8],
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
                    let size = shared.len();
                    poke(shared, at, width, value).ok_or_else(|| outside("shared", at, bytes, size))?;
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
                    let done = if WEAK && core.weak.is_some() {
                        self.buffer.store(core, at, width, value, order)
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
    fn update<const WEAK: bool>(
        &mut self,
        core: &mut Core<'_>,
        shared: &mut [u8],
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
                let old = peek(shared, at, width).ok_or_else(|| outside("shared", at, bytes, shared.len()))?;
                poke(shared, at, width, change(old));
                old
            }
            Space::Local | Space::Param => {
                return Err(Fault::new(
                    TrapKind::AddressSpace,
                    "an atomic in local memory or in a parameter; atomics are for global and shared memory",
                ));
            }
            _ => {
                core.statistics.atomics += 1;
                let old = if WEAK && core.weak.is_some() {
                    self.buffer.update(core, at, width, scope, change)
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

    fn special(&self, core: &Core<'_>, special: Special, place: &Place) -> u64 {
        let lane = self.lane();
        let threads: u32 = place.block.iter().product();
        let timer = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            now.as_nanos() as u64
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
            Special::Clock => return core.statistics.instructions,
            Special::Timer => return timer(),
            Special::TimerHigh => return timer() >> 32,
        };
        u64::from(small)
    }
}

fn window(space: Space) -> u64 {
    match space {
        Space::Shared => SHARED,
        Space::Local | Space::LocalFrame => LOCAL,
        Space::Param | Space::ParamFrame => PARAM,
        Space::Generic | Space::Global | Space::Constant => 0,
    }
}

/// What an atomic makes of the old value.
pub fn changed(op: Atomic, old: u64, b: u64, c: u64, width: u8, sign: bool) -> u64 {
    let less = |one: u64, other: u64| if sign { signed(one, width) < signed(other, width) } else { one < other };
    match op {
        Atomic::Add => old.wrapping_add(b),
        Atomic::Exchange => b,
        Atomic::CompareExchange => {
            if old == b {
                c
            } else {
                old
            }
        }
        Atomic::Min => {
            if less(b, old) {
                b
            } else {
                old
            }
        }
        Atomic::Max => {
            if less(old, b) {
                b
            } else {
                old
            }
        }
        Atomic::And => old & b,
        Atomic::Or => old | b,
        Atomic::Xor => old ^ b,
        Atomic::Increment => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        Atomic::Decrement => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
    }
}
