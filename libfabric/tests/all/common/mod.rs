//! The libraries that the tests run with.

use std::path::Path;
use std::sync::Arc;

use ferrogin_libfabric::Libfabric;

/// The installed libfabric, and the one that FERROGIN_LIBFABRIC_ALT names, in `make check`. Without the first, the test is skipped on it.
pub fn libraries(test: &str) -> Vec<Arc<Libfabric>> {
    let mut found = Vec::new();
    match Libfabric::load(None) {
        Ok(lib) => found.push(lib),
        Err(error) => ferrogin_test_support::skip(test, error),
    }
    if let Some(path) = std::env::var_os("FERROGIN_LIBFABRIC_ALT") {
        found.push(Libfabric::load(Some(Path::new(&path))).expect("FERROGIN_LIBFABRIC_ALT loads"));
    }
    for lib in &found {
        println!("{test}: libfabric {} from {}", lib.version(), lib.path().display());
    }
    found
}
