//! The ferrogin command line tool: shows that it works here (`demo`), and what is missing where it does not
//! (`doctor`).

mod cards;
mod demo;
mod doctor;
#[allow(unsafe_code)]
mod gpu;
mod probe;
mod ptx;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// GPU-initiated networking for AWS EFA.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Exchanges values between ranks through the plugin, on the software card unless FERROGIN_PROVIDER says otherwise;
    /// then measures.
    Demo(demo::DemoArgs),
    /// Says what is found on this machine, what is missing, and what to do about it.
    ///
    /// Exits with 0 if NCCL could use the plugin with the settings that are in force.
    Doctor,
    /// Prints the device code as PTX: the functions of ferrogin/gin.h, for linking with kernels.
    Ptx {
        /// Prints where the PTX comes from instead.
        #[arg(long)]
        about: bool,
    },
    /// One rank of a demo.
    #[command(hide = true)]
    Rank(demo::DemoArgs),
    /// Loads the plugin and asks for its devices.
    #[command(hide = true)]
    Probe,
}

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Demo(args) => demo::launch(&args),
        Command::Rank(args) => demo::rank(&args),
        Command::Doctor => doctor::run(),
        Command::Ptx { about } => ptx::run(about),
        Command::Probe => probe::run(),
    }
}

/// A file of the distribution, which lies beside this program.
fn beside(name: &str) -> PathBuf {
    let directory = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.to_path_buf()));
    directory.unwrap_or_default().join(name)
}
