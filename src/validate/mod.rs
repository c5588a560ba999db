//! `ferrogin validate`: runs, in one command, what needs hardware that the developers lack, and writes a report to send
//! them.
//!
//! | module | content |
//! |---|---|
//! | [`step`] | the steps, each a child process on each rank |
//! | [`fidelity`] | checks the card with raw work requests |
//! | [`expected`] | the software card's values, and the comparison |
//! | [`machine`] | a machine's facts, and the variables in a report |
//! | [`mlx5`] | `--mlx5`: a ConnectX card |
//! | [`archive`] | the .tar.gz with its MANIFEST, and what it omits |
//!
//! The validation's ranks meet once. For each step, the children, which are ranks of their own job, meet at the same
//! address. A child that fails, crashes or hangs ends only its step.

mod archive;
mod expected;
mod fidelity;
mod machine;
mod mlx5;
mod step;

use crate::probe;
use archive::{Output, Redaction};
use expected::Row;
use mini_nccl::Bootstrap;
use mini_nccl::bootstrap::Identity;
use mini_nccl::launch::{Job, Output as JobOutput};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::mkdtemp;
use scenario_runner::gpu::{self, Launch};
use scenario_runner::scenario;
use scenario_runner::world::{Config, World, plugin_from_env};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use step::{Outcome, Step};

#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// The report archive, which rank 0 writes; an existing file is replaced.
    #[arg(short, long, value_name = "FILE.tar.gz", default_value = "ferrogin-report.tar.gz")]
    output: PathBuf,
    /// Number of ranks to start on this host, if no launcher did [default: 2].
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Option<u32>,
    /// Runs fewer scenarios and repetitions: a minute instead of several.
    #[arg(long)]
    quick: bool,
    /// Validates a ConnectX card instead: the one in FERROGIN_MLX5 (`mlx5_0`), or a software one. One host is enough.
    #[arg(long, conflicts_with_all = ["ranks", "quick"])]
    mlx5: bool,
    /// Time limit in seconds for each step [default: 180, for perf 600; with --quick 90].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    limit: Option<u64>,
}

/// The hidden subcommand: one part of a validation, as a rank of the job of the launcher's variables.
#[derive(Debug, clap::Args)]
pub struct PartArgs {
    /// A scenario, `fidelity` or `mlx5`.
    part: String,
    /// Repetitions of each step of a scenario.
    #[arg(long, default_value_t = 500)]
    reps: u32,
}

/// Extra time after a step's limit for the ranks to exchange its results.
const EXCHANGE: Duration = Duration::from_secs(30);
/// Time limit of the search for a GPU.
const PROBE: Duration = Duration::from_secs(30);
/// Time that rank 0 has to write its report after a rank was lost.
const GRACE: Duration = Duration::from_secs(2);

/// Runs a validation as a rank if a launcher started this process; otherwise starts the ranks.
pub fn run(args: &ValidateArgs) -> ExitCode {
    let result = match Identity::from_env() {
        _ if args.mlx5 => mlx5_report(args),
        Ok(Some(identity)) if args.ranks.is_some_and(|ranks| ranks as usize != identity.nranks) => Err(format!(
            "--ranks {} contradicts the launcher, which started {}: leave out --ranks under a launcher",
            args.ranks.unwrap_or(0),
            identity.nranks
        )),
        Ok(Some(identity)) => rank(args, &identity),
        Ok(None) => launch(args),
        Err(error) => Err(error.to_string()),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ferrogin validate: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a part in this process.
pub fn part(args: &PartArgs) -> ExitCode {
    // The step's limit ends this process earlier; this one is in case the parent is killed.
    crate::child::end_with_parent(Duration::from_secs(86_400));
    if args.part == "fidelity" {
        return fidelity::run();
    }
    let run = || {
        if args.part == "mlx5" {
            return mlx5::part();
        }
        let scenario = scenario::find(&args.part).ok_or_else(|| format!("there is no scenario {}", args.part))?;
        let bootstrap = Bootstrap::from_env(mini_nccl::timeout_from_env()).map_err(|error| error.to_string())?;
        let runner = gpu::runner_from_env(Launch::default()).map_err(|error| error.to_string())?;
        let world = World::open(&Config::from_env(), bootstrap, runner).map_err(|error| error.to_string())?;
        scenario::run(&world, scenario, args.reps).map_err(|error| error.to_string())?;
        world.close().map_err(|error| error.to_string())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Validates a ConnectX card: runs one child process, whose output becomes the report.
fn mlx5_report(args: &ValidateArgs) -> Result<bool, String> {
    let output = Output::create(&args.output)?;
    let mut command = crate::child::this_program()?;
    command.args(["validate-part", "mlx5"]);
    let ended = crate::child::run(command, Duration::from_secs(args.limit.unwrap_or(300)));
    let redaction = Redaction::new([]);
    let last = ended.stdout.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok());
    let observed = last.map_or(Value::Null, |seen| seen["observed"].clone());
    let mut rows = expected::compare(mlx5::SOFTWARE_CARD, std::slice::from_ref(&observed));
    // Without compression there is nothing to compare.
    rows.retain(|row| row.observed != [None] || !row.key.starts_with("compressed"));
    let failure = ended.failure();
    let mut text = format!("ferrogin {} validate --mlx5\n", env!("CARGO_PKG_VERSION"));
    if let Some(why) = &failure {
        let _ = writeln!(text, "FAILED: {why}: {}", ended.last_errors(1).join(""));
    } else {
        write_rows(&mut text, &rows);
    }
    let all = format!("{}\n--- standard error ---\n{}", ended.stdout.trim_end(), ended.stderr);
    let facts = [("machine", machine::facts(&redaction)), ("environment", machine::environment(&redaction))];
    let mut files: BTreeMap<String, String> =
        facts.into_iter().map(|(name, text)| (format!("{name}.txt"), text)).collect();
    files.insert("summary.txt".into(), redaction.apply(&text));
    files.insert("mlx5.txt".into(), redaction.apply(&all));
    let path = output.write(&files)?;
    say(&format!("{text}\nReport: {}", path.display()));
    Ok(failure.is_none() && !rows.iter().any(Row::fails))
}

fn launch(args: &ValidateArgs) -> Result<bool, String> {
    // Rank 0 would notice too, but only after the others have started.
    drop(Output::create(&args.output)?);
    let program = std::env::current_exe().map_err(|error| format!("cannot find the path of this program: {error}"))?;
    let job = Job::new(program, args.ranks.unwrap_or(2) as usize).output(JobOutput::Inherit);
    let outcome = job.args(std::env::args_os().skip(1)).run().map_err(|error| error.to_string())?;
    Ok(outcome.success())
}

/// This rank's new directory, which no other user can enter; removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, String> {
        let template = std::env::temp_dir().join("ferrogin-validate-XXXXXX");
        let made = mkdtemp(&template).map_err(|error| {
            format!("cannot create {}: {error}; set TMPDIR to a writable directory", template.display())
        })?;
        Ok(Scratch(made))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All ranks' results for one step.
struct Done {
    step: Step,
    ranks: Vec<Outcome>,
}

impl Done {
    fn passed(&self) -> bool {
        self.ranks.iter().all(|outcome| outcome.passed)
    }

    fn seconds(&self) -> f64 {
        self.ranks.iter().map(|outcome| outcome.seconds).fold(0.0, f64::max)
    }

    fn reasons(&self) -> Vec<String> {
        let reasons: BTreeSet<&str> = self.ranks.iter().map(|outcome| outcome.reason.as_str()).collect();
        let failed = self.ranks.iter().enumerate().filter(|(_, outcome)| !outcome.passed);
        match (reasons.first(), reasons.len()) {
            (Some(reason), 1) if failed.clone().count() > 1 => vec![format!("all ranks: {reason}")],
            _ => failed.map(|(rank, outcome)| format!("rank {rank}: {}", outcome.reason)).collect(),
        }
    }

    fn json(&self) -> Value {
        let ranks: Vec<Value> = self
            .ranks
            .iter()
            .map(|outcome| json!({ "passed": outcome.passed, "seconds": outcome.seconds, "reason": outcome.reason, "facts": outcome.facts }))
            .collect();
        json!({ "step": self.step.name(), "passed": self.passed(), "seconds": self.seconds(), "ranks": ranks })
    }
}

/// Runs one rank of a validation; true if everything passed.
fn rank(args: &ValidateArgs, identity: &Identity) -> Result<bool, String> {
    // A reader of the output that goes away (`| head`) must not cost the report. Children start with no signal blocked.
    let _ = SigSet::from(Signal::SIGPIPE).thread_block();
    let is_first = identity.rank == 0;
    let output = if is_first { Some(Output::create(&args.output)) } else { None };
    if is_first {
        say(&format!("ferrogin {} validates {} ranks", env!("CARGO_PKG_VERSION"), identity.nranks));
    }
    let bootstrap = Bootstrap::join(identity, mini_nccl::timeout_from_env()).map_err(|error| {
        format!("{error}; start `ferrogin validate` on all hosts with the same FERROGIN_BOOTSTRAP=host:port of rank 0, which a firewall must let through")
    })?;
    let scratch = Scratch::new();
    let error = output.as_ref().and_then(|output| output.as_ref().err()).or(scratch.as_ref().err());
    agree(&bootstrap, args, error)?;
    let (output, scratch) = (output.transpose()?, scratch?);
    let address = identity.address.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']).to_owned());
    let redaction = Redaction::new(address);

    let gpus = all_have_gpus(&bootstrap)?;
    if is_first {
        say(&match &gpus {
            Ok(driver) => format!("Kernels run on CPU threads, and again as PTX on {driver}."),
            Err(reason) => format!("Kernels run on CPU threads only: {reason}."),
        });
        if std::env::var_os("NCCL_GIN_PLUGIN").is_none_or(|list| list.is_empty()) {
            say(&format!("NCCL_GIN_PLUGIN is not set (only NCCL needs it); the plugin is {}.", plugin_from_env()));
        }
    }
    let settings = step_settings(&gpus);
    let steps = step::all(args.quick, gpus.is_ok());
    let limit = |step: &Step| args.limit.map_or_else(|| step.limit(args.quick), Duration::from_secs);
    // A rank waits for the results of the slowest rank.
    let longest = steps.iter().map(limit).max().unwrap_or_default();
    let bootstrap = bootstrap.with_timeout(longest + EXCHANGE);
    let mut done: Vec<Done> = Vec::new();
    let mut interrupted = None;
    for step in steps {
        let limit = limit(&step);
        let result = run_step(&bootstrap, identity, &step, args.quick, limit, &settings, &scratch.0, &redaction);
        match result {
            Ok(ranks) => {
                let step = Done { step, ranks };
                if is_first {
                    print_step(&step);
                    // Shows what differs between cards before the long steps.
                    if step.step == Step::Fidelity {
                        say(&comparison(&compared(std::slice::from_ref(&step))));
                    }
                }
                done.push(step);
            }
            Err(error) => {
                interrupted = Some(format!("{}: {error}", step.name()));
                break;
            }
        }
    }
    let path = machine::provider_path();
    let environment = [("FI_PROVIDER_PATH", path.as_str())];
    let is_software = std::env::var("FERROGIN_PROVIDER").as_deref() == Ok("softefa");
    let libfabric = probe::start(&["libfabric"], if is_software { &environment } else { &[] }, PROBE);
    let providers = |key: &str| libfabric.all(key).next().cloned().unwrap_or_default();
    let own = json!({
        "environment": machine::environment(&redaction),
        "machine": machine::facts(&redaction),
        "rma": providers("rma"),
        "channels": providers("channels"),
    });
    let facts = match &interrupted {
        None => bootstrap.allgather(own.to_string().as_bytes()).map_err(|error| error.to_string())?,
        Some(_) => vec![own.to_string().into_bytes()],
    };
    let rows = compared(&done);
    let passed = interrupted.is_none() && done.iter().all(Done::passed) && !rows.iter().any(Row::fails);
    if let Some(output) = output {
        report(output, identity.nranks, &done, &rows, interrupted.as_deref(), &facts, &redaction)?;
    } else if let Some(reason) = interrupted {
        // A launcher ends all ranks when one fails: this gives rank 0 time to write its report.
        std::thread::sleep(GRACE);
        return Err(reason);
    }
    // As above: no rank exits before the report is written. Without rank 0, there is nothing to wait for.
    let _ = bootstrap.barrier();
    Ok(passed)
}

/// Compares the cards with the software card; empty before the fidelity check has run.
fn compared(done: &[Done]) -> Vec<Row> {
    let fidelity: Vec<Value> = done
        .iter()
        .filter(|done| done.step == Step::Fidelity)
        .flat_map(|done| done.ranks.iter().map(|outcome| outcome.facts.clone()))
        .collect();
    let is_empty = |seen: &Value| seen.as_array().is_none_or(Vec::is_empty);
    if fidelity.iter().all(is_empty) { Vec::new() } else { expected::compare(expected::SOFTWARE_CARD, &fidelity) }
}

/// Returns the comparison with its title.
fn comparison(rows: &[Row]) -> String {
    let mut text = "\nThe card compared with the software card\n".to_owned();
    write_rows(&mut text, rows);
    text
}

/// Says whether this machine can run the GIN plugin, the RMA plugin and the channels, a line each.
fn abilities(done: &[Done], rows: &[Row], facts: &[Vec<u8>]) -> String {
    let why = |done: &Done| format!("{}: {}", done.step.name(), done.reasons().join("; "));
    let (of_rma, of_gin): (Vec<_>, Vec<_>) = done.iter().partition(|done| done.step == Step::Rma);
    // The GIN plugin needs everything that the kernels tried on the CPU.
    let failed = of_gin.into_iter().find(|done| !done.passed()).map(why);
    let failed = failed.or(rows.iter().find(|row| row.fails()).map(|row| format!("{}: {}", row.key, row.shown())));
    let gin = failed.map_or_else(|| "yes".to_owned(), |why| format!("no: {why}"));
    let facts: Vec<Value> = facts.iter().map(|block| serde_json::from_slice(block).unwrap_or(Value::Null)).collect();
    // A provider that all ranks have is enough.
    let common = |key: &str, needs: &str| {
        let of = |rank: &Value| -> BTreeSet<String> {
            rank[key].as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
        };
        let all =
            facts.iter().map(of).reduce(|all, rank| all.intersection(&rank).cloned().collect()).unwrap_or_default();
        if all.is_empty() {
            format!("no: no libfabric provider on all ranks has {needs}")
        } else {
            format!("yes, over {}", all.into_iter().collect::<Vec<_>>().join(", "))
        }
    };
    let rma = match of_rma.into_iter().find(|done| !done.passed()) {
        Some(done) => format!("no: {}", why(done)),
        None => common("rma", "reliable datagrams, RMA and immediate data"),
    };
    let channels = common("channels", "reliable datagrams");
    format!("The GIN plugin runs here: {gin}\nThe RMA plugin runs here: {rma}\nThe channels run here: {channels}\n")
}

/// Collective: compares the ranks' versions and options, and tells each rank about the others' errors.
fn agree(bootstrap: &Bootstrap, args: &ValidateArgs, error: Option<&String>) -> Result<(), String> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let options = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "quick": args.quick,
        "limit": args.limit,
        "FERROGIN_PROVIDER": variable("FERROGIN_PROVIDER"),
        "FERROGIN_DEVICE": variable("FERROGIN_DEVICE"),
    });
    let own = json!({ "options": options, "error": error });
    let blocks = bootstrap.allgather(own.to_string().as_bytes()).map_err(|error| error.to_string())?;
    let blocks: Vec<Value> = blocks.iter().map(|block| serde_json::from_slice(block).unwrap_or(Value::Null)).collect();
    if let Some((rank, error)) =
        blocks.iter().enumerate().find_map(|(rank, block)| Some((rank, block["error"].as_str()?)))
    {
        return Err(if rank == bootstrap.rank() { error.to_owned() } else { format!("rank {rank} failed: {error}") });
    }
    for (rank, block) in blocks.iter().enumerate() {
        let Some(theirs) = block["options"].as_object() else {
            return Err(format!("rank {rank} runs a different program: start `ferrogin validate` on all ranks"));
        };
        for (name, value) in theirs {
            let first = &blocks[0]["options"][name];
            if value != first {
                return Err(format!(
                    "rank {rank} has {name} {value}, and rank 0 has {first}: start all ranks with the same version, options and settings"
                ));
            }
        }
    }
    Ok(())
}

/// Collective: returns rank 0's GPU if kernels can run as PTX on all ranks, otherwise the reason why not.
fn all_have_gpus(bootstrap: &Bootstrap) -> Result<Result<String, String>, String> {
    let own = match std::env::var("FERROGIN_DEVICE").as_deref() {
        Ok("cpu") => Err("FERROGIN_DEVICE=cpu".to_owned()),
        // If FERROGIN_DEVICE=cuda and there is no GPU, the steps fail.
        device => {
            let probed = probe::start(&["gpu"], &[], PROBE);
            let gpu = probed
                .all("gpu")
                .next()
                .and_then(|gpu| gpu["name"].as_str())
                .unwrap_or("the GPU that FERROGIN_DEVICE=cuda asks for");
            match probed.failure() {
                Some(reason) if device != Ok("cuda") => Err(reason),
                _ => Ok(gpu.to_owned()),
            }
        }
    };
    let block = serde_json::to_vec(&own).map_err(|error| error.to_string())?;
    let blocks = bootstrap.allgather(&block).map_err(|error| error.to_string())?;
    let mut all = blocks.iter().enumerate().map(|(rank, block)| {
        let has: Result<String, String> = serde_json::from_slice(block).map_err(|error| error.to_string())?;
        has.map_err(|reason| format!("rank {rank}: {reason}"))
    });
    let first = all.next().unwrap_or_else(|| Err("there are no ranks".to_owned()));
    Ok(all.fold(first, |first, other| first.and_then(|gpu| other.map(|_| gpu))))
}

/// Returns every step's variables, so that the steps use what the validation found.
fn step_settings(gpus: &Result<String, String>) -> Vec<(&'static str, String)> {
    let mut settings = vec![("NCCL_GIN_PLUGIN", plugin_from_env())];
    if gpus.is_err() {
        settings.push(("FERROGIN_DEVICE", "cpu".into()));
    }
    if std::env::var("FERROGIN_PROVIDER").as_deref() == Ok("softefa") {
        settings.push(("FI_PROVIDER_PATH", machine::provider_path()));
    }
    settings
}

/// Collective: runs a step on all ranks and returns all outcomes.
#[allow(clippy::too_many_arguments)]
fn run_step(
    bootstrap: &Bootstrap,
    identity: &Identity,
    step: &Step,
    quick: bool,
    limit: Duration,
    settings: &[(&'static str, String)],
    directory: &Path,
    redaction: &Redaction,
) -> Result<Vec<Outcome>, String> {
    let exchange = |block: &[u8]| bootstrap.allgather(block).map_err(|error| error.to_string());
    let variables = [
        &[
            ("FERROGIN_RANK", identity.rank.to_string()),
            ("FERROGIN_NRANKS", identity.nranks.to_string()),
            // Free again: the previous step's processes have exited on all ranks.
            ("FERROGIN_BOOTSTRAP", identity.address.clone()),
        ],
        settings,
    ]
    .concat();
    let own = step::run(step, quick, limit, &variables, directory, redaction);
    let own = serde_json::to_vec(&own).map_err(|error| error.to_string())?;
    let outcomes = exchange(&own)?;
    outcomes
        .iter()
        .enumerate()
        .map(|(rank, block)| {
            serde_json::from_slice(block)
                .map_err(|_| format!("rank {rank} sent no result: run the same ferrogin on all ranks"))
        })
        .collect()
}

/// Prints a line. If standard output is closed, the line is lost, but not the report.
fn say(line: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stdout(), format!("{line}\n").as_bytes());
}

fn print_step(done: &Done) {
    let verdict = if done.passed() { "passed" } else { "FAILED" };
    say(&format!("{verdict}  {:<31} {:>7.1} s", done.step.name(), done.seconds()));
    done.reasons().iter().for_each(|reason| say(&format!("        {reason}")));
}

fn report(
    output: Output,
    ranks: usize,
    done: &[Done],
    rows: &[Row],
    interrupted: Option<&str>,
    facts: &[Vec<u8>],
    redaction: &Redaction,
) -> Result<(), String> {
    let interrupted = interrupted.map(|reason| redaction.apply(reason));
    let verdict = verdict(done, rows);
    let summary = summary(ranks, done, rows, interrupted.as_deref());
    let abilities = redaction.apply(&abilities(done, rows, facts));
    let json = json!({
        "form": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "ranks": ranks,
        "runs": abilities.lines().collect::<Vec<_>>(),
        "passed": interrupted.is_none() && done.iter().all(Done::passed) && !rows.iter().any(Row::fails),
        "interrupted": interrupted,
        "steps": done.iter().map(Done::json).collect::<Vec<_>>(),
        "comparison": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    let mut files = BTreeMap::from([
        ("summary.txt".to_owned(), format!("{summary}\n{verdict}\n\n{abilities}")),
        ("summary.json".to_owned(), format!("{json:#}\n")),
    ]);
    for done in done {
        for (rank, outcome) in done.ranks.iter().enumerate() {
            for (name, text) in &outcome.files {
                files.insert(format!("rank-{rank}/{name}"), text.clone());
            }
        }
    }
    for (rank, block) in facts.iter().enumerate() {
        let facts: Value = serde_json::from_slice(block).unwrap_or(Value::Null);
        for name in ["environment", "machine"] {
            if let Some(text) = facts[name].as_str() {
                files.insert(format!("rank-{rank}/{name}.txt"), text.to_owned());
            }
        }
    }
    let manifest = archive::manifest(&files, &machine::VARIABLES);
    files.insert("MANIFEST".into(), manifest);
    let count = files.len();
    let path = output.write(&files)?;
    // The steps and the comparison are on the screen already.
    if let Some(reason) = &interrupted {
        say(&format!("FAILED  the validation was interrupted: {reason}"));
    }
    say(&format!("\n{verdict}\nReport: {} with {count} files. It contains:", path.display()));
    for (names, content) in archive::CONTENTS {
        say(&format!("  {names}: {content}"));
    }
    say("Host names, the home directory and IP addresses are replaced. Its file MANIFEST lists the variables.");
    say(&format!("\n{}", abilities.trim_end()));
    Ok(())
}

/// Writes the comparison, one row per line. Writing to a string cannot fail.
fn write_rows(text: &mut String, rows: &[Row]) {
    if rows.is_empty() {
        let _ = writeln!(text, "  nothing was observed");
        return;
    }
    let _ = writeln!(text, "  {:<8} {:<48} {:<22} observed", "", "", "software card");
    for row in rows {
        let _ = writeln!(text, "  {:<8} {:<48} {:<22} {}", row.verdict(), row.key, row.software_card, row.shown());
    }
}

fn summary(ranks: usize, done: &[Done], rows: &[Row], interrupted: Option<&str>) -> String {
    let mut text = format!("ferrogin {} validate, {ranks} ranks\n\nSteps\n", env!("CARGO_PKG_VERSION"));
    // Writing to a string cannot fail.
    for done in done {
        let verdict = if done.passed() { "passed" } else { "FAILED" };
        let _ = writeln!(text, "  {verdict}  {:<31} {:>7.1} s", done.step.name(), done.seconds());
        for reason in done.reasons() {
            let _ = writeln!(text, "          {reason}");
        }
    }
    if let Some(reason) = interrupted {
        let _ = writeln!(text, "  FAILED  the validation was interrupted: {reason}");
    }
    text += &comparison(rows);
    text
}

/// Counts the steps that passed, and the observations that agree.
fn verdict(done: &[Done], rows: &[Row]) -> String {
    let count = |verdict: &str| rows.iter().filter(|row| row.verdict() == verdict).count();
    let failed = done.iter().filter(|done| !done.passed()).count();
    format!(
        "{} of {} steps passed; {} observations agree with the software card, {} differ as cards may, {} fail.",
        done.len() - failed,
        done.len(),
        count("agrees"),
        count("differs"),
        count("FAILS")
    )
}

/// The arguments of `ferrogin pack`.
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// The directory, whose files become those of the archive.
    directory: PathBuf,
    /// The archive; an older file of this name is replaced.
    #[arg(short, long, value_name = "FILE.tar.gz")]
    output: PathBuf,
}

/// `ferrogin pack`: packs a directory into an archive like that of a validation.
pub fn run_pack(args: &PackArgs) -> ExitCode {
    match pack(&args.directory, &args.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferrogin pack: {error}");
            ExitCode::FAILURE
        }
    }
}

fn pack(directory: &Path, output: &Path) -> Result<(), String> {
    let failed = |path: &Path, error: std::io::Error| format!("{} cannot be read: {error}", path.display());
    let output = Output::create(output)?;
    let redaction = Redaction::new([]);
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(|error| failed(directory, error))? {
        let path = entry.map_err(|error| failed(directory, error))?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else { continue };
        let bytes = std::fs::read(&path).map_err(|error| failed(&path, error))?;
        files.insert(name.to_string_lossy().into_owned(), redaction.apply(&String::from_utf8_lossy(&bytes)));
    }
    files.insert("environment.txt".into(), machine::environment(&redaction));
    files.insert("machine.txt".into(), machine::facts(&redaction));
    output.write(&files).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn without_gpus_every_step_runs_on_the_cpu() {
        let device = |gpus: Result<String, String>| {
            step_settings(&gpus).into_iter().find_map(|(name, value)| (name == "FERROGIN_DEVICE").then_some(value))
        };
        assert_eq!(device(Err("rank 1: no CUDA driver".into())), Some("cpu".into()));
        assert_eq!(device(Ok("a GPU".into())), None);
    }

    #[test]
    fn directory_is_new_and_private() {
        // What another user who knows the process id and the rank would create in advance.
        let guessed = std::env::temp_dir().join(format!("ferrogin-validate-{}-0", std::process::id()));
        let _ = std::fs::remove_dir_all(&guessed);
        std::fs::create_dir(&guessed).unwrap();
        std::fs::write(guessed.join("perf.json"), "a file of another user's choice").unwrap();
        let (one, two) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        for place in [&one.0, &two.0] {
            assert_eq!(std::fs::read_dir(place).unwrap().count(), 0, "{}", place.display());
            assert_eq!(std::fs::metadata(place).unwrap().permissions().mode() & 0o777, 0o700);
        }
        assert_ne!(one.0, two.0);
        let path = one.0.clone();
        drop(one);
        assert!(!path.exists());
        std::fs::remove_dir_all(guessed).unwrap();
    }
}
