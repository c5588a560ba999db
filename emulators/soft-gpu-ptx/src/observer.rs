//! What the observer of a launch learns: every access to shared and global memory, and all that orders threads.

/// A thread of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Who {
    /// The block's number in the grid.
    pub block: u32,
    /// The thread's number in the block.
    pub thread: u32,
}

/// Which threads an access or a fence is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Those of the block.
    Block,
    /// Those of the GPU.
    Gpu,
    /// All of the system.
    System,
}

/// How a strong access or a fence orders memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ordering {
    /// It acquires.
    pub acquires: bool,
    /// It releases.
    pub releases: bool,
    /// Its scope.
    pub reach: Reach,
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Does {
    /// It reads.
    Load,
    /// It writes.
    Store,
    /// An atomic: reads and writes.
    Update,
}

/// An access to shared or global memory, of at most 16 aligned bytes.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// The instruction ([`Program::origins`](crate::Program::origins)).
    pub site: u32,
    /// The address is an offset in the block's shared memory.
    pub shared: bool,
    /// The first byte.
    pub address: u64,
    /// How many bytes.
    pub bytes: u32,
    /// What it does.
    pub does: Does,
    /// Set for a strong access.
    pub ordering: Option<Ordering>,
    /// A `.mmio` access: to a card's registers and rings.
    pub mmio: bool,
    /// The first word that was read or is written.
    pub value: u64,
    /// The bytes are no longer the same afterwards.
    pub changes: bool,
}

/// A use of an mbarrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MbarrierUse {
    /// It was initialized or invalidated.
    Reset,
    /// The thread arrived, or changed the number of bytes.
    Arrived {
        /// The arrival releases.
        releases: bool,
    },
    /// The thread waited, and a phase was complete.
    Passed {
        /// The wait acquires.
        acquires: bool,
    },
}

/// A bulk copy, which a thread started.
#[derive(Clone, Copy, Debug)]
pub struct BulkStart {
    /// The instruction.
    pub site: u32,
    /// The copy is from global to shared memory.
    pub to_shared: bool,
    /// The offset in shared memory.
    pub shared: u32,
    /// The address in global memory.
    pub global: u64,
    /// How many bytes.
    pub bytes: u32,
    /// The mbarrier of a copy to shared memory.
    pub mbarrier: u32,
    /// A fence came after its initialization.
    pub sees_mbarrier: bool,
    /// The group of a copy to global memory.
    pub group: u32,
}

/// Learns what the threads of a launch do, in the order in which they do it. Memory must be strong.
pub trait Observer {
    /// A block begins.
    fn begin(&mut self, block: u32, threads: u32, shared: u32);
    /// All threads of a block have exited.
    fn end(&mut self, block: u32);
    /// A thread accesses memory.
    fn access(&mut self, who: Who, access: &Access);
    /// A thread executes a fence.
    fn fence(&mut self, who: Who, site: u32, ordering: Ordering);
    /// A thread arrives at a barrier of its block, and waits or goes on.
    fn arrive(&mut self, who: Who, number: u32, waits: bool);
    /// The threads that wait at a barrier go on.
    fn barrier(&mut self, block: u32, number: u32);
    /// Lanes of a warp meet at `bar.warp.sync` (`barrier`) or at an instruction that exchanges values.
    fn warp(&mut self, block: u32, warp: u32, lanes: u32, barrier: bool, site: u32);
    /// A thread uses an mbarrier, which is in this phase then.
    fn mbarrier(&mut self, who: Who, site: u32, at: u32, phase: u32, usage: MbarrierUse);
    /// A thread starts a bulk copy. If it is to shared memory, `phase` is its mbarrier's before and after it has
    /// arrived there.
    fn bulk(&mut self, who: Who, start: &BulkStart, phases: (u32, u32));
    /// A thread's copies of groups before `group` have read, and have written unless `read`.
    fn bulk_wait(&mut self, who: Who, group: u32, read: bool);
    /// A thread executes `fence.proxy.async` for shared memory.
    fn proxy_fence(&mut self, who: Who);
    /// A thread calls a function of the program (`Program::functions`), with these arguments.
    fn call(&mut self, who: Who, site: u32, function: u32, arguments: &[u64]);
    /// A thread returns from a function.
    fn leave(&mut self, who: Who, function: u32);
}

/// A line of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// The file's name, as the compiler was given it.
    pub file: String,
    /// The line, counting from 1.
    pub line: u32,
}

/// Where an instruction comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The number of its function.
    pub function: u32,
    /// Its line in the module's text.
    pub line: u32,
    /// It stores a part of a request: `.mmio`, of 64 bits.
    pub posts: bool,
    /// Its source line and those that it's inlined at, innermost first; none if the text doesn't have them.
    pub lines: Vec<SourceLine>,
}
