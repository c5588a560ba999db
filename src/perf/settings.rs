//! The settings that all ranks agree on.

use super::operation::{Operation, barrier_rounds};
use super::statistics::bytes_text;
use clap::ValueEnum;
use scenario_runner::timed::repetitions;
use serde::{Deserialize, Serialize};

/// Iterations for small operations.
const DEFAULT_ITERATIONS: u32 = 10_000;

/// The processor that posts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// CPU threads.
    Cpu,
    /// Kernels on a GPU.
    Cuda,
}

impl Device {
    /// Returns its value for FERROGIN_DEVICE.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// What all ranks have in common. The fields are named after the options.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The operations, in order.
    pub operations: Vec<Operation>,
    /// Smallest size.
    pub begin: u64,
    /// Largest size.
    pub end: u64,
    /// Ratio of each size to the previous one.
    pub factor: u64,
    /// Iterations per size; `None` for the default, which depends on the size.
    pub iterations: Option<u32>,
    /// Warm-up iterations; `None` for a tenth of the iterations.
    pub warmup: Option<u32>,
    /// Posting threads.
    pub threads: u32,
    /// Send queue slots.
    pub depth: u32,
    /// Posts per burst.
    pub aggregate: u32,
    /// Whether data is verified.
    pub verify: bool,
    /// The processor that posts.
    pub device: Device,
}

/// How often an operation is repeated: before it is measured, and measured.
#[derive(Debug, Clone, Copy, Default)]
pub struct Iterations {
    pub warmup: u32,
    pub measured: u32,
}

impl Iterations {
    pub const fn all(self) -> u32 {
        self.warmup + self.measured
    }
}

impl Settings {
    /// Returns an operation's sizes, in order: just 0 if it carries no bytes.
    pub fn sizes(&self, operation: Operation) -> Vec<u64> {
        if !operation.has_bytes() {
            return vec![0];
        }
        let next = |size: &u64| size.checked_mul(self.factor);
        let sizes = std::iter::successors(Some(self.begin), next).take_while(|size| *size <= self.end);
        sizes.filter(|size| operation != Operation::PutValue || [1, 2, 4, 8].contains(size)).collect()
    }

    /// Returns the iterations of an operation with `bytes`.
    pub fn iterations(&self, bytes: u64) -> Iterations {
        let measured = self.iterations.unwrap_or_else(|| repetitions(DEFAULT_ITERATIONS, bytes));
        Iterations { warmup: self.warmup.unwrap_or(measured / 10), measured }
    }

    /// Returns the first option whose values differ: its name, the other rank's value, and this rank's.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let fields = |settings: &Self| match serde_json::to_value(settings) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => serde_json::Map::new(),
        };
        let theirs = fields(other);
        let text = |name: &str, value: &serde_json::Value| match (name, value) {
            (_, serde_json::Value::Null) => "its default".to_owned(),
            ("begin" | "end", value) => bytes_text(value.as_u64().unwrap_or(0)),
            (_, value) => value.to_string().replace(['"', '[', ']'], "").replace(',', " "),
        };
        fields(self).iter().find(|(name, value)| theirs.get(*name) != Some(value)).map(|(name, ours)| {
            let option = if name == "operations" { "the operations".to_owned() } else { format!("--{name}") };
            (option, text(name, &theirs[name]), text(name, ours))
        })
    }

    /// Signals that a context needs for the operations.
    pub fn signals(&self, ranks: usize) -> u32 {
        let of = |operation: &Operation| match operation {
            Operation::PutSignal | Operation::PutValue | Operation::Signal => self.threads,
            Operation::Barrier => barrier_rounds(ranks as u32),
            Operation::Alltoall => 2,
            Operation::Put | Operation::Get | Operation::Flush => 0,
            Operation::Rpc | Operation::RmaPut | Operation::RmaPutSignal => 0,
        };
        self.operations.iter().map(of).max().unwrap_or(0)
    }
}
