//! Work requests with a meaning.
