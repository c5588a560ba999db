//! Checks that load foreign libraries, each in a child process of this program: a crash, a hang or a flood of output
//! ends only the child.
//!
//! The child writes a line for each step that it begins and for each result; `MARK` sets them apart from what libraries
//! print.

mod exchange;
#[allow(unsafe_code)]
mod gpu;
mod library;
mod outcome;

use crate::child::{self, Ended};
use crate::mlx5_cards::{self, Report};
use clap::Subcommand;
use outcome::{MARK, emit};
use serde_json::{Value, json};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// The hidden subcommands of `ferrogin probe`.
#[derive(Debug, Subcommand)]
pub enum Probe {
    /// NCCL's calls to the plugin, and an exchange of this process with itself.
    Plugin {
        /// Ends after `init`.
        #[arg(long)]
        init: bool,
    },
    /// NCCL's calls to the RMA plugin, and a put of this process to itself.
    Rma {
        /// Its path, or its name as in NCCL_RMA_PLUGIN.
        plugin: String,
    },
    /// libfabric and its providers.
    Libfabric,
    /// The GPUs.
    Gpu,
    /// The mlx5 cards.
    Mlx5,
    /// NCCL's library.
    Nccl {
        /// Its name or path.
        library: String,
    },
}

/// Runs a probe in this process, the child.
pub fn run(probe: &Probe, limit: Duration) -> ExitCode {
    child::end_with_parent(limit + Duration::from_secs(5));
    let outcome = match probe {
        Probe::Plugin { init } => exchange::run(*init),
        Probe::Rma { plugin } => exchange::rma(plugin),
        Probe::Libfabric => library::libfabric(),
        Probe::Gpu => gpu::list(emit),
        Probe::Mlx5 => {
            for entry in mlx5_cards::report() {
                match entry {
                    Report::Line(text) => emit("line", json!(text)),
                    Report::Fix(text) => emit("fix", json!(text)),
                }
            }
            Ok(())
        }
        Probe::Nccl { library } => library::nccl(library),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            emit("error", json!(error));
            ExitCode::FAILURE
        }
    }
}

/// A probe that has ended, in the parent.
#[derive(Debug)]
pub struct Probed {
    pub ended: Ended,
    results: Vec<(String, Value)>,
}

impl Probed {
    /// Returns a key's values, in order.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a Value> {
        self.results.iter().filter(move |(name, _)| name == key).map(|(_, value)| value)
    }

    /// Returns a key's first value as text; empty if there is none.
    pub fn text(&self, key: &str) -> String {
        self.all(key).next().and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    /// Returns a key's values that are texts.
    pub fn texts(&self, key: &str) -> Vec<String> {
        self.all(key).filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Returns the reason for a failure: the probe's error, or how and where the child ended. `None` after success.
    pub fn failure(&self) -> Option<String> {
        let end = self.ended.failure()?;
        if let Some(error) = self.all("error").next().and_then(Value::as_str) {
            return Some(error.to_owned());
        }
        let step = self.texts("step").pop().map_or(String::new(), |step| format!(" while it was {step}"));
        Some(format!("the check ran in a child process{step}, and {end}"))
    }
}

/// Runs `ferrogin probe ARGUMENTS` in a child process, with additional environment variables.
pub fn start(arguments: &[&str], environment: &[(&str, &str)], limit: Duration) -> Probed {
    let ended = child::this_program().map(|mut command: Command| {
        command.args(["probe", "--limit", &limit.as_secs().to_string()]).args(arguments);
        command.env("NCCL_DEBUG", "NONE").envs(environment.iter().copied());
        child::run(command, limit)
    });
    let ended = ended.unwrap_or_else(|reason| Ended {
        end: child::End::Unknown(reason),
        stdout: String::new(),
        stderr: String::new(),
    });
    let lines = ended.stdout.lines().filter_map(|line| line.strip_prefix(MARK));
    let results = lines.filter_map(|line| serde_json::from_str::<(String, Value)>(line).ok()).collect();
    Probed { ended, results }
}
