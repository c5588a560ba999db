//! The shape of a `createContext`: NCCL's configuration, checked.

use crate::config::Signals;
use crate::error::Error;
use ferrogin_ffi::block::Layout;
use ferrogin_ffi::nccl::GinConfigV14;
use ferrogin_libfabric::bindings;

/// The limit for the numbers of signals, counters and contexts. No card has that many queue pairs.
const COUNT_MAX: i32 = 1 << 16;
/// The limit for the number of emulated signals.
const SIGNALS_MAX: i32 = 1 << 20;

/// The checked configuration of a `createContext`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Signals per context that the card counts.
    pub n_signals: usize,
    /// Emulated signals per context, which replace those.
    pub n_words: Option<usize>,
    /// Counters per context.
    pub n_counters: usize,
    /// Number of contexts, at least one.
    pub n_contexts: usize,
    /// NCCL's queueDepth; 0 means the default.
    pub depth: usize,
    /// NCCL's trafficClass; the default unless it's in 0 to 255.
    pub traffic_class: i32,
    /// Layout of the queue structs.
    pub layout: Layout,
    /// NCCL's backendVersion.
    pub backend_version: i32,
    /// Kernels post only to peers whose distance is a multiple of this. At least 1; 1 if it doesn't divide the number
    /// of ranks.
    pub rank_stride: usize,
    /// Initial limit of a kernel's wait in nanoseconds; 0 is no limit, as NCCL's kernels have limits of their own.
    pub wait_ns: u64,
    /// Whether a lost rank ends only the requests to it.
    pub isolates: bool,
}

/// Checks a count in NCCL's configuration.
fn count_up_to(name: &str, value: i32, most: i32) -> Result<usize, Error> {
    let valid = (0..=most).contains(&value);
    valid
        .then_some(value as usize)
        .ok_or_else(|| Error::Argument(format!("{name} = {value} is not between 0 and {most}")))
}

impl Shape {
    /// Checks NCCL's configuration.
    ///
    /// # Errors
    /// A count is negative or above any card's limit; the plugin doesn't know the backend version.
    pub fn new(config: &GinConfigV14) -> Result<Self, Error> {
        let count = |name: &str, value: i32| count_up_to(name, value, COUNT_MAX);
        let layout = Layout::of(config.backend_version).ok_or_else(|| {
            Error::Usage(format!(
                "backendVersion {} is not known: this ferrogin supports 0 to 2 (kernels built with NCCL 2.31 and 2.32); \
                 install a newer ferrogin, or build the kernels with an older NCCL",
                config.backend_version
            ))
        })?;
        if config.queue_depth < 0 {
            return Err(Error::Argument(format!("queueDepth = {} is negative", config.queue_depth)));
        }
        let rank_stride = count("rankStride", config.rank_stride)?.max(1);
        Ok(Self {
            n_signals: count_up_to("nSignals", config.n_signals, SIGNALS_MAX)?,
            n_words: None,
            n_counters: count("nCounters", config.n_counters)?,
            n_contexts: count("nContexts", config.n_contexts)?.max(1),
            depth: config.queue_depth as usize,
            traffic_class: config.traffic_class,
            layout,
            backend_version: config.backend_version,
            rank_stride,
            wait_ns: 0,
            isolates: false,
        })
    }

    /// Returns the shape adapted to a job's number of ranks and kind of signals.
    ///
    /// # Errors
    /// Too many signals for any card.
    pub fn in_job(&self, nranks: usize, signals: Signals) -> Result<Self, Error> {
        // The stride is a hint, and all ranks ignore it in the same cases.
        let rank_stride = if nranks.is_multiple_of(self.rank_stride) { self.rank_stride } else { 1 };
        if rank_stride != self.rank_stride {
            let given = self.rank_stride;
            crate::info!(
                "rankStride {given} does not divide the {nranks} ranks: the plugin ignores it and reaches all ranks"
            );
        }
        Ok(match signals {
            Signals::Card => {
                count_up_to("nSignals", self.n_signals as i32, COUNT_MAX)?;
                Self { rank_stride, ..*self }
            }
            Signals::Emulated => Self { rank_stride, n_signals: 0, n_words: Some(self.n_signals), ..*self },
        })
    }

    /// Returns libfabric's traffic class; 0 means the default.
    pub fn tclass(&self) -> u32 {
        // An InfiniBand traffic class carries the DSCP in its upper six bits.
        match self.traffic_class {
            class @ 0..=255 => bindings::FI_TC_DSCP | (class as u32 >> 2),
            _ => 0,
        }
    }

    /// Returns true if `rank`'s kernels may post to `peer`.
    pub fn reaches(&self, rank: usize, peer: usize) -> bool {
        rank.abs_diff(peer).is_multiple_of(self.rank_stride)
    }

    /// Returns the number of endpoints per context.
    pub fn endpoints(&self) -> usize {
        2 + self.n_counters + self.n_signals
    }

    /// Returns the number of completion counters per context.
    pub fn counters(&self) -> usize {
        2 + self.n_counters + 2 * self.n_signals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> GinConfigV14 {
        GinConfigV14 { n_signals: 3, n_counters: 2, n_contexts: 4, traffic_class: -1, ..Default::default() }
    }

    #[test]
    fn invalid_configurations_are_refused() {
        let shape = Shape::new(&config()).unwrap();
        assert_eq!((shape.endpoints(), shape.counters(), shape.tclass(), shape.depth), (7, 10, 0, 0));
        assert_eq!(Shape::new(&GinConfigV14 { n_contexts: 0, ..config() }).unwrap().n_contexts, 1);
        assert_eq!(Shape::new(&GinConfigV14 { traffic_class: 104, ..config() }).unwrap().tclass(), 256 | 26);
        assert_eq!(Shape::new(&GinConfigV14 { traffic_class: i32::MIN, ..config() }).unwrap().tclass(), 0);
        for bad in [
            GinConfigV14 { n_signals: -1, ..config() },
            GinConfigV14 { n_counters: -1, ..config() },
            GinConfigV14 { n_contexts: -1, ..config() },
            GinConfigV14 { n_signals: i32::MAX, ..config() },
            GinConfigV14 { queue_depth: -1, ..config() },
            GinConfigV14 { backend_version: 3, ..config() },
            GinConfigV14 { backend_version: 99, ..config() },
            GinConfigV14 { rank_stride: -1, ..config() },
            GinConfigV14 { backend_version: -1, ..config() },
        ] {
            assert!(Shape::new(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn rank_stride_excludes_other_peers() {
        let shape = Shape::new(&GinConfigV14 { rank_stride: 4, ..config() }).unwrap();
        let reached: Vec<_> = (0..16).filter(|peer| shape.reaches(5, *peer)).collect();
        assert_eq!(reached, [1, 5, 9, 13]);
        let all = Shape::new(&GinConfigV14 { rank_stride: 0, ..config() }).unwrap();
        assert!((0..16).all(|peer| all.reaches(5, peer)));
    }
}
