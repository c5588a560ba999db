//! `ferrogin gpu`, with the library that `make build` leaves in dist/ (or FERROGIN_DIST).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::command;

fn dist(test: &str) -> Option<PathBuf> {
    ferrogin_test_support::dist(test, &["gpu/libcuda.so.1", "libnccl-gin-ferrogin.so", "libsoftefa-fi.so"])
}

/// Runs the program on a software GPU, and returns its success and what it wrote.
fn on_gpu(dist: &Path, program: &[&str], settings: &[(&str, &str)]) -> (bool, String) {
    let mut tool = command();
    tool.args(["gpu", "--"]).args(program).env("FERROGIN_DIST", dist).envs(settings.iter().copied());
    let output = tool.output().expect("the tool starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

#[test]
fn demo_passes_with_memory_of_a_software_gpu() {
    let Some(dist) = dist("demo_passes_with_memory_of_a_software_gpu") else { return };
    let plugin = dist.join("libnccl-gin-ferrogin.so").to_string_lossy().into_owned();
    let program = [env!("CARGO_BIN_EXE_ferrogin"), "demo", "--launcher", "builtin", "--reps", "50"];
    let settings = [("FERROGIN_DEVICE", "cuda"), ("NCCL_GIN_PLUGIN", &*plugin), ("NCCL_DEBUG", "INFO")];
    let (good, text) = on_gpu(&dist, &program, &settings);
    assert!(good && text.contains("kernels on cuda") && text.contains("PASS (c)"), "{text}");
}

#[test]
fn doctor_finds_software_gpu() {
    let Some(dist) = dist("doctor_finds_software_gpu") else { return };
    let program = [env!("CARGO_BIN_EXE_ferrogin"), "doctor", "--only", "gpu"];
    let (_, text) = on_gpu(&dist, &program, &[("SOFTGPU_NAME", "a GPU of this test")]);
    assert!(text.contains("a GPU of this test"), "{text}");
}

#[test]
fn gpu_without_its_library_or_program_says_so() {
    let Some(dist) = dist("gpu_without_its_library_or_program_says_so") else { return };
    let (good, text) = on_gpu(Path::new("/nonexistent"), &["true"], &[]);
    // The library may lie beside the tool.
    assert!(good || text.contains("make build"), "{text}");
    let (good, text) = on_gpu(&dist, &["/nonexistent/program"], &[]);
    assert!(!good && text.contains("cannot run /nonexistent/program"), "{text}");
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("gpu").output().expect("the tool starts");
    assert_eq!(output.status.code(), Some(2));
}
