//! Lines for people, on standard error: one write each, so that those of several processes do not mix.

use std::fmt;
use std::io::Write;

/// Writes `softefa...` lines; a closed standard error is no reason to fail.
pub fn line(what: fmt::Arguments<'_>) {
    let text = format!("{what}\n");
    let _ = std::io::stderr().write_all(text.as_bytes());
}
