//! Loading libfabric and its providers leaves the process's signal dispositions alone. Runs in a child process, which
//! has its own.
#![allow(unsafe_code)]

use std::path::Path;
use std::process::Command;

use ferrogin_libfabric::{Hints, Libfabric};
use ferrogin_test_support::libraries;
use ferrogin_test_support::{child, of_process, skip};

/// A library whose constructor takes over a signal, as PSM's do.
const TAKES_SIGNAL: &str = "#include <signal.h>
static void taken(int signal) {}
__attribute__((constructor)) static void take(void) { signal(SIGNAL, taken); }";

#[test]
fn libfabric_and_providers_leave_signal_dispositions_alone() {
    let test = "libfabric_and_providers_leave_signal_dispositions_alone";
    child::run(test, &[], || {
        let directory = of_process(std::env::temp_dir(), "ferrogin-signals");
        std::fs::create_dir_all(&directory).unwrap();
        let before = dispositions();
        for lib in libraries(test) {
            assert_eq!(dispositions(), before, "after loading {}", lib.path().display());
            if compile(&directory.join("libtaker-fi.so"), "SIGUSR1") {
                // SAFETY: this process runs one test, so no other thread uses the environment.
                unsafe { std::env::set_var("FI_PROVIDER_PATH", &directory) };
            }
            let _ = lib.getinfo(&Hints::new("taker"));
            assert_eq!(dispositions(), before, "after fi_getinfo of {}", lib.path().display());
        }
        let library = directory.join("libtaker.so");
        if compile(&library, "SIGUSR2") {
            assert!(Libfabric::load(Some(&library)).unwrap_err().to_string().contains("fi_getinfo"))
        } else {
            skip(test, "cc is not installed")
        }
        assert_eq!(dispositions(), before, "after the load of a library without symbols");
        std::fs::remove_dir_all(directory).unwrap();
    });
}

fn compile(library: &Path, signal: &str) -> bool {
    let source = library.with_extension("c");
    std::fs::write(&source, TAKES_SIGNAL.replace("SIGNAL", signal)).unwrap();
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-o"]).arg(library).arg(source);
    command.status().is_ok_and(|status| status.success())
}

/// Returns the handler of each signal that has a disposition.
fn dispositions() -> Vec<(i32, usize)> {
    let read = |signal| {
        // SAFETY: zeros are a valid struct.
        let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes to `found` and changes nothing.
        let code = unsafe { libc::sigaction(signal, std::ptr::null(), &mut found) };
        (code == 0).then_some((signal, found.sa_sigaction))
    };
    (1..=64).filter_map(read).collect()
}
