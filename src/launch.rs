//! A subcommand's ranks: this process is one if a launcher started it; otherwise it starts them.

use mini_nccl::bootstrap::Identity;
pub use mini_nccl::launch::Launcher;
use mini_nccl::launch::{Job, Output, Signal};
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::Command;

/// The exit code of a rank whose output was closed, as in a shell.
const CLOSED_OUTPUT: u8 = 128 + Signal::SIGPIPE as u8;

/// Variables, and the values that they get in all ranks unless they are already set.
pub type Defaults<'a> = &'a [(&'a str, OsString)];

/// The rank that a launcher gave this process; `None` without a launcher. A rank that lacks a default re-executes this program with it,
/// because a running process must not change its environment.
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

/// Runs this same command as `ranks` ranks. Returns when all have ended, with the job's exit code and its first failure.
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
