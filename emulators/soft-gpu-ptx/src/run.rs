//! Runs kernels: checks the launch, and returns what the caller asks for.

use crate::cost::{Cost, Places};
use crate::error::{Trap, TrapKind};
use crate::launch::{Launch, Statistics};
use crate::memory::Memory;
use crate::observer::Observer;
use crate::program::{Kernel, Loaded};
use crate::scheduler::{Ended, Scheduler, Watch};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The most shared memory per block, in bytes.
const MAX_SHARED: u64 = 227 << 10;

/// Runs a kernel on this thread until all of its threads have exited.
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

/// Runs a kernel like [`run`], and returns the lines of its modules that were executed.
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

/// Runs a kernel like [`run`], and returns the cost for each thread, in order of blocks and threads.
///
/// # Errors
///
/// The event that ended the kernel early.
#[allow(clippy::result_large_err)]
pub fn cost(
    loaded: &Loaded,
    kernel: &Kernel,
    launch: &Launch,
    memory: &dyn Memory,
    stop: &AtomicBool,
    places: Places<'_>,
) -> Result<Vec<Cost>, Trap> {
    run_with(loaded, kernel, launch, memory, stop, Watch::Cost(places)).map(|ended| ended.costs)
}

/// Runs a kernel like [`run`], and tells an observer what its threads do.
///
/// # Errors
///
/// The event that ended the kernel early.
#[allow(clippy::result_large_err)]
pub fn observe<'a>(
    loaded: &'a Loaded,
    kernel: &'a Kernel,
    launch: &'a Launch,
    memory: &'a dyn Memory,
    stop: &'a AtomicBool,
    observer: &'a mut dyn Observer,
) -> Result<Statistics, Trap> {
    run_with(loaded, kernel, launch, memory, stop, Watch::Observer(observer)).map(|ended| ended.statistics)
}

/// Runs a kernel, and records what the caller asks for.
#[allow(clippy::result_large_err)]
fn run_with<'a>(
    loaded: &'a Loaded,
    kernel: &'a Kernel,
    launch: &'a Launch,
    memory: &'a dyn Memory,
    stop: &'a AtomicBool,
    watch: Watch<'a>,
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
            origin: None,
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
    if let (Some(given), Some(required)) = (launch.cluster, kernel.required_cluster)
        && given != required
    {
        return wrong(format!("clusters of {given:?} blocks; the kernel requires {required:?} (.reqnctapercluster)"));
    }
    if let Some(cluster) = launch.cluster.or(kernel.required_cluster) {
        let fits = cluster.iter().all(|blocks| (1..=16).contains(blocks)) && cluster.iter().product::<u32>() <= 16;
        if !fits || (0..3).any(|axis| !launch.grid[axis].is_multiple_of(cluster[axis])) {
            return wrong(format!(
                "clusters of {cluster:?} blocks in a grid of {:?}; a cluster has 1 to 16 blocks, and the grid a multiple of its size",
                launch.grid
            ));
        }
    }
    let bytes = kernel.parameters.last().map_or(0, |last| last.offset + last.size) as usize;
    if launch.parameters.len() < bytes {
        return wrong(format!("{} bytes of parameters; the kernel has {bytes}", launch.parameters.len()));
    }
    let shared = u64::from(kernel.shared) + u64::from(launch.shared);
    if shared > MAX_SHARED {
        return Err((
            TrapKind::Resources,
            format!("{shared} bytes of shared memory; a block has at most {MAX_SHARED}"),
        ));
    }
    Ok(())
}
