//! The ferrogin command line tool.
fn main() {}
