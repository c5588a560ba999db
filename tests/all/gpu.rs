//! `ferrogin gpu`, with the library that `make build` leaves in dist/ (or FERROGIN_DIST).

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tool::command;

fn dist(test: &str) -> Option<PathBuf> {
    ferrogin_test_support::dist(test, &["gpu/libcuda.so.1", "libnccl-gin-ferrogin.so", "libsoftefa-fi.so"])
}

/// Runs the program on a software GPU; returns whether it succeeded, and its output.
fn on_gpu(dist: &Path, program: &[&str], settings: &[(&str, &str)]) -> (bool, String) {
    let mut tool = command();
    tool.args(["gpu", "--"]).args(program).env("FERROGIN_DIST", dist).envs(settings.iter().copied());
    let output = tool.output().expect("the tool starts");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

/// Runs the tool on a software GPU from dist/, with the software card.
fn tool_on_gpu(dist: &Path, args: &[&str], settings: &[(&str, &str)]) -> (bool, String) {
    let plugin = dist.join("libnccl-gin-ferrogin.so").to_string_lossy().into_owned();
    let usual = [("FERROGIN_PROVIDER", "softefa"), ("NCCL_GIN_PLUGIN", &*plugin)];
    on_gpu(dist, &[&[env!("CARGO_BIN_EXE_ferrogin")], args].concat(), &[&usual, settings].concat())
}

#[test]
fn demo_passes_as_ptx_on_a_software_gpu() {
    let Some(dist) = dist("demo_passes_as_ptx_on_a_software_gpu") else { return };
    let args = ["demo", "--reps", "50"];
    let (good, text) = tool_on_gpu(&dist, &args, &[("FERROGIN_DEVICE", "cuda")]);
    assert!(good && text.contains("kernels as PTX on ferrogin software GPU"), "{text}");
    for phase in ["PASS (a)", "PASS (b)", "PASS (c)", "All phases passed as PTX on the software GPU"] {
        assert_eq!(text.matches(phase).count(), 1, "{text}");
    }
    // They would be an interpreter's times.
    assert!(!text.contains("MB/s") && !text.contains("repetitions in"), "{text}");
}

#[test]
#[ignore = "make check"]
fn perf_measures_every_operation_as_ptx_and_says_what_its_times_mean() {
    let Some(dist) = dist("perf_measures_every_operation_as_ptx_and_says_what_its_times_mean") else { return };
    let args = "perf all -b 1 -e 4096 -f 64 -n 20 -w 3 --threads 2 --aggregate 4 --depth 16 --verify --device cuda";
    let args: Vec<&str> = args.split(' ').collect();
    let (good, text) = tool_on_gpu(&dist, &args, &[("SOFTGPU_SEED", "3")]);
    assert!(good && text.contains("posts by kernels on ferrogin software GPU"), "{text}");
    assert!(text.contains("these are not a GPU's times") && text.contains("# SOFTGPU_SEED=3"), "{text}");
    for operation in ["put", "put-signal", "put-value", "get", "signal", "flush", "barrier", "alltoall"] {
        assert_eq!(text.matches(&format!("\n{operation}: ")).count(), 1, "{operation}: {text}");
    }
}

/// Three ranks, with FERROGIN_DEVICE instead of the option.
#[test]
fn perf_measures_collectives_as_ptx() {
    let Some(dist) = dist("perf_measures_collectives_as_ptx") else { return };
    let args = ["perf", "barrier", "alltoall", "--ranks", "3", "-e", "64", "-n", "10", "--verify", "--json", "-"];
    let mut tool = command();
    tool.args(["gpu", "--", env!("CARGO_BIN_EXE_ferrogin")]).args(args).env("FERROGIN_DIST", &dist);
    tool.env("NCCL_GIN_PLUGIN", dist.join("libnccl-gin-ferrogin.so"));
    let output = tool.envs([("FERROGIN_PROVIDER", "softefa"), ("FERROGIN_DEVICE", "cuda")]).output().expect("the tool");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("only JSON");
    assert_eq!(crate::schema::check(&report), Ok(()));
    assert_eq!((&report["settings"]["device"], &report["gpu"]["software"]), (&"cuda".into(), &"0.1.0".into()));
}

#[test]
fn perf_with_another_device_than_the_settings_is_refused() {
    let Some(dist) = dist("perf_with_another_device_than_the_settings_is_refused") else { return };
    for (args, setting, cause) in [
        ("--device cpu", "cuda", "--device is cpu, but FERROGIN_DEVICE=cuda selects a GPU"),
        ("--device cuda", "cpu", "--device is cuda, but FERROGIN_DEVICE=cpu selects CPU threads"),
    ] {
        let args = format!("perf put -e 8 -n 10 {args}");
        let args: Vec<&str> = args.split(' ').collect();
        let (good, text) = tool_on_gpu(&dist, &args, &[("FERROGIN_DEVICE", setting)]);
        assert!(!good && text.contains(cause), "{text}");
    }
}

#[test]
fn doctor_says_which_driver_answers() {
    let Some(dist) = dist("doctor_says_which_driver_answers") else { return };
    let settings = [("SOFTGPU_NAME", "a GPU of this test"), ("SOFTGPU_SEED", "7")];
    let (good, text) = tool_on_gpu(&dist, &["doctor", "--json", "--only", "gpu"], &settings);
    assert!(good && text.contains("a GPU of this test, compute capability 9.0"), "{text}");
    let driver = "ferrogin's software GPU 0.1.0, with SOFTGPU_NAME=a GPU of this test, SOFTGPU_SEED=7";
    assert!(text.contains(driver) && text.contains("CUDA driver API 12.8"), "{text}");
}

#[test]
fn doctor_names_invalid_settings_of_the_software_gpu() {
    let Some(dist) = dist("doctor_names_invalid_settings_of_the_software_gpu") else { return };
    for (name, value, device, good, cause) in [
        ("SOFTGPU_MEMORY", "weka", "cuda", false, "SOFTGPU_MEMORY=weka is not valid: it must be strong or weak"),
        ("SOFTGPU_MEMORY", "weka", "auto", true, "SOFTGPU_MEMORY=weka is not valid: it must be strong or weak"),
        ("SOFTGPU_DEVICES", "0", "cuda", false, "SOFTGPU_DEVICES=0 means a machine without a GPU"),
        ("SOFTGPU_MEMROY", "weak", "cuda", false, "SOFTGPU_MEMROY is set, and the software GPU has no such setting"),
    ] {
        let settings = [(name, value), ("FERROGIN_DEVICE", device)];
        let (passed, text) = tool_on_gpu(&dist, &["doctor", "--json", "--only", "gpu,settings"], &settings);
        assert!(passed == good && text.contains(cause), "{name}={value}, {device}: {text}");
    }
}

/// The software GPU lists its settings when it refuses an unknown one.
#[test]
fn settings_of_the_software_gpu_are_the_listed_ones() {
    let Some(dist) = dist("settings_of_the_software_gpu_are_the_listed_ones") else { return };
    let (_, text) = tool_on_gpu(&dist, &["probe", "gpu"], &[("SOFTGPU_TYPO", "1")]);
    let list = text.split("the settings are ").nth(1).and_then(|rest| rest.lines().next()).expect("a list");
    assert_eq!(list.split(", ").collect::<Vec<_>>(), ferrogin_ffi::settings::SOFTWARE_GPU);
}

#[test]
fn gpu_without_its_library_or_program_says_so() {
    let Some(dist) = dist("gpu_without_its_library_or_program_says_so") else { return };
    let (good, text) = on_gpu(Path::new("/nonexistent"), &["true"], &[]);
    // The library may be next to the tool.
    assert!(good || text.contains("make build"), "{text}");
    let (good, text) = on_gpu(&dist, &["/nonexistent/program"], &[]);
    assert!(!good && text.contains("cannot run /nonexistent/program"), "{text}");
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("gpu").output().expect("the tool starts");
    assert_eq!(output.status.code(), Some(2));
}
