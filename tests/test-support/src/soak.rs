//! The size of tests that repeat a scenario.

/// Returns whether this is a soak run (`FERROGIN_SOAK=1`), in which tests have their full size.
pub fn soak() -> bool {
    std::env::var_os("FERROGIN_SOAK").is_some_and(|value| value == "1")
}

/// A number of repetitions: the value of `variable`, or `full` in a soak run, or `usual`.
///
/// # Panics
/// If the value is not a number.
pub fn repetitions(variable: &str, usual: u64, full: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text:?} is not a number")),
        Err(_) if soak() => full,
        Err(_) => usual,
    }
}
