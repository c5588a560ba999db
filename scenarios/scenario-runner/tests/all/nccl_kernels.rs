//! The scenarios through kernels for NCCL's device API (`scenario-kernels/nccl.cu`), which clang compiles here with
//! NCCL's headers, with ferrogin's backend and with NCCL's own.

use crate::common::must_pass;
use crate::on_gpu::{all_pass, gpu, has_driver, kernels};
use ferrogin_test_support::{skip, workspace};
use scenario_runner::scenario::WORKLOADS;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Compiles the kernels to PTX; skips the test if they cannot be compiled.
fn module(test: &str, backend: &[&str], name: &str) -> Option<PathBuf> {
    let kernels = workspace().join("scenarios/scenario-kernels");
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("nccl-{name}.ptx"));
    let mut command = Command::new(kernels.join("clang.sh"));
    command.arg(kernels.join("nccl.cu")).arg(&to).args(backend).stdin(Stdio::null());
    let output = command.output().expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        skip(test, said.trim());
        return None;
    }
    assert!(output.status.success(), "clang does not compile nccl.cu: {said}");
    Some(to)
}

#[test]
#[ignore = "make check"]
fn nccl_kernels_pass_with_ferrogin_backend() {
    let name = "nccl_kernels_pass_with_ferrogin_backend";
    let Some(dist) = gpu(name) else { return };
    let Some(module) = module(name, &[], "ferrogin") else { return };
    let module = module.to_string_lossy();
    let unordered = "seed=7,reorder=32,delay_us=0..200,reread=0.2,sq_size=16,max_batch=4";
    for (threads, layout, policy, faults) in [("one", "2", "combining", unordered), ("warp", "1", "locked", "")] {
        let options = ["--api", "cuda", "--gin", &module, "--threads", threads, "--backend-version", layout];
        all_pass(kernels(&dist, 2, &options).env("FERROGIN_POST", policy).env("SOFTEFA_FAULTS", faults));
    }
    let faults = "seed=7,reorder=512,reread=0.5,delay_us=0..50";
    let emulated = |options: &[&str]| {
        let job = kernels(&dist, 2, &["--api", "cuda", "--gin", &module]).args(options.iter().copied());
        job.env("FERROGIN_SIGNALS", "emulated").env("SOFTEFA_FAULTS", faults)
    };
    all_pass(emulated(&[]));
    let workloads: Vec<&str> = WORKLOADS.iter().flat_map(|workload| ["--only", workload.name]).collect();
    must_pass(&emulated(&workloads).run().expect("the job starts"));
    let storm = ["--api", "cuda", "--gin", &module, "--lanes", "48", "--only", "value-storm"];
    must_pass(&kernels(&dist, 2, &storm).run().expect("the job starts"));
}

/// NCCL's own backend has no asynchronous flush, raises a signal by one when a kernel adds nothing, and checks no
/// arguments.
#[test]
fn nccl_kernels_pass_with_backend_of_nccl() {
    let name = "nccl_kernels_pass_with_backend_of_nccl";
    let Some(dist) = gpu(name) else { return };
    let Some(module) = module(name, &["-DNCCL_OWN_BACKEND"], "own") else { return };
    let module = module.to_string_lossy();
    let scenarios =
        ["value-poll", "value-signal", "aggregate", "value-sizes", "put-signal", "get", "flush-reuse", "flood"];
    let only =
        scenarios.into_iter().chain(["signal-reset", "all-pairs", "threads", "value-storm", "sharing", "contexts"]);
    let options: Vec<&str> = only.flat_map(|scenario| ["--only", scenario]).collect();
    must_pass(&kernels(&dist, 2, &options).args(["--api", "cuda", "--gin", &module]).run().expect("the job starts"));
}

/// The two-rank test of `tests/gpu` on the software GPU, with ferrogin's device code, with NCCL's own, and with NCCL's
/// proxy, which calls the RMA plugin: the commands in its README.md.
#[test]
#[ignore = "make check"]
fn two_rank_test_passes_with_every_backend() {
    let name = "two_rank_test_passes_with_every_backend";
    let Some(dist) = gpu(name) else { return };
    if has_driver() {
        return skip(name, "tests/gpu/run.sh runs it on this machine's GPU");
    }
    let script = workspace().join("tests/gpu/two_ranks/run.sh");
    let mut command = Command::new(script);
    command.arg(&dist).env("SOFTWARE_GPU", "1").env("SOFTEFA_FAULTS", "seed=7,reorder=64,delay_us=0..200,reread=0.2");
    let output = command.stdin(Stdio::null()).output().expect("bash");
    let said = String::from_utf8_lossy(&output.stdout);
    if let Some(why) = said.lines().find_map(|line| line.strip_prefix("SKIP ")) {
        return skip(name, why);
    }
    assert!(output.status.success(), "{said}");
    for backend in ["ferrogin", "nccl", "proxy"] {
        for rank in [0, 1] {
            let passed = format!("PASS two_ranks-software-{backend}, rank {rank}, ");
            assert_eq!(said.matches(&passed).count(), 5, "{passed}: {said}");
        }
    }
}
