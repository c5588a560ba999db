//! The corpus and seeded bytes: inputs that a fuzzer found are checked in every run.

use ferrogin_test_support::replay;

#[test]
fn completions_of_any_bytes_keep_invariants() {
    replay("mlx5_cq", super::completions);
}

#[test]
fn requests_of_any_bytes_stay_in_registered_memory() {
    replay("mlx5_requests", super::requests);
}
