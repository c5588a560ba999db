//! One GPU thread: a stack of frames, and the loop that executes its instructions.

mod access;
mod call;

pub use access::changed;
use access::{LATE, Late, WINDOW, window};
pub use call::DEEPEST;

use crate::alu::{Values, combined, compares, compute};
use crate::code::{ALWAYS, Instruction, Op, Order, Special, low};
use crate::cost::Depths;
use crate::error::TrapKind;
use crate::launch::{Statistics, Time};
use crate::memory::{Refusal, View};
use crate::program::Program;
use crate::weak::{Buffer, Weak};
use std::time::SystemTime;

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
    /// There with weak memory.
    pub buffer: Option<Box<Buffer>>,
    /// Loads and atomics of weak memory that have not happened, and the slots that wait for them.
    late: Vec<Late>,
    late_slots: u64,
    /// There if the launch counts what a call costs.
    pub depths: Option<Box<Depths>>,
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

/// The label of a branch's table.
fn entry(table: &[u32], index: u64) -> Result<u32, Fault> {
    table.get(index as usize).copied().ok_or_else(|| {
        let most = table.len();
        Fault::new(TrapKind::Trap, format!("the index {index} is outside a branch's table of {most} labels"))
    })
}

/// What all threads of a launch share.
pub struct Core<'a> {
    pub program: &'a Program,
    pub templates: Vec<Vec<u64>>,
    pub view: View<'a>,
    pub statistics: Statistics,
    pub time: Time,
    /// Instructions since the last change of memory.
    pub quiet: u64,
    pub weak: Option<Weak>,
    /// The addresses of doorbells, if the launch counts what a call costs.
    pub doorbells: Option<&'a [u64]>,
    /// The instructions of each function that a thread has executed, if the caller asks for them.
    pub executed: Option<Vec<Vec<bool>>>,
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
    pub fn new(
        core: &Core<'_>,
        kernel: usize,
        index: u32,
        tid: [u32; 3],
        parameters: &[u8],
        buffer: Option<Buffer>,
    ) -> Self {
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
            buffer: buffer.map(Box::new),
            late: Vec::new(),
            late_slots: 0,
            depths: core.doorbells.map(|_| Box::default()),
        }
    }

    /// The buffer of weak memory.
    #[inline(always)]
    pub fn buffer(&mut self) -> &mut Buffer {
        self.buffer.get_or_insert_default()
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
        // A result that no instruction needs is not late for ever.
        if !self.late.is_empty() && core.weak.as_mut().is_some_and(|weak| weak.one_in(LATE)) {
            self.happen(core, shared, |_| true)?;
        }
        let counts = core.doorbells.is_some() || core.executed.is_some();
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

    /// `COUNTS`: the launch counts what a call costs, or notes what is executed. `WEAK`: memory may be weak.
    fn steps<const COUNTS: bool, const WEAK: bool>(
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
            if COUNTS && let Some(doorbells) = core.doorbells {
                self.account(i, runs, doorbells);
            }
            if COUNTS && let Some(executed) = &mut core.executed {
                executed[self.at.function as usize][pc as usize] |= runs;
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
            Special::Clock => return core.statistics.instructions,
            Special::Timer => return timer(),
            Special::TimerHigh => return timer() >> 32,
        };
        u64::from(small)
    }
}
