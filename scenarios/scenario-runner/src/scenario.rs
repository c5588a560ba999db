//! The list of scenarios.

use crate::RunError;
use crate::plan::Program;
use crate::step::{CTA, Order, Step, THREAD};
use crate::world::World;

impl Scenario {
    /// Returns whether it is one of [`WORKLOADS`].
    pub fn is_workload(&self) -> bool {
        self.steps.iter().any(|step| step.program.is_workload())
    }
}

/// A scenario in the list.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// The name for `--only`.
    pub name: &'static str,
    /// The description.
    pub description: &'static str,
    /// The phase in `ferrogin demo`, if it's one of the three.
    pub phase: Option<char>,
    /// The programs, run one after another.
    pub steps: &'static [Step],
}

const POLL: Step = Step::new(Program::ValuePoll);
const SIGNAL: Step = Step::new(Program::ValueSignal);

/// Maximum values between two flushes of a thread in `value-storm`.
pub const STORM_BURST: u32 = 500;
/// Threads per rank in `value-storm`.
pub const STORM_LANES: u32 = 4;

/// All scenarios, in order of difficulty.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "value-poll",
        description: "putValue without a signal; the peer polls memory",
        phase: Some('a'),
        steps: &[POLL.order(Order::FirstBegins), POLL.order(Order::LastBegins), POLL],
    },
    Scenario {
        name: "value-signal",
        description: "putValue with a signal; the peer waits for it, then reads the value",
        phase: Some('b'),
        steps: &[SIGNAL.order(Order::FirstBegins), SIGNAL.order(Order::LastBegins), SIGNAL, SIGNAL.burst(16)],
    },
    Scenario {
        name: "aggregate",
        description: "8 putValues, seven of them aggregated; all arrive",
        phase: Some('c'),
        steps: &[
            POLL.burst(8).aggregated().order(Order::FirstBegins),
            POLL.burst(8).aggregated().order(Order::LastBegins),
            POLL.burst(8).aggregated(),
            SIGNAL.burst(8).aggregated(),
        ],
    },
    Scenario {
        name: "value-sizes",
        description: "values of 1, 2, 4 and 8 bytes; the neighbouring bytes keep their values",
        phase: None,
        steps: &[Step::new(Program::ValueSizes)],
    },
    Scenario {
        name: "put-signal",
        description: "puts of 1 byte to 1 MiB with a signal; the peer checks every byte",
        phase: None,
        steps: &[Step::new(Program::PutSignal)],
    },
    Scenario {
        name: "get",
        description: "a signal announces a buffer; the peer gets it and flushes",
        phase: None,
        steps: &[Step::new(Program::Get), Step::new(Program::Get).all_pairs().divided(4)],
    },
    Scenario {
        name: "flush-reuse",
        description: "the source changes immediately after a flush; a signal after the flush proves that all data arrived",
        phase: None,
        steps: &[Step::new(Program::FlushReuse).burst(8).divided(4)],
    },
    Scenario {
        name: "flood",
        description: "many more posts than slots, without a pause; signals and counters count exactly",
        phase: None,
        steps: &[Step::new(Program::Flood), Step::new(Program::Flood).all_pairs()],
    },
    Scenario {
        name: "signal-reset",
        description: "a signal starts again from 0 after a reset",
        phase: None,
        steps: &[Step::new(Program::SignalReset)],
    },
    Scenario {
        name: "signal-add",
        description: "signals raised by 4, 1 and 0 in one round; their sum is exact",
        phase: None,
        steps: &[Step::new(Program::SignalAdd)],
    },
    Scenario {
        name: "all-pairs",
        description: "each rank sends to each other rank at once, by memory and by signal",
        phase: None,
        steps: &[POLL.all_pairs(), SIGNAL.burst(4).all_pairs(), Step::new(Program::PutSignal).all_pairs().divided(4)],
    },
    Scenario {
        name: "threads",
        description: "two threads of a rank post on the same endpoints",
        phase: None,
        steps: &[POLL.burst(8).aggregated().lanes(2, false)],
    },
    Scenario {
        name: "value-storm",
        description: "values from four threads on one endpoint, flushed at different times and read back; signals count exactly",
        phase: None,
        steps: &[
            Step::new(Program::ValueStorm).burst(STORM_BURST).lanes(STORM_LANES, false).divided(20),
            Step::new(Program::ValueStormSignal).burst(STORM_BURST).lanes(STORM_LANES, false).divided(20),
        ],
    },
    Scenario {
        name: "sharing",
        description: "values in mode CTA from four threads; in mode THREAD from one thread, and from two threads with a context each",
        phase: None,
        steps: &[
            Step::new(Program::ValueStormSignal).burst(100).lanes(STORM_LANES, false).shared(CTA).divided(20),
            Step::new(Program::ValueStormSignal).burst(STORM_BURST).shared(THREAD).divided(20),
            Step::new(Program::ValueStorm).burst(STORM_BURST).lanes(2, true).shared(THREAD).divided(20),
        ],
    },
    Scenario {
        name: "lanes",
        description: "values, puts and signals from threads that post together, as lanes of a warp; every byte read back",
        phase: None,
        steps: &[
            Step::new(Program::Lanes).lanes(8, false).divided(10),
            Step::new(Program::Lanes).lanes(8, false).all_pairs().divided(20),
            Step::new(Program::Lanes).lanes(8, false).shared(CTA).divided(20),
        ],
    },
    Scenario {
        name: "strong-signal",
        description: "strong signals and signals in memory; all earlier puts and values are there, and each add appears in one step",
        phase: None,
        steps: &[
            Step::new(Program::Strong).burst(8).divided(4),
            Step::new(Program::Strong).burst(3).all_pairs().divided(4),
        ],
    },
    Scenario {
        name: "flush-async",
        description: "the source changes after the wait for an asynchronous flush, with more posts meanwhile",
        phase: None,
        steps: &[
            Step::new(Program::FlushAsync).burst(8).divided(4),
            Step::new(Program::FlushAsync).all_pairs().divided(4),
        ],
    },
    Scenario {
        name: "bad-input",
        description: "peers, ids, windows and sizes out of range are refused without effect",
        phase: None,
        steps: &[Step::new(Program::BadInput).divided(20), Step::new(Program::BadInput).all_pairs().divided(20)],
    },
    Scenario {
        name: "contexts",
        description: "two threads of a rank, each on its own context",
        phase: None,
        steps: &[SIGNAL.burst(4).lanes(2, true)],
    },
];

/// The patterns of programs that need emulated signals (FERROGIN_SIGNALS=emulated) and more contexts than the
/// scenarios.
pub const WORKLOADS: &[Scenario] = &[
    Scenario {
        name: "barriers",
        description: "all-to-all and barriers by NCCL's default requirements: strong signals, flushes and weak ones, signals of puts",
        phase: None,
        steps: &[Step::new(Program::Barriers).lanes(2, true)],
    },
    Scenario {
        name: "deepep",
        description: "DeepEP's dispatch and combine: 17 contexts, words of two fields, flushes by another thread, resets by stores",
        phase: None,
        steps: &[Step::new(Program::DeepEp).lanes(4, false).divided(2)],
    },
    Scenario {
        name: "deepep-indexed",
        description: "Amazon's variant of DeepEP's dispatch: 11 contexts of 21 signals, each put raises one",
        phase: None,
        steps: &[Step::new(Program::DeepEpIndexed).lanes(2, false).divided(2)],
    },
    Scenario {
        name: "nccl-ep",
        description: "nccl_ep's dispatch: the amount of one signal is the number of tokens and one more",
        phase: None,
        steps: &[Step::new(Program::NcclEp).lanes(2, true)],
    },
];

/// Finds the scenario or workload with this name.
pub fn find(name: &str) -> Option<&'static Scenario> {
    SCENARIOS.iter().chain(WORKLOADS).find(|scenario| scenario.name == name)
}

/// Collective: runs one scenario with `reps` repetitions of each step.
///
/// # Errors
/// The scenario fails on a rank.
pub fn run(world: &World, scenario: &'static Scenario, reps: u32) -> Result<(), RunError> {
    for (index, step) in scenario.steps.iter().enumerate() {
        let reps = (reps / step.divisor).max(1);
        let plans: Vec<_> = (0..world.lanes(step)).map(|lane| world.plan(step, reps, lane)).collect();
        world.run(&format!("{} (step {} of {})", scenario.name, index + 1, scenario.steps.len()), &plans)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_phases_complete() {
        for (i, scenario) in SCENARIOS.iter().enumerate() {
            assert_eq!(SCENARIOS.iter().position(|other| other.name == scenario.name), Some(i));
            assert!(!scenario.steps.is_empty());
        }
        let phases: String = SCENARIOS.iter().filter_map(|scenario| scenario.phase).collect();
        assert_eq!(phases, "abc");
        assert!(find("flood").is_some() && find("nothing").is_none());
        assert!(WORKLOADS.iter().all(Scenario::is_workload) && !SCENARIOS.iter().any(Scenario::is_workload));
        assert!(WORKLOADS.iter().all(|workload| find(workload.name).is_some_and(Scenario::is_workload)));
    }
}
