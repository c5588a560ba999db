//! One command of a test run. Its output goes to a file and is counted.

use crate::tally::{Counts, Tally, closing_line, ignored, libtest_result, program_of_cargo, skip_reason};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Runs a command with an empty `/proc/kallsyms`. libfabric's verbs provider reads that file twice in each process, which takes longer than many
/// tests: 0.1 s.
const WITHOUT_KERNEL_SYMBOLS: [&str; 6] =
    ["unshare", "--mount", "sh", "-c", "mount --bind /dev/null /proc/kallsyms; exec \"$@\"", "sh"];

/// Whether this user may run [`WITHOUT_KERNEL_SYMBOLS`]: root, mostly.
static MAY_MOUNT: LazyLock<bool> = LazyLock::new(|| {
    let mut command = Command::new(WITHOUT_KERNEL_SYMBOLS[0]);
    command.args(&WITHOUT_KERNEL_SYMBOLS[1..]).args(["test", "-c", "/proc/kallsyms"]);
    command.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
});

/// At most so many tests of a stage are tried again.
const SECOND_TRIES: usize = 3;

/// A command of a test run.
pub struct Stage {
    /// Its name, unique in a run.
    pub name: &'static str,
    /// The stage that must have ended before.
    pub after: Option<&'static str>,
    /// The program with its arguments.
    pub command: Vec<OsString>,
    /// Variables of its environment.
    pub envs: Vec<(&'static str, OsString)>,
    /// The command's output has the results of tests. Otherwise the command counts as one test.
    pub has_tests: bool,
    /// The command is killed after this time, and the stage has failed.
    pub limit: Duration,
}

/// The end of a stage.
pub struct Outcome {
    /// What was counted.
    pub tally: Tally,
    /// The command succeeded.
    pub success: bool,
    /// The file with the output.
    pub log: PathBuf,
    /// How long the command ran.
    pub time: Duration,
}

impl Stage {
    /// A command that counts as one test.
    pub fn new<A: Into<OsString>>(name: &'static str, command: impl IntoIterator<Item = A>) -> Stage {
        let command = command.into_iter().map(Into::into).collect();
        Stage { name, after: None, command, envs: Vec::new(), has_tests: false, limit: Duration::from_secs(3600) }
    }

    /// Counts the tests in the command's output.
    pub fn of_tests(self) -> Stage {
        Stage { has_tests: true, ..self }
    }

    /// Starts the command only when stage `name` has ended.
    pub fn after(self, name: &'static str) -> Stage {
        Stage { after: Some(name), ..self }
    }

    /// Sets a variable of the command's environment.
    pub fn env(mut self, name: &'static str, value: impl Into<OsString>) -> Stage {
        self.envs.push((name, value.into()));
        self
    }

    /// Sets the time after which the command is killed.
    pub fn limit(self, limit: Duration) -> Stage {
        Stage { limit, ..self }
    }

    /// Runs the command in `root`, with its output in `logs`/NAME.log.
    pub fn run(&self, root: &Path, logs: &Path) -> Outcome {
        let log = logs.join(self.name.replace([' ', '\''], "-") + ".log");
        let began = Instant::now();
        let mut output = Output::default();
        let result = self.execute(root, &log, &mut output);
        let mut tally = Tally::default();
        let success = match result {
            Ok(success) => {
                output.count(self, success, &mut tally);
                success
            }
            Err(error) => {
                tally.fail(format!("{}: {error}", self.name));
                false
            }
        };
        if !success && began.elapsed() >= self.limit {
            tally.fail(format!("{}: killed after its limit of {:?}", self.name, self.limit));
        }
        Outcome { success: success && tally.counts.failed == 0, tally, log, time: began.elapsed() }
    }

    /// A second try of the tests that failed, if these are few and known by name: a test that other tests starved passes alone.
    pub fn second_try(&self, tally: &Tally) -> Option<Stage> {
        let name = |failure: &String| Some(OsString::from(failure.strip_prefix(self.name)?.strip_prefix(": ")?));
        let names = tally.failures.iter().map(name).collect::<Option<Vec<OsString>>>()?;
        if !self.has_tests || names.is_empty() || names.len() > SECOND_TRIES {
            return None;
        }
        let mut command = self.command.clone();
        // A script has no such choice.
        if command.iter().any(|argument| argument == "--") {
            command.push("--exact".into());
            command.extend(names);
        }
        let name = format!("{}, second try", self.name).leak();
        let stage = Stage { name, after: None, command, envs: self.envs.clone(), ..*self };
        Some(stage.env("RUST_TEST_THREADS", "1"))
    }

    fn execute(&self, root: &Path, log: &Path, output: &mut Output) -> std::io::Result<bool> {
        let mut file = File::create(log)?;
        let (from, to) = std::io::pipe()?;
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", &self.limit.as_secs().to_string()]);
        if *MAY_MOUNT {
            command.args(WITHOUT_KERNEL_SYMBOLS);
        }
        command.args(&self.command);
        command.envs(self.envs.iter().cloned()).current_dir(root).stdin(Stdio::null());
        command.stdout(to.try_clone()?).stderr(to);
        let mut child = command.spawn()?;
        // The pipe ends when the children of the stage, and not this process, have closed it.
        drop(command);
        for line in BufReader::new(from).split(b'\n') {
            let line = line?;
            file.write_all(&line)?;
            file.write_all(b"\n")?;
            output.take(&String::from_utf8_lossy(&line));
        }
        Ok(child.wait()?.success())
    }
}

#[derive(Default)]
struct Output {
    libtest: Counts,
    /// The total in a script's last line, which replaces libtest's counts.
    closing: Option<Counts>,
    skips: Vec<String>,
    ignored: Vec<String>,
    failures: Vec<String>,
    /// What cargo says of test programs that a signal ended.
    crashes: Vec<String>,
    /// The test program of the present lines of cargo.
    program: String,
    tests: Vec<String>,
}

impl Output {
    fn take(&mut self, line: &str) {
        if let Some(counts) = libtest_result(line) {
            self.libtest += counts;
        } else if let Some(counts) = closing_line(line) {
            self.closing = Some(counts);
        } else if let Some(reason) = skip_reason(line) {
            self.tests.push(reason.clone());
            self.skips.push(reason);
        } else if let Some(name) = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED")) {
            // A test that runs again in a child process may print the child's line.
            if !self.failures.iter().any(|known| known == name) {
                self.failures.push(name.to_string());
            }
        } else if line.starts_with("  process didn't exit successfully: ") {
            self.crashes.push(line.trim().to_string());
        } else if let Some(reason) = ignored(line) {
            self.ignored.push(reason);
        } else if let Some(name) = line.strip_prefix("FAIL ") {
            self.failures.push(name.to_string());
        } else if let Some(name) = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... ok")) {
            self.tests.push(format!("{} {name}", self.program));
        } else if let Some(name) = line.strip_prefix("PASS ") {
            // Not the time of this run: `(0.4 s)`.
            let (name, _) = name.rsplit_once(" (").filter(|(_, time)| time.ends_with(" s)")).unwrap_or((name, ""));
            self.tests.push(name.to_string());
        } else if let Some(program) = program_of_cargo(line) {
            self.program = program;
        }
    }

    fn count(self, stage: &Stage, success: bool, tally: &mut Tally) {
        let skipped = self.skips.len() as u64;
        let counts = match self.closing {
            Some(counts) => counts,
            // libtest has no skips: it counts a test that prints SKIP and returns as passed.
            None => Counts {
                passed: self.libtest.passed.saturating_sub(skipped),
                failed: self.libtest.failed,
                skipped: self.libtest.skipped + skipped,
            },
        };
        let ran = stage.has_tests && counts.total() > 0;
        match (ran, success) {
            (true, _) => tally.counts += counts,
            (false, true) if stage.has_tests => tally.fail(format!("{}: the command ran no test", stage.name)),
            (false, true) => tally.counts.passed += 1,
            (false, false) => tally.fail(stage.name.to_string()),
        }
        if ran && !success && counts.failed == 0 {
            tally.fail(format!("{}: the command failed, but no test did", stage.name));
        }
        tally.failures.extend(self.failures.into_iter().map(|name| format!("{}: {name}", stage.name)));
        if !success {
            tally.failures.extend(self.crashes.into_iter().map(|crash| format!("{} crashed: {crash}", stage.name)));
        }
        tally.skips.extend(self.skips.into_iter().chain(self.ignored));
        tally.tests.extend(self.tests.into_iter().map(|name| format!("{}: {}", stage.name, name.trim())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, has_tests: bool) -> Tally {
        let logs = std::env::temp_dir();
        let name: &'static str = Box::leak(format!("xtask-{:?}", std::thread::current().id()).into_boxed_str());
        let stage = Stage { has_tests, ..Stage::new(name, ["sh", "-c", script]) };
        let outcome = stage.run(&logs, &logs);
        std::fs::remove_file(outcome.log).unwrap();
        outcome.tally
    }

    #[test]
    fn command_counts_as_one_test() {
        assert_eq!(run("true", false).counts, Counts { passed: 1, failed: 0, skipped: 0 });
        assert_eq!(run("false", false).counts, Counts { passed: 0, failed: 1, skipped: 0 });
    }

    #[test]
    fn libtest_results_are_added_up() {
        let script = "echo '     Running tests/a.rs (target/deps/a-b-0f)' >&2; echo 'test a::b ... FAILED'; echo 'test a::d ... ok'; \
            echo 'SKIP c: no card'; \
            echo 'test result: FAILED. 5 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.0s'; \
            echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s'; exit 1";
        let tally = run(script, true);
        assert_eq!(tally.counts, Counts { passed: 6, failed: 1, skipped: 2 });
        assert!(tally.failures[0].ends_with(": a::b"), "{:?}", tally.failures);
        assert_eq!(tally.skips, ["c: no card"]);
        assert!(tally.tests[0].ends_with(": a-b tests/a.rs a::d"), "{:?}", tally.tests);
        assert!(tally.summary().ends_with("\n6 passed, 1 failed, 2 skipped"), "{}", tally.summary());
    }

    #[test]
    fn failed_tests_are_named_once_and_crashes_are_failures() {
        let script = "echo 'test a ... FAILED'; echo 'test a ... FAILED'; \
            echo 'test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s'; \
            echo \"  process didn't exit successfully: x (signal: 6, SIGABRT: process abort signal)\"; exit 1";
        let tally = run(script, true);
        assert_eq!(tally.failures.len(), 2, "{:?}", tally.failures);
        assert!(tally.failures[1].contains(" crashed: process didn't"), "{:?}", tally.failures);
    }

    #[test]
    fn last_line_replaces_other_counts() {
        let tally = run("echo 'SKIP c: no card'; echo 'foreign: 7 passed, 0 failed, 1 skipped'", true);
        assert_eq!(tally.counts, Counts { passed: 7, failed: 0, skipped: 1 });
        assert!(tally.success());
    }

    #[test]
    fn missing_tests_and_failed_builds_are_failures() {
        assert!(!run("true", true).success());
        assert!(!run("exit 101", true).success());
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out'; exit 101";
        assert_eq!(run(script, true).counts, Counts { passed: 2, failed: 1, skipped: 0 });
        let missing = Stage::new("xtask-missing", ["/nonexistent/x"]).run(&std::env::temp_dir(), &std::env::temp_dir());
        assert!(!missing.success && !missing.tally.success());
    }

    #[test]
    fn second_try_has_only_the_tests_that_failed() {
        let stage = Stage::new("s", ["cargo", "test", "--", "--show-output"]).of_tests();
        let failed = |names: &[&str]| {
            let mut tally = Tally::default();
            names.iter().for_each(|name| tally.fail(name.to_string()));
            tally
        };
        let second = stage.second_try(&failed(&["s: a::b", "s: c"])).unwrap();
        assert_eq!(second.command, ["cargo", "test", "--", "--show-output", "--exact", "a::b", "c"]);
        let script = Stage::new("s", ["script", "dist"]).of_tests();
        assert_eq!(script.second_try(&failed(&["s: a"])).unwrap().command, ["script", "dist"]);
        // Too many, none, one without a name, a crash, and a command that is no runner of tests.
        assert!(stage.second_try(&failed(&["s: a", "s crashed: x"])).is_none());
        assert!(stage.second_try(&failed(&["s: a"; SECOND_TRIES + 1])).is_none());
        assert!(stage.second_try(&failed(&[])).is_none());
        assert!(stage.second_try(&failed(&["s: a", "s"])).is_none());
        assert!(Stage::new("s", ["cargo"]).second_try(&failed(&["s: a"])).is_none());
    }

    #[test]
    fn stage_is_killed_after_its_limit() {
        let logs = std::env::temp_dir();
        let stage = Stage::new("xtask-limit", ["sleep", "60"]).limit(Duration::from_secs(1));
        let outcome = stage.run(&logs, &logs);
        assert!(!outcome.success && outcome.time < Duration::from_secs(30));
        assert!(outcome.tally.failures.iter().any(|failure| failure.contains("limit")), "{:?}", outcome.tally.failures);
    }
}
