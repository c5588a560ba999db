//! A validation's steps, on one rank: each is a child process with a time limit.

use super::archive::Redaction;
use crate::child::{self, Ended};
use scenario_runner::scenario::SCENARIOS;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// `ferrogin doctor --json` on each rank.
    Doctor,
    /// A scenario between all ranks.
    Scenario(&'static str, Kernels),
    /// The card, compared with the software card.
    Fidelity,
    /// `ferrogin perf` between all ranks.
    Perf(Kernels),
    /// Verified puts and signals through the RMA plugin.
    Rma,
}

/// Where a step's kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// On CPU threads.
    Cpu,
    /// As PTX, on the GPU that the driver finds.
    Ptx,
}

impl Kernels {
    /// Returns FERROGIN_DEVICE, and the suffix of the step's name.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Kernels::Cpu => ("cpu", ""),
            Kernels::Ptx => ("cuda", " as PTX"),
        }
    }
}

/// Scenarios for `--quick`: one for each kind of operation.
const QUICK: [&str; 4] = ["value-signal", "put-signal", "get", "contexts"];

/// Returns all steps, in order; includes kernels as PTX if all ranks have a GPU.
pub fn all(quick: bool, has_gpu: bool) -> Vec<Step> {
    let names = || SCENARIOS.iter().map(|scenario| scenario.name).filter(move |name| !quick || QUICK.contains(name));
    let mut steps = vec![Step::Doctor, Step::Fidelity];
    steps.extend(names().map(|name| Step::Scenario(name, Kernels::Cpu)));
    steps.extend([Step::Perf(Kernels::Cpu), Step::Rma]);
    if has_gpu {
        steps.extend(names().map(|name| Step::Scenario(name, Kernels::Ptx)));
        steps.push(Step::Perf(Kernels::Ptx));
    }
    steps
}

impl Step {
    pub fn name(&self) -> String {
        match self {
            Step::Doctor => "doctor".into(),
            Step::Scenario(name, kernels) => format!("scenario {name}{}", kernels.names().1),
            Step::Fidelity => "fidelity".into(),
            Step::Perf(kernels) => format!("perf{}", kernels.names().1),
            Step::Rma => "RMA plugin".into(),
        }
    }

    /// Returns the step's time limit.
    pub fn limit(&self, quick: bool) -> Duration {
        Duration::from_secs(match (self, quick) {
            (Step::Perf(_), false) => 600,
            (_, false) => 180,
            (_, true) => 90,
        })
    }

    fn arguments(&self, quick: bool) -> Vec<&str> {
        let repetitions = if quick { "50" } else { "500" };
        let mut arguments = match self {
            Step::Doctor => vec!["doctor", "--json"],
            Step::Scenario(name, _) => vec!["validate-part", "--reps", repetitions, name],
            Step::Fidelity => vec!["validate-part", "fidelity"],
            Step::Perf(_) if quick => {
                "perf put put-signal put-value -b 8 -e 4096 -f 8 -n 100 --json".split(' ').collect()
            }
            // The GPU may be an interpreter, so this has fewer sizes and repetitions.
            Step::Perf(Kernels::Ptx) => {
                "perf put put-signal put-value get signal -b 8 -e 1M -f 8 -n 1000 --json".split(' ').collect()
            }
            Step::Perf(Kernels::Cpu) => "perf put put-signal put-value get signal --json".split(' ').collect(),
            Step::Rma => {
                let options = "perf rma-put rma-put-signal -b 8 -e 128K -f 16 --verify -n";
                options.split(' ').chain([repetitions, "--json"]).collect()
            }
        };
        arguments.extend(self.report_of_perf());
        arguments
    }

    /// Returns perf's report, in its rank's directory: all ranks have the same arguments.
    fn report_of_perf(&self) -> Option<&'static str> {
        match self {
            Step::Perf(Kernels::Cpu) => Some("perf.json"),
            Step::Perf(Kernels::Ptx) => Some("perf-ptx.json"),
            Step::Rma => Some("rma.json"),
            _ => None,
        }
    }
}

/// A step's result on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    pub passed: bool,
    pub seconds: f64,
    /// The reason for a failure; after success, a note or nothing.
    pub reason: String,
    /// Files for the archive.
    pub files: BTreeMap<String, String>,
    /// The doctor's verdict, or what was observed of the card.
    pub facts: Value,
}

/// Runs a step in `directory`, with the variables of a rank in its own job.
pub fn run(
    step: &Step,
    quick: bool,
    limit: Duration,
    variables: &[(&str, String)],
    directory: &Path,
    redaction: &Redaction,
) -> Outcome {
    let began = Instant::now();
    let ended = child::this_program().map(|mut command| {
        command
            .args(step.arguments(quick))
            .envs(variables.iter().map(|(name, value)| (*name, value)))
            .current_dir(directory);
        match step {
            Step::Scenario(_, kernels) | Step::Perf(kernels) => drop(command.env("FERROGIN_DEVICE", kernels.names().0)),
            Step::Rma => drop(command.env("FERROGIN_DEVICE", Kernels::Cpu.names().0)),
            _ => {}
        }
        child::run(command, limit)
    });
    let ended = ended.unwrap_or_else(|reason| Ended {
        end: child::End::Unknown(reason),
        stdout: String::new(),
        stderr: String::new(),
    });
    let mut outcome = judge(step, &ended, directory);
    outcome.seconds = began.elapsed().as_secs_f64();
    outcome.reason = redaction.apply(&outcome.reason);
    outcome.files.values_mut().for_each(|text| *text = redaction.apply(text));
    outcome
}

fn judge(step: &Step, ended: &Ended, directory: &Path) -> Outcome {
    let failure = ended.failure();
    let mut outcome = Outcome {
        passed: failure.is_none(),
        seconds: 0.0,
        reason: String::new(),
        files: BTreeMap::new(),
        facts: Value::Null,
    };
    if let Some(end) = failure {
        // A program's error is its last line, or a line marked as an error before a hint.
        let lines = ended.last_errors(12);
        let line = lines.iter().rev().find(|line| line.starts_with("error: ")).or(lines.last());
        outcome.reason = line.map_or(end.clone(), |line| format!("{end}: {line}"));
    }
    let both = format!("{}\n--- standard error ---\n{}", ended.stdout.trim_end(), ended.stderr);
    match step {
        Step::Doctor => {
            let report: Option<Value> = serde_json::from_str(&ended.stdout).ok();
            match report {
                Some(report) => {
                    outcome.reason = problems(&report);
                    outcome.facts = report["verdict"].clone();
                    outcome.files.insert("doctor.json".into(), ended.stdout.clone());
                }
                None => drop(outcome.files.insert("doctor.json".into(), both)),
            }
        }
        Step::Scenario(..) if outcome.passed => {}
        Step::Scenario(..) => drop(outcome.files.insert(format!("{}.txt", step.name().replace(' ', "-")), both)),
        Step::Fidelity => {
            let last = ended.stdout.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok());
            outcome.facts = last.map_or(Value::Null, |seen| seen["observed"].clone());
            outcome.files.insert("fidelity.txt".into(), both);
        }
        Step::Perf(_) | Step::Rma => {
            let report = step.report_of_perf().unwrap_or_default();
            outcome.files.insert(report.replace(".json", ".txt"), both);
            if let Ok(json) = std::fs::read_to_string(directory.join(report)) {
                outcome.files.insert(report.into(), json);
            }
        }
    }
    outcome
}

/// Returns the doctor's problems, in one line.
fn problems(report: &Value) -> String {
    let findings = report["findings"].as_array().into_iter().flatten();
    let problems = findings.filter(|finding| finding["level"] == "problem");
    let lines: Vec<String> = problems
        .filter_map(|finding| Some(format!("{}: {}", finding["area"].as_str()?, finding["what"].as_str()?)))
        .collect();
    lines.join("; ")
}
