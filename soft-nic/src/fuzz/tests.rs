//! The corpus and seeded bytes: what a fuzzer found stays fixed.

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
