//! One launch of a kernel.

use crate::error::{Trap, TrapKind};
use crate::memory::Memory;
use crate::program::{Kernel, Loaded};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What a launch is given.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
    /// The parameters' bytes, each at its offset in [`Kernel::parameters`].
    pub parameters: Vec<u8>,
    /// The seed of the interleaving.
    pub seed: u64,
    /// The longest time that the kernel may take.
    pub watchdog: Option<Duration>,
    /// Stores leave a thread in seeded order; only fences, releases and atomics force them.
    pub weak: bool,
}

impl Launch {
    /// A launch without dynamic shared memory, with seed 0, no watchdog, and memory in program order.
    pub fn new(grid: [u32; 3], block: [u32; 3], parameters: Vec<u8>) -> Self {
        Self { grid, block, shared: 0, parameters, seed: 0, watchdog: None, weak: false }
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

/// Runs a kernel on this thread until all of its threads have ended.
///
/// # Errors
///
/// The event that ended the kernel early.
pub fn run(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &AtomicBool,
) -> Result<Statistics, Trap> {
    let _ = (loaded, launch, memory, stop);
    Err(Trap {
        kind: TrapKind::Launch,
        kernel: kernel.name.clone(),
        block: [0; 3],
        thread: [0; 3],
        module: String::new(),
        function: String::new(),
        line: 0,
        cause: "the interpreter runs no kernel yet".into(),
    })
}
