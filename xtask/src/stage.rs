//! One command of the test run, whose output is shown and counted.

use crate::tally::{Counts, Tally, closing_line, ignored, libtest_result, skip_reason};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

/// A command of the test run.
pub struct Stage {
    name: &'static str,
    command: Command,
    has_tests: bool,
}

impl Stage {
    /// A command that counts as one test.
    pub fn new(name: &'static str, command: Command) -> Stage {
        Stage { name, command, has_tests: false }
    }

    /// Counts the tests in the command's output.
    pub fn of_tests(self) -> Stage {
        Stage { has_tests: true, ..self }
    }

    /// Runs the command, copies its output to `show`, and adds its counts to `tally`.
    pub fn run(mut self, tally: &mut Tally, show: &mut dyn Write) {
        // The run continues if its own output is closed.
        let _ = writeln!(show, "==> {}", self.name);
        let began = Instant::now();
        let child = self.command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => return tally.fail(format!("{}: the command does not start: {error}", self.name)),
        };
        let mut output = Output::default();
        if let Some(stdout) = child.stdout.take() {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                let _ = writeln!(show, "{line}");
                output.take(&line);
            }
        }
        let success = child.wait().is_ok_and(|status| status.success());
        output.count(&self, success, tally);
        let result = if success { "passed" } else { "FAILED" };
        let _ = writeln!(show, "==> {}: {result} after {:.0?}", self.name, began.elapsed());
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
}

impl Output {
    fn take(&mut self, line: &str) {
        if let Some(counts) = libtest_result(line) {
            self.libtest += counts;
        } else if let Some(counts) = closing_line(line) {
            self.closing = Some(counts);
        } else if let Some(reason) = skip_reason(line) {
            self.skips.push(reason);
        } else if let Some(name) = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED")) {
            self.failures.push(name.to_string());
        } else if let Some(reason) = ignored(line) {
            self.ignored.push(reason);
        } else if let Some(name) = line.strip_prefix("FAIL ") {
            self.failures.push(name.to_string());
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
        tally.skips.extend(self.skips.into_iter().chain(self.ignored));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, has_tests: bool) -> Tally {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut tally = Tally::default();
        Stage { name: "it", command, has_tests }.run(&mut tally, &mut std::io::sink());
        tally
    }

    #[test]
    fn command_counts_as_one_test() {
        assert_eq!(run("true", false).counts, Counts { passed: 1, failed: 0, skipped: 0 });
        assert_eq!(run("false", false).counts, Counts { passed: 0, failed: 1, skipped: 0 });
    }

    #[test]
    fn libtest_results_are_added_up() {
        let script = "echo 'test a::b ... FAILED'; echo 'SKIP c: no card'; \
            echo 'test result: FAILED. 5 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.0s'; \
            echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s'; exit 1";
        let tally = run(script, true);
        assert_eq!(tally.counts, Counts { passed: 6, failed: 1, skipped: 2 });
        assert_eq!(tally.failures, ["it: a::b"]);
        assert_eq!(tally.skips, ["c: no card"]);
        assert!(tally.summary().ends_with("\n6 passed, 1 failed, 2 skipped"), "{}", tally.summary());
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
        let mut tally = Tally::default();
        Stage::new("x", Command::new("/nonexistent/x")).run(&mut tally, &mut std::io::sink());
        assert!(!tally.success());
    }
}
