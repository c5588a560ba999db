//! `ferrogin run`: starts a program's ranks on this host.

use mini_nccl::launch::{Job, Output};
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

/// Longer than any job runs.
const YEARS: Duration = Duration::from_secs(10 * 366 * 86_400);

/// The arguments of `ferrogin run`.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Number of ranks.
    #[arg(short = 'n', long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

/// Runs the ranks. Returns the exit code of the first one that failed.
pub fn run(args: &RunArgs) -> ExitCode {
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let job = Job::new(program, args.ranks as usize).args(arguments).output(Output::Prefix).timeout(YEARS);
    match job.run() {
        Ok(outcome) => {
            if let Some(failure) = &outcome.failure {
                eprintln!("ferrogin run: {failure}");
            }
            ExitCode::from(u8::try_from(outcome.code).unwrap_or(1))
        }
        Err(error) => {
            eprintln!("ferrogin run: {error}");
            ExitCode::from(127)
        }
    }
}
