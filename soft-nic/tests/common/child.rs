//! Tests that need an environment of their own: the test runs again in a process that has it.

use std::process::Command;

const ROLE: &str = "SOFTEFA_TEST_CHILD";

/// In the first process: runs the test `name` again with `environment` and gives what it wrote to standard error.
/// In the second: runs `body` and gives nothing.
pub fn run(name: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if std::env::var(ROLE).is_ok_and(|role| role == name) {
        if super::have_libfabric(name) {
            body();
        }
        return None;
    }
    if !super::have_libfabric(name) {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ROLE, name);
    for (name, value) in environment {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name} with {environment:?} failed:\n{text}\n{errors}");
    Some(errors)
}
