//! The system's libfabric.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ferrogin_libfabric::{Error, Libfabric};

/// Loads libfabric into the process, because providers call its functions. Without libfabric, `test` is skipped.
pub fn have_libfabric(test: &str) -> bool {
    static LOADED: OnceLock<Result<Arc<Libfabric>, Error>> = OnceLock::new();
    // This loader keeps the signal dispositions, so that SIGTERM ends the test program.
    let loaded = LOADED.get_or_init(|| Libfabric::load(None));
    if let Err(why) = loaded {
        super::skip(test, why);
    }
    loaded.is_ok()
}

/// The installed libfabric, and in `make check` also the one that FERROGIN_LIBFABRIC_ALT names. Reports a skip if the
/// first is missing.
pub fn libraries(test: &str) -> Vec<Arc<Libfabric>> {
    let mut found = Vec::new();
    match Libfabric::load(None) {
        Ok(lib) => found.push(lib),
        Err(error) => super::skip(test, error),
    }
    if let Some(path) = std::env::var_os("FERROGIN_LIBFABRIC_ALT") {
        found.push(Libfabric::load(Some(Path::new(&path))).expect("FERROGIN_LIBFABRIC_ALT loads"));
    }
    for lib in &found {
        println!("{test}: libfabric {} from {}", lib.version(), lib.path().display());
    }
    found
}

/// The file in FERROGIN_LIBFABRIC, if its own `efa` provider has operations for GPUs. Otherwise, `test` is skipped; no
/// system's package has such a libfabric today.
pub fn libfabric_for_gpus(test: &str) -> Option<PathBuf> {
    let offers = |path: &PathBuf| {
        let bytes = std::fs::read(path).unwrap_or_default();
        bytes.windows(11).any(|window| window == b"efa gda ops")
    };
    let found = std::env::var_os("FERROGIN_LIBFABRIC").map(PathBuf::from).filter(offers);
    if found.is_none() {
        super::skip(test, "FERROGIN_LIBFABRIC names no libfabric whose efa provider has operations for GPUs");
    }
    found
}
