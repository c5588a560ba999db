//! Chores for the ferrogin repository: `cargo xtask test`, `check`, `soak`, `ptx` and `gpu-cost`.

mod count;
mod gpu_cost;
mod ptx;
mod runner;
mod stages;

use clap::{Parser, Subcommand, builder::PossibleValuesParser};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Chores of the ferrogin repository.
#[derive(Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
struct Options {
    /// The directory of `make build` [default: FERROGIN_DIST, else dist].
    #[arg(long, global = true)]
    dist: Option<PathBuf>,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// What `make test` runs.
    Test {
        /// Run the tests of each program in an order that this seed determines.
        #[arg(long, value_name = "SEED")]
        shuffle: Option<u64>,
        /// Only these stages, by a part of their names.
        stages: Vec<String>,
    },
    /// What `make check` runs: everything else that a change must pass.
    Check {
        /// Only these stages, by a part of their names.
        stages: Vec<String>,
    },
    /// Long runs: more seeds, full repetitions, live fuzzing, sanitizers.
    Soak {
        /// Start rounds for this many minutes; otherwise run one.
        #[arg(long, value_name = "N", default_value_t = 0)]
        minutes: u64,
        /// The number of the first round, which determines its seeds.
        #[arg(long, value_name = "N", default_value_t = 0)]
        round: u64,
        /// Only these stages [default: all].
        #[arg(value_name = "STAGE", value_parser = PossibleValuesParser::new(stages::SOAK.iter().map(|stage| stage.0)))]
        stages: Vec<String>,
    },
    /// Makes the checked-in PTX, bitcode and headers from the sources again. Debian's rustc-web, cargo-web and
    /// rust-web-src make the same bytes everywhere.
    Ptx,
    /// Prints what operations of the device code cost a GPU thread: dependent memory round trips, instructions,
    /// atomics, fences. The device code runs as PTX in the software GPU's interpreter: xtask/README.md.
    GpuCost(gpu_cost::CostArgs),
}

fn main() -> ExitCode {
    let options = Options::parse();
    let root = root();
    let from_environment = || std::env::var_os("FERROGIN_DIST").map(PathBuf::from);
    let dist = options.dist.or_else(from_environment).unwrap_or_else(|| root.join("dist"));
    match options.task {
        Task::Test { shuffle, stages } => runner::run(&root, stages::test(&root, &dist, shuffle), &stages, Vec::new()),
        Task::Check { stages } => {
            let (all, skips) = stages::check(&root, &dist);
            runner::run(&root, all, &stages, skips)
        }
        Task::Soak { minutes, round, stages } => soak(&root, &dist, minutes, round, &stages),
        Task::Ptx => ptx::refresh(&root),
        Task::GpuCost(args) => gpu_cost::run(&root, &args),
    }
}

/// Runs the stages in rounds, until one fails or the time is up.
fn soak(root: &Path, dist: &Path, minutes: u64, first: u64, only: &[String]) -> ExitCode {
    let began = Instant::now();
    let is_wanted = |name: &str| only.is_empty() || only.iter().any(|wanted| wanted == name);
    for round in first.. {
        for &(name, what) in stages::SOAK.iter().filter(|stage| is_wanted(stage.0)) {
            println!("round {round}, {name}: {what}");
            if runner::run(root, vec![stages::soak(name, round, root, dist)], &[], Vec::new()) != ExitCode::SUCCESS {
                println!("repeat it with: cargo xtask soak --round {round} {name}");
                return ExitCode::FAILURE;
            }
        }
        if began.elapsed() >= Duration::from_secs(minutes * 60) {
            println!("the next round is --round {}", round + 1);
            break;
        }
    }
    ExitCode::SUCCESS
}

/// The repository that this program was built from.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
