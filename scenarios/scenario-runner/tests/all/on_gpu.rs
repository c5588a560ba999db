//! The scenarios as kernels, on the CUDA driver's GPU, or if there is none, on the software GPU. The tests don't know
//! which.

use crate::common::{dist, must_pass, must_pass_all, not_over_efa, repeated, report, scenarios};
use mini_nccl::launch::{Job, Launcher, Outcome, find_mpirun};
use nccl_gin_ferrogin::device::cuda::CudaDevice;
use scenario_runner::scenario::SCENARIOS;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// Returns the directory that `make build` fills.
pub fn gpu(test: &str) -> Option<PathBuf> {
    if !has_driver() {
        ferrogin_test_support::dist(test, &["gpu/libcuda.so.1"])?;
        if not_over_efa(test, "a libfabric without CUDA registers no memory of a GPU") {
            return None;
        }
    }
    dist(test)
}

pub fn has_driver() -> bool {
    static HAS_DRIVER: LazyLock<bool> = LazyLock::new(|| CudaDevice::open(true).is_ok());
    *HAS_DRIVER
}

/// MPI's launcher. If there is none, says so and returns the built-in launcher.
fn mpirun(test: &str) -> Launcher {
    if find_mpirun().is_some() {
        return Launcher::Mpirun;
    }
    ferrogin_test_support::skip(&format!("{test}, with mpirun"), "it is not on PATH (apt-get install openmpi-bin)");
    Launcher::Builtin
}

/// Returns a job that runs the scenarios as kernels.
pub fn kernels(dist: &Path, ranks: usize, options: &[&str]) -> Job {
    on_gpu(dist, repeated(dist, ranks, 60).args(options.iter().copied()))
}

pub fn on_gpu(dist: &Path, job: Job) -> Job {
    let job = job.env("FERROGIN_DEVICE", "cuda");
    if has_driver() { job } else { job.env("LD_LIBRARY_PATH", dist.join("gpu")) }
}

pub fn all_pass(job: Job) -> Outcome {
    let outcome = job.run().expect("the job starts");
    must_pass_all(&outcome, SCENARIOS.len());
    assert!(outcome.text().contains("kernels as PTX on "), "{}", report(&outcome));
    outcome
}

/// Also holds if the launcher numbers a host's ranks beyond its GPUs.
#[test]
fn rank_uses_gpu_of_its_local_rank() {
    let name = "rank_uses_gpu_of_its_local_rank";
    let Some(software) = ferrogin_test_support::dist(name, &["gpu/libcuda.so.1"]) else { return };
    let path = software.join("gpu");
    let path = path.to_str().expect("a path in UTF-8");
    let settings = [
        ("LD_LIBRARY_PATH", path),
        ("SOFTGPU_DEVICES", "2"),
        ("FERROGIN_DEVICE", "cuda"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "3"),
    ];
    ferrogin_test_support::child::run(name, &settings, || {
        let config = nccl_gin_ferrogin::config::Config::from_env().expect("settings");
        let device = scenario_runner::gpu::open_local(&config).expect("a GPU");
        assert_eq!(device.gpu().map(|(ordinal, _)| ordinal), Some(1));
    });
}

#[test]
fn kernels_pass_with_each_api() {
    let name = "kernels_pass_with_each_api";
    let Some(dist) = gpu(name) else { return };
    let launcher = mpirun(name);
    for api in ["c", "cuda", "rust"] {
        all_pass(kernels(&dist, 2, &["--api", api]).launcher(launcher));
    }
}

/// Posts more than the ring has slots.
#[test]
#[ignore = "make check"]
fn floods_of_kernels_pass_with_each_api() {
    let Some(dist) = gpu("floods_of_kernels_pass_with_each_api") else { return };
    for api in ["c", "cuda", "rust"] {
        let flood = ["--api", api, "--only", "flood", "--only", "value-signal", "--reps", "200"];
        must_pass(&on_gpu(&dist, scenarios(&dist, 2).args(flood)).run().expect("the job starts"));
    }
}

/// The card and the plugin reach GPU memory only through the driver's copies.
#[test]
fn kernels_pass_where_cpu_cannot_touch_memory_of_gpu() {
    let Some(dist) = gpu("kernels_pass_where_cpu_cannot_touch_memory_of_gpu") else { return };
    all_pass(kernels(&dist, 2, &["--api", "cuda"]).env("SOFTGPU_CPU_ACCESS", "no"));
}

/// Windows of several allocations side by side, and windows in host memory from the driver, also where the CPU can't
/// touch the GPU's.
#[test]
fn kernels_pass_with_windows_of_segments_and_of_host_memory() {
    let Some(dist) = gpu("kernels_pass_with_windows_of_segments_and_of_host_memory") else { return };
    for (memory, access) in [("segments", "yes"), ("host", "no")] {
        let scenarios = ["put-signal", "get", "strong-signal"].map(|name| ["--only", name]).concat();
        let options = [&["--memory", memory][..], &scenarios].concat();
        must_pass(&kernels(&dist, 2, &options).env("SOFTGPU_CPU_ACCESS", access).run().expect("the job starts"));
    }
}

#[test]
#[ignore = "make check"]
fn kernels_pass_with_each_group() {
    let Some(dist) = gpu("kernels_pass_with_each_group") else { return };
    for (api, threads) in [("cuda", "tile"), ("rust", "warp"), ("c", "block"), ("cuda", "block")] {
        all_pass(kernels(&dist, 2, &["--api", api, "--threads", threads]));
    }
    for (api, threads) in [("c", "one"), ("cuda", "warp")] {
        let options = ["--api", api, "--threads", threads, "--packed", "--only", "threads", "--only", "sharing"];
        must_pass(&kernels(&dist, 2, &options).run().expect("the job starts"));
    }
}

#[test]
#[ignore = "make check"]
fn kernels_pass_with_each_layout_and_policy() {
    let Some(dist) = gpu("kernels_pass_with_each_layout_and_policy") else { return };
    for (layout, policy, api) in [("0", "combining", "c"), ("1", "combining", "cuda"), ("2", "locked", "c")] {
        let job = kernels(&dist, 2, &["--backend-version", layout, "--api", api]);
        all_pass(job.env("FERROGIN_POST", policy));
    }
}

const UNORDERED: &str = "seed=7,reorder=32,delay_us=0..200,reread=0.2,sq_size=16,max_batch=4";

#[test]
fn kernels_pass_with_faults_of_card() {
    let Some(dist) = gpu("kernels_pass_with_faults_of_card") else { return };
    let job = kernels(&dist, 2, &["--backend-version", "1", "--api", "cuda"]);
    all_pass(job.env("SOFTEFA_WIRE", "shm").env("SOFTEFA_FAULTS", UNORDERED));
}

#[test]
#[ignore = "make check"]
fn kernels_pass_with_faults_over_tcp_and_with_old_cards() {
    let Some(dist) = gpu("kernels_pass_with_faults_over_tcp_and_with_old_cards") else { return };
    for (wire, faults) in [("tcp", UNORDERED), ("shm", "qp_caps=0")] {
        let job = kernels(&dist, 2, &["--backend-version", "2", "--api", "cuda"]);
        all_pass(job.env("SOFTEFA_WIRE", wire).env("SOFTEFA_FAULTS", faults));
    }
}

#[test]
#[ignore = "make check"]
fn kernels_pass_with_four_ranks() {
    let name = "kernels_pass_with_four_ranks";
    let Some(dist) = gpu(name) else { return };
    all_pass(kernels(&dist, 4, &[]));
    all_pass(kernels(&dist, 4, &["--api", "cuda"]).launcher(mpirun(name)));
}

/// 132 blocks post on one endpoint and flush while others post, and so do 132 threads of one block, in mode CTA.
#[test]
#[ignore = "make check"]
fn many_blocks_share_one_endpoint() {
    let Some(dist) = gpu("many_blocks_share_one_endpoint") else { return };
    for (api, scenario) in [("c", "value-storm"), ("cuda", "value-storm"), ("c", "sharing")] {
        let options = ["--api", api, "--lanes", "132", "--only", scenario];
        let outcome = kernels(&dist, 2, &options).run().expect("the job starts");
        must_pass(&outcome);
    }
}

/// Lanes of a warp: in `lanes` they make calls together as lanes, and in `value-storm` gin.cuh combines those that post
/// at the same time.
fn lanes_pass(dist: &Path, api: &str, layout: &str, policy: &str, memory: &str, faults: &str) {
    let options = ["--api", api, "--backend-version", layout, "--packed", "--lanes", "32"];
    let job = kernels(dist, 2, &options).args(["--only", "lanes", "--only", "value-storm"]);
    let job = job.env("FERROGIN_POST", policy).env("SOFTGPU_MEMORY", memory).env("SOFTEFA_FAULTS", faults);
    must_pass(&job.run().expect("the job starts"));
}

#[test]
fn lanes_of_warp_post_together() {
    let Some(dist) = gpu("lanes_of_warp_post_together") else { return };
    lanes_pass(&dist, "cuda", "1", "combining", "weak", "seed=7,reorder=32,delay_us=0..200,reread=0.2,max_batch=32");
}

/// With cards whose batches are limited to 32, 4 and 16.
#[test]
#[ignore = "make check"]
fn lanes_of_warp_post_together_with_each_api() {
    let Some(dist) = gpu("lanes_of_warp_post_together_with_each_api") else { return };
    lanes_pass(&dist, "c", "2", "combining", "weak", "max_batch=32");
    lanes_pass(&dist, "rust", "2", "combining", "strong", "sq_size=16,max_batch=4");
    lanes_pass(&dist, "cuda", "2", "locked", "strong", "");
}

const FAILED: &[&str] = &["the card completed a work request in error", "aborted by the host"];

/// Checks that the job fails with one of the expected statuses. The plugin may abort the kernels before they see the
/// card's error.
fn ends_with(dist: &Path, faults: &str, options: &[&str], expected: &[&str]) {
    let outcome = kernels(dist, 2, options).env("SOFTEFA_FAULTS", faults).run().expect("the job starts");
    let is_named = expected.iter().any(|status| outcome.text().contains(status));
    assert!(!outcome.success() && is_named, "{faults}, {options:?}: {}", report(&outcome));
}

#[test]
fn kernels_end_with_status_of_failure() {
    let Some(dist) = gpu("kernels_end_with_status_of_failure") else { return };
    ends_with(&dist, "error_every=2", &["--api", "cuda", "--only", "flood"], FAILED);
}

/// A wait ends with the status for its cause, and the next job runs.
#[test]
#[ignore = "make check"]
fn kernels_of_each_api_end_with_status_of_failure() {
    let Some(dist) = gpu("kernels_of_each_api_end_with_status_of_failure") else { return };
    for api in ["c", "cuda", "rust"] {
        ends_with(&dist, "error_every=2", &["--api", api, "--only", "flood"], FAILED);
        ends_with(&dist, "error_every=9", &["--api", api, "--only", "lanes", "--packed", "--lanes", "32"], FAILED);
        let options = ["--api", api, "--only", "value-signal", "--deadline", "1"];
        ends_with(&dist, "delay_us=10000000..10000000", &options, &["waited for 1, still at 0"]);
    }
}
