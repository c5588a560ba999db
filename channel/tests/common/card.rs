//! The software card, as built.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// The directory with the card's provider, FERROGIN_DIST. Prints a SKIP line and gives None without one.
pub fn provider_path(test: &str) -> Option<OsString> {
    let dist = std::env::var_os("FERROGIN_DIST").filter(|dist| Path::new(dist).join("libsoftefa-fi.so").exists());
    if dist.is_none() {
        println!("SKIP {test}: FERROGIN_DIST names no directory with libsoftefa-fi.so");
    }
    dist
}

/// True in a process that has the card. Otherwise `test` has been run in one of its own, for libfabric takes its providers from the
/// environment, or was skipped.
pub fn is_here(test: &str) -> bool {
    let Some(dist) = provider_path(test) else { return false };
    if std::env::var_os("FI_PROVIDER_PATH").is_some_and(|path| path == dist) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env("FI_PROVIDER_PATH", dist);
    assert!(child.status().unwrap().success());
    false
}
