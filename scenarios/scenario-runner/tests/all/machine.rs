//! A GPU or driver that cannot run the kernels gets one line with the versions and the fix.

use crate::common::{not_over_efa, report, scenarios};
use crate::on_gpu::{gpu, has_driver, kernels};
use std::path::Path;
use std::process::Command;

/// Returns the exit status and output of `--gpu` on a software GPU with these settings.
fn machine(dist: &Path, settings: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_scenario-runner"));
    command.arg("--gpu").env("LD_LIBRARY_PATH", dist.join("gpu")).envs(settings.iter().copied());
    let output = command.output().expect("the program starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), text)
}

#[test]
fn gpu_is_named_with_capability_and_driver() {
    let Some(dist) = gpu("gpu_is_named_with_capability_and_driver") else { return };
    let (status, text) = machine(&dist, &[("SOFTGPU_CAPABILITY", "7.5"), ("SOFTGPU_NAME", "a GPU of this test")]);
    let named = "a GPU of this test (compute capability 7.5, driver of CUDA 12.8)\n";
    assert_eq!((status, &*text), (Some(0), named));
}

#[test]
fn old_or_missing_gpu_is_refused_with_fix() {
    let Some(dist) = gpu("old_or_missing_gpu_is_refused_with_fix") else { return };
    let (status, text) = machine(&dist, &[("SOFTGPU_CAPABILITY", "7.0")]);
    assert_eq!(status, Some(3), "{text}");
    assert!(text.contains("compute capability 7.0") && text.contains("take a newer GPU"), "{text}");
    let (status, text) = machine(&dist, &[("SOFTGPU_DEVICES", "0")]);
    assert!(status == Some(3) && text.contains("no usable GPU"), "{text}");
    if !has_driver() {
        let (status, text) = machine(Path::new("/nonexistent"), &[]);
        assert!(status == Some(3) && text.contains("libcuda.so.1 is missing"), "{text}");
    }
}

/// Newer PTX from nvcc on an older driver, and machine code on another GPU: each rank exits with the file, the versions
/// and the fix.
#[test]
fn kernels_for_another_machine_are_refused_with_versions() {
    let name = "kernels_for_another_machine_are_refused_with_versions";
    let Some(dist) = gpu(name) else { return };
    if not_over_efa(name, "the refusal comes before the card") {
        return;
    }
    let place = std::env::temp_dir().join(format!("ferrogin-machine-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a directory");
    let (newer, code) = (place.join("newer.ptx"), place.join("code.cubin"));
    std::fs::write(&newer, ".version 99.0\n.target sm_75\n.address_size 64\n").expect("a file");
    std::fs::write(&code, b"\x7fELF\x02\x01\x01 for another GPU").expect("a file");
    for (option, file, parts) in [
        ("--gin", &newer, ["PTX of version 99.0", "install a driver of CUDA 103.0 or newer"]),
        ("--image", &code, ["code.cubin does not load on", "it must be machine code for this GPU"]),
    ] {
        let job = kernels(&dist, 2, &[option]).arg(file);
        let outcome = job.run().expect("the job starts");
        for part in parts {
            assert!(!outcome.success() && outcome.text().contains(part), "{part:?}: {}", report(&outcome));
        }
    }
    let both = scenarios(&dist, 2).arg("--gin").arg(&newer).arg("--image").arg(&code).run().expect("the job starts");
    assert!(both.text().contains("cannot be used with"), "{}", report(&both));
    std::fs::remove_dir_all(&place).expect("removed");
}
