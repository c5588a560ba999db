//! Runs stages, two at a time. Each stage writes its output to a log, from which its tests are counted.

use crate::count::{Count, count, without_passed};
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Stages that run at the same time: one that waits leaves its core to one that computes.
const WORKERS: usize = 2;
/// A stage that runs longer than this hangs.
const HANG_LIMIT: Duration = Duration::from_secs(3600);

/// Runs a command with an empty `/proc/kallsyms`, if that is allowed. libfabric's verbs provider reads this file twice
/// in each process, which takes 0.1 s, longer than many tests.
const WITHOUT_KERNEL_SYMBOLS: [&str; 6] =
    ["unshare", "--mount", "sh", "-c", "mount --bind /dev/null /proc/kallsyms; exec \"$@\"", "sh"];
static MAY_MOUNT: LazyLock<bool> = LazyLock::new(|| {
    let [program, arguments @ ..] = WITHOUT_KERNEL_SYMBOLS;
    let mut command = Command::new(program);
    command.args(arguments).args(["test", "-c", "/proc/kallsyms"]).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
});

/// One of a run's commands.
pub struct Stage {
    /// Its name, unique in the run.
    pub name: &'static str,
    /// The stage that must have ended first.
    pub after: Option<&'static str>,
    command: Vec<OsString>,
    envs: Vec<(&'static str, OsString)>,
    is_test: bool,
}

impl Stage {
    /// Returns a command whose output has test results.
    pub fn of_tests<A: Into<OsString>>(name: &'static str, command: impl IntoIterator<Item = A>) -> Stage {
        let command = command.into_iter().map(Into::into).collect();
        Stage { name, after: None, command, envs: Vec::new(), is_test: false }
    }

    /// Returns a command that counts as one test.
    pub fn test<A: Into<OsString>>(name: &'static str, command: impl IntoIterator<Item = A>) -> Stage {
        Stage { is_test: true, ..Stage::of_tests(name, command) }
    }

    /// Starts the command once stage `name` has ended.
    pub fn after(self, name: &'static str) -> Stage {
        Stage { after: Some(name), ..self }
    }

    /// Sets an environment variable for the command.
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Stage {
        self.envs.push((name, value.into()));
        self
    }

    /// Runs the command in `root`, and prints what failed.
    fn run(&self, root: &Path, logs: &Path) -> Count {
        println!("==> {}: starts", self.name);
        let began = Instant::now();
        let log = logs.join(self.name.replace([' ', '\''], "-") + ".log");
        let result = self.execute(root, &log).and_then(|success| Ok((success, std::fs::read(&log)?)));
        let (success, output) = result.unwrap_or_else(|error| (false, format!("{}: {error}", log.display()).into()));
        let output = String::from_utf8_lossy(&output);
        let counted = match (self.is_test, success) {
            (false, _) => count(self.name, &output, success),
            (true, true) => Count { passed: 1, ..Count::default() },
            (true, false) => Count { failures: vec![self.name.to_owned()], ..Count::default() },
        };
        let failed = counted.failures.len();
        let shown = if failed > 0 { without_passed(&output) } else { String::new() };
        let Count { passed, skips, .. } = &counted;
        let time = began.elapsed();
        // One call, so that lines from another stage don't come in between.
        println!("{shown}==> {}: {passed} passed, {failed} failed, {} skipped in {time:.0?}", self.name, skips.len());
        counted
    }

    fn execute(&self, root: &Path, log: &Path) -> std::io::Result<bool> {
        let output = File::create(log)?;
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", &HANG_LIMIT.as_secs().to_string()]);
        if *MAY_MOUNT {
            command.args(WITHOUT_KERNEL_SYMBOLS);
        }
        command.args(&self.command).envs(self.envs.iter().cloned()).current_dir(root);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        Ok(command.status()?.success())
    }
}

/// Runs the stages whose names contain one of `only`, or all, and prints the count, including what was skipped earlier.
pub fn run(root: &Path, mut stages: Vec<Stage>, only: &[String], skips: Vec<String>) -> ExitCode {
    if !only.is_empty() {
        stages.retain(|stage| only.iter().any(|part| stage.name.contains(part)));
    }
    if stages.is_empty() {
        eprintln!("no stage has a name with one of {only:?}");
        return ExitCode::from(2);
    }
    let logs = root.join("target/test-logs");
    if let Err(error) = std::fs::create_dir_all(&logs) {
        eprintln!("{}: {error}", logs.display());
        return ExitCode::FAILURE;
    }
    let began = Instant::now();
    let mut counted = Count { skips, ..Count::default() };
    counted.add(run_stages(stages, root, &logs));
    println!("all stages in {:.0?}; their logs are in {}", began.elapsed(), logs.display());
    println!("{}", counted.summary());
    if counted.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

struct Schedule {
    waiting: Vec<Stage>,
    /// The names of stages that have not ended yet.
    unfinished: HashSet<&'static str>,
    count: Count,
}

impl Schedule {
    /// Takes the first stage that doesn't have to wait.
    fn next(&mut self) -> Option<Stage> {
        let ready = |stage: &Stage| stage.after.is_none_or(|name| !self.unfinished.contains(name));
        let at = self.waiting.iter().position(ready)?;
        Some(self.waiting.remove(at))
    }
}

/// Runs all stages, [`WORKERS`] at a time, each after the one that it waits for.
fn run_stages(waiting: Vec<Stage>, root: &Path, logs: &Path) -> Count {
    let unfinished = waiting.iter().map(|stage| stage.name).collect();
    let schedule = Mutex::new(Schedule { waiting, unfinished, count: Count::default() });
    let lock = || schedule.lock();
    let changed = Condvar::new();
    let work = || {
        let mut now = lock();
        while !now.waiting.is_empty() {
            let Some(stage) = now.next() else {
                changed.wait(&mut now);
                continue;
            };
            drop(now);
            let counted = stage.run(root, logs);
            now = lock();
            now.unfinished.remove(stage.name);
            now.count.add(counted);
            changed.notify_all();
        }
    };
    std::thread::scope(|scope| (0..WORKERS).for_each(|_| drop(scope.spawn(work))));
    std::mem::take(&mut lock().count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_starts_after_the_one_it_waits_for() {
        let place = std::env::temp_dir().join(format!("xtask-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let stages = vec![
            Stage::test("first", ["touch", "first"]),
            Stage::test("second", ["test", "-e", "first"]).after("first"),
            Stage::test("third", ["true"]).after("not of this run"),
            Stage::test("fourth", ["/nonexistent/program"]),
        ];
        let count = run_stages(stages, &place, &place);
        std::fs::remove_dir_all(&place).unwrap();
        assert_eq!((count.passed, count.failures), (3, vec!["fourth".to_owned()]));
    }
}
