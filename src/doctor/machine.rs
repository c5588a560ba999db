//! The checks' inputs.

use std::path::PathBuf;
use std::time::Duration;

/// The checks' inputs.
pub struct Machine {
    pub root: PathBuf,
    /// FERROGIN_PROVIDER, or its default.
    pub provider: String,
    /// The directory of the software card's libraries, if this process runs under `ferrogin verbs`.
    pub verbs: Option<PathBuf>,
    pub nccl: String,
    pub limit: Duration,
}

impl Machine {
    /// Returns a path below the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub fn read(&self, path: &str) -> Option<String> {
        Some(std::fs::read_to_string(self.path(path)).ok()?.trim().to_owned())
    }

    /// Returns whether the card is libfabric's provider softefa.
    pub fn is_software_card(&self) -> bool {
        self.provider == "softefa"
    }

    /// Returns whether the card is software: provider softefa, or below verbs.
    pub fn has_software_card(&self) -> bool {
        self.is_software_card() || self.verbs.is_some()
    }
}

/// Returns a variable's value; `None` if it is unset or empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()).filter(|value| !value.is_empty())
}
