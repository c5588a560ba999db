//! Tests that need their own environment.

use ferrogin_test_support::{child, have_libfabric};

/// Calls [`child::run`] if libfabric is installed.
pub fn run(name: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<String> {
    if !have_libfabric(name) {
        return None;
    }
    child::run(name, environment, body)
}
