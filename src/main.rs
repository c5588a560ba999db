//! The ferrogin command line tool: `demo` exchanges values between ranks, `perf` measures, `doctor` reports what a
//! machine is missing.
#![deny(clippy::print_stdout)]

mod check;
#[cfg(test)]
mod checked_in;
mod child;
mod demo;
mod doctor;
mod help;
mod launch;
mod mlx5_cards;
mod perf;
mod probe;
mod ptx;
mod stdout;
mod trace;
mod validate;
mod verbs;

use clap::{FromArgMatches, Parser, Subcommand};
use nix::sys::signal::{SigHandler, Signal, signal};
use std::process::ExitCode;
use std::time::Duration;

/// GPU-initiated networking for AWS EFA.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 80)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Exchanges values between ranks through the plugin, and measures latencies and rates.
    ///
    /// The demo uses the software card unless FERROGIN_PROVIDER is set. With FERROGIN_DEVICE=cuda, kernels run as PTX
    /// on a GPU, or on the software GPU (`ferrogin gpu -- ferrogin demo`).
    Demo(demo::DemoArgs),
    /// Says whether NCCL can use the plugin with these settings, and how to fix each problem.
    Doctor(doctor::DoctorArgs),
    /// Measures latencies, rates and bandwidths between ranks.
    ///
    /// Under mpirun or torchrun, this process is one rank; otherwise it starts --ranks ranks on this host. Without an
    /// EFA card, set FERROGIN_PROVIDER=softefa.
    Perf(perf::PerfArgs),
    /// Compares two reports of perf: prints the ratios of their figures.
    Compare(perf::CompareArgs),
    /// Plots reports of perf: latency and bandwidth against size.
    Plot(perf::PlotArgs),
    /// Runs every check on the ranks of a job, and writes a report you can send us. Made for machines with hardware.
    ///
    /// Runs the doctor, the scenarios, checks of the card, and perf. This process is one rank under mpirun or torchrun,
    /// or with FERROGIN_RANK, FERROGIN_NRANKS and FERROGIN_BOOTSTRAP set; otherwise it starts --ranks ranks on this
    /// host.
    Validate(validate::ValidateArgs),
    /// Prints a trace of software cards (SOFTEFA_TRACE), or decodes a work request or completion from hexadecimal
    /// digits.
    Trace(trace::TraceArgs),
    /// Prints the device code as PTX: the functions of ferrogin/gin.h, to link with kernels.
    Ptx {
        /// Prints instead where the PTX comes from: its compiler and sources.
        #[arg(long)]
        about: bool,
    },
    /// Starts the ranks of a host API program on this host.
    ///
    /// Sets FERROGIN_RANK, FERROGIN_NRANKS, FERROGIN_BOOTSTRAP and FERROGIN_SECRET for each rank, and prefixes its
    /// output with its rank. If a rank fails, the others have 5 s to exit.
    Run(launch::RunArgs),
    /// Runs a verbs program on software EFA cards.
    ///
    /// The program finds the cards the way it finds EFA hardware. SOFTEFA_NICS and SOFTEFA_FAULTS apply.
    Verbs(verbs::VerbsArgs),
    /// Runs a program on software GPUs: it finds their libcuda.so.1 instead of NVIDIA's.
    ///
    /// SOFTGPU_DEVICES, SOFTGPU_MEMORY_BYTES and other settings apply: docs/software-gpu.md.
    Gpu(verbs::GpuArgs),
    /// Reports what a program's kernels and requests leave unordered, on software GPUs and software cards.
    ///
    /// Every access to memory that nothing orders against another one, signals that don't cover what they are waited
    /// for, sources reused too early, doorbells that nobody rings: docs/check.md.
    Check(check::CheckArgs),
    /// Packs the files of a directory for a report, without host names, addresses and the home directory.
    #[command(hide = true)]
    Pack(validate::PackArgs),
    /// Runs one part of a validation, as a rank.
    #[command(hide = true)]
    ValidatePart(validate::PartArgs),
    /// Runs one check of the doctor in this process.
    #[command(hide = true)]
    Probe {
        /// Ends the process after this many seconds.
        #[arg(long, default_value_t = 30)]
        limit: u64,
        #[command(subcommand)]
        probe: probe::Probe,
    },
}

fn main() -> ExitCode {
    reset_signals();
    let args = Args::from_arg_matches(&help::command().get_matches()).unwrap_or_else(|error| error.exit());
    match args.command {
        Command::Demo(args) => demo::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Compare(args) => perf::compare(&args),
        Command::Plot(args) => perf::plot(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Run(args) => launch::run_program(&args),
        Command::Ptx { about } => ptx::run(about),
        Command::Gpu(args) => verbs::run_gpu(&args),
        Command::Verbs(args) => verbs::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Pack(args) => validate::run_pack(&args),
        Command::ValidatePart(args) => validate::part(&args),
        Command::Probe { limit, probe } => probe::run(&probe, Duration::from_secs(limit)),
    }
}

/// Lets SIGPIPE end the process, as for other programs: Rust ignores it. Also resets SIGCHLD, which the parent may
/// ignore: the kernel would then not keep the children's exit statuses.
#[allow(unsafe_code)]
fn reset_signals() {
    for reset in [Signal::SIGPIPE, Signal::SIGCHLD] {
        // SAFETY: the default action runs no handler, and no other thread is running yet.
        // The call only fails for an unknown signal.
        let _ = unsafe { signal(reset, SigHandler::SigDfl) };
    }
}
