//! The list of operations.

use scenario_runner::plan;
use serde::{Deserialize, Serialize};

/// A measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    Put,
    PutSignal,
    PutValue,
    Get,
    Signal,
    Flush,
    Barrier,
    Alltoall,
    Rpc,
    RmaPut,
    RmaPutSignal,
}

impl Operation {
    /// All operations, in the order of `all`.
    pub const ALL: [Self; 11] = [
        Self::Put,
        Self::PutSignal,
        Self::PutValue,
        Self::Get,
        Self::Signal,
        Self::Flush,
        Self::Barrier,
        Self::Alltoall,
        Self::Rpc,
        Self::RmaPut,
        Self::RmaPutSignal,
    ];

    /// Returns the name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::PutSignal => "put-signal",
            Self::PutValue => "put-value",
            Self::Get => "get",
            Self::Signal => "signal",
            Self::Flush => "flush",
            Self::Barrier => "barrier",
            Self::Alltoall => "alltoall",
            Self::Rpc => "rpc",
            Self::RmaPut => "rma-put",
            Self::RmaPutSignal => "rma-put-signal",
        }
    }

    /// Returns what its latency means.
    pub fn latency(self) -> &'static str {
        match self {
            Self::Put => "ranks 0 and 1; latency: one put and the flush after it",
            Self::PutSignal => "ranks 0 and 1; latency: half a round trip of puts with a signal",
            Self::PutValue => {
                "ranks 0 and 1; latency: half a round trip of values that ranks poll for; rate: values with a signal"
            }
            Self::Get => "ranks 0 and 1; latency: one get and the flush after it",
            Self::Signal => "ranks 0 and 1; latency: half a round trip of signals",
            Self::Flush => "ranks 0 and 1; latency: the flush alone, after one put",
            Self::Barrier => "all ranks; latency: one barrier, by signals",
            Self::Alltoall => "all ranks; latency: a block to and from every rank, and the signals that they were read",
            Self::Rpc => "ranks 0 and 1; latency: one call, with a body of this size both ways",
            Self::RmaPut => "ranks 0 and 1, by the RMA plugin; latency: one put until its request is done",
            Self::RmaPutSignal => "ranks 0 and 1, by the RMA plugin; latency: half a round trip of puts with a signal",
        }
    }

    /// Returns whether it carries bytes, and therefore has sizes.
    pub fn has_bytes(self) -> bool {
        !matches!(self, Self::Signal | Self::Barrier)
    }

    /// Returns whether its rate times its size is a bandwidth.
    pub fn has_bandwidth(self) -> bool {
        self.has_bytes() && self != Self::Flush
    }

    /// Returns whether it is an operation between CPUs, which device code doesn't have.
    pub fn is_of_cpus(self) -> bool {
        matches!(self, Self::Rpc | Self::RmaPut | Self::RmaPutSignal)
    }

    /// Returns the operation between two ranks, if device code has it.
    pub fn of_pair(self) -> Option<plan::Operation> {
        match self {
            Self::Put => Some(plan::Operation::Put),
            Self::PutSignal => Some(plan::Operation::PutSignal),
            Self::PutValue => Some(plan::Operation::PutValue),
            Self::Get => Some(plan::Operation::Get),
            Self::Signal => Some(plan::Operation::Signal),
            Self::Flush => Some(plan::Operation::Flush),
            Self::Barrier | Self::Alltoall | Self::Rpc | Self::RmaPut | Self::RmaPutSignal => None,
        }
    }
}

/// Returns a barrier's rounds: the base-2 logarithm of the number of ranks, rounded up.
pub fn barrier_rounds(ranks: u32) -> u32 {
    ranks.next_power_of_two().ilog2()
}
