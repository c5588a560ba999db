//! `ferrogin doctor`: reports whether NCCL can use the plugin with these settings, and how to fix each problem.
//!
//! | module | checks |
//! |---|---|
//! | [`finding`] | the result of a check; the report as text and JSON |
//! | [`machine`] | the checks' inputs |
//! | [`plugin`] | the files of the plugin and the provider ([`elf`]), their versions, a rank's exchange with itself |
//! | [`libfabric`] | libfabric, its providers |
//! | [`rdma`] | RDMA devices, mlx5 cards |
//! | [`gpu`] | GPUs and their driver |
//! | [`nccl`] | NCCL's settings, its library, and what a program must set |
//! | [`limits`] | process limits, shared memory, loopback, pages |
//! | [`settings`] | environment variables |
//!
//! Everything that runs foreign code is a [`probe`](crate::probe), a child process with a time limit.

mod elf;
mod finding;
mod gpu;
mod libfabric;
mod limits;
mod machine;
mod nccl;
mod plugin;
mod rdma;
mod settings;

pub use settings::VARIABLES;

use clap::ValueEnum;
use finding::{Finding, Level, Report};
use machine::{Machine, variable};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Seconds that a check in a child process may take without FERROGIN_TIMEOUT, and the most that FERROGIN_TIMEOUT may
/// set.
const LIMIT_DEFAULT: u64 = 30;
const LIMIT_MAX: u64 = 60;
/// Time that an area may take on top of its children.
const FILES_LIMIT: Duration = Duration::from_secs(8);

#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Prints the report as JSON; docs/doctor.md describes the format.
    #[arg(long)]
    json: bool,
    /// Also prints the checks that passed, not only the verdict, problems and warnings.
    #[arg(long)]
    all: bool,
    /// Time limit in seconds for the checks that load libraries, which all run at once [default: FERROGIN_TIMEOUT, at
    /// most 60, or 30].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: Option<u64>,
    /// Checks only these areas, separated by commas; the exit code covers only them.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "AREA")]
    only: Vec<Area>,
    /// NCCL's library, if your program loads another one than the dynamic linker finds.
    #[arg(long, value_name = "FILE", default_value = "libnccl.so.2")]
    nccl: String,
    /// The directory below which /sys, /proc and /dev are read.
    #[arg(long, hide = true, default_value = "/")]
    root: PathBuf,
}

/// A part of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
enum Area {
    Plugin,
    Libfabric,
    Rdma,
    Gpu,
    Nccl,
    Limits,
    Settings,
}

/// Returns the time limit for a check in a child process.
fn limit(option: Option<u64>) -> Duration {
    let setting = || variable("FERROGIN_TIMEOUT")?.parse::<u64>().ok().filter(|seconds| *seconds > 0);
    Duration::from_secs(option.or_else(|| setting().map(|seconds| seconds.min(LIMIT_MAX))).unwrap_or(LIMIT_DEFAULT))
}

/// Prints the report. The exit code is 0 unless a finding is a problem.
pub fn run(args: &DoctorArgs) -> ExitCode {
    let report = examine(args);
    let text = if args.json { format!("{:#}\n", report.json()) } else { report.text(args.all) };
    // A closed standard output doesn't affect the result. Colours are only for terminals, and not with NO_COLOR.
    let _ = std::io::Write::write_all(&mut anstream::stdout(), text.as_bytes());
    if report.usable() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn examine(args: &DoctorArgs) -> Report {
    let machine = Arc::new(Machine {
        root: args.root.clone(),
        provider: variable("FERROGIN_PROVIDER").unwrap_or_else(|| "efa".into()),
        verbs: crate::verbs::below(),
        nccl: args.nccl.clone(),
        limit: limit(args.timeout),
    });
    let wanted = |area: &Area| args.only.is_empty() || args.only.contains(area);
    let areas: Vec<Area> = Area::value_variants().iter().copied().filter(wanted).collect();
    let (sender, receiver) = channel();
    for &area in &areas {
        let (machine, sender) = (Arc::clone(&machine), sender.clone());
        // The receiver may have given up.
        std::thread::spawn(move || drop(sender.send((area, check(area, &machine)))));
    }
    drop(sender);
    // An area runs at most two children, one after the other. Its own file reads may hang too, as on a network file
    // system that lost its server.
    let deadline = Instant::now() + 2 * machine.limit + FILES_LIMIT;
    let mut done = HashMap::new();
    while let Ok((area, findings)) = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        done.insert(area, findings);
    }
    let of_area = |area: &Area| done.remove(area).unwrap_or_else(|| vec![not_ended(*area)]);
    let mut findings: Vec<Finding> = areas.iter().flat_map(of_area).collect();
    // If a card has exchanged data, files that the RDMA checks miss aren't needed.
    let is_proven = findings.iter().any(|finding| finding.area == plugin::EXCHANGE && finding.level == Level::Ok);
    for finding in findings.iter_mut().filter(|finding| is_proven && finding.area == rdma::AREA) {
        finding.level = finding.level.min(Level::Warning);
    }
    one_problem_per_cause(&mut findings);
    let only = args.only.iter().filter_map(|area| Some(area.to_possible_value()?.get_name().to_owned())).collect();
    Report { findings, only }
}

/// Turns problems that follow from another one into facts.
fn one_problem_per_cause(findings: &mut [Finding]) {
    let is_problem = |finding: &&Finding| finding.level == Level::Problem;
    // What a plugin needs before it can open a card.
    let needs = |finding: &&Finding| {
        [libfabric::AREA, rdma::AREA, gpu::AREA, settings::AREA, limits::AREA, limits::SHARED_MEMORY]
            .contains(&finding.area)
    };
    let cause = findings.iter().filter(is_problem).find(needs).map(|cause| cause.what.clone());
    let list = findings.iter().filter(is_problem).find(|finding| finding.what.ends_with(nccl::NONE));
    let list = list.map(|cause| cause.what.clone());
    for finding in findings.iter_mut().filter(|finding| finding.level == Level::Problem) {
        let cause = if plugin::may_follow(finding.area) {
            &cause
        } else if finding.what.ends_with(plugin::NAMES_NONE) {
            &list
        } else {
            continue;
        };
        if let Some(cause) = cause {
            finding.level = Level::Ok;
            finding.why = format!("this probably follows from the problem: {cause}");
        }
    }
}

fn check(area: Area, machine: &Machine) -> Vec<Finding> {
    match area {
        Area::Plugin => plugin::check(machine),
        Area::Libfabric => libfabric::check(machine),
        Area::Rdma => rdma::check(machine),
        Area::Gpu => gpu::check(machine),
        Area::Nccl => nccl::check(machine),
        Area::Limits => limits::check(machine),
        Area::Settings => settings::check(machine),
    }
}

fn not_ended(area: Area) -> Finding {
    let name = area.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    Finding::problem(
        "doctor",
        format!("the check of the area {name} did not finish, or failed: standard error has the message"),
        "the report is not complete",
        "check that this area's files can be read (a network file system may have lost its server), or leave the \
         area out with --only",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_that_follows_from_another_is_counted_once() {
        let problem = |area, what: &str| Finding::problem(area, what, "why", "fix");
        let count = |findings: &[Finding]| {
            let mut findings = findings.to_vec();
            one_problem_per_cause(&mut findings);
            findings.iter().filter(|finding| finding.level == Level::Problem).count()
        };
        let card = problem("software card", "not usable");
        assert_eq!(count(std::slice::from_ref(&card)), 1);
        for cause in ["libfabric", "RDMA device", "setting", "limits", "shared memory"] {
            assert_eq!(count(&[card.clone(), problem(cause, "broken")]), 1, "{cause}");
        }
        assert_eq!(count(&[card.clone(), problem("NCCL", "NCCL_GIN_TYPE=3")]), 2);
        let none = [
            problem("plugin", "NCCL_GIN_PLUGIN=none names no plugin"),
            problem("NCCL", "NCCL_GIN_PLUGIN=none has the entry none"),
        ];
        assert_eq!(count(&none), 1);
    }
}
