//! Standard output, which may be full: the print macros would panic.

use std::fmt::Display;
use std::io::{self, Write};

/// A failed write.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct Error(#[from] io::Error);

/// Writes `text`.
///
/// # Errors
/// Standard output is full or cannot be written.
pub fn print(text: impl Display) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    // A single write, because several processes write.
    out.write_all(text.to_string().as_bytes())?;
    Ok(out.flush()?)
}
