//! `ferrogin check`: runs a program on the software GPU and the software card, and reports what nothing orders.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use gin_check::event::{Event, Record, decode, directory};
use gin_check::join::{MAX_REQUESTS, join};
use gin_check::report::{Exception, Report, merge};
use mini_nccl::bootstrap::Identity;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::Pid;

use crate::verbs;

/// The arguments of `ferrogin check`.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Runs the program this many times, each with another schedule of its kernels' threads and another order of the
    /// card's work.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    seeds: u32,
    /// Lets a warp's collectives (shfl, vote, match, elect) order its lanes, as much code assumes.
    #[arg(long)]
    lenient: bool,
    /// Prints JSON, one report per line. What the program prints goes to standard error.
    #[arg(long)]
    json: bool,
    /// A file of accepted reports. A line has a kind, one or two places, and a reason: `race a.cu:7 a.cu:9 : the value
    /// is a hint`.
    #[arg(long, value_name = "FILE")]
    exceptions: Option<PathBuf>,
    /// The program, or its launcher, and the arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

/// The exit status if the check itself fails.
const FAILED: u8 = 2;
/// The seeds of the GPUs of one run follow each other, so those of runs are this far apart.
const SEED_STEP: u32 = 1000;

/// A run's directory of records, removed at its end.
struct Records(PathBuf);

impl Records {
    fn new() -> Result<Self, String> {
        let name = format!("ferrogin-check-{}-XXXXXX", std::process::id());
        let parent = std::env::temp_dir();
        nix::unistd::mkdtemp(&parent.join(name)).map(Self).map_err(|error| {
            format!(
                "cannot make a directory for records in {}: {error}. Set TMPDIR to a directory that this user may write",
                parent.display()
            )
        })
    }

    /// All files, decoded.
    fn read(&self) -> Result<Vec<Vec<Record>>, String> {
        let failed = |path: &Path, error: io::Error| format!("the records in {}: {error}", path.display());
        let entries = fs::read_dir(&self.0).map_err(|error| failed(&self.0, error))?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        let read = |path: &PathBuf| {
            let records = decode(&fs::read(path).map_err(|error| failed(path, error))?);
            // Who can't write a record empties its file.
            if !matches!(records.first(), Some(Record { event: Event::Process { .. }, .. })) {
                let place = std::env::temp_dir();
                return Err(format!(
                    "a process could not write all its records, so nothing was checked. If {} is full, set TMPDIR to another directory",
                    place.display()
                ));
            }
            Ok(records)
        };
        paths.iter().map(read).collect()
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs the command.
pub fn run(args: &CheckArgs) -> ExitCode {
    match check(args) {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("ferrogin check: {problem}");
            ExitCode::from(FAILED)
        }
    }
}

fn check(args: &CheckArgs) -> Result<ExitCode, String> {
    let exceptions = match &args.exceptions {
        None => Vec::new(),
        Some(path) => fs::read_to_string(path)
            .map_err(|error| error.to_string())
            .and_then(|text| Exception::parse(&text))
            .map_err(|error| format!("--exceptions {}: {error}", path.display()))?,
    };
    if directory().is_some() {
        return Err(
            "this is a part of a program that is being checked: run `ferrogin check` once, around all of it".into()
        );
    }
    if Identity::from_env().ok().flatten().is_some_and(|own| own.nranks > 1) {
        return Err(
            "this is one rank of a job, and the check needs all of them: run `ferrogin check` around the launcher, \
                    as in `ferrogin check -- ferrogin run -n 2 -- PROGRAM`"
                .into(),
        );
    }
    let gpu = verbs::library_path(verbs::directory("gpu", "libcuda.so.1")?);
    let (mut reports, mut failure, mut launches) = (Vec::new(), None, 0);
    for seed in 0..args.seeds {
        let records = Records::new()?;
        failure = failure.or(run_once(args, seed, &gpu, &records.0)?);
        let files = records.read()?;
        let count = |is: fn(&Event) -> bool| files.iter().flatten().filter(|record| is(&record.event)).count();
        launches += count(|event| matches!(event, Event::Launch { .. }));
        let requests = count(|event| matches!(event, Event::Taken { .. }));
        if requests > MAX_REQUESTS {
            failure.get_or_insert(format!(
                "only races inside kernels were checked, as the program posts {requests} requests and the check takes at most \
                 {MAX_REQUESTS}: run fewer rounds"
            ));
        }
        merge(&mut reports, join(&files));
    }
    if launches == 0 {
        return Err(nothing_checked(failure.as_deref()));
    }
    let (excepted, reports): (Vec<Report>, Vec<Report>) =
        reports.into_iter().partition(|report| exceptions.iter().any(|exception| exception.covers(report)));
    for unused in exceptions.iter().filter(|exception| !excepted.iter().any(|report| exception.covers(report))) {
        eprintln!("ferrogin check: line {} of the exceptions covered nothing in this run", unused.line);
    }
    if reports.iter().any(lacks_lines) {
        eprintln!(
            "ferrogin check: these kernels have no line information, so calls that are inlined aren't recognised, and \
             reports may be false: compile with -gline-tables-only (clang) or -lineinfo (nvcc)"
        );
    }
    print(args, &reports, excepted.len())?;
    if reports.iter().all(|report| report.kind.is_note()) {
        return failure.map_or(Ok(ExitCode::SUCCESS), Err);
    }
    if let Some(failure) = failure {
        eprintln!("ferrogin check: {failure}");
    }
    Ok(ExitCode::FAILURE)
}

/// Runs the program once. Returns how it failed, if it did.
fn run_once(args: &CheckArgs, seed: u32, gpu: &OsString, records: &Path) -> Result<Option<String>, String> {
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", gpu).env("GIN_CHECK", records).stdin(Stdio::null());
    // Weak memory would only add reorderings, which the check finds without seeing them.
    command.env("SOFTGPU_MEMORY", "strong");
    let mut default = |name: &str, value: String| {
        if std::env::var_os(name).is_none_or(|value| value.is_empty()) {
            command.env(name, value);
        }
    };
    default("FERROGIN_PROVIDER", "softefa".into());
    default("FERROGIN_DEVICE", "cuda".into());
    // A kernel's records are written when it ends.
    default("SOFTGPU_WATCHDOG", "600".into());
    if args.seeds > 1 {
        default("SOFTEFA_FAULTS", format!("seed={},reorder=64", seed + 1));
        command.env("SOFTGPU_SEED", (SEED_STEP * seed).to_string());
    }
    if args.lenient {
        command.env("GIN_CHECK_LENIENT", "1");
    }
    if args.json {
        let stderr = io::stderr().as_fd().try_clone_to_owned();
        command.stdout(stderr.map_err(|error| format!("standard error: {error}"))?);
    }
    let name = program.to_string_lossy();
    let status = match run_program(&mut command).map_err(|error| format!("cannot run {name}: {error}"))? {
        Waited::Ended(status) => status,
        Waited::Interrupted(signal) => return Err(format!("interrupted by {signal}: nothing was checked")),
    };
    Ok(match (status.code(), status.signal().map(Signal::try_from)) {
        (Some(0), _) => None,
        (Some(code), _) => Some(format!("{name} exited with {code}")),
        (None, Some(Ok(signal))) => Some(format!("{name} was killed by {signal}")),
        (None, _) => Some(format!("{name} ended: {status}")),
    })
}

/// How the program ended.
enum Waited {
    Ended(ExitStatus),
    /// This process got a signal, and has ended the program.
    Interrupted(Signal),
}

/// Runs the program. A signal that would end this process ends the program first, so that the records can be removed.
#[allow(unsafe_code)]
fn run_program(command: &mut Command) -> io::Result<Waited> {
    let signals: SigSet = [Signal::SIGCHLD, Signal::SIGINT, Signal::SIGTERM].into_iter().collect();
    let mask = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let descriptor = SignalFd::new(&signals)?;
    // SAFETY: the hook is async-signal-safe: it makes one system call, and its errors allocate no memory.
    unsafe { command.pre_exec(move || Ok(mask.thread_set_mask()?)) };
    let mut child = command.spawn()?;
    let mut interrupted = None;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let got = descriptor.read_signal()?.and_then(|got| Signal::try_from(got.ssi_signo.cast_signed()).ok());
        if got.is_some_and(|signal| signal != Signal::SIGCHLD) {
            // The second signal kills a program that ignores the first.
            let sent = if interrupted.is_some() { Signal::SIGKILL } else { Signal::SIGTERM };
            interrupted = interrupted.or(got);
            kill(Pid::from_raw(child.id().cast_signed()), sent)?;
        }
    };
    mask.thread_set_mask()?;
    Ok(interrupted.map_or(Waited::Ended(status), Waited::Interrupted))
}

fn nothing_checked(failure: Option<&str>) -> String {
    let why = "nothing was checked: the program has to launch kernels through libcuda.so.1; kernels on CPU threads aren't checked";
    failure.map_or_else(
        || why.into(),
        |failure| format!("{failure} before its first kernel. If it succeeds without the check, {why}"),
    )
}

fn print(args: &CheckArgs, reports: &[Report], excepted: usize) -> Result<(), String> {
    let mut text = String::new();
    for report in reports {
        text += &if args.json { report.json() } else { report.text(source_line) };
        text.push('\n');
    }
    if !args.json {
        let runs = if args.seeds == 1 { "one run".to_owned() } else { format!("{} runs", args.seeds) };
        let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let notes = reports.iter().filter(|report| report.kind.is_note()).count();
        text += &format!("ferrogin check: {}", counted(reports.len() - notes, "error"));
        if notes > 0 {
            text += &format!(" and {}", counted(notes, "note"));
        }
        text += &format!(" in {runs}");
        if excepted > 0 {
            text += &format!(", {excepted} excepted");
        }
        text.push('\n');
    }
    crate::stdout::print(&text).map_err(|error| error.to_string())
}

/// Whether a place is a line of PTX, in a module that the program has named or not.
fn lacks_lines(report: &Report) -> bool {
    let is_ptx = |line: &String| line.rsplit_once(':').is_some_and(|(file, _)| file == "PTX" || file.ends_with(".ptx"));
    std::iter::once(&report.first).chain(&report.second).any(|side| side.lines.iter().any(is_ptx))
}

/// The text of `file:line`, if the file is here.
fn source_line(place: &str) -> Option<String> {
    let (file, line) = place.rsplit_once(':')?;
    let line: usize = line.parse().ok()?;
    fs::read_to_string(file).ok()?.lines().nth(line.checked_sub(1)?).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gin_check::report::{Access, Kind};

    #[test]
    fn a_line_of_ptx_is_no_line_information() {
        for (line, expected) in [("PTX:7", true), ("kernels.ptx:7", true), ("a.cu:7", false)] {
            let first = Access { rank: None, kernel: "k".into(), what: "put".into(), lines: vec![line.into()] };
            let (memory, second) = (String::new(), None);
            let report = Report { kind: Kind::Unrung, first, second, memory, bytes: 8, count: 1 };
            assert_eq!(lacks_lines(&report), expected, "{line}");
        }
    }
}
