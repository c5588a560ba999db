//! The ferrogin command line tool: `demo` exchanges values between ranks, `doctor` reports what a machine lacks.

mod demo;
mod doctor;
#[allow(unsafe_code)]
mod gpu;
mod mlx5_cards;
mod probe;
mod ptx;

use clap::{Parser, Subcommand};
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
    /// Exchanges values between ranks through the plugin, and measures latencies and rates.
    ///
    /// The demo uses the software card unless FERROGIN_PROVIDER is set.
    Demo(demo::DemoArgs),
    /// Reports what this machine has, what it lacks, and how to get it.
    ///
    /// Exits with 0 if NCCL could use the plugin with the present settings.
    Doctor,
    /// Prints the device code as PTX: the functions of ferrogin/gin.h, to be linked with kernels.
    Ptx {
        /// Prints the origin of the PTX instead: its compiler and sources.
        #[arg(long)]
        about: bool,
    },
    /// Runs one rank of a demo.
    #[command(hide = true)]
    Rank(demo::DemoArgs),
    /// Loads the plugin and lists its devices.
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
