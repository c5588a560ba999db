//! `ferrogin gpu`: runs a program on software GPUs.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use crate::verbs::{directory, library_path};

/// The arguments of `ferrogin gpu`.
#[derive(Debug, clap::Args)]
pub struct GpuArgs {
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

/// Runs the program in place of this one.
pub fn run(args: &GpuArgs) -> ExitCode {
    let directory = match directory("gpu", "libcuda.so.1") {
        Ok(directory) => directory,
        Err(problem) => {
            eprintln!("ferrogin gpu: {problem}");
            return ExitCode::FAILURE;
        }
    };
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let error = Command::new(program).args(arguments).env("LD_LIBRARY_PATH", library_path(directory)).exec();
    eprintln!("ferrogin gpu: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(127)
}
