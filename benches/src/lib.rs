//! Instruction counts and rates, each next to its baseline.
//!
//! [`card`] is a device context in plain memory, whose card completes rung requests at once and at no cost.
//! [`nccl`] is NCCL's own device code, compiled for this processor, on the same context.

#[allow(unsafe_code)]
pub mod card;
#[allow(unsafe_code)]
pub mod nccl;

use std::io;
use std::path::{Path, PathBuf};

/// Returns the directory `name` in cargo's target directory, created if it doesn't exist.
///
/// # Errors
/// The directory cannot be created.
pub fn target_dir(name: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    // The program is in target/release/deps.
    let dir = program.ancestors().nth(3).unwrap_or(Path::new(".")).join(name);
    std::fs::create_dir_all(&dir)?;
    Ok(dir)
}
