//! libfabric's own programs find and list the provider.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use softefa_rig::child::run;
use softefa_rig::have_libfabric;

/// A directory that is removed after the test.
struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Makes a directory with the provider's library, which cargo builds next to this test, under the name that libfabric
/// loads.
fn provider_dir() -> Option<Dir> {
    let built = std::env::current_exe().unwrap().with_file_name("libsoftefa_fi.so");
    if !built.exists() {
        return None;
    }
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("softefa-test-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::copy(built, dir.join("libsoftefa-fi.so")).unwrap();
    Some(Dir(dir))
}

fn fi_info(dir: &Dir, environment: &[(&str, &str)], args: &[&str]) -> (bool, String) {
    let mut command = Command::new("fi_info");
    command.args(["-p", "softefa"]).args(args).env("FI_PROVIDER_PATH", &dir.0);
    for (name, value) in environment {
        command.env(name, value);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

#[test]
fn fi_info_lists_cards() {
    let name = "fi_info_lists_cards";
    if !have_libfabric(name) {
        return;
    }
    if Command::new("fi_info").arg("--version").output().is_err() {
        ferrogin_test_support::skip(name, "fi_info (libfabric-bin) is not installed");
        return;
    }
    let Some(dir) = provider_dir() else {
        ferrogin_test_support::skip(name, "the provider's library was not built beside the test");
        return;
    };
    let (good, text) = fi_info(&dir, &[("SOFTEFA_NICS", "2")], &[]);
    assert!(good, "{text}");
    for line in ["provider: softefa", "fabric: efa-direct", "domain: softefa0-rdm", "domain: softefa1-rdm"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    let (good, text) = fi_info(&dir, &[], &["-v"]);
    assert!(good && text.contains("addr_format: FI_ADDR_EFA"), "{text}");
    let (good, text) = fi_info(&dir, &[("SOFTEFA_WIRE", "carrier pigeon")], &[]);
    let line = "SOFTEFA_WIRE=\"carrier pigeon\": must be shm or tcp";
    assert!(!good && text.matches(line).count() == 1, "once, however often it asks: {text}");
    let (good, _) = fi_info(&dir, &[], &["-t", "FI_EP_MSG"]);
    assert!(!good, "there are no connected endpoints");
}

/// A handle may refer to the provider's functions, so the library stays loaded.
#[test]
fn provider_library_stays_loaded_when_closed() {
    let Some(dir) = provider_dir() else {
        ferrogin_test_support::skip(
            "provider_library_stays_loaded_when_closed",
            "the provider's library was not built beside the test",
        );
        return;
    };
    run("provider_library_stays_loaded_when_closed", &[], || open_and_close(&dir));
}

fn open_and_close(dir: &Dir) {
    let loaded = || unsafe { Library::open(Some("libsoftefa-fi.so"), RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(loaded().is_err(), "nothing is loaded");
    let library = unsafe { Library::open(Some(dir.0.join("libsoftefa-fi.so")), RTLD_NOW | RTLD_LOCAL) }.unwrap();
    assert!(library.close().is_ok() && loaded().is_ok());
}
