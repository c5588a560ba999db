//! Runs the scenarios, as one rank in a launcher's job, or as the launcher of a new job.

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use mini_nccl::bootstrap::Identity;
use mini_nccl::launch::{Job, Output};
use mini_nccl::{Bootstrap, Error};
use scenario_runner::RunError;
use scenario_runner::gpu::{self, Launch};
use scenario_runner::machine::Machine;
use scenario_runner::plan::{Api, Spoil, Threads};
use scenario_runner::scenario::{self, SCENARIOS, Scenario, WORKLOADS};
use scenario_runner::segments::WindowMemory;
use scenario_runner::world::{Config, MAX_LANES, World};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Runs scenarios between the ranks of a job, through the plugin of NCCL_GIN_PLUGIN, of FERROGIN_DIST, or of this
/// program's directory. Under an mpirun the program is one rank; otherwise it launches the ranks.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Print the scenarios and the workloads and exit.
    #[arg(long)]
    list: bool,
    /// Run only this scenario or workload; may be given several times. Workloads need FERROGIN_SIGNALS=emulated, and
    /// run only by name.
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Repetitions of each step.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    reps: u32,
    /// Layout of the device structs: 0, 1 or 2.
    #[arg(long, default_value_t = 2)]
    backend_version: i32,
    /// Work requests in flight.
    #[arg(long, default_value_t = 64)]
    queue_depth: i32,
    /// Limit of one wait in seconds [default: 30, or FERROGIN_TIMEOUT if less].
    #[arg(long, overrides_with = "deadline")]
    deadline: Option<u64>,
    /// Number of ranks to launch.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Threads or groups of each rank in the steps that have several on a context.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=MAX_LANES.into()))]
    lanes: Option<u32>,
    /// A deliberate fault of the workloads, which has to make them fail.
    #[arg(long, default_value = "nothing", value_parser = one_of(&SPOILS))]
    spoil: Spoil,
    /// On a GPU: the threads that run a program together; a tile has 8.
    #[arg(long, default_value = "one", value_parser = one_of(&THREADS))]
    threads: Threads,
    /// On a GPU: the form of the device API, which is the Rust crate, gin.h or gin.cuh.
    #[arg(long, default_value = "c", value_parser = one_of(&APIS))]
    api: Api,
    /// On a GPU: run all programs of a rank in one block.
    #[arg(long)]
    packed: bool,
    /// On a GPU: PTX of the functions of gin.cu from another compiler, or of nccl.cu, in place of this program's own.
    #[arg(long, value_name = "FILE", conflicts_with = "image")]
    gin: Option<PathBuf>,
    /// On a GPU: machine code of all kernels for this GPU, in place of PTX.
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// On a GPU: the memory of the window, which is one allocation, several side by side, or memory of the host.
    #[arg(long, default_value = "whole", value_parser = one_of(&MEMORIES))]
    memory: WindowMemory,
    /// Print the GPU and its driver and exit. The status is 3, with the reason, if there is no GPU, or if it is older
    /// than compute capability 7.5 or its driver older than the PTX.
    #[arg(long)]
    gpu: bool,
}

const THREADS: [(&str, Threads); 4] =
    [("one", Threads::One), ("tile", Threads::Tile), ("warp", Threads::Warp), ("block", Threads::Block)];
const MEMORIES: [(&str, WindowMemory); 3] =
    [("whole", WindowMemory::Whole), ("segments", WindowMemory::Segments), ("host", WindowMemory::Host)];
const APIS: [(&str, Api); 3] = [("rust", Api::Rust), ("c", Api::C), ("cuda", Api::Cuda)];
const SPOILS: [(&str, Spoil); 6] = [
    ("nothing", Spoil::Nothing),
    ("weak", Spoil::Weak),
    ("lost", Spoil::Lost),
    ("doubled", Spoil::Doubled),
    ("reset", Spoil::Reset),
    ("flush", Spoil::Flush),
];

fn one_of<T: Copy + Send + Sync>(values: &'static [(&str, T)]) -> impl TypedValueParser<Value = T> {
    let parser = PossibleValuesParser::new(values.iter().map(|(name, _)| *name));
    parser.try_map(|text| values.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or("not a value"))
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        for Scenario { name, description, .. } in SCENARIOS.iter().chain(WORKLOADS) {
            println!("{name:<14} {description}");
        }
        return ExitCode::SUCCESS;
    }
    if args.gpu {
        return match Machine::first() {
            Ok(machine) => {
                println!("{machine}");
                ExitCode::SUCCESS
            }
            Err(why) => {
                eprintln!("scenario-runner: {why}");
                ExitCode::from(3)
            }
        };
    }
    let result = match Identity::from_env() {
        Ok(Some(identity)) => run_rank(&args, &identity),
        Ok(None) => return launch(&args),
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scenario-runner: {error}");
            ExitCode::FAILURE
        }
    }
}

fn launch(args: &Args) -> ExitCode {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("scenario-runner: cannot find the path of this program: {error}");
            return ExitCode::FAILURE;
        }
    };
    let job = Job::new(program, args.ranks).args(std::env::args_os().skip(1));
    match job.output(Output::Prefix).run() {
        Ok(outcome) => {
            if let Some(failure) = &outcome.failure {
                eprintln!("scenario-runner: {failure}");
            }
            ExitCode::from(u8::try_from(outcome.code).unwrap_or(1))
        }
        Err(error) => {
            eprintln!("scenario-runner: {error}");
            ExitCode::FAILURE
        }
    }
}

fn selected(args: &Args) -> Result<Vec<&'static Scenario>, RunError> {
    if args.only.is_empty() {
        return Ok(SCENARIOS.iter().collect());
    }
    let unknown = |name: &String| RunError::Usage(format!("there is no scenario {name}: --list prints all"));
    args.only.iter().map(|name| scenario::find(name).ok_or_else(|| unknown(name))).collect()
}

fn run_rank(args: &Args, identity: &Identity) -> Result<(), RunError> {
    let scenarios = selected(args)?;
    let defaults = Config::from_env();
    let config = Config {
        backend_version: args.backend_version,
        queue_depth: args.queue_depth,
        lanes: args.lanes,
        workloads: scenarios.iter().any(|scenario| scenario.is_workload()),
        spoil: args.spoil,
        deadline: args.deadline.map_or(defaults.deadline, Duration::from_secs),
        ..defaults
    };
    let bootstrap = Bootstrap::join(identity, mini_nccl::timeout_from_env()).map_err(Error::from)?;
    let (gin, image) = (args.gin.clone(), args.image.clone());
    let launch = Launch { threads: args.threads, api: args.api, packed: args.packed, gin, image, memory: args.memory };
    let world = World::open(&config, bootstrap, gpu::runner_from_env(launch)?)?;
    let first = world.rank() == 0;
    if first {
        let device = world.comm().device_name();
        let (ranks, slots) = (world.nranks(), world.ring_slots());
        println!("{ranks} ranks on {device}, send queues of {slots} slots, {}", world.runner().name());
    }
    for scenario in scenarios {
        let began = Instant::now();
        scenario::run(&world, scenario, args.reps)?;
        if first {
            println!("PASS {:<14} {:>8.2?}", scenario.name, began.elapsed());
        }
    }
    world.close()
}
