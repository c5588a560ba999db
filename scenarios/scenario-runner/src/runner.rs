//! Runners of device programs.

use crate::RunError;
use crate::machine::Machine;
use crate::plan::{Plan, Report, Verdict};
use crate::program;
use ferrogin_device::Context;
use mini_nccl::DeviceMemory;

/// Runs one rank's device programs at once, each in its own thread or group of threads.
pub trait Runner {
    /// Returns the name for messages: "kernels on ...".
    fn name(&self) -> String;

    /// Returns the GPU, if there is one.
    fn gpu(&self) -> Option<&Machine> {
        None
    }

    /// Allocates memory for a window.
    ///
    /// # Errors
    /// There is too little memory.
    fn allocate(&self, bytes: usize) -> Result<DeviceMemory, RunError> {
        Ok(DeviceMemory::alloc(bytes)?)
    }

    /// Runs all plans to completion. Returns one report per plan, in order.
    ///
    /// # Errors
    /// The device failed.
    fn run(&self, plans: &[Plan]) -> Result<Vec<Report>, String>;
}

/// Threads of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuThreads;

impl Runner for CpuThreads {
    fn name(&self) -> String {
        "kernels on CPU threads".into()
    }

    fn run(&self, plans: &[Plan]) -> Result<Vec<Report>, String> {
        if let [plan] = plans {
            return Ok(vec![run(plan)]);
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = plans.iter().map(|&plan| scope.spawn(move || run(&{ plan }))).collect();
            let panicked = Report { verdict: Verdict::Status, ..Report::PASSED };
            Ok(threads.into_iter().map(|thread| thread.join().unwrap_or(panicked)).collect())
        })
    }
}

#[allow(unsafe_code)]
fn run(plan: &Plan) -> Report {
    // SAFETY: the `World` that made the plan keeps the context open until the run ends.
    program::run(plan, unsafe { Context::from_handle(plan.handle, plan.context_id) })
}
