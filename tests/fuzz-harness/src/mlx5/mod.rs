//! Entry points for arbitrary bytes: libFuzzer (`tests/fuzz/`) uses them, and so do the tests with the corpus and seeded bytes.
//!
//! Each entry point runs the bytes as a small program and checks the invariants. Only tests and the feature `fuzz` have this module.

mod completions;
mod requests;
#[cfg(test)]
mod tests;

pub use completions::completions;
pub use requests::requests;
