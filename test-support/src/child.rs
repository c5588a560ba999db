//! Tests that need an environment of their own run again in a child process that has it.

use std::process::Command;

const ROLE: &str = "FERROGIN_TEST_ROLE";

/// In the parent process: runs the test `name` again in a child process with `environment`, and returns what the child wrote to
/// standard error. In the child process: runs `body` and returns nothing.
///
/// # Panics
/// The child process failed.
pub fn run(name: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if std::env::var(ROLE).is_ok_and(|role| role == name) {
        body();
        return None;
    }
    let program = std::env::current_exe().expect("the path of the test's program");
    let mut command = Command::new(program);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ROLE, name);
    command.envs(environment.iter().copied());
    let output = command.output().expect("a child process");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name} with {environment:?} failed:\n{text}\n{errors}");
    assert!(text.contains("1 passed"), "{name} did not run in the child process:\n{text}");
    Some(errors)
}
