//! `ferrogin check` where there is nothing to check, with the libraries that `make build` leaves in dist/ (or
//! FERROGIN_DIST).

use gin_check::event::{Event, NO_RANK, encode};
use std::path::Path;

/// Runs a script under the check, with the tool as `$0`. Returns the check's error.
fn error(dist: &Path, settings: &[(&str, &str)], script: &str) -> String {
    let mut command = crate::tool::command();
    command.args(["check", "--", "sh", "-c", script, env!("CARGO_BIN_EXE_ferrogin")]);
    let output = command.env("FERROGIN_DIST", dist).envs(settings.iter().copied()).output().expect("the tool starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
    text
}

/// A script that leaves the record of a process, and then does this.
fn recorded(then: &str) -> String {
    let mut bytes = Vec::new();
    encode(&mut bytes, 1, &Event::Process { rank: NO_RANK, pid: 1, library: "card".into() });
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
    assert!(error.contains("sh was ended by signal 9 before its first kernel"), "{error}");
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
