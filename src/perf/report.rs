//! The results: a table, printed row by row, and a report as JSON, CSV or a plot.

use super::error::Error;
use super::machine::Machine;
use super::operation::Operation;
use super::settings::Settings;
use super::statistics::Latency;
use super::statistics::bytes_text;
use crate::doctor::VARIABLES;
use crate::stdout;
use nccl_gin_ferrogin::log::counted;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::Path;

/// The version of the JSON; docs/perf.schema.json describes it.
pub const VERSION: u32 = 1;

/// A run: its description, and a row for each operation and size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// The release of ferrogin.
    pub ferrogin: String,
    /// The network path and the machine.
    #[serde(flatten)]
    pub about: About,
    /// The options.
    pub settings: Settings,
    /// Rank 0's variables that affect ferrogin and the software card, without the launcher's.
    pub environment: std::collections::BTreeMap<String, String>,
    /// The figures.
    pub rows: Vec<Row>,
}

/// The network path and the machine of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The cards' libfabric provider.
    pub provider: String,
    /// The wire between the cards.
    pub wire: String,
    /// libfabric's version.
    pub libfabric: String,
    /// Rank 0's machine.
    pub machine: Machine,
    /// Rank 0's GPU, if kernels posted.
    #[serde(default)]
    pub gpu: Option<Gpu>,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of hosts.
    pub hosts: usize,
}

/// The GPU whose kernels posted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// The software GPU's release, whose times mean nothing; `None` for hardware.
    pub software: Option<String>,
}

impl About {
    /// Returns the software GPU's release, if it posted.
    pub fn software_gpu(&self) -> Option<&str> {
        self.gpu.as_ref()?.software.as_deref()
    }
}

/// The figures of one operation and size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The operation.
    pub operation: Operation,
    /// Bytes of one operation; 0 if it carries none.
    pub bytes: u64,
    /// Posting threads.
    pub threads: u32,
    /// Measured latencies.
    pub iterations: u64,
    /// Latencies in microseconds.
    pub latency_us: Latency,
    /// Millions of operations per second.
    pub rate_mops: f64,
    /// Bandwidth in 10^9 bytes per second, if the operation has one.
    pub bandwidth_gbs: Option<f64>,
}

impl Row {
    /// Makes a row. `blocks` is the number of blocks of `bytes` that one operation carries.
    pub fn new(
        operation: Operation,
        (bytes, blocks): (u64, usize),
        threads: u32,
        samples: Vec<u64>,
        rate_mops: f64,
    ) -> Self {
        Self {
            operation,
            bytes,
            threads,
            iterations: samples.len() as u64,
            latency_us: Latency::of(samples),
            rate_mops,
            bandwidth_gbs: operation.has_bandwidth().then_some(rate_mops * (bytes * blocks as u64) as f64 / 1e3),
        }
    }
}

impl Report {
    /// Returns a report without rows.
    pub fn new(about: About, settings: &Settings) -> Self {
        let matters = ["FERROGIN_POST", "FERROGIN_SIGNALS", "FERROGIN_LIBFABRIC", "SOFTEFA_", "SOFTGPU_", "FI_EFA_"];
        let names = VARIABLES.iter().filter(|name| matters.iter().any(|prefix| name.starts_with(prefix)));
        let variables = names.filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)));
        Self {
            version: VERSION,
            ferrogin: env!("CARGO_PKG_VERSION").to_owned(),
            about,
            settings: settings.clone(),
            environment: variables.collect(),
            rows: Vec::new(),
        }
    }

    /// Reads a report from a file.
    ///
    /// # Errors
    /// The file cannot be read, or is not a report of this version.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let failed = |text: String| Error::File { action: "read", path: path.to_owned(), text };
        let text = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
        let not_a_report = |error: serde_json::Error| {
            failed(format!("{error}. A report is a complete file written by `ferrogin perf --json FILE`"))
        };
        let json: serde_json::Value = serde_json::from_slice(&text).map_err(not_a_report)?;
        if let Some(version) = json["version"].as_u64().filter(|version| *version != u64::from(VERSION)) {
            return Err(failed(format!(
                "it is a report of version {version}, but this ferrogin reads version {VERSION}: use the ferrogin that wrote it"
            )));
        }
        serde_json::from_value(json).map_err(not_a_report)
    }

    /// Returns the report as JSON.
    ///
    /// # Errors
    /// A figure cannot be represented in JSON.
    pub fn json(&self) -> Result<String, Error> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(|error| Error::Usage(error.to_string()))
    }

    /// Returns the rows as CSV.
    pub fn csv(&self) -> String {
        let mut text =
            "operation,bytes,threads,iterations,min_us,median_us,p99_us,p999_us,max_us,rate_mops,bandwidth_gbs\n"
                .to_owned();
        for row in &self.rows {
            let latency = row.latency_us.all().map(|value| value.to_string()).join(",");
            let bandwidth = row.bandwidth_gbs.map_or(String::new(), |value| value.to_string());
            let Row { bytes, threads, iterations, rate_mops, .. } = row;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{},{bytes},{threads},{iterations},{latency},{rate_mops},{bandwidth}",
                row.operation.name()
            );
        }
        text
    }
}

/// Prints the table on standard output, and the progress on a terminal.
pub struct Printer {
    prints: bool,
    /// Whether to show progress on standard error, which is a terminal.
    progress: bool,
    done: usize,
    total: usize,
}

impl Printer {
    /// `prints` is true on the rank that prints.
    pub fn new(prints: bool, settings: &Settings) -> Self {
        let total = settings.operations.iter().map(|operation| settings.sizes(*operation).len()).sum();
        Self { prints, progress: prints && std::io::stderr().is_terminal(), done: 0, total }
    }

    /// Prints the lines before the first table.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn begin(&self, report: &Report) -> Result<(), Error> {
        if !self.prints {
            return Ok(());
        }
        let Report { ferrogin, about, settings, environment, .. } = report;
        let Machine { processor, cores, linux, .. } = &about.machine;
        let device = about.gpu.as_ref().map_or("CPU threads".to_owned(), |gpu| format!("kernels on {}", gpu.name));
        let mut text = format!(
            "# ferrogin {ferrogin}: provider {} over {}, posts by {device}\n\
             # {} on {}; libfabric {}\n\
             # {processor}, {}, Linux {linux}\n\
             # threads {}, depth {}, aggregation {}, {}\n",
            about.provider,
            about.wire,
            counted(about.ranks, "rank"),
            counted(about.hosts, "host"),
            about.libfabric,
            counted(*cores, "core"),
            settings.threads,
            settings.depth,
            settings.aggregate,
            if settings.verify { "data verified" } else { "data not verified" }
        );
        for (name, value) in environment {
            text += &format!("# {name}={value}\n");
        }
        if let Some(version) = about.software_gpu() {
            text += &format!("# The software GPU {version} interprets the kernels: these are not a GPU's times.\n");
        }
        if about.provider == "softefa" {
            text += "# The software card runs on the ranks' cores: these are not EFA's figures.\n";
        }
        Ok(stdout::print(text)?)
    }

    /// Prints an operation's heading.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn operation(&self, operation: Operation) -> Result<(), Error> {
        if !self.prints {
            return Ok(());
        }
        let columns = format!(
            "{:>10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}",
            "bytes", "count", "min us", "med. us", "p99 us", "p99.9 us", "max us", "Mops/s", "GB/s"
        );
        let about = operation.latency().replace("; ", "\n  ");
        Ok(stdout::print(format_args!("\n{}: {about}\n{columns}\n", operation.name()))?)
    }

    /// Shows that a measurement begins.
    pub fn measuring(&self, operation: Operation, bytes: u64) {
        if self.progress {
            const WIDTH: usize = 24;
            let filled = WIDTH * self.done / self.total.max(1);
            let bar = format!("{}{}", "=".repeat(filled), " ".repeat(WIDTH - filled));
            eprint!("\r\x1b[K[{bar}] {}/{} {} {}", self.done, self.total, operation.name(), bytes_text(bytes));
        }
    }

    /// Prints a line of the table.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn row(&mut self, row: &Row) -> Result<(), Error> {
        self.done += 1;
        if self.progress {
            eprint!("\r\x1b[K");
        }
        if self.prints {
            stdout::print(format_args!("{}\n", line(row)))?;
        }
        Ok(())
    }
}

/// Formats a row as a line of the table.
fn line(row: &Row) -> String {
    // A wait lasts at most 30 s, so whole microseconds fit where decimals would not.
    let [min, median, p99, p999, max] =
        row.latency_us.all().map(|us| if us < 1e5 { format!("{us:.2}") } else { format!("{us:.0}") });
    let rate = if row.rate_mops < 0.01 { format!("{:.6}", row.rate_mops) } else { format!("{:.4}", row.rate_mops) };
    let bandwidth = row.bandwidth_gbs.map_or("-".to_owned(), |value| match value {
        ..10.0 => format!("{value:.4}"),
        ..100.0 => format!("{value:.3}"),
        _ => format!("{value:.2}"),
    });
    let bytes = if row.operation.has_bytes() { row.bytes.to_string() } else { "-".to_owned() };
    format!(
        "{bytes:>10} {:>8} {min:>8} {median:>8} {p99:>8} {p999:>8} {max:>8} {rate:>8} {bandwidth:>6}",
        row.iterations
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_only_if_exact() {
        assert_eq!([8, 1024, 1536, 1 << 20, 3 << 30].map(bytes_text), ["8", "1K", "1536", "1M", "3G"]);
    }

    #[test]
    fn columns_are_aligned() {
        let row = |operation: Operation, bytes, samples| line(&Row::new(operation, (bytes, 1), 1, samples, 0.5));
        let small = row(Operation::Put, 8, vec![1000]);
        let large = row(Operation::PutSignal, 1 << 20, vec![123_456_789, 30_000_000_000]);
        let without = row(Operation::Barrier, 0, vec![5]);
        assert!(small.len() == large.len() && small.len() == without.len(), "{small}\n{large}\n{without}");
        assert!(large.len() == 80, "{large}");
        assert!(without.trim_start().starts_with('-') && without.ends_with('-'), "{without}");
    }
}
