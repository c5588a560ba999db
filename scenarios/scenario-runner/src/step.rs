//! A step of a scenario: one program on all ranks.

use crate::plan::{Pattern, Program, Turn};

/// Which ranks send before they receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Rank 0 sends first and each other rank answers, so that one message is in flight at a time.
    FirstBegins,
    /// The last rank sends first.
    LastBegins,
    /// All ranks send first.
    AllBegin,
}

impl Order {
    /// Returns the turn of one rank.
    pub fn turn(self, rank: usize, nranks: usize) -> Turn {
        let begins = match self {
            Order::FirstBegins => rank == 0,
            Order::LastBegins => rank + 1 == nranks,
            Order::AllBegin => true,
        };
        if begins { Turn::First } else { Turn::Second }
    }
}

/// One program on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The program of each rank.
    pub program: Program,
    /// The ranks that send first.
    pub order: Order,
    /// The pairs of ranks that communicate.
    pub pattern: Pattern,
    /// Values or puts per round.
    pub burst: u32,
    /// Whether all values of a round but the last have the aggregate flag.
    pub aggregate: bool,
    /// Threads per rank.
    pub lanes: u32,
    /// Whether the threads use different contexts.
    pub spread: bool,
    /// Sharing mode of a storm's values, as flags of the device API.
    pub sharing: u32,
    /// The number of rounds is the number of repetitions divided by this.
    pub divisor: u32,
}

/// Flags of the sharing modes (`FGIN_SHARING_CTA`, `FGIN_SHARING_THREAD`).
pub(crate) const CTA: u32 = 0x100;
pub(crate) const THREAD: u32 = 0x200;

impl Step {
    /// One thread, one value per round to the next rank; all ranks send first.
    pub const fn new(program: Program) -> Step {
        Step {
            program,
            order: Order::AllBegin,
            pattern: Pattern::Ring,
            burst: 1,
            aggregate: false,
            lanes: 1,
            spread: false,
            sharing: 0,
            divisor: 1,
        }
    }

    pub(crate) const fn order(self, order: Order) -> Step {
        Step { order, ..self }
    }

    pub(crate) const fn all_pairs(self) -> Step {
        Step { pattern: Pattern::AllPairs, ..self }
    }

    pub(crate) const fn burst(self, burst: u32) -> Step {
        Step { burst, ..self }
    }

    pub(crate) const fn aggregated(self) -> Step {
        Step { aggregate: true, ..self }
    }

    pub(crate) const fn lanes(self, lanes: u32, spread: bool) -> Step {
        Step { lanes, spread, ..self }
    }

    pub(crate) const fn shared(self, sharing: u32) -> Step {
        Step { sharing, ..self }
    }

    pub(crate) const fn divided(self, divisor: u32) -> Step {
        Step { divisor, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_least_one_rank_sends_first() {
        for order in [Order::FirstBegins, Order::LastBegins, Order::AllBegin] {
            for nranks in 2..5 {
                assert!((0..nranks).any(|rank| order.turn(rank, nranks) == Turn::First));
            }
        }
    }
}
