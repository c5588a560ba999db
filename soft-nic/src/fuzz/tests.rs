//! The corpus and seeded bytes: inputs that a fuzzer found are checked in every run.

use ferrogin_test_support::replay;

#[test]
fn rings() {
    replay("rings", super::rings);
}

#[test]
fn wires() {
    replay("wires", super::wires);
}

#[test]
fn settings() {
    replay("settings", super::settings);
}

#[test]
fn formats() {
    replay("formats", super::formats);
}
