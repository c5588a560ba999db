//! `cargo xtask faults`: the scenarios on cards with faults, one run for each seed.
//!
//! The seed determines the faults, the wire, the sizes of queues, the posting policy and the layout. Most runs must deliver every byte
//! despite the faults. In some runs requests fail, and each rank that posted one must report it. In a few runs a card stops answering,
//! and all ranks must end.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The limit of one run.
const LIMIT: Duration = Duration::from_secs(300);

/// Options of the campaign.
#[derive(clap::Args)]
pub struct Options {
    /// Number of seeds.
    #[arg(long, value_name = "N", default_value_t = 200)]
    seeds: u64,
    /// The first seed; `--first 17 --seeds 1` repeats one run.
    #[arg(long, value_name = "N", default_value_t = 0)]
    first: u64,
    /// Run only this scenario; may be given several times.
    #[arg(long = "scenario", value_name = "NAME")]
    scenarios: Vec<String>,
    /// Repetitions of each step [default: the seed's].
    #[arg(long, value_name = "N")]
    reps: Option<u32>,
    /// Runs at the same time [default: the number of cores].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
}

/// The expected result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// All data arrives.
    Exact,
    /// Requests fail, and each rank that posted one reports it.
    Errors,
    /// A card stops answering, and all ranks end.
    Death,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    seed: u64,
    kind: Kind,
    faults: String,
    wire: &'static str,
    post: &'static str,
    layout: &'static str,
    depth: u32,
    reps: u32,
}

/// splitmix64: the seed alone determines a run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

impl Run {
    fn of_seed(seed: u64) -> Run {
        let mut random = Random(seed);
        let kind = match seed % 40 {
            n if n % 8 == 5 => Kind::Errors,
            18 => Kind::Death,
            _ => Kind::Exact,
        };
        let mut faults = format!("seed={seed}");
        let mut fault = |text: String| {
            if !text.is_empty() {
                let _ = write!(faults, ",{text}");
            }
        };
        fault(random.of(&["", "reorder=2", "reorder=8", "reorder=16", "reorder=64"]).into());
        let delay = random.of(&["", "", "delay_us=0..5", "delay_us=0..50", "delay_us=20..200"]);
        fault(delay.into());
        fault(random.of(&["", "reread=0.01", "reread=0.2", "reread=1"]).into());
        // Counter starts near both ends of the range, and anywhere.
        let start = match random.below(4) {
            0 => String::new(),
            1 => format!("cntr_start={}", 0x7fff_ffff - random.below(600)),
            2 => format!("cntr_start={}", random.below(0x8000_0000)),
            _ => format!("cntr_start={}", 0x8000_0000u64 - 4096 - random.below(64)),
        };
        fault(start);
        let sq = random.of(&[4096, 16, 32, 64]);
        let batch = random.of(&[1, 2, 4, 16]);
        fault(format!("sq_size={sq},max_batch={batch}"));
        fault(random.of(&["", "wqe_size=64"]).into());
        fault(random.of(&["", "qp_caps=0"]).into());
        match kind {
            Kind::Exact => {}
            Kind::Errors => {
                fault(format!(
                    "error_every={},error_status={}",
                    5 + random.below(400),
                    random.of(&[7, 8, 9, 11, 12, 13])
                ));
            }
            Kind::Death => fault(format!("die_after={}", 1 + random.below(300))),
        }
        // A run with long delays has fewer repetitions.
        let reps = if delay.ends_with("200") { 6 } else { random.of(&[12, 20, 30]) };
        Run {
            seed,
            kind,
            wire: random.of(&["shm", "shm", "shm", "tcp"]),
            post: random.of(&["combining", "combining", "locked"]),
            layout: random.of(&["1", "2"]),
            depth: random.of(&[8, 16, 64]),
            reps,
            faults,
        }
    }

    fn describe(&self) -> String {
        let Run { seed, kind, faults, wire, post, layout, depth, reps } = self;
        format!("seed {seed} ({kind:?}: {faults}; {wire}, {post}, layout {layout}, depth {depth}, {reps} repetitions)")
    }

    fn command(&self, program: &Path, dist: &Path, options: &Options) -> Command {
        let mut command = Command::new(program);
        command.args(["--reps", &options.reps.unwrap_or(self.reps).to_string()]);
        command.args(["--backend-version", self.layout, "--queue-depth", &self.depth.to_string()]);
        if self.kind != Kind::Exact {
            command.args(["--deadline", "10"]);
        }
        for name in &options.scenarios {
            command.args(["--only", name]);
        }
        let settings = [
            ("FERROGIN_PROVIDER", "softefa"),
            ("FERROGIN_DEVICE", "cpu"),
            ("FERROGIN_POST", self.post),
            ("SOFTEFA_WIRE", self.wire),
            ("SOFTEFA_FAULTS", &self.faults),
        ];
        command.envs(settings).env("FERROGIN_DIST", dist).env_remove("SOFTEFA_NICS");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// The end of a run.
struct Outcome {
    /// `None` if the run exceeded its limit.
    success: Option<bool>,
    text: String,
}

fn execute(mut command: Command) -> std::io::Result<Outcome> {
    let mut child = command.spawn()?;
    let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    };
    let read = |from: &mut dyn Read| {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let out = scope.spawn(move || read(&mut out));
        let err = scope.spawn(move || read(&mut err));
        let success = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status.success());
            }
            if began.elapsed() >= LIMIT {
                child.kill()?;
                child.wait()?;
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = out.join().unwrap_or_default() + &err.join().unwrap_or_default();
        Ok(Outcome { success, text })
    })
}

/// Checks the end of a run against its kind.
fn judge(run: &Run, outcome: &Outcome) -> Result<(), String> {
    let Some(success) = outcome.success else { return Err(format!("still running after {LIMIT:?}")) };
    let injected = |rank: usize| {
        let mark = format!("[{rank}] softefa0: ");
        outcome.text.lines().any(|line| line.starts_with(&mark) && line.contains("fails by error_every"))
    };
    for word in ["panicked", "is a bug of softefa", "expected 0x"] {
        if outcome.text.contains(word) {
            return Err(format!("the output has {word:?}"));
        }
    }
    match run.kind {
        Kind::Exact if success => Ok(()),
        Kind::Exact => Err("the run failed".into()),
        Kind::Errors => {
            let posters: Vec<usize> = (0..2).filter(|rank| injected(*rank)).collect();
            if success != posters.is_empty() {
                return Err(format!("requests of ranks {posters:?} failed and the run {}", passed(success)));
            }
            for rank in posters {
                let reports =
                    [format!("rank {rank}: queryLastError reports an error"), format!("rank {rank} (thread ")];
                let card_error = "the card completed a work request in error";
                let mut parts = outcome.text.lines().flat_map(|line| line.split("; "));
                if !parts
                    .any(|part| part.contains(&reports[0]) || part.contains(&reports[1]) && part.contains(card_error))
                {
                    return Err(format!("a request of rank {rank} failed, but rank {rank} did not report it"));
                }
            }
            Ok(())
        }
        // A card that stops during the last step may have completed all requests.
        Kind::Death => Ok(()),
    }
}

fn passed(success: bool) -> &'static str {
    if success { "passed" } else { "failed" }
}

/// Runs all seeds: prints `PASS` or `FAIL` for each seed, and a line with the counts.
pub fn run(root: &Path, dist: &Path, options: &Options) -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let jobs = options.jobs.map_or(cores, usize::from);
    let program = match build(root) {
        Ok(program) => program,
        Err(problem) => {
            println!("FAIL faults: {problem}");
            println!("faults: 0 passed, 1 failed, 0 skipped");
            return ExitCode::FAILURE;
        }
    };
    let began = Instant::now();
    let next = AtomicU64::new(options.first);
    let end = options.first.saturating_add(options.seeds);
    let failures = Mutex::new(0u64);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let run = Run::of_seed(seed);
                    let outcome = execute(run.command(&program, dist, options));
                    let verdict = match &outcome {
                        Ok(outcome) => judge(&run, outcome).map_err(|reason| (reason, outcome.text.as_str())),
                        Err(error) => Err((error.to_string(), "")),
                    };
                    // The lock keeps the lines of one run together.
                    let mut failures = failures.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    match verdict {
                        Ok(()) => println!("PASS {}", run.describe()),
                        Err((reason, text)) => {
                            *failures += 1;
                            println!("FAIL {}: {reason}", run.describe());
                            text.lines()
                                .rev()
                                .take(12)
                                .collect::<Vec<_>>()
                                .iter()
                                .rev()
                                .for_each(|l| println!("    {l}"));
                        }
                    }
                }
            });
        }
    });
    let failed = failures.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    println!("{} seeds in {:.0?}", options.seeds, began.elapsed());
    println!("faults: {} passed, {failed} failed, 0 skipped", options.seeds - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The program that runs the scenarios.
fn build(root: &Path) -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--release", "--locked", "--package", "gpu-scenarios"]).current_dir(root);
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(format!("cargo build --package gpu-scenarios: {status}")),
        Err(error) => return Err(format!("cargo does not start: {error}")),
    }
    // cargo places it beside this program.
    let here = std::env::current_exe().map_err(|error| format!("the path of this program is unknown: {error}"))?;
    Ok(here.with_file_name("gpu-scenarios"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_run() {
        assert_eq!(Run::of_seed(17), Run::of_seed(17));
        let kinds: Vec<Kind> = (0..200).map(|seed| Run::of_seed(seed).kind).collect();
        let count = |kind| kinds.iter().filter(|k| **k == kind).count();
        assert_eq!((count(Kind::Errors), count(Kind::Death)), (25, 5));
        let runs: Vec<Run> = (0..200).map(Run::of_seed).collect();
        for fault in ["reorder=64", "delay_us=20..200", "reread=1", "cntr_start=21474", "sq_size=16", "wqe_size=64"] {
            assert!(runs.iter().any(|run| run.faults.contains(fault)), "no run has {fault}");
        }
        assert!(runs.iter().any(|run| run.wire == "tcp") && runs.iter().any(|run| run.post == "locked"));
    }

    fn outcome(success: Option<bool>, text: &str) -> Outcome {
        Outcome { success, text: text.into() }
    }

    #[test]
    fn failed_requests_must_be_reported_by_their_rank() {
        let run = Run::of_seed(5);
        let injected = "[1] softefa0: QP 3 slot 4: fails by error_every with status 8; request 4: 00\n";
        let reported = format!("{injected}[0] gpu-scenarios: flood: rank 1: queryLastError reports an error\n");
        let other = format!("{injected}[0] gpu-scenarios: flood: rank 0: queryLastError reports an error\n");
        assert_eq!(judge(&run, &outcome(Some(false), &reported)), Ok(()));
        assert!(judge(&run, &outcome(Some(false), &other)).unwrap_err().contains("rank 1"));
        assert!(judge(&run, &outcome(Some(true), injected)).is_err(), "not reported");
        assert!(judge(&run, &outcome(Some(false), "")).is_err(), "a failure without an injected error");
        assert_eq!(judge(&run, &outcome(Some(true), "")), Ok(()));
        assert!(judge(&run, &outcome(None, "")).is_err());
    }
}
