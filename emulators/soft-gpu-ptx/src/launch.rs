//! One launch of a kernel.

use crate::error::{Trap, TrapKind};
use crate::memory::Memory;
use crate::program::{Kernel, Loaded};
use crate::scheduler::{Ended, Scheduler, Watch};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The processors that a block may find itself on.
pub const PROCESSORS: u32 = 132;
/// Bytes of shared memory of a block.
const MOST_SHARED: u64 = 227 << 10;

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
    /// The parameters' bytes, each at its offset in [`Kernel::parameters`].
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

/// Runs a kernel on this thread until all of its threads have ended.
///
/// # Errors
///
/// The event that ended the kernel early.
#[allow(clippy::result_large_err)]
pub fn run(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &AtomicBool,
) -> Result<Statistics, Trap> {
    run_with(loaded, kernel, launch, memory, stop, Watch::Nothing).map(|ended| ended.statistics)
}

/// Runs a kernel as [`run`] does, and returns the lines of its modules that threads have executed.
///
/// # Errors
///
/// The event that ended the kernel early.
#[allow(clippy::result_large_err)]
pub fn executed(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &AtomicBool,
) -> Result<BTreeSet<(Arc<str>, u32)>, Trap> {
    let ended = run_with(loaded, kernel, launch, memory, stop, Watch::Lines)?;
    let functions = loaded.program().functions.iter().zip(&ended.executed);
    let lines = functions.flat_map(|(function, executed)| {
        let lines = function.body.lines.iter().zip(executed).filter(|(_, executed)| **executed);
        lines.map(|(&line, _)| (function.module.clone(), line))
    });
    Ok(lines.collect())
}

/// Runs a kernel, and notes what the caller asks for.
#[allow(clippy::result_large_err)]
pub fn run_with(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &AtomicBool,
    watch: Watch<'_>,
) -> Result<Ended, Trap> {
    if let Err((kind, cause)) = possible(kernel, launch) {
        return Err(Trap {
            kind,
            kernel: kernel.name.clone(),
            block: [0; 3],
            thread: [0; 3],
            module: String::new(),
            function: String::new(),
            line: 0,
            cause,
        });
    }
    Scheduler::new(loaded, kernel, launch, memory, stop, watch).run().map_err(|trap| *trap)
}

/// Whether a GPU could start the launch.
fn possible(kernel: &Kernel, launch: &Launch) -> Result<(), (TrapKind, String)> {
    let wrong = |cause: String| Err((TrapKind::Launch, cause));
    let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
    let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
    if gx == 0 || gy == 0 || gz == 0 || gx > i32::MAX as u32 || gy > 65535 || gz > 65535 {
        return wrong(format!("a grid of {gx} x {gy} x {gz} blocks; a grid has 1 to 2147483647 x 65535 x 65535"));
    }
    if threads == 0 || threads > u64::from(kernel.max_threads) || bx > 1024 || by > 1024 || bz > 64 {
        let most = kernel.max_threads;
        return wrong(format!(
            "a block of {bx} x {by} x {bz} threads; a block of this kernel has 1 to {most}, and at most 64 in z"
        ));
    }
    if let Some(required) = kernel.required_block.filter(|required| *required != launch.block) {
        return wrong(format!("a block of {bx} x {by} x {bz} threads; the kernel requires {required:?} (.reqntid)"));
    }
    let bytes = kernel.parameters.last().map_or(0, |last| last.offset + last.size) as usize;
    if launch.parameters.len() < bytes {
        return wrong(format!("{} bytes of parameters; the kernel has {bytes}", launch.parameters.len()));
    }
    let shared = u64::from(kernel.shared) + u64::from(launch.shared);
    if shared > MOST_SHARED {
        return Err((
            TrapKind::Resources,
            format!("{shared} bytes of shared memory; a block has at most {MOST_SHARED}"),
        ));
    }
    Ok(())
}
