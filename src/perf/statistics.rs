//! Latencies and rates from samples in nanoseconds, and sizes as text.

use scenario_runner::timed::percentile;
use serde::{Deserialize, Serialize};

/// Latencies in microseconds; each is the time that some operation in the run took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// The shortest.
    pub min: f64,
    /// Half of the operations took no longer.
    pub median: f64,
    /// 99 % took no longer.
    pub p99: f64,
    /// 99.9 % took no longer.
    pub p999: f64,
    /// The longest.
    pub max: f64,
}

impl Latency {
    /// Returns the latencies of `samples`, which must not be empty.
    pub fn of(mut samples: Vec<u64>) -> Self {
        samples.sort_unstable();
        let at = |per_mille| percentile(&samples, per_mille) as f64 / 1e3;
        Self { min: at(0), median: at(500), p99: at(990), p999: at(999), max: at(1000) }
    }

    /// Returns all five, in the order of the table.
    pub fn all(&self) -> [f64; 5] {
        [self.min, self.median, self.p99, self.p999, self.max]
    }
}

/// Millions of operations per second, if `count` operations took `nanoseconds`.
pub fn mops(count: u64, nanoseconds: u64) -> f64 {
    count as f64 * 1e3 / nanoseconds.max(1) as f64
}

/// Formats a size with the largest suffix that divides it: "8", "64K".
pub fn bytes_text(bytes: u64) -> String {
    let units = [("G", 1u64 << 30), ("M", 1 << 20), ("K", 1 << 10)];
    match units.into_iter().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit)) {
        Some((suffix, unit)) => format!("{}{suffix}", bytes / unit),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_samples_in_microseconds() {
        let latency = Latency::of((1..=10_000).rev().map(|n| n * 1000).collect());
        assert_eq!(latency.all(), [1.0, 5000.0, 9900.0, 9990.0, 10_000.0]);
        assert_eq!(Latency::of(vec![1500]).all(), [1.5; 5]);
    }

    #[test]
    fn rate_is_in_millions_per_second() {
        assert_eq!(mops(2_000_000, 1_000_000_000), 2.0);
        assert!(mops(1, 0).is_finite());
    }
}
