//! Values from four threads on one endpoint, on a card that completes in any order and rereads sources, while its
//! counters wrap. Another test shows that such a run detects a value slot that is reused too early.

use crate::common::{child, dist, must_pass, role, scenarios};
use ferrogin_device::Context;
use ferrogin_ffi::device::DevHandle;
use ferrogin_ffi::ext::{ContextExt, EndpointExt, HandleHeader};
use ferrogin_test_support::repetitions;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use mini_nccl::Bootstrap;
use mini_nccl::launch::Job;
use scenario_runner::plan::{Plan, Report};
use scenario_runner::runner::{CpuThreads, Runner};
use scenario_runner::scenario::{self, STORM_BURST, STORM_LANES};
use scenario_runner::world::{Config, World};
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

/// Values in a long run; a million takes a minute or two.
fn many() -> u32 {
    repetitions("FERROGIN_VALUES", 100_000, 100_000) as u32
}

/// Sets up a card that completes in any order and rereads sources, and whose counters wrap while an endpoint posts.
fn with_hard_faults(job: Job, values: u32) -> Job {
    let start = (1u32 << 31) - values / 4;
    job.env("SOFTEFA_FAULTS", format!("seed=11,reorder=64,reread=0.2,cntr_start={start}"))
}

fn storm(test: &str, policy: &str, layout: &str, values: u32) {
    let Some(dist) = dist(test) else { return };
    // There are two steps with a divisor of 20, and a round has three quarters of the burst on average.
    let rounds = (values / (2 * STORM_LANES * STORM_BURST * 3 / 4)).max(1);
    let job = scenarios(&dist, 2).env("FERROGIN_POST", policy);
    let job = job.args(["--only", "value-storm", "--backend-version", layout, "--reps", &(rounds * 20).to_string()]);
    must_pass(&with_hard_faults(job, values).run().expect("the job starts"));
}

#[test]
fn values_arrive_through_slots() {
    storm("values_arrive_through_slots", "combining", "1", 20_000);
}

#[test]
#[ignore = "make check"]
fn many_values_arrive_through_slots() {
    storm("many_values_arrive_through_slots", "combining", "1", many());
}

#[test]
#[ignore = "make check"]
fn many_values_arrive_inline() {
    storm("many_values_arrive_inline", "combining", "2", many());
}

#[test]
#[ignore = "make check"]
fn many_values_arrive_with_locked_policy() {
    storm("many_values_arrive_with_locked_policy", "locked", "1", many());
}

/// If posts don't wait for the previous lap, a slot is written while the card may still read it. Such a run must fail,
/// and must pass on an unchanged copy.
#[test]
#[ignore = "make check"]
fn early_slot_reuse_is_detected() {
    let name = "early_slot_reuse_is_detected";
    if let Some(role) = role() {
        let edit = if role == "guarded" { Edit::Nothing } else { Edit::NoSlotGuard };
        return rank_on_a_copy(edit, &["value-storm"], 200);
    }
    let Some(dist) = dist(name) else { return };
    let job = |role| with_hard_faults(child(&dist, name, role, 2), 1 << 20);
    must_pass(&job("guarded").run().expect("the job starts"));
    // On a loaded machine, the card may stay ahead of the posts for a whole run.
    wait_until("wrong value in a run without the guard", || {
        let outcome = job("unguarded").run().expect("the job starts");
        !outcome.success() && outcome.text().contains("expected 0x")
    });
}

/// Like operations over 1 GiB, but with less memory: a request carries at most 1000 bytes.
#[test]
fn large_operations_are_split() {
    large_operations_pass("large_operations_are_split", "combining");
}

#[test]
#[ignore = "make check"]
fn large_operations_are_split_with_locked_policy() {
    large_operations_pass("large_operations_are_split_with_locked_policy", "locked");
}

fn large_operations_pass(name: &str, policy: &str) {
    if role().is_some() {
        return rank_on_a_copy(Edit::SmallRequests, &["put-signal", "get", "flush-reuse", "flood", "all-pairs"], 64);
    }
    let Some(dist) = dist(name) else { return };
    let job = child(&dist, name, "rank", 2).env("FERROGIN_POST", policy);
    must_pass(&with_hard_faults(job, 1 << 20).run().expect("the job starts"));
}

fn rank_on_a_copy(edit: Edit, names: &[&str], reps: u32) {
    let config = Config { backend_version: 1, deadline: HANG_LIMIT, ..Config::from_env() };
    let bootstrap = Bootstrap::from_env(HANG_LIMIT).expect("the ranks meet");
    let runner = OnCopy { edit, handle: OnceLock::new() };
    let world = World::open(&config, bootstrap, Box::new(runner)).expect("the ranks connect");
    for name in names {
        let scenario = scenario::find(name).expect("it is on the list");
        scenario::run(&world, scenario, reps).expect("it passes");
    }
    world.close().expect("teardown");
}

/// A change to a copy of ferrogin's part of the device block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edit {
    Nothing,
    /// The policy doesn't know that values use slots.
    NoSlotGuard,
    /// A request carries at most 1000 bytes.
    SmallRequests,
}

/// Runs programs on such a copy.
struct OnCopy {
    edit: Edit,
    handle: OnceLock<usize>,
}

#[repr(C)]
struct Block {
    header: HandleHeader,
    /// The array that handles are computed from. Only the reset reads it, for a number of slots that these tests don't
    /// use.
    devs: [u8; size_of::<DevHandle>()],
}

impl OnCopy {
    #[allow(unsafe_code)]
    fn copy(&self, handle: *mut c_void) -> *mut c_void {
        let header = handle.wrapping_byte_sub(size_of::<HandleHeader>()).cast::<HandleHeader>();
        // SAFETY: the handle is that of ferrogin's plugin, which places the header before it.
        let mut header = unsafe { ptr::read_unaligned(header) };
        // SAFETY: the plugin keeps the header readable while the context is open.
        unsafe { Context::from_handle(handle, 0) }.expect("a handle of this plugin");
        let contexts: Vec<ContextExt> = (0..header.n_contexts as usize)
            .map(|id| {
                // SAFETY: `contexts` has `n_contexts` elements.
                let mut context = unsafe { *header.contexts.wrapping_add(id) };
                if self.edit == Edit::SmallRequests {
                    context.max_rdma_size = 1000;
                    context.routes.fast_put_limit = context.routes.fast_put_limit.min(1000);
                }
                let mut endpoints = Vec::new();
                for i in 0..context.n_endpoints as usize {
                    // SAFETY: `endpoints` has `n_endpoints` elements, and no thread posts yet.
                    let mut endpoint: EndpointExt = unsafe { ptr::read(context.routes.endpoints.wrapping_add(i)) };
                    if self.edit == Edit::NoSlotGuard {
                        endpoint.config.values.slots = 0;
                    }
                    endpoints.push(endpoint);
                }
                context.routes.endpoints = endpoints.leak().as_mut_ptr();
                context
            })
            .collect();
        header.contexts = contexts.leak().as_mut_ptr();
        let block = Box::leak(Box::new(Block { header, devs: [0; size_of::<DevHandle>()] }));
        block.devs.as_mut_ptr().cast()
    }
}

impl Runner for OnCopy {
    fn name(&self) -> String {
        "CPU threads on a copy".into()
    }

    fn run(&self, plans: &[Plan]) -> Result<Vec<Report>, String> {
        let Some(first) = plans.first() else { return Ok(Vec::new()) };
        let handle = *self.handle.get_or_init(|| self.copy(first.handle) as usize) as *mut c_void;
        let plans: Vec<Plan> = plans.iter().map(|plan| Plan { handle, ..*plan }).collect();
        CpuThreads.run(&plans)
    }
}
