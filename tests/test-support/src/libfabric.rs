//! libfabric as the system has it.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library;

/// Loads libfabric into the process, for providers take functions of it. Without libfabric `test` is skipped.
pub fn have_libfabric(test: &str) -> bool {
    static LOADED: OnceLock<Option<Library>> = OnceLock::new();
    // SAFETY: libfabric's constructors only register its built-in providers.
    let loaded = LOADED.get_or_init(|| unsafe { Library::new("libfabric.so.1") }.ok());
    if loaded.is_none() {
        super::skip(test, "libfabric.so.1 is not installed");
    }
    loaded.is_some()
}

/// The file in FERROGIN_LIBFABRIC, if its own `efa` provider has operations for GPUs. Without such a libfabric, which no package of a system has
/// today, `test` is skipped.
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
