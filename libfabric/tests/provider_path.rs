//! Naming a provider directory: before the first question to libfabric, or not at all. One test, in a process of its own, because
//! the environment and libfabric's initialisation are the process's.
#![allow(unsafe_code)]

mod common;

use std::path::Path;

use common::libraries;
use ferrogin_libfabric::{Error, Hints};

#[test]
fn provider_directory_comes_first_or_too_late() {
    for lib in libraries("provider_directory_comes_first_or_too_late") {
        let dir = std::env::temp_dir();
        // SAFETY: this process has one test, so no other thread uses the environment.
        unsafe { lib.use_provider_dir(&dir) }.unwrap();
        let path = std::env::var("FI_PROVIDER_PATH").unwrap();
        assert!(Path::new(path.split(':').next().unwrap()) == dir, "{path}");

        let error = lib.getinfo(&Hints::new("softefa")).unwrap_err();
        assert!(matches!(error, Error::ProviderNotLoaded { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("softefa") && text.contains(&format!("FI_PROVIDER_PATH={}", dir.display())), "{text}");

        // The same directory again is no change; another one comes too late.
        // SAFETY: as above.
        unsafe { lib.use_provider_dir(&dir) }.unwrap();
        // SAFETY: as above.
        let error = unsafe { lib.use_provider_dir(Path::new("/nonexistent")) }.unwrap_err();
        assert!(matches!(error, Error::TooLateForProviderDir { .. }), "{error}");
        assert!(error.to_string().contains("FI_PROVIDER_PATH=/nonexistent"), "{error}");
        // What this library has read must not count for the next.
        // SAFETY: as above.
        unsafe { std::env::remove_var("FI_PROVIDER_PATH") };
    }
}
