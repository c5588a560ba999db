//! Runs tests that need their own process again, in a child process.

use std::process::Command;
use std::sync::OnceLock;

const ROLE: &str = "FERROGIN_TEST_ROLE";

/// In the parent process: runs the test `name` again in a child process with `environment`, and returns what the child
/// wrote to standard error. In the child process: runs `body` and returns `None`.
///
/// # Panics
/// If the child process fails.
pub fn run(name: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if std::env::var(ROLE).is_ok_and(|role| role == name) {
        body();
        return None;
    }
    let mut command = command(name);
    command.env(ROLE, name).envs(environment.iter().copied());
    let output = command.output().expect("a child process");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{name} with {environment:?} failed:\n{text}\n{errors}");
    text.lines()
        .filter_map(|line| line.strip_prefix("SKIP ")?.split_once(": "))
        .for_each(|(test, why)| super::skip(test, why));
    assert!(text.contains("1 passed"), "{name} did not run in the child process:\n{text}");
    Some(errors)
}

/// Runs the tests whose names contain one of `filters` again in a child process with `environment`, except those that
/// need `make check`.
///
/// # Panics
/// If one of the tests fails, or there are none.
pub fn run_again(filters: &[&str], environment: &[(&str, &str)]) {
    let mut command = Command::new(program());
    command.args(filters).envs(environment.iter().copied());
    let output = command.output().expect("a child process");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let passed = output.status.success() && !text.contains("ok. 0 passed");
    assert!(passed, "{filters:?} with {environment:?} failed:\n{text}\n{errors}");
}

/// The command that runs only this program's test `name`.
///
/// # Panics
/// Like [`full_name`].
pub fn command(name: &str) -> Command {
    let mut command = Command::new(program());
    // The tests of `make check` are ignored unless asked for.
    command.args(["--exact", &full_name(name), "--include-ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// The full name of the test `name`, with its modules, as the test runner knows it.
///
/// # Panics
/// If this program has no test `name`, or several.
pub fn full_name(name: &str) -> String {
    static TESTS: OnceLock<String> = OnceLock::new();
    let tests = TESTS.get_or_init(|| {
        let output = Command::new(program()).args(["--list", "--format=terse"]).output().expect("a list of the tests");
        String::from_utf8(output.stdout).expect("names of tests")
    });
    let is_module = |path: &str| path.is_empty() || path.ends_with("::");
    let tests = tests.lines().filter_map(|line| line.strip_suffix(": test"));
    let found: Vec<&str> = tests.filter(|test| test.strip_suffix(name).is_some_and(is_module)).collect();
    assert_eq!(found.len(), 1, "tests of the name {name}: {found:?}; name the module of one of them");
    found[0].to_owned()
}

fn program() -> std::path::PathBuf {
    std::env::current_exe().expect("the path of the test's program")
}
