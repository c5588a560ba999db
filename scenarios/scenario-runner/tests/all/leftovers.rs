//! No files remain in /dev/shm or /tmp after success, or after a rank is killed. The test runs in its own mount
//! namespace, where both directories start out empty.

use crate::common::{ROLE, dist, must_pass, on_software_card, over_efa, report, reps, role, seconds, wires};
use ferrogin_test_support::child::full_name;
use ferrogin_test_support::wait::{HANG_LIMIT, wait_until};
use mini_nccl::launch::{Job, Running, Signal};
use std::path::Path;
use std::process::{Command, Stdio};

/// Where the programs are in the namespace.
const STAGE: &str = "/mnt";

#[test]
fn success_leaves_no_files() {
    in_namespace("success_leaves_no_files", || {
        for wire in wires() {
            run(wire);
        }
    });
}

#[test]
#[ignore = "make check"]
fn sigkill_leaves_no_files() {
    in_namespace("sigkill_leaves_no_files", || {
        for wire in wires() {
            for victim in [0, 1] {
                killed(wire, victim);
            }
            run(wire);
        }
    });
}

/// Runs `body` in a mount namespace.
fn in_namespace(name: &str, body: impl FnOnce()) {
    if role().is_some() {
        assert_no_files("the start");
        body();
        println!("no files remain");
        return;
    }
    let Some(dist) = dist(name) else { return };
    let work = std::env::temp_dir().join(format!("ferrogin-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&work).unwrap();
    let copy = |from: &Path, to: &str| std::fs::copy(from, work.join(to)).unwrap();
    copy(&dist.join("libnccl-gin-ferrogin.so"), "libnccl-gin-ferrogin.so");
    copy(&dist.join("libsoftefa-fi.so"), "libsoftefa-fi.so");
    if let Some(libfabric) = std::env::var_os("FERROGIN_LIBFABRIC").filter(|_| over_efa()) {
        copy(Path::new(&libfabric), "libfabric.so.1");
        copy(&dist.join("ferrogin"), "ferrogin");
        assert!(Command::new("cp").arg("-a").arg(dist.join("verbs")).arg(&work).status().unwrap().success());
    }
    copy(Path::new(env!("CARGO_BIN_EXE_scenario-runner")), "scenario-runner");
    copy(&std::env::current_exe().unwrap(), "test");
    let test = full_name(name);
    let script = format!(
        "mount --bind {} {STAGE} && mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm || exit 77; \
         exec {STAGE}/test --exact {test} --include-ignored --nocapture",
        work.display()
    );
    // Any user may use a user namespace. Where those are not available, as in a chroot, root may do without one.
    let attempts: [&[&str]; 2] = [&["--mount", "--user", "--map-root-user"], &["--mount"]];
    let mut refusals = Vec::new();
    let output = attempts.iter().find_map(|flags| {
        let mut command = Command::new("unshare");
        command.args(*flags).args(["sh", "-c", &script]).env(ROLE, "inside").env_remove("TMPDIR");
        if over_efa() {
            command.env("FERROGIN_LIBFABRIC", format!("{STAGE}/libfabric.so.1"));
        }
        match command.stdin(Stdio::null()).output() {
            Ok(output) if !matches!(output.status.code(), Some(1 | 77)) => Some(output),
            Ok(output) => {
                refusals.push(String::from_utf8_lossy(&output.stderr).trim().to_string());
                None
            }
            Err(error) => {
                refusals.push(format!("unshare: {error}"));
                None
            }
        }
    });
    std::fs::remove_dir_all(&work).unwrap();
    let Some(output) = output else {
        ferrogin_test_support::skip(
            name,
            format_args!("this machine allows no mount namespace: {}", refusals.join("; ")),
        );
        return;
    };
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("no files remain"), "{text}");
}

fn scenarios(reps: &str) -> Job {
    let job = on_software_card(format!("{STAGE}/scenario-runner"), Path::new(STAGE), 2);
    job.args(["--reps", reps, "--deadline", &seconds(HANG_LIMIT)]).env_remove(ROLE)
}

fn assert_no_files(after: &str) {
    for dir in ["/tmp", "/dev/shm"] {
        let left: Vec<_> = std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()).collect();
        assert!(left.is_empty(), "after {after}: {left:?}");
    }
}

/// Runs the scenarios to completion.
fn run(wire: &str) {
    must_pass(&scenarios(&reps(200).to_string()).env("SOFTEFA_WIRE", wire).run().unwrap());
    assert_no_files("success");
}

/// Kills one rank during the scenarios. The other rank must exit on its own, with an error.
fn killed(wire: &str, victim: usize) {
    let job = scenarios("20000").args(["--deadline", "5"]).env("SOFTEFA_WIRE", wire);
    let mut running: Running = job.start().unwrap();
    wait_until("set-up", || running.captured().iter().any(|line| line.text.contains("2 ranks on")));
    running.signal(victim, Signal::SIGKILL);
    let outcome = running.wait();
    let survivor = outcome.statuses[1 - victim].and_then(|status| status.code());
    assert_eq!(survivor, Some(1), "the other rank must end with an error: {}", report(&outcome));
    assert_no_files("SIGKILL");
}
