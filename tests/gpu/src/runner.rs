//! Runners of device programs.

use crate::plan::{Plan, Report, Verdict};
use crate::program;

/// Runs the device programs of one rank at once, each in its own thread or block.
pub trait Runner {
    /// The name for messages.
    fn name(&self) -> String;

    /// Runs all plans to their end. Returns one report for each plan, in order.
    fn run(&self, plans: &[Plan]) -> Vec<Report>;
}

/// Threads of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuThreads;

impl Runner for CpuThreads {
    fn name(&self) -> String {
        "CPU threads".into()
    }

    fn run(&self, plans: &[Plan]) -> Vec<Report> {
        if let [plan] = plans {
            return vec![program::run(plan)];
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = plans
                .iter()
                .map(|&plan| {
                    scope.spawn(move || {
                        let whole = plan;
                        program::run(&whole)
                    })
                })
                .collect();
            let panicked = Report { verdict: Verdict::Status, ..Report::PASSED };
            threads.into_iter().map(|thread| thread.join().unwrap_or(panicked)).collect()
        })
    }
}
