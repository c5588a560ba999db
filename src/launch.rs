//! A subcommand's ranks: this process is one if a launcher started it; otherwise it starts them. `ferrogin run` starts
//! those of a program.

use mini_nccl::bootstrap::Identity;
pub use mini_nccl::launch::Launcher;
use mini_nccl::launch::{Job, Output, Signal};
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// The exit code of a rank whose output was closed, as in a shell.
const CLOSED_OUTPUT: u8 = 128 + Signal::SIGPIPE as u8;

/// Variables, and the values that they get in all ranks unless they are already set.
pub type Defaults<'a> = &'a [(&'a str, OsString)];

/// Returns the rank that a launcher gave this process; `None` without a launcher. A rank that lacks a default
/// re-executes this program with it, because a running process must not change its environment.
///
/// # Errors
/// The launcher's variables contradict each other, or give a number of ranks other than `ranks`.
pub fn identity(ranks: Option<u32>, defaults: Defaults<'_>) -> Result<Option<Identity>, String> {
    let Some(identity) = Identity::from_env().map_err(|error| error.to_string())? else { return Ok(None) };
    if let Some(ranks) = ranks.filter(|ranks| *ranks as usize != identity.nranks) {
        return Err(format!(
            "--ranks {ranks}, but the launcher that started this process started {}: leave --ranks out under a launcher, or unset the \
             launcher's variables (FERROGIN_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK, or RANK and WORLD_SIZE)",
            identity.nranks
        ));
    }
    let missing: Vec<_> = missing(defaults).collect();
    if missing.is_empty() {
        return Ok(Some(identity));
    }
    let error = Command::new(own_path()?).args(std::env::args_os().skip(1)).envs(missing).exec();
    Err(format!("this program cannot execute itself with a rank's settings: {error}"))
}

/// Runs this same command as `ranks` ranks. Returns when all have ended, with the job's exit code and its first
/// failure.
///
/// # Errors
/// A rank does not start.
pub fn run(ranks: u32, launcher: Launcher, defaults: Defaults<'_>) -> Result<(u8, Option<String>), String> {
    let mut job = Job::new(own_path()?, ranks as usize).launcher(launcher).output(Output::Inherit);
    job = job.args(std::env::args_os().skip(1));
    for (name, value) in missing(defaults) {
        job = job.env(name, value);
    }
    let outcome = job.run().map_err(|error| error.to_string())?;
    // The reader of standard output has gone, and needs no message.
    let is_closed = |status: &Option<_>| {
        status.is_some_and(|status: std::process::ExitStatus| status.signal() == Some(Signal::SIGPIPE as i32))
    };
    if outcome.statuses.iter().any(is_closed) {
        return Ok((CLOSED_OUTPUT, None));
    }
    Ok((u8::try_from(outcome.code).unwrap_or(1), outcome.failure))
}

fn missing<'a>(defaults: Defaults<'a>) -> impl Iterator<Item = (&'a str, &'a OsString)> {
    let is_unset = |name: &str| std::env::var_os(name).is_none();
    defaults.iter().filter(move |(name, _)| is_unset(name)).map(|(name, value)| (*name, value))
}

fn own_path() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("cannot find the path of this program: {error}"))
}

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
pub fn run_program(args: &RunArgs) -> ExitCode {
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
