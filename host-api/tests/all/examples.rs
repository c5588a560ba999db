//! The first exchange in C, C++ and Rust, as the documentation shows it.

use crate::common::{alone, compile, compile_with, dist, include, is_child, job, on_software_card, text, this_test};
use ferrogin_test_support::wait::HANG_LIMIT;
use mini_nccl::launch::{Job, LaunchError, Launcher, Output as Destination};
use std::path::Path;
use std::process::{Command, Output};

#[path = "../../examples/exchange.rs"]
mod exchange;

const C: (&str, &str) = ("CC", "cc");
const CXX: (&str, &str) = ("CXX", "c++");

/// Runs the first exchange on `ranks` ranks, then removes the program.
pub fn passes(program: &Path, ranks: usize, test: &str) {
    let outputs = job(test, ranks, |_| {
        let mut command = Command::new(program);
        on_software_card(&mut command);
        command
    });
    received(&outputs);
    let _ = std::fs::remove_file(program);
}

/// Checks that every rank received the previous rank's value.
fn received(outputs: &[Output]) {
    let ranks = outputs.len();
    for (rank, output) in outputs.iter().enumerate() {
        let line = format!("rank {rank} of {ranks} received {}", 100 + (rank + ranks - 1) % ranks);
        assert!(output.status.success() && text(output).contains(&line), "rank {rank}: {}", text(output));
    }
}

#[test]
fn example_in_c_passes() {
    let test = "example_in_c_passes";
    if let Some(program) = compile(test, C, &["-std=c11"], "examples/exchange.c") {
        passes(&program, 2, test);
    }
}

#[test]
fn example_in_c_passes_under_mpirun() {
    let test = "example_in_c_passes_under_mpirun";
    let Some(program) = compile(test, C, &["-std=c11"], "examples/exchange.c") else { return };
    let job = Job::new(&program, 2).launcher(Launcher::Mpirun).output(Destination::Capture).timeout(HANG_LIMIT);
    let job = job.env("FERROGIN_PROVIDER", "softefa").env("FERROGIN_DEVICE", "cpu");
    match job.run() {
        Ok(outcome) => {
            let text = outcome.text();
            let received = text.contains("rank 0 of 2 received 101") && text.contains("rank 1 of 2 received 100");
            assert!(outcome.success() && received, "{:?}: {text}", outcome.failure);
        }
        Err(LaunchError::NoMpirun) => ferrogin_test_support::skip(test, LaunchError::NoMpirun),
        Err(error) => panic!("{error}"),
    }
    let _ = std::fs::remove_file(program);
}

#[test]
#[ignore = "make check"]
fn example_in_c_passes_between_hosts() {
    let test = "example_in_c_passes_between_hosts";
    let Some(program) = compile(test, C, &["-std=c11"], "examples/exchange.c") else { return };
    let mut command = Command::new(&program);
    on_software_card(&mut command);
    if let Some(output) = ferrogin_test_support::ranks_on_hosts(test, (2, 1), &command) {
        let text = text(&output);
        let received = text.contains("rank 0 of 2 received 101") && text.contains("rank 1 of 2 received 100");
        assert!(output.status.success() && received, "{text}");
    }
    let _ = std::fs::remove_file(program);
}

#[test]
fn example_in_cpp_passes() {
    let test = "example_in_cpp_passes";
    if let Some(program) = compile(test, CXX, &["-std=c++17", "-x", "c++"], "examples/exchange.cpp") {
        passes(&program, 3, test);
    }
}

#[test]
fn example_in_rust_passes() {
    let test = "example_in_rust_passes";
    if is_child(test) {
        return exchange::main().expect("an exchange");
    }
    if let Some(dist) = dist(test) {
        received(&job(test, 2, |_| this_test(test, &dist)));
    }
}

#[test]
fn cpp_objects_own_their_handles() {
    let test = "cpp_objects_own_their_handles";
    let Some(program) = compile(test, CXX, &["-std=c++17", "-x", "c++"], "tests/raii.cpp") else { return };
    let output = on_software_card(&mut Command::new(&program)).output().expect("a process");
    assert!(output.status.success(), "{}", text(&output));
    let _ = std::fs::remove_file(program);
}

/// Runs a program from the repository's `examples/` on CPU threads, over a card that reorders requests. Each rank
/// prints that nothing differs.
fn kernel_example_passes(test: &str, source: &str, ranks: usize) {
    let Some(program) = compile(test, CXX, &["-std=c++17", "-O2", "-x", "c++"], source) else { return };
    let outputs = job(test, ranks, |_| {
        let mut command = Command::new(&program);
        on_software_card(&mut command).env("SOFTEFA_FAULTS", "seed=5,reorder=32,reread=0.2");
        command
    });
    for output in &outputs {
        let text = text(output);
        assert!(output.status.success() && text.contains(", 0 "), "{text}");
    }
    let _ = std::fs::remove_file(program);
}

#[test]
fn ring_of_values_passes() {
    let test = "ring_of_values_passes";
    if let Some(program) = compile(test, CXX, &["-std=c++17", "-O2", "-x", "c++"], "../examples/ring.cu") {
        passes(&program, 3, test);
    }
}

#[test]
#[ignore = "make check"]
fn halo_exchange_passes() {
    kernel_example_passes("halo_exchange_passes", "../examples/halo.cu", 3);
}

#[test]
fn all_to_all_passes() {
    kernel_example_passes("all_to_all_passes", "../examples/alltoall.cu", 4);
}

#[test]
#[ignore = "make check"]
fn ring_all_gather_passes() {
    kernel_example_passes("ring_all_gather_passes", "../examples/allgather.cu", 4);
}

#[test]
#[ignore = "make check"]
fn kernel_barrier_passes() {
    kernel_example_passes("kernel_barrier_passes", "../examples/barrier.cu", 3);
}

#[test]
#[ignore = "make check"]
fn mixture_of_experts_passes() {
    kernel_example_passes("mixture_of_experts_passes", "../examples/moe.cu", 3);
}

/// Runs `moe.cu` on three ranks, one of which ends in the middle of a round: the others go on without it, or fail.
fn mixture_of_experts_loses_a_rank(test: &str, start: impl Fn() -> Command) {
    for policy in ["isolate", "abort"] {
        let outputs = job(test, 3, |_| {
            let mut command = start();
            command.args(["6", "1"]).env("FERROGIN_ON_PEER_FAILURE", policy);
            command
        });
        for output in [&outputs[0], &outputs[2]] {
            let text = text(output);
            let is_right = text.contains("576 tokens (") && text.contains("), 0 numbers differ");
            let expected = if policy == "isolate" {
                output.status.success() && is_right && !text.contains("(0 dropped)")
            } else {
                let reasons = ["rank 1 ended without closing its communicator", "a write to rank 1 on"];
                output.status.code() == Some(1) && reasons.iter().any(|reason| text.contains(reason))
            };
            assert!(expected, "{policy}: {text}");
        }
    }
}

#[test]
#[ignore = "make check"]
fn mixture_of_experts_goes_on_without_a_lost_rank() {
    let test = "mixture_of_experts_goes_on_without_a_lost_rank";
    let Some(program) = compile(test, CXX, &["-std=c++17", "-O2", "-x", "c++"], "../examples/moe.cu") else { return };
    for signals in ["card", "emulated"] {
        mixture_of_experts_loses_a_rank(test, || {
            let mut command = Command::new(&program);
            on_software_card(&mut command).env("SOFTEFA_FAULTS", "seed=5,reorder=32,reread=0.2");
            command.env("FERROGIN_SIGNALS", signals);
            command
        });
    }
    let _ = std::fs::remove_file(program);
}

/// The programs on the software GPU, with their kernels compiled to PTX by clang: the commands of docs/software-gpu.md.
#[test]
#[ignore = "make check"]
fn kernel_examples_pass_as_ptx_on_the_software_gpu() {
    let test = "kernel_examples_pass_as_ptx_on_the_software_gpu";
    let Some(dist) = ferrogin_test_support::dist(test, &["ferrogin", "gpu/libcuda.so.1", "libferrogin.so"]) else {
        return;
    };
    let Some(clang) =
        ["clang-22", "clang-19", "clang"].into_iter().find(|name| Command::new(name).arg("-v").output().is_ok())
    else {
        return ferrogin_test_support::skip(test, "no clang is on PATH (apt-get install clang-22)");
    };
    let root = ferrogin_test_support::workspace();
    let device = root.join("device-kernels/ptx/ferrogin_device.ptx");
    for name in ["ring", "halo", "alltoall", "allgather", "barrier", "moe"] {
        let source = format!("../examples/{name}.cu");
        let ptx = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.ptx", std::process::id()));
        let files = format!("-DPTX={{\"{}\", \"{}\"}}", ptx.display(), device.display());
        let mut kernel = Command::new(clang);
        kernel.args([
            "-x",
            "cuda",
            "-std=c++17",
            "--cuda-device-only",
            "--cuda-gpu-arch=sm_75",
            "--cuda-feature=+ptx82",
        ]);
        kernel.args(["-nocudainc", "-nocudalib", "-O2", "-S", "-Wall", "-Wextra", "-Werror", &files, "-I"]);
        kernel.arg(include()).args(["-include", "ferrogin/clang_cuda.h"]).arg(&source).arg("-o").arg(&ptx);
        let output = kernel.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("clang starts");
        assert!(output.status.success(), "{kernel:?}: {}", text(&output));

        let flags = ["-std=c++17", "-x", "c++", &files, "-I../emulators/soft-gpu/tests"];
        let gpu = dist.join("gpu");
        let link = ["-L", gpu.to_str().expect("a path in UTF-8"), "-lcuda"];
        let Some(program) = compile_with(test, CXX, &flags, &source, &link) else { return };
        let start = || {
            let mut command = Command::new(dist.join("ferrogin"));
            on_software_card(command.args(["gpu", "--"]).arg(&program)).env("FERROGIN_DEVICE", "cuda");
            command
        };
        let run = || job(test, 2, |_| start());
        for output in run() {
            let text = text(&output);
            assert!(
                output.status.success() && (text.contains(", 0 ") || text.contains(" received 10")),
                "{name}: {text}"
            );
        }
        if name == "moe" {
            mixture_of_experts_loses_a_rank(test, start);
        }
        let _ = std::fs::remove_file(&ptx);
        if name == "ring" {
            // The program runs the kernel in the file, not the one that the host compiler built in.
            assert!(run().iter().all(|output| text(output).contains("failed: CUDA_ERROR_FILE_NOT_FOUND")), "{name}");
        }
        let _ = std::fs::remove_file(program);
    }
}

/// The five programs over libfabric's own `efa` provider, on the software card below verbs.
#[test]
#[ignore = "make check"]
fn kernel_examples_pass_over_libfabrics_own_efa_provider() {
    let test = "kernel_examples_pass_over_libfabrics_own_efa_provider";
    let Some(libfabric) = ferrogin_test_support::libfabric_for_gpus(test) else { return };
    let Some(dist) = ferrogin_test_support::dist(test, &["ferrogin", "verbs/libibverbs.so.1"]) else { return };
    for name in ["halo", "alltoall", "allgather", "barrier", "moe"] {
        let source = format!("../examples/{name}.cu");
        let Some(program) = compile(test, CXX, &["-std=c++17", "-O2", "-x", "c++"], &source) else { return };
        let outputs = job(test, 3, |_| {
            let mut command = Command::new(dist.join("ferrogin"));
            command.args(["verbs", "--"]).arg(&program);
            on_software_card(&mut command).env("SOFTEFA_FAULTS", "seed=5,reorder=32,reread=0.2");
            command.env("FERROGIN_PROVIDER", "efa").env("FERROGIN_LIBFABRIC", &libfabric);
            command
        });
        let _ = std::fs::remove_file(program);
        for output in &outputs {
            let text = text(output);
            assert!(output.status.success() && text.contains(", 0 "), "{name}: {text}");
        }
    }
}

#[test]
fn rank_without_card_is_reported_to_other_ranks() {
    let test = "rank_without_card_is_reported_to_other_ranks";
    let Some(program) = compile(test, C, &["-std=c11"], "examples/exchange.c") else { return };
    let outputs = job(test, 2, |rank| {
        let mut command = Command::new(&program);
        // An invalid value fails on any machine.
        on_software_card(&mut command).env("FERROGIN_POST", if rank == 1 { "nonsense" } else { "locked" });
        command
    });
    let _ = std::fs::remove_file(program);
    let own = "FERROGIN_POST=nonsense is not valid: set it to combining or locked";
    for (rank, prefix) in [(0, "failed: rank 1 failed in open: "), (1, "failed: ")] {
        let text = text(&outputs[rank]);
        assert!(!outputs[rank].status.success() && text.contains(&format!("{prefix}{own}")), "rank {rank}: {text}");
    }
}

#[test]
fn program_without_launcher_is_refused() {
    alone("program_without_launcher_is_refused", &[], || {
        let error = exchange::main().expect_err("no launcher").to_string();
        assert!(
            error.contains("no launcher started this process: run it with ferrogin run, mpirun or torchrun"),
            "{error}"
        );
    });
}
