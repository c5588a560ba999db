//! Instruction counts: the program runs under valgrind's callgrind, and tells it where to start and stop counting.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The environment variable that marks a run under callgrind.
const DIR: &str = "FERROGIN_BENCH_CALLGRIND";

/// Client requests, with their numbers from valgrind's callgrind.h.
const ZERO_STATS: usize = 0x4354_0001;
const DUMP_STATS_AT: usize = 0x4354_0003;
const START_INSTRUMENTATION: usize = 0x4354_0004;
const STOP_INSTRUMENTATION: usize = 0x4354_0005;

/// One count.
#[derive(Debug, Clone, PartialEq)]
pub struct Count {
    /// As given to [`count`].
    pub name: String,
    /// Instructions per repetition.
    pub each: f64,
    /// The same by the file name of the program or library that they are in.
    pub by_object: BTreeMap<String, f64>,
}

/// Why there are no counts.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Client requests are implemented for one processor only.
    #[error("callgrind's requests are only known to this program on x86-64")]
    Processor,
    /// Valgrind isn't installed.
    #[error("valgrind cannot be started ({0}): install valgrind")]
    Missing(io::Error),
    /// Valgrind failed.
    #[error("the run under valgrind failed: {0}")]
    Failed(String),
    /// Valgrind's output could not be read.
    #[error("{path}: {error}")]
    Output {
        /// File or directory.
        path: PathBuf,
        /// What went wrong.
        error: io::Error,
    },
}

/// Returns whether this process was started by [`run_again`], under callgrind.
pub fn running() -> bool {
    std::env::var_os(DIR).is_some()
}

#[cfg(target_arch = "x86_64")]
fn request(number: usize, argument: usize) {
    let arguments = [number, argument, 0, 0, 0, 0];
    // SAFETY: valgrind's marker is four rotations that cancel out, and an exchange of a register with itself;
    // valgrind reads the six words and returns its answer in rdx.
    unsafe {
        core::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") &arguments, inout("rdx") 0usize => _, inout("rdi") 0usize => _,
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn request(_number: usize, _argument: usize) {}

/// Counts the instructions of `work`, which repeats an operation `reps` times, after a short warm-up that isn't
/// counted.
pub fn count(name: &str, reps: u32, mut work: impl FnMut(u32)) {
    let label = std::ffi::CString::new(format!("{name}|{reps}")).unwrap_or_default();
    work(reps.min(64));
    request(START_INSTRUMENTATION, 0);
    // A second warm-up, under instrumentation, so that translating the code isn't counted.
    work(reps.min(64));
    request(ZERO_STATS, 0);
    work(reps);
    request(DUMP_STATS_AT, label.as_ptr() as usize);
    request(STOP_INSTRUMENTATION, 0);
}

/// Runs this program again under callgrind, with `args`, and returns its counts in order.
///
/// # Errors
/// If valgrind is missing, or the run fails.
pub fn run_again(args: &[&str], dir: &Path) -> Result<Vec<Count>, Error> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Error::Processor);
    }
    let program = std::env::current_exe().map_err(|error| Error::Output { path: PathBuf::from("."), error })?;
    let at = |path: &Path| {
        let path = path.to_path_buf();
        move |error| Error::Output { path, error }
    };
    if dir.exists() {
        std::fs::remove_dir_all(dir).map_err(at(dir))?;
    }
    std::fs::create_dir_all(dir).map_err(at(dir))?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--instr-atstart=no", "-q"])
        .arg(format!("--callgrind-out-file={}", dir.join("out").display()))
        .arg(program)
        .args(args)
        .env(DIR, dir)
        .stdin(Stdio::null())
        .output()
        .map_err(Error::Missing)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::Failed(format!("{}: {}", output.status, said.trim())));
    }
    let mut counts = Vec::new();
    for number in 1.. {
        let path = dir.join(format!("out.{number}"));
        if !path.exists() {
            break;
        }
        let text = std::fs::read_to_string(&path).map_err(at(&path))?;
        counts.extend(parse(&text));
    }
    if counts.is_empty() {
        return Err(Error::Failed("it counted nothing".into()));
    }
    Ok(counts)
}

/// Parses one of callgrind's files; returns `None` unless it comes from [`count`].
fn parse(text: &str) -> Option<Count> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let label = field("desc: Trigger: Client Request:")?;
    let (name, reps) = label.rsplit_once('|')?;
    let total: f64 = field("summary:").or(field("totals:"))?.parse().ok()?;
    let reps: f64 = reps.parse().ok()?;
    let by_object = by_object(text).into_iter().map(|(object, cost)| (object, cost / reps)).collect();
    Some(Count { name: name.into(), each: total / reps, by_object })
}

/// Adds up the lines of costs: a position, then a count. The line after `calls=` has the callee's, which stand
/// elsewhere too.
fn by_object(text: &str) -> BTreeMap<String, f64> {
    let (mut names, mut object, mut costs) = (BTreeMap::new(), String::new(), BTreeMap::new());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(named) = line.strip_prefix("ob=").or_else(|| line.strip_prefix("cob=")) {
            // The first mention has the name after the number.
            let (number, path) = named.split_once(' ').unwrap_or((named, ""));
            if let Some(file) = path.rsplit('/').next().filter(|file| !file.is_empty()) {
                names.insert(number, file.to_owned());
            }
            if line.starts_with("ob=") {
                object = names.get(number).cloned().unwrap_or_default();
            }
        } else if line.starts_with("calls=") {
            lines.next();
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first))
            && let Some(cost) = line.split_ascii_whitespace().nth(1).and_then(|cost| cost.parse::<f64>().ok())
        {
            *costs.entry(object.clone()).or_default() += cost;
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumps_are_read() {
        let text = "version: 1\ndesc: Trigger: Client Request: put|100\nevents: Ir\nob=(1) /a/program\nfn=(1) f\n12 50\n\
                    cob=(2) /b/lib.so\ncfn=(2) g\ncalls=1 +3\n+1 12000\nob=(2)\nfn=(2)\n* 12000\nsummary: 12050\n";
        let by_object = BTreeMap::from([("program".to_owned(), 0.5), ("lib.so".to_owned(), 120.0)]);
        assert_eq!(parse(text), Some(Count { name: "put".into(), each: 120.5, by_object }));
        assert_eq!(parse("desc: Trigger: Program termination\nsummary: 1\n"), None);
    }
}
