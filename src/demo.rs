//! `ferrogin demo`: runs the three phases through the plugin, with kernels on CPU threads or, as PTX, on a GPU; then
//! prints a table of latencies and rates, unless the GPU is software.

use crate::{launch, stdout};
use clap::ValueEnum;
use mini_nccl::Bootstrap;
use scenario_runner::gpu::{self, Launch};
use scenario_runner::measure;
use scenario_runner::scenario::{self, SCENARIOS};
use scenario_runner::world::{Config, World};
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Number of ranks [default: 2, or as many as mpirun or torchrun started].
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Option<u32>,
    /// Repetitions of each part of a phase.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    reps: u32,
    /// How to start the ranks.
    #[arg(long, value_enum, default_value_t = Launcher::Builtin)]
    launcher: Launcher,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Launcher {
    /// This program.
    Builtin,
    /// The mpirun on PATH.
    Mpirun,
}

/// Runs one rank if a launcher started this process; otherwise starts the ranks and waits for them.
pub fn run(args: &DemoArgs) -> ExitCode {
    let defaults = [("FERROGIN_PROVIDER", "softefa".into()), ("FERROGIN_DEVICE", "cpu".into())];
    match launch::identity(args.ranks, &defaults) {
        Ok(Some(_)) => return rank(args).map_or_else(|error| failed(&error.to_string()), |()| ExitCode::SUCCESS),
        Ok(None) => {}
        Err(error) => return failed(&error),
    }
    let launcher = match args.launcher {
        Launcher::Mpirun => launch::Launcher::Mpirun,
        Launcher::Builtin => launch::Launcher::Builtin,
    };
    match launch::run(args.ranks.unwrap_or(2), launcher, &defaults) {
        Ok((code, None)) => code.into(),
        Ok((_, Some(failure))) => {
            // If standard output is full, the message below still reports the failure.
            let _ = stdout::print("FAIL\n");
            failed(&format!("{failure}; run `ferrogin doctor` to see what this machine is missing"))
        }
        Err(error) => failed(&error),
    }
}

fn failed(reason: &str) -> ExitCode {
    eprintln!("ferrogin demo: {reason}");
    ExitCode::FAILURE
}

fn rank(args: &DemoArgs) -> Result<(), Box<dyn Error>> {
    let config = Config::from_env();
    let bootstrap = Bootstrap::from_env(mini_nccl::timeout_from_env())?;
    let began = Instant::now();
    let world = World::open(&config, bootstrap, gpu::runner_from_env(Launch::default())?)?;
    let software = world.runner().gpu().and_then(|gpu| gpu.software.clone());
    let print = |text: std::fmt::Arguments<'_>| match world.rank() {
        0 => stdout::print(format_args!("{text}\n")),
        _ => Ok(()),
    };
    let plugin = world.comm().plugin();
    print(format_args!("plugin {} ({:?}) from {}", plugin.name(), plugin.abi(), plugin.path().display()))?;
    print(format_args!(
        "{} ranks on card {}, send queues of {} slots, set up in {:.0?}\n{}\n",
        world.nranks(),
        world.comm().device_name(),
        world.ring_slots(),
        began.elapsed(),
        world.runner().name()
    ))?;
    for scenario in SCENARIOS {
        let Some(phase) = scenario.phase else { continue };
        let began = Instant::now();
        scenario::run(&world, scenario, args.reps)?;
        let parts = scenario.steps.len();
        let time =
            if software.is_none() { format!(" in {:.2} s", began.elapsed().as_secs_f64()) } else { String::new() };
        print(format_args!(
            "PASS ({phase}) {}\n         {parts} x {} repetitions{time}",
            scenario.description, args.reps
        ))?;
    }
    if let Some(version) = software {
        print(format_args!(
            "\nAll phases passed as PTX on the software GPU {version}. An interpreter ran\n\
             the kernels, so there are no latencies and rates (docs/software-gpu.md)."
        ))?;
        return Ok(world.close()?);
    }
    let rows = measure::table(&world, args.reps)?;
    print(format_args!("\nMeasured between ranks 0 and 1; latency is one way, rates are those of a stream:\n"))?;
    print(format_args!("{}", measure::render(&rows)))?;
    Ok(world.close()?)
}
