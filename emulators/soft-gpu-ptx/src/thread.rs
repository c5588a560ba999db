//! A GPU thread: a stack of frames and their slots, and what it waits for.

mod access;
mod bulk;
mod call;
mod execute;
mod print;

use crate::code::{Instruction, Space};
pub use access::peek;

use crate::core::Core;
use crate::cost::Depths;
use crate::program::Program;
use crate::weak::Buffer;

/// A block's place in the grid, and its sizes.
pub struct Place {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub ctaid: [u32; 3],
    /// The processor that the block would run on.
    pub sm: u32,
    pub dynamic: u32,
    pub shared: u32,
    /// The blocks of a cluster; `explicit_cluster`: the launch or the kernel asked for them.
    pub cluster: [u32; 3],
    pub explicit_cluster: bool,
    /// The address of two words for a cooperative grid's barrier, or 0.
    pub workspace: u64,
}

/// What a return has to restore.
#[derive(Clone, Copy, Debug)]
struct Frame {
    function: u32,
    /// The current instruction.
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
    /// An `activemask`, for this many turns.
    Gather(u32),
    Ended,
}

/// A GPU thread.
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
    /// The group of the next bulk copies.
    group: u32,
    spin: Spin,
    /// Set if memory is weak.
    pub buffer: Option<Box<Buffer>>,
    /// Delayed loads and atomics under weak memory, and the slots that wait for them, as a hashed bit set.
    late: Vec<Late>,
    late_slots: u64,
    /// Set if the launch measures the cost of calls.
    pub depths: Option<Box<Depths>>,
}

/// A load or atomic that happens when its result is needed, or when memory order or an access to the same word requires
/// it.
#[derive(Clone, Copy, Debug)]
struct Late {
    i: Instruction,
    address: u64,
    operands: (u64, u64),
    /// The result's slot, counting from the bottom of the stack.
    slot: usize,
}

/// Detects spinning: what a thread has loaded since its last backward branch.
#[derive(Default)]
struct Spin {
    hash: u64,
    loaded: bool,
    wrote: bool,
    /// The last rounds; a loop may have several backward branches.
    last: [(u32, u64); 4],
    /// The thread has done more than wait since its turn began.
    progress: bool,
}

impl Spin {
    fn load(&mut self, address: u64, value: u64) {
        self.hash = (self.hash ^ address).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ value;
        self.loaded = true;
    }

    /// Handles a backward branch. Returns whether the thread loaded the same as in an earlier round and changed
    /// nothing.
    fn round(&mut self, pc: u32) -> bool {
        let now = (pc, self.hash);
        let spins = self.loaded && !self.wrote && self.last.contains(&now);
        let progress = self.progress || self.wrote || !spins;
        let [a, b, c, _] = self.last;
        *self = Self { last: [now, a, b, c], progress, ..Self::default() };
        spins
    }
}

/// Why a thread's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Turn,
    Spin,
    Ended,
    /// The thread is at a warp instruction, barrier or `activemask`, which the scheduler executes.
    Meets,
}

impl Thread {
    /// Makes a thread at a kernel's first instruction.
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
            group: 0,
            spin: Spin::default(),
            buffer: buffer.map(Box::new),
            late: Vec::new(),
            late_slots: 0,
            depths: core.places.map(|_| Box::default()),
        }
    }

    /// Returns the thread's store buffer for weak memory.
    #[inline(always)]
    pub fn buffer(&mut self) -> &mut Buffer {
        self.buffer.get_or_insert_default()
    }

    /// Returns the group of the next bulk copies.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// Returns a call's argument, at this offset of the frame's parameters, of this many bytes.
    pub fn argument(&self, (at, size): (u32, u32)) -> u64 {
        peek(&self.params, u64::from(self.at.params + at), (size * 8) as u8).unwrap_or(0)
    }

    pub fn lane(&self) -> u32 {
        self.index % 32
    }

    /// Returns the function and index of the current instruction.
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

    /// Whether the thread did more in its turn than check whether memory has changed.
    pub fn progressed(&self) -> bool {
        self.spin.progress || self.spin.wrote
    }

    /// Continues after the instruction that the scheduler executed.
    pub fn proceed(&mut self) {
        self.at.pc += 1;
        self.state = State::Running;
        self.spin.wrote = true;
    }

    /// Records that the lanes of a warp instruction have met at this depth.
    pub fn meet(&mut self, depth: u32, i: &Instruction) {
        let base = self.at.base as usize;
        if let Some(depths) = &mut self.depths {
            depths.meet(base, i, depth);
        }
    }
}
