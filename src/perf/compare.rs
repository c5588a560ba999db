//! `ferrogin compare`: the ratios between two reports.

use super::error::Error;
use super::report::{Report, Row};
use super::statistics::bytes_text;
use crate::stdout;
use nccl_gin_ferrogin::log::counted;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit code for reports that cannot be compared.
const REFUSED: u8 = 3;
/// The exit code for a figure below `--fail-below`.
const WORSE: u8 = 4;

#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// The baseline report.
    before: PathBuf,
    /// The report to compare with it; ratios are AFTER divided by BEFORE.
    after: PathBuf,
    /// Fails (exit code 4) if a median latency or a rate in AFTER is worse than this fraction of BEFORE: 0.9 allows 10
    /// %.
    #[arg(long, value_name = "RATIO", value_parser = part)]
    fail_below: Option<f64>,
}

fn part(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| *number > 0.0 && *number <= 1.0);
    number.ok_or("a ratio is a number above 0 and at most 1, such as 0.9".to_owned())
}

/// Prints a line for each operation and size that is in both reports.
pub fn run(args: &CompareArgs) -> Result<ExitCode, Error> {
    let (before, after) = (Report::read(&args.before)?, Report::read(&args.after)?);
    if let Some(reason) = refusal(&before, &after) {
        eprintln!("ferrogin: {} and {} cannot be compared: {reason}", args.before.display(), args.after.display());
        return Ok(REFUSED.into());
    }
    let mut text = format!("# before: {}\n# after: {}\n", describe(&before), describe(&after));
    if before.about.software_gpu().is_some() {
        text += "# the software GPU posted: neither these times nor their ratios are a GPU's\n";
    }
    text += "# ratios are after / before: below 1 a latency is better, above 1 a rate\n";
    text += &format!(
        "{:<10} {:>4} {:>7} {:>7} {:>5} {:>7} {:>7} {:>5} {:>7} {:>6} {:>5}\n",
        "operation", "size", "med. us", "after", "ratio", "p99 us", "after", "ratio", "Mops/s", "after", "ratio"
    );
    for (old, new) in pairs(&before, &after) {
        let figures = [
            (old.latency_us.median, new.latency_us.median),
            (old.latency_us.p99, new.latency_us.p99),
            (old.rate_mops, new.rate_mops),
        ];
        let [median, p99, rate] = figures.map(|(old, new)| (figure(old), figure(new), ratio(old, new)));
        let bytes = if old.operation.has_bytes() { bytes_text(old.bytes) } else { "-".to_owned() };
        text += &format!("{:<10} {bytes:>4} {:>7} {:>7} {:>5} ", old.operation.name(), median.0, median.1, median.2);
        text += &format!("{:>7} {:>7} {:>5} {:>7} {:>6} {:>5}\n", p99.0, p99.1, p99.2, rate.0, rate.1, rate.2);
    }
    let only = before.rows.len() + after.rows.len() - 2 * pairs(&before, &after).count();
    if only > 0 {
        text += &format!("# rows that only one report has: {only}\n");
    }
    let worst = pairs(&before, &after).filter_map(|(old, new)| {
        let (latency, rate) = (old.latency_us.median / new.latency_us.median, new.rate_mops / old.rate_mops);
        [("median latency", latency), ("rate", rate)]
            .into_iter()
            .filter(|(_, part)| part.is_finite())
            .map(|(name, part)| (part, format!("the {name} of {}, {} bytes", new.operation.name(), new.bytes)))
            .min_by(|one, other| one.0.total_cmp(&other.0))
    });
    let worst = worst.min_by(|one, other| one.0.total_cmp(&other.0));
    stdout::print(text)?;
    match (args.fail_below, worst) {
        (Some(least), Some((part, what))) if part < least => {
            eprintln!("ferrogin: {what}: {part:.2} of before, below --fail-below {least}");
            Ok(WORSE.into())
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Formats a figure with at least four digits.
fn figure(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("{value:.3}"),
        value if value < 1000.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

fn ratio(old: f64, new: f64) -> String {
    if old > 0.0 { format!("{:.2}", new / old) } else { "-".to_owned() }
}

fn pairs<'a>(before: &'a Report, after: &'a Report) -> impl Iterator<Item = (&'a Row, &'a Row)> {
    let same = |old: &&Row, new: &Row| old.operation == new.operation && old.bytes == new.bytes;
    after.rows.iter().filter_map(move |new| Some((before.rows.iter().find(|old| same(old, new))?, new)))
}

/// Returns why two runs cannot be compared: they answer different questions.
fn refusal(before: &Report, after: &Report) -> Option<String> {
    let (a, b) = (&before.settings, &after.settings);
    let differences = [
        ("ranks", before.about.ranks.to_string(), after.about.ranks.to_string()),
        ("--threads", a.threads.to_string(), b.threads.to_string()),
        ("--depth", a.depth.to_string(), b.depth.to_string()),
        ("--aggregate", a.aggregate.to_string(), b.aggregate.to_string()),
        ("--device", format!("{:?}", a.device), format!("{:?}", b.device)),
        ("the GPU", kind(before), kind(after)),
        ("provider", before.about.provider.clone(), after.about.provider.clone()),
        ("faults", faults(before), faults(after)),
    ];
    let difference = differences.into_iter().find(|(_, old, new)| old != new);
    if let Some((name, old, new)) = difference {
        return Some(format!("{name} {old} and {new}. Measure both with the same"));
    }
    let none = pairs(before, after).next().is_none();
    none.then(|| {
        "they have no operation and size in common. Measure both with the same operations and sizes".to_owned()
    })
}

fn kind(report: &Report) -> String {
    match &report.about.gpu {
        None => "none".to_owned(),
        Some(gpu) => if gpu.software.is_some() { "software" } else { "hardware" }.to_owned(),
    }
}

fn faults(report: &Report) -> String {
    report
        .environment
        .get("SOFTEFA_FAULTS")
        .filter(|faults| !faults.is_empty())
        .map_or("none".to_owned(), String::clone)
}

/// Describes what may differ between comparable runs.
fn describe(report: &Report) -> String {
    let about = &report.about;
    let gpu = about.gpu.as_ref().map_or(String::new(), |gpu| format!(", {}", gpu.name));
    let environment: String = report.environment.iter().map(|(name, value)| format!("\n#   {name}={value}")).collect();
    format!(
        "ferrogin {}, {} over {}, {} on {}, libfabric {}{gpu}\n#   {}, {}, Linux {}{environment}",
        report.ferrogin,
        about.provider,
        about.wire,
        counted(about.ranks, "rank"),
        counted(about.hosts, "host"),
        about.libfabric,
        about.machine.processor,
        counted(about.machine.cores, "core"),
        about.machine.linux,
    )
}
