//! The line about a context's first failed operation: it names cause and fix, from CPU threads and from a GPU.
#![allow(unsafe_code)]

use crate::common::{compile, compile_with, dist, include, is_child, on_software_card, ranks, text, this_test};
use ferrogin::device::capi::{fgin_open, fgin_put_value};
use ferrogin::{ContextOptions, Memory};
use std::path::Path;
use std::process::Command;

const CXX: (&str, &str) = ("CXX", "c++");
const FIRST: &str = "ferrogin WARN rank 0: the first failure of a kernel in this context: ";

/// How the kernel of failing.cu fails, and what is printed.
const FAILURES: [(&str, &str); 3] = [
    ("wait", "fgin_wait_signal returned FGIN_TIMEOUT: signal 0 is 0, and not 3, after 20ms: check that the peer runs"),
    ("peer", "fgin_put returned FGIN_INVALID_ARGUMENT: there is only one rank, so the peer must be 0"),
    (
        "signal",
        "fgin_put returned FGIN_INVALID_ARGUMENT: rank 0 has no signal 7: create its context with at least 8 signals",
    ),
];

/// The kernel of failing.cu leaves its window: `line` says where, and no more than `lines` follow it.
fn fault_is_explained(mut command: Command, line: &str, lines: usize) {
    let output =
        command.arg("outside").env("FERROGIN_RANK", "0").env("FERROGIN_NRANKS", "1").output().expect("a process");
    let text = text(&output);
    assert!(!output.status.success() && text.contains(line), "{text}");
    assert!(text.lines().count() <= 1 + lines, "{text}");
}

fn all_are_explained(command: impl Fn() -> Command) {
    for (how, line) in FAILURES {
        let mut command = command();
        command.arg(how).env("FERROGIN_RANK", "0").env("FERROGIN_NRANKS", "1");
        let output = command.output().expect("a process");
        let text = text(&output);
        assert_eq!(output.status.code(), Some(1), "{how}: {text}");
        assert_eq!(text.matches(&format!("{FIRST}{line}")).count(), 1, "{how}: {text}");
        assert!(text.contains("the kernel's operation in line "), "{how}: {text}");
    }
}

#[test]
fn first_failure_of_cpu_threads_is_explained() {
    let test = "first_failure_of_cpu_threads_is_explained";
    let flags = ["-std=c++17", "-x", "c++", "-I../examples"];
    let Some(program) = compile(test, CXX, &flags, "tests/failing.cu") else { return };
    all_are_explained(|| {
        let mut command = Command::new(&program);
        on_software_card(&mut command);
        command
    });
    let mut command = Command::new(&program);
    on_software_card(&mut command);
    fault_is_explained(command, "which is in no window: is a window too small?", 0);
    let _ = std::fs::remove_file(program);
}

#[test]
#[ignore = "make check"]
fn first_failure_on_the_software_gpu_is_explained() {
    let test = "first_failure_on_the_software_gpu_is_explained";
    let Some(dist) = dist(test) else { return };
    let Some(clang) = ["clang-22", "clang-19"].into_iter().find(|name| Command::new(name).arg("-v").output().is_ok())
    else {
        return ferrogin_test_support::skip(test, "no clang is on PATH (apt-get install clang-22)");
    };
    let ptx = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("failing-{}.ptx", std::process::id()));
    let device = dist.join("cuda/ferrogin_device.ptx");
    let files = format!("-DPTX={{\"{}\", \"{}\"}}", ptx.display(), device.display());
    let mut kernel = Command::new(clang);
    kernel.args(["-x", "cuda", "-std=c++17", "--cuda-device-only", "--cuda-gpu-arch=sm_75", "--cuda-feature=+ptx82"]);
    kernel.args(["-nocudainc", "-nocudalib", "-O2", "-S", "-DPTX=", "-I../examples", "-I"]).arg(include());
    kernel.args(["-include", "ferrogin/clang_cuda.h", "tests/failing.cu", "-o"]).arg(&ptx);
    let output = kernel.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("clang starts");
    assert!(output.status.success(), "{}", text(&output));
    let gpu = dist.join("gpu").display().to_string();
    let flags = ["-std=c++17", "-x", "c++", &files, "-I../examples", "-I", &gpu];
    let Some(program) = compile_with(test, CXX, &flags, "tests/failing.cu", &["-L", &gpu, "-lcuda"]) else { return };
    let command = || {
        let mut command = Command::new(dist.join("ferrogin"));
        on_software_card(command.args(["gpu", "--"]).arg(&program)).env("FERROGIN_DEVICE", "cuda");
        command
    };
    all_are_explained(command);
    fault_is_explained(command(), "a store of 1 bytes at ", 2);
    let mut narrow = command();
    narrow.arg("narrow").envs([("FERROGIN_RANK", "0"), ("FERROGIN_NRANKS", "1"), ("SOFTGPU_CHECK_POSTS", "yes")]);
    let text = text(&narrow.output().expect("a process"));
    assert!(text.contains("kernel fails, block (0, 0, 0), thread ("), "{text}");
    assert!(text.contains(", so the two posted on one queue at the same time in a sharing mode"), "{text}");
    let _ = std::fs::remove_file(program);
    let _ = std::fs::remove_file(ptx);
}

/// The watcher's thread has no time to see the failure.
#[test]
fn failure_is_reported_by_a_process_that_exits_at_once() {
    let test = "failure_is_reported_by_a_process_that_exits_at_once";
    let Some(dist) = dist(test) else { return };
    if is_child(test) {
        ranks(1, |comm| {
            let window = comm.allocate(64, Memory::Host).expect("a window");
            let options = ContextOptions { signals: 1, ..Default::default() };
            let context = comm.context(&options).expect("a context");
            let mut gin = std::ptr::null();
            // SAFETY: the handle is open, and `gin` has room for a pointer.
            assert_eq!(unsafe { fgin_open(context.handle(), 0, &mut gin) }, 0);
            // SAFETY: the context and the window are alive; the peer may be any number.
            assert_eq!(unsafe { fgin_put_value(gin, 9, window.handle().0, 0, 1, 8, 0, 0) }, 1);
            std::process::exit(7);
        });
    }
    for _ in 0..5 {
        let output = this_test(test, &dist).output().expect("a process");
        let text = text(&output);
        assert_eq!(output.status.code(), Some(7), "{text}");
        assert_eq!(text.matches(FIRST).count(), 1, "{text}");
    }
}
