//! The error of a setting.

use std::borrow::Cow;

/// A variable of the environment with a value that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value:?}: {problem}")]
pub struct ConfigError {
    /// The variable.
    pub variable: Cow<'static, str>,
    /// Its value.
    pub value: String,
    /// The problem, and the valid values.
    pub problem: String,
}

impl ConfigError {
    /// An error of `variable` with `value`.
    pub fn new(variable: impl Into<Cow<'static, str>>, value: &str, problem: impl Into<String>) -> Self {
        Self { variable: variable.into(), value: value.to_owned(), problem: problem.into() }
    }
}
