//! The C programs, each of which checks its own results.

use std::path::{Path, PathBuf};

use super::{compile, run, text};

fn ptx() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels.ptx")
}

/// Runs a program whose checks must all pass, and returns their number and the program's output.
fn passes(test: &str, name: &str, settings: &[(&str, &str)]) -> Option<(usize, String)> {
    let program = compile(test, name)?;
    let output = run(&program, &[&ptx()], settings);
    let text = text(&output);
    assert!(output.status.success(), "{name}: {}\n{text}", output.status);
    Some((text.lines().filter(|line| line.starts_with("ok ")).count(), text))
}

#[test]
fn memory_streams_and_events_work_by_the_driver_api() {
    let test = "memory_streams_and_events_work_by_the_driver_api";
    let Some((checks, text)) = passes(test, "memory", &[("SOFTGPU_NAME", "a GPU of this test")]) else { return };
    assert!(checks > 35 && text.contains("device a GPU of this test"), "{text}");
}

#[test]
fn kernels_run_and_wild_accesses_stick_to_their_context() {
    let Some((checks, text)) = passes("kernels_run_and_wild_accesses_stick_to_their_context", "kernels", &[]) else {
        return;
    };
    assert!(checks > 45, "{checks} checks:\n{text}");
    for cause in [
        "kernel store, block (0, 0, 0), thread (0, 0, 0)",
        "null pointer",
        "see cuMemHostRegister",
        "freed",
        "just past the end of 64 bytes",
        "unregistered",
        "read-only",
        "kernels.ptx:",
    ] {
        assert!(text.contains(cause), "no \"{cause}\" in\n{text}");
    }
}

#[test]
fn wrong_calls_return_the_documented_codes() {
    let settings = [("SOFTGPU_DEVICES", "2"), ("SOFTGPU_MEMORY_BYTES", "1073741824")];
    let Some((checks, text)) = passes("wrong_calls_return_the_documented_codes", "misuse", &settings) else { return };
    assert!(checks >= 200, "{checks} checks:\n{text}");
    assert_eq!(text.matches("cuMemAllocManaged is not supported").count(), 1, "{text}");
}

#[test]
fn handles_host_memory_segments_and_pages_keep_the_reference_s_contract() {
    let test = "handles_host_memory_segments_and_pages_keep_the_reference_s_contract";
    for access in ["yes", "no"] {
        let Some((checks, text)) = passes(test, "contract", &[("SOFTGPU_CPU_ACCESS", access)]) else { return };
        assert!(checks > 90 && text.contains("ok at exit"), "{checks} checks:\n{text}");
        assert!(text.contains("forked after cuInit") && !text.contains("panicked"), "{text}");
    }
}

#[test]
fn two_processes_share_memory_by_its_handle() {
    let Some((checks, text)) = passes("two_processes_share_memory_by_its_handle", "ipc", &[]) else { return };
    assert!(checks > 15 && text.contains("has no such memory"), "{checks} checks:\n{text}");
}

#[test]
fn two_processes_share_an_event_by_its_handle() {
    let Some((checks, text)) = passes("two_processes_share_an_event_by_its_handle", "events", &[]) else { return };
    assert!(checks > 30 && text.contains("exited before its stream reached an event"), "{checks} checks:\n{text}");
}

#[test]
fn watchdog_ends_endless_kernels_and_names_their_line() {
    let settings = [("SOFTGPU_WATCHDOG", "1")];
    let Some((checks, text)) = passes("watchdog_ends_endless_kernels_and_names_their_line", "endless", &settings)
    else {
        return;
    };
    assert_eq!(checks, 2, "{text}");
    for part in ["kernel wait, block (0, 0, 0), thread (", "kernels.ptx:6", "has run for 1s", "SOFTGPU_WATCHDOG"] {
        assert!(text.contains(part), "no \"{part}\" in\n{text}");
    }
}

#[test]
fn invalid_settings_leave_no_device() {
    let Some(program) = compile("invalid_settings_leave_no_device", "memory") else { return };
    for (name, value, line) in [
        ("SOFTGPU_DEVICES", "many", "SOFTGPU_DEVICES=many is not valid: it must be a number from 0 to 16"),
        ("SOFTGPU_MEMROY", "weak", "SOFTGPU_MEMROY is not a setting"),
        ("SOFTGPU_DEVICES", "0", "CUDA_ERROR_NO_DEVICE"),
    ] {
        let output = run(&program, &[], &[(name, value)]);
        let text = text(&output);
        assert!(output.status.code() == Some(100) && text.contains(line), "{text}");
    }
}
