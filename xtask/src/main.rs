//! Tasks of the ferrogin repository: `cargo xtask test`, `soak`, `faults`, `ptx` and `release`.

mod faults;
mod ptx;
mod release;
mod soak;
mod stage;
mod tally;
mod test;

use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    /// Everything that CI runs; the last line has the numbers of passed, failed and skipped tests.
    Test {
        /// Only what a developer runs after every edit: format, lints, and the tests of the workspace without the slow ones.
        #[arg(long)]
        quick: bool,
        /// Only these stages, by a part of their names.
        stages: Vec<String>,
    },
    /// Long runs, stage by stage, that continue where the last soak ended.
    Soak(soak::Options),
    /// The scenarios on cards with faults, one run for each seed.
    Faults(faults::Options),
    /// Makes ptx/ferrogin_device.ptx and ferrogin/fast_path.cuh from the sources again. Debian's rustc-web, cargo-web and rust-web-src
    /// make the same bytes everywhere.
    Ptx,
    /// Tarballs for x86-64 and aarch64 in target/release-tarballs/, after checks of the tree and of the tarballs.
    Release(release::Options),
}

fn main() -> ExitCode {
    let options = Options::parse();
    let root = root();
    let from_environment = || std::env::var_os("FERROGIN_DIST").map(PathBuf::from);
    let dist = options.dist.or_else(from_environment).unwrap_or_else(|| root.join("dist"));
    match options.task {
        Task::Test { quick, stages } => test::run(&root, &dist, quick, &stages),
        Task::Soak(options) => soak::run(&root, &dist, &options),
        Task::Faults(options) => faults::run(&root, &dist, &options),
        Task::Ptx => ptx::refresh(&root),
        Task::Release(options) => release::run(&root, &options),
    }
}

/// The repository that this program was built from.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}
