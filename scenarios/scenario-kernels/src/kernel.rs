//! The kernel that runs the programs.

use crate::api::{Context, Group, Order};
use crate::plan::{Plan, Report, Threads};
use crate::program;
use core::arch::asm;
use ferrogin_device::Coop;
use ferrogin_device::coop::Cta;

/// Runs a rank's `lanes` plans: group `n` of the grid runs plan `n` and writes report `n`. All plans have the same kind
/// of group.
///
/// # Safety
/// The arrays have `lanes` elements, in memory that the GPU may access. `orders` is zeroed.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn scenario(plans: *const Plan, reports: *mut Report, orders: *const Order, lanes: u32) {
    // SAFETY: there is at least one plan.
    let threads = unsafe { (*plans).threads };
    let block: u32;
    // SAFETY: reads a special register and touches no memory.
    unsafe { asm!("mov.u32 {}, %ctaid.x;", out(reg32) block, options(pure, nomem, nostack)) };
    let number = block * Cta.size() + Cta.rank();
    let lane = match threads {
        Threads::One => number,
        Threads::Tile => number / 8,
        Threads::Warp => number / 32,
        Threads::Block => block,
    };
    if lane >= lanes {
        return;
    }
    let lane = lane as usize;
    // SAFETY: `lane` is below `lanes`, and no thread writes a plan.
    let plan = unsafe { &*plans.add(lane) };
    // SAFETY: `lane` is below `lanes`, and an order consists of atomics.
    let group = Group { threads, order: unsafe { &*orders.add(lane) } };
    // SAFETY: the `World` that made the plan keeps the context open until the run ends.
    let context = unsafe { Context::open(plan.api, plan.handle, plan.context_id, group) };
    if group.rank() == 0 {
        let report = program::run(plan, context);
        // SAFETY: `lane` is below `lanes`, and no other group uses this element.
        unsafe { reports.add(lane).write(report) };
        if let Ok(context) = context {
            context.end();
        }
    } else if let Ok(context) = context {
        context.obey();
    }
}
