//! Launch settings and statistics.

use std::time::Duration;

/// The number of processors that blocks are spread over.
pub const PROCESSORS: u32 = 132;

/// What `%globaltimer` and the watchdog count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Time {
    /// Nanoseconds of the system clock.
    #[default]
    System,
    /// Instructions of all threads, one per nanosecond: a launch that nothing else races with is the same on every run
    /// of its seed.
    Instructions,
}

/// The settings of a launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Blocks in the grid.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: [u32; 3],
    /// Blocks per cluster, if the grid has clusters; the kernel may require a size (`.reqnctapercluster`).
    pub cluster: Option<[u32; 3]>,
    /// The address of two zeroed words for the barrier of a cooperative grid, or 0.
    pub workspace: u64,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
    /// The parameters' bytes, each at its offset in [`Kernel::parameters`](crate::Kernel::parameters).
    pub parameters: Vec<u8>,
    /// The seed of the interleaving.
    pub seed: u64,
    /// What `%globaltimer` and the watchdog count.
    pub time: Time,
    /// The kernel's time limit.
    pub watchdog: Option<Duration>,
    /// Stores leave a thread in seeded order; only fences, releases and atomics force them out.
    pub weak: bool,
    /// Threads that post on one queue at the same time without sharing it end the kernel.
    pub checks_posts: bool,
}

impl Launch {
    /// Returns a launch with no dynamic shared memory, seed 0, no watchdog, memory in program order, and no check of
    /// posts.
    pub fn new(grid: [u32; 3], block: [u32; 3], parameters: Vec<u8>) -> Self {
        Self {
            grid,
            block,
            cluster: None,
            workspace: 0,
            shared: 0,
            parameters,
            seed: 0,
            time: Time::System,
            watchdog: None,
            weak: false,
            checks_posts: false,
        }
    }
}

/// What a kernel did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions executed by all threads.
    pub instructions: u64,
    /// Threads.
    pub threads: u64,
    /// Loads from global memory.
    pub loads: u64,
    /// Stores to global memory.
    pub stores: u64,
    /// Atomics on global memory.
    pub atomics: u64,
    /// Fences.
    pub fences: u64,
    /// How often all threads were waiting for memory to change.
    pub idle: u64,
}
