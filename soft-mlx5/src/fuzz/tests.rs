//! The corpus and seeded bytes: inputs that a fuzzer found are checked in every run.

use ferrogin_test_support::replay;

#[test]
fn completions() {
    replay("mlx5_cq", super::completions);
}

#[test]
fn requests() {
    replay("mlx5_requests", super::requests);
}
