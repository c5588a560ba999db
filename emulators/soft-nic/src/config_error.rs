//! The error for an invalid setting.

use std::borrow::Cow;

/// An environment variable with an invalid value.
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
    /// Creates an error for `variable` with `value`.
    pub fn new(variable: impl Into<Cow<'static, str>>, value: &str, problem: impl Into<String>) -> Self {
        Self { variable: variable.into(), value: value.to_owned(), problem: problem.into() }
    }
}
