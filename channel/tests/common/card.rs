//! The software card, as built.

use std::process::Command;

use ferrogin_test_support::dist;

/// True in a process that has the card. Otherwise `test` has been run in one of its own, for libfabric takes its providers from the
/// environment, or was skipped.
pub fn is_here(test: &str) -> bool {
    let Some(dist) = dist(test, &["libsoftefa-fi.so"]) else { return false };
    if std::env::var_os("FI_PROVIDER_PATH").is_some_and(|path| path == *dist) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env("FI_PROVIDER_PATH", dist);
    assert!(child.status().unwrap().success());
    false
}
