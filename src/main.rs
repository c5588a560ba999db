//! The ferrogin command line tool: `demo` exchanges values between ranks, `doctor` reports what a machine lacks.

mod demo;
mod doctor;
#[allow(unsafe_code)]
mod gpu;
mod launch;
mod mlx5_cards;
mod probe;
mod ptx;

use clap::{Parser, Subcommand};
use nix::sys::signal::{SigHandler, Signal, signal};
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
    /// Loads the plugin and lists its devices.
    #[command(hide = true)]
    Probe,
}

fn main() -> ExitCode {
    end_with_closed_output();
    match Args::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Doctor => doctor::run(),
        Command::Ptx { about } => ptx::run(about),
        Command::Probe => probe::run(),
    }
}

/// Lets SIGPIPE end the process, as it ends other programs. Rust ignores the signal, and print macros panic on the error.
#[allow(unsafe_code)]
fn end_with_closed_output() {
    // SAFETY: the default action runs no handler, and no other thread runs yet.
    // The call fails for an unknown signal only.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}
