//! libfabric as the system has it.
#![allow(unsafe_code)]

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
