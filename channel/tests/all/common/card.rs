//! The software card, as built.

use ferrogin_test_support::{child, dist};

/// True in a process that has the card. Otherwise `test` has been run in one of its own, for libfabric takes its providers from the
/// environment, or was skipped.
pub fn is_here(test: &str) -> bool {
    let Some(dist) = dist(test, &["libsoftefa-fi.so"]) else { return false };
    if std::env::var_os("FI_PROVIDER_PATH").is_some_and(|path| path == *dist) {
        return true;
    }
    assert!(child::command(test).env("FI_PROVIDER_PATH", dist).status().unwrap().success());
    false
}
