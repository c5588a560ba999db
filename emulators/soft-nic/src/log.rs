//! Log lines on standard error. Each is one write, so that lines from several processes do not mix.

use std::fmt;
use std::io::Write;

/// Writes a line, and ignores errors.
pub fn line(what: fmt::Arguments<'_>) {
    let text = format!("{what}\n");
    let _ = std::io::stderr().write_all(text.as_bytes());
}
