//! What a probe writes to its parent.

use serde_json::{Value, json};

/// Begins each of a probe's lines.
pub const MARK: &str = "ferrogin-probe ";

/// The result of a probe, in the child.
pub type Outcome = Result<(), String>;

pub fn emit(key: &str, value: Value) {
    // The parent reports a missing result.
    let _ = crate::stdout::print(format_args!("\n{MARK}{}\n", json!([key, value])));
}
