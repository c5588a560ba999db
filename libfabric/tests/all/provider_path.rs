//! A provider directory only counts before the first call to libfabric. The test runs in a child process, because the
//! environment and libfabric's initialisation are per process.
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::Arc;

use ferrogin_libfabric::{Error, Hints, Libfabric};
use ferrogin_test_support::child::run;
use ferrogin_test_support::libraries;

#[test]
fn provider_directory_after_getinfo_is_refused() {
    let test = "provider_directory_after_getinfo_is_refused";
    let libraries = libraries(test);
    run(test, &[], || name_directories(&libraries));
}

fn name_directories(libraries: &[Arc<Libfabric>]) {
    for lib in libraries {
        let dir = std::env::temp_dir();
        // SAFETY: this process runs one test, so no other thread uses the environment.
        unsafe { lib.use_provider_dir(&dir) }.unwrap();
        let path = std::env::var("FI_PROVIDER_PATH").unwrap();
        assert!(Path::new(path.split(':').next().unwrap()) == dir, "{path}");

        let error = lib.getinfo(&Hints::new("softefa")).unwrap_err();
        assert!(matches!(error, Error::ProviderNotLoaded { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("softefa") && text.contains(&format!("FI_PROVIDER_PATH={}", dir.display())), "{text}");

        // The same directory again is accepted; another one is refused.
        // SAFETY: this process has one test, so no other thread uses the environment.
        unsafe { lib.use_provider_dir(&dir) }.unwrap();
        // SAFETY: this process has one test, so no other thread uses the environment.
        let error = unsafe { lib.use_provider_dir(Path::new("/nonexistent")) }.unwrap_err();
        assert!(matches!(error, Error::TooLateForProviderDir { .. }), "{error}");
        assert!(error.to_string().contains("FI_PROVIDER_PATH=/nonexistent"), "{error}");
        // The next library must not find this one's directory.
        // SAFETY: this process has one test, so no other thread uses the environment.
        unsafe { std::env::remove_var("FI_PROVIDER_PATH") };
    }
}
