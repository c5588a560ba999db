//! The libraries that the tests run with.

use std::path::Path;
use std::sync::Arc;

use ferrogin_libfabric::Libfabric;

/// The installed libfabric, and the one in FERROGIN_LIBFABRIC_ALT. Prints which one is missing.
pub fn libraries(test: &str) -> Vec<Arc<Libfabric>> {
    let mut found = Vec::new();
    match Libfabric::load(None) {
        Ok(lib) => found.push(lib),
        Err(error) => println!("SKIP {test}: {error}"),
    }
    match std::env::var_os("FERROGIN_LIBFABRIC_ALT") {
        Some(path) => found.push(Libfabric::load(Some(Path::new(&path))).expect("FERROGIN_LIBFABRIC_ALT loads")),
        None => println!("SKIP {test} on a second libfabric: FERROGIN_LIBFABRIC_ALT names none"),
    }
    for lib in &found {
        println!("{test}: libfabric {} from {}", lib.version(), lib.path().display());
    }
    found
}
