//! What a launch of a kernel is given, and what the kernel did.

use std::time::Duration;

/// The processors that a block may find itself on.
pub const PROCESSORS: u32 = 132;

/// What `%globaltimer` and the watchdog count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Time {
    /// Nanoseconds of the system's clock.
    #[default]
    System,
    /// Instructions of all threads, one a nanosecond: a launch that nothing else changes is the same on every run of its seed.
    Instructions,
}

/// What a launch is given.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// The parameters' bytes, each at its offset in [`Kernel::parameters`](crate::Kernel::parameters).
    pub parameters: Vec<u8>,
    /// The seed of the interleaving.
    pub seed: u64,
    /// What `%globaltimer` and the watchdog count.
    pub time: Time,
    /// The longest time that the kernel may take.
    pub watchdog: Option<Duration>,
    /// Stores leave a thread in seeded order; only fences, releases and atomics force them.
    pub weak: bool,
}

impl Launch {
    /// A launch without dynamic shared memory, with seed 0, no watchdog, and memory in program order.
    pub fn new(grid: [u32; 3], block: [u32; 3], parameters: Vec<u8>) -> Self {
        Self { grid, block, shared: 0, parameters, seed: 0, time: Time::System, watchdog: None, weak: false }
    }
}

/// What a kernel did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions of all threads.
    pub instructions: u64,
    /// Threads.
    pub threads: u64,
    /// Loads of global memory.
    pub loads: u64,
    /// Stores into global memory.
    pub stores: u64,
    /// Atomics in global memory.
    pub atomics: u64,
    /// Fences.
    pub fences: u64,
    /// Times that no thread could do other than wait for memory to change.
    pub idle: u64,
}
