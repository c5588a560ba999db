//! `ferrogin check` where there is nothing to check, with the libraries that `make build` leaves in dist/ (or
//! FERROGIN_DIST).

use gin_check::event::{Event, NO_RANK, encode};
use gin_check::race::{Example, Fault, Pair};
use std::path::Path;

/// Runs a script under the check, with the tool as `$0`.
fn check(dist: &Path, settings: &[(&str, &str)], script: &str) -> std::process::Output {
    let mut command = crate::tool::command();
    command.args(["check", "--", "sh", "-c", script, env!("CARGO_BIN_EXE_ferrogin")]);
    command.env("FERROGIN_DIST", dist).envs(settings.iter().copied()).output().expect("the tool starts")
}

/// The same, where nothing can be checked. Returns the check's error.
fn error(dist: &Path, settings: &[(&str, &str)], script: &str) -> String {
    let output = check(dist, settings, script);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
    text
}

/// A script that leaves the record of a process, and then does this.
fn recorded(then: &str) -> String {
    recorded_with(&[], then)
}

fn recorded_with(events: &[Event], then: &str) -> String {
    let mut bytes = Vec::new();
    encode(&mut bytes, 1, &Event::Process { rank: NO_RANK, pid: 1, library: "card".into() });
    events.iter().for_each(|event| encode(&mut bytes, 1, event));
    let octal: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
    format!("printf '{octal}' > $GIN_CHECK/card.1; {then}")
}

fn dist(test: &str) -> Option<std::path::PathBuf> {
    ferrogin_test_support::dist(test, &["gpu/libcuda.so.1"])
}

#[test]
fn program_without_kernels_is_not_called_right() {
    let Some(dist) = dist("program_without_kernels_is_not_called_right") else { return };
    for script in ["true", &recorded("true")] {
        let error = error(&dist, &[], script);
        assert!(error.contains("nothing was checked: the program has to launch kernels"), "{error}");
    }
    let error = error(&dist, &[], &recorded("kill -9 $$"));
    assert!(error.contains("sh was killed by SIGKILL before its first kernel"), "{error}");
}

#[test]
fn records_that_could_not_be_written_are_an_error() {
    let Some(dist) = dist("records_that_could_not_be_written_are_an_error") else { return };
    for records in ["> $GIN_CHECK/gpu.7", "printf '\\377\\377' > $GIN_CHECK/gpu.7"] {
        let error = error(&dist, &[], &recorded(records));
        assert!(error.contains("a process could not write all its records"), "{error}");
    }
    let error = error(&dist, &[("TMPDIR", "/nonexistent")], "true");
    assert!(error.contains("cannot make a directory for records in /nonexistent"), "{error}");
}

#[test]
fn check_within_a_check_is_refused() {
    let Some(dist) = dist("check_within_a_check_is_refused") else { return };
    let error = error(&dist, &[], "$0 check -- true");
    assert!(error.contains("run `ferrogin check` once, around all of it"), "{error}");
}

#[test]
fn a_failure_of_the_program_is_named_with_reports_and_without() {
    let Some(dist) = dist("a_failure_of_the_program_is_named_with_reports_and_without") else { return };
    let pair = Pair { first: 1, second: 2, writes: [true; 2], shared: true, fault: Fault::Race };
    let example = Example { first: 64, second: 65, address: 0, bytes: 4, count: 1 };
    let launch = Event::Launch { launch: 0, kernel: "kernel".into() };
    for (events, code) in [(vec![launch.clone()], 2), (vec![launch, Event::Raced { launch: 0, pair, example }], 1)] {
        let output = check(&dist, &[], &recorded_with(&events, "exit 7"));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains("ferrogin check: sh exited with 7\n"), "{text}");
    }
}

#[test]
fn a_kernel_that_never_ends_is_ended() {
    let Some(dist) = dist("a_kernel_that_never_ends_is_ended") else { return };
    for (set, expected) in [("", "600"), ("7", "7")] {
        let error = error(&dist, &[("SOFTGPU_WATCHDOG", set)], "echo limit=$SOFTGPU_WATCHDOG >&2");
        assert!(error.contains(&format!("limit={expected}\n")), "{error}");
    }
}

#[test]
fn check_of_one_rank_of_a_job_is_refused() {
    let Some(dist) = dist("check_of_one_rank_of_a_job_is_refused") else { return };
    let error = error(&dist, &[("FERROGIN_RANK", "0"), ("FERROGIN_NRANKS", "2")], "true");
    assert!(error.contains("run `ferrogin check` around the launcher"), "{error}");
}

#[test]
fn check_that_is_interrupted_ends_its_program_and_leaves_no_records() {
    let Some(dist) = dist("check_that_is_interrupted_ends_its_program_and_leaves_no_records") else { return };
    let records = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interrupted-check");
    std::fs::create_dir_all(&records).expect("the directory is made");
    for signal in ["INT", "TERM"] {
        let script = recorded(&format!("kill -{signal} $PPID; exec sleep 20"));
        let error = error(&dist, &[("TMPDIR", records.to_str().expect("a path in UTF-8"))], &script);
        assert!(error.contains(&format!("interrupted by SIG{signal}")), "{error}");
        assert_eq!(std::fs::read_dir(&records).expect("the directory is there").count(), 0);
    }
}
