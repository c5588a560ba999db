//! Latencies and rates, measured between ranks 0 and 1.

use crate::RunError;
use crate::plan::{Measured, Operation, Plan, Program};
use crate::step::Step;
use crate::timed::{percentile, repetitions};
use crate::world::World;
use std::fmt::Write;

/// One line of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The operation.
    pub operation: String,
    /// Bytes per operation.
    pub bytes: u32,
    /// One-way latency in nanoseconds: median and 99th percentile. `None` if only the rate is meaningful.
    pub latency_ns: Option<(u64, u64)>,
    /// Operations per second in a stream.
    pub rate: f64,
}

/// Sizes of the measured puts.
const SIZES: [u32; 6] = [8, 64, 512, 4 << 10, 64 << 10, 1 << 20];

/// Collective: measures all rows, with about `reps` repetitions of small operations; rank 0 gets the rows.
///
/// # Errors
/// An operation fails.
pub fn table(world: &World, reps: u32) -> Result<Vec<Row>, RunError> {
    let reps = reps.clamp(100, 100_000) / 8 * 8;
    let mut rows = Vec::new();
    let latency = one_way(world, Operation::PutValue, 8, reps)?;
    let rate = stream(world, Operation::PutValue, 8, 1, reps * 4)?;
    rows.push(Row { operation: "putValue".into(), bytes: 8, latency_ns: Some(latency), rate });
    let rate = stream(world, Operation::PutValue, 8, 8, reps * 4)?;
    rows.push(Row { operation: "putValue, 8 aggregated".into(), bytes: 8, latency_ns: None, rate });
    for bytes in SIZES {
        let reps = repetitions(reps, bytes.into());
        let latency = one_way(world, Operation::PutSignal, bytes, reps)?;
        let rate = stream(world, Operation::PutSignal, bytes, 1, reps)?;
        rows.push(Row { operation: "put with signal".into(), bytes, latency_ns: Some(latency), rate });
    }
    Ok(rows)
}

fn plan(world: &World, program: Program, operation: Operation, bytes: u32, reps: u32) -> Plan {
    let plan = world.plan(&Step::new(program), reps, 0);
    let (rank, peer) = (plan.rank, 1 - plan.rank.min(1));
    let (from, to, inbox) = (plan.outbox(), plan.inbox(rank), plan.inbox(peer));
    let measured = Measured { operation, raised: rank, awaited: peer, from, to, inbox, ..Measured::default() };
    Plan { bytes, measured, ..plan }
}

/// Returns the median and 99th percentile of the latency.
fn one_way(world: &World, operation: Operation, bytes: u32, reps: u32) -> Result<(u64, u64), RunError> {
    let warmup = reps / 10;
    let mut samples = vec![0u64; reps as usize];
    let plan = Plan {
        warmup,
        samples: samples.as_mut_ptr(),
        ..plan(world, Program::Latency, operation, bytes, reps + warmup)
    };
    world.run("measurement", &[plan])?;
    samples.sort_unstable();
    Ok((percentile(&samples, 500), percentile(&samples, 990)))
}

/// Operations per second on rank 0, from the first post after the warm-up to the end of the flush.
fn stream(world: &World, operation: Operation, bytes: u32, burst: u32, reps: u32) -> Result<f64, RunError> {
    let warmup = reps / 10;
    let plan = Plan { warmup, burst, ..plan(world, Program::Stream, operation, bytes, reps + warmup) };
    let reports = world.run("measurement", &[plan])?;
    let elapsed = reports.iter().map(|report| report.measured).max().unwrap_or(0).max(1);
    Ok(f64::from(reps) * 1e9 / elapsed as f64)
}

/// Returns the table as text.
pub fn render(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<24} {:>9} {:>11} {:>11} {:>11} {:>9}\n",
        "operation", "bytes", "median us", "p99 us", "ops/s", "MB/s"
    );
    for row in rows {
        let (median, p99) = match row.latency_ns {
            Some((median, p99)) => (microseconds(median), microseconds(p99)),
            None => ("-".into(), "-".into()),
        };
        let bandwidth = row.rate * f64::from(row.bytes) / 1e6;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<24} {:>9} {median:>11} {p99:>11} {:>11.0} {bandwidth:>9.1}",
            row.operation, row.bytes, row.rate
        );
    }
    text
}

fn microseconds(nanoseconds: u64) -> String {
    format!("{:.2}", nanoseconds as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_line_for_each_row() {
        let row = Row { operation: "put".into(), bytes: 1 << 20, latency_ns: Some((1500, 2_000_000)), rate: 1000.0 };
        let text = render(&[row.clone(), Row { latency_ns: None, ..row }]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        for part in ["1048576", "1.50", "2000.00", "1000", "1048.6"] {
            assert!(lines[1].contains(part), "{text}");
        }
        assert!(lines[2].contains('-'));
    }
}
