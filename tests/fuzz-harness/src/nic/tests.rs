//! The corpus and seeded bytes: inputs that a fuzzer found are checked in every run.

use ferrogin_test_support::replay;

#[test]
fn rings_of_any_bytes_keep_invariants() {
    replay("rings", super::rings);
}

#[test]
fn wires_of_any_bytes_keep_invariants() {
    replay("wires", super::wires);
}

#[test]
fn settings_of_any_bytes_are_in_range_or_refused() {
    replay("settings", super::settings);
}

#[test]
fn parsed_formats_round_trip() {
    replay("formats", super::formats);
}
