//! The command line, and the settings that all ranks agree on.

use super::error::Error;
use super::operation::Operation;
use super::output::{Destination, Format};
use super::settings::{Device, Settings};
use super::statistics::bytes_text;
use std::path::PathBuf;

/// Largest size: the most that one EFA work request carries.
const LARGEST: u64 = 1 << 30;
/// The default range of sizes.
const DEFAULT_SIZES: (u64, u64) = (8, 1 << 20);
/// The name that stands for all operations.
const ALL: &str = "all";

#[derive(Debug, clap::Args)]
pub struct PerfArgs {
    /// Operations to measure, in this order; `all` means all of them.
    #[arg(required = true, value_name = "OPERATION", value_parser = operation_names())]
    operations: Vec<String>,
    /// Smallest size in bytes, optionally with a suffix K, M or G [default: 8].
    #[arg(short, long, value_name = "BYTES", value_parser = size)]
    begin: Option<u64>,
    /// Largest size in bytes [default: 1M].
    #[arg(short, long, value_name = "BYTES", value_parser = size)]
    end: Option<u64>,
    /// Ratio of each size to the one before.
    #[arg(short, long, default_value = "2", value_parser = factor)]
    factor: u64,
    /// Measured operations per thread and size [default: 10000, fewer above 16 KiB].
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: Option<u32>,
    /// Operations before the measured ones [default: a tenth of the iterations].
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    warmup: Option<u32>,
    /// Number of ranks [default: 2, or as many as mpirun or torchrun started].
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub ranks: Option<u32>,
    /// Threads that post on one context, on a GPU each in its own block; barrier and alltoall use one.
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Slots of a send queue, so how many posts may be outstanding before one waits; for rpc, concurrent calls per
    /// thread. A power of two.
    #[arg(short, long, default_value = "64", value_parser = depth)]
    depth: u32,
    /// Posts per burst, of which only the last rings the doorbell; for the rate.
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    aggregate: u32,
    /// Compares the data and signals that arrived with those that were sent, after each measurement.
    #[arg(long)]
    verify: bool,
    /// What posts: CPU threads, or PTX kernels on a GPU [default: FERROGIN_DEVICE, or cpu].
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Writes the results as JSON; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the results as CSV; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Plots latency and bandwidth against size.
    #[arg(long, value_name = "FILE.svg", value_parser = super::plot::svg_file())]
    plot: Option<PathBuf>,
}

impl PerfArgs {
    /// Returns the settings of these arguments.
    ///
    /// # Errors
    /// The sizes are not a range, or an operation has none of them; kernels cannot do the operation.
    pub fn settings(&self) -> Result<Settings, Error> {
        let usage = |text: String| Err(Error::Usage(text));
        let device = self.device.unwrap_or_else(|| match std::env::var("FERROGIN_DEVICE").as_deref() {
            Ok("cuda") => Device::Cuda,
            _ => Device::Cpu,
        });
        let (begin, end) = match (self.begin, self.end) {
            (None, None) => DEFAULT_SIZES,
            (Some(begin), None) => (begin, begin.max(DEFAULT_SIZES.1)),
            (None, Some(end)) => (end.min(DEFAULT_SIZES.0), end),
            (Some(begin), Some(end)) if begin > end => {
                let (begin, end) = (bytes_text(begin), bytes_text(end));
                return usage(format!(
                    "-b {begin} is above -e {end}: the smallest size comes first (-b {end} -e {begin})"
                ));
            }
            (Some(begin), Some(end)) => (begin, end),
        };
        let all = self.operations.iter().any(|name| name == ALL);
        let named = |operation: &Operation| all || self.operations.iter().any(|name| name == operation.name());
        let mut operations: Vec<_> = Operation::ALL.into_iter().filter(named).collect();
        if !all {
            operations.sort_by_key(|operation| self.operations.iter().position(|name| name == operation.name()));
        }
        let mut settings = Settings {
            operations,
            begin,
            end,
            factor: self.factor,
            iterations: self.iterations,
            warmup: self.warmup,
            threads: self.threads,
            depth: self.depth,
            aggregate: self.aggregate,
            verify: self.verify,
            device,
        };
        if device == Device::Cuda {
            if let (false, Some(operation)) = (all, settings.operations.iter().find(|operation| operation.is_of_cpus()))
            {
                let name = operation.name();
                return usage(format!("{name} runs between CPUs, not in kernels: leave out {name} or --device cuda"));
            }
            settings.operations.retain(|operation| !operation.is_of_cpus());
        }
        if settings.sizes(Operation::PutValue).is_empty() {
            if self.operations.iter().any(|name| name == Operation::PutValue.name()) {
                return usage(format!(
                    "put-value only has the sizes 1, 2, 4 and 8, and -b {} -e {} -f {} includes none of them: pass \
                     for example -b 1 -e 8, or leave put-value out",
                    bytes_text(begin),
                    bytes_text(end),
                    self.factor
                ));
            }
            settings.operations.retain(|operation| *operation != Operation::PutValue);
        }
        Ok(settings)
    }

    /// Returns the files to write.
    pub fn outputs(&self) -> Outputs {
        let files = [(&self.json, Format::Json), (&self.csv, Format::Csv), (&self.plot, Format::Svg)];
        let files = files.into_iter().filter_map(|(path, format)| Some((path.clone()?, format)));
        Outputs { files: files.collect() }
    }
}

/// The files to write.
pub struct Outputs {
    files: Vec<(PathBuf, Format)>,
}

impl Outputs {
    /// Checks what can be checked without measuring.
    ///
    /// # Errors
    /// Two outputs are standard output; a plot would be empty.
    pub fn check(&self, settings: &Settings) -> Result<(), Error> {
        if self.files.iter().filter(|(path, _)| path.as_os_str() == "-").count() > 1 {
            let text = "two outputs are standard output (-): write one of them to a file";
            return Err(Error::Usage(text.to_owned()));
        }
        let drawn = settings.operations.iter().any(|operation| operation.has_bytes());
        if !drawn && self.files.iter().any(|(_, format)| *format == Format::Svg) {
            let text = "--plot draws figures against sizes, and signal and barrier have none: add another operation, \
                        or leave --plot out";
            return Err(Error::Usage(text.to_owned()));
        }
        Ok(())
    }

    /// Checks, before a measurement, that the files can be written.
    ///
    /// # Errors
    /// A file cannot be opened.
    pub fn open(&self) -> Result<Vec<Destination>, Error> {
        self.files.iter().map(|(path, format)| Destination::open(path, *format)).collect()
    }
}

fn operation_names() -> clap::builder::PossibleValuesParser {
    Operation::ALL.map(Operation::name).into_iter().chain([ALL]).collect::<Vec<_>>().into()
}

/// Returns a size with an optional suffix.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => Some(1),
        "K" | "KB" | "KIB" => Some(1 << 10),
        "M" | "MB" | "MIB" => Some(1 << 20),
        "G" | "GB" | "GIB" => Some(1u64 << 30),
        _ => None,
    };
    let number = digits.parse::<u64>().ok().zip(unit);
    let (number, unit) =
        number.ok_or("a size is a whole number of bytes, optionally with a suffix K, M or G (of 1024)")?;
    match number.checked_mul(unit) {
        Some(bytes @ 1..=LARGEST) => Ok(bytes),
        _ => Err("a size is from 1 byte to 1G, the most that one work request carries".to_owned()),
    }
}

fn factor(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|factor| *factor >= 2);
    number.ok_or("a factor is a whole number of at least 2, so that the sizes grow".to_owned())
}

fn depth(text: &str) -> Result<u32, String> {
    let number = text.parse::<u32>().ok().filter(|depth| depth.is_power_of_two() && (1..=1024).contains(depth));
    number.ok_or("a depth is a power of two from 1 to 1024".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: PerfArgs,
    }

    fn settings(line: &str) -> Result<Settings, String> {
        let line = Line::try_parse_from(format!("perf {line}").split(' ')).map_err(|error| error.to_string())?;
        line.args.settings().map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_grow_from_begin_to_end() {
        let sizes = |line: &str| settings(line).unwrap().sizes(Operation::Put);
        assert_eq!(sizes("put -b 8 -e 64"), [8, 16, 32, 64]);
        assert_eq!(sizes("put -b 3 -e 1K -f 10"), [3, 30, 300]);
        assert_eq!(sizes("put -b 1g"), [1 << 30]);
        assert_eq!(sizes("put -e 4"), [4]);
        assert_eq!((sizes("put").first().copied(), sizes("put").last().copied()), (Some(8), Some(1 << 20)));
        assert_eq!(sizes("put -b 1G -e 1G -f 18446744073709551615"), [1 << 30]);
        let all = settings("all -b 1 -e 64").unwrap();
        assert_eq!(all.operations, Operation::ALL);
        assert_eq!(all.sizes(Operation::PutValue), [1, 2, 4, 8]);
        assert_eq!(all.sizes(Operation::Barrier), [0]);
    }

    #[test]
    fn operations_keep_their_order_and_come_once() {
        let operations = |line: &str| settings(line).unwrap().operations;
        assert_eq!(operations("rpc put put"), [Operation::Rpc, Operation::Put]);
        assert!(!operations("all -b 16").contains(&Operation::PutValue));
    }

    #[test]
    fn ranks_learn_the_first_difference() {
        let (a, b) = (settings("put get -b 1K").unwrap(), settings("put get -b 2K -n 7").unwrap());
        assert_eq!(a.difference(&a), None);
        let (name, theirs, ours) = a.difference(&b).unwrap();
        assert_eq!((&*name, &*theirs, &*ours), ("--begin", "2K", "1K"));
        let other = Settings { begin: 1024, ..b };
        let (name, theirs, ours) = a.difference(&other).unwrap();
        assert_eq!((&*name, &*theirs, &*ours), ("--iterations", "7", "its default"));
        let (name, theirs, ours) = a.difference(&settings("put -b 1K").unwrap()).unwrap();
        assert_eq!((&*name, &*theirs, &*ours), ("the operations", "put", "put get"));
    }
}
