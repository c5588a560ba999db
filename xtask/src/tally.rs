//! Counts of tests, and their parsing from the output of test runners.

use std::fmt::Write;
use std::ops::AddAssign;
use std::path::Path;

/// Tests by result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Passed.
    pub passed: u64,
    /// Failed.
    pub failed: u64,
    /// Skipped, with a reason in the output.
    pub skipped: u64,
}

impl Counts {
    /// The number of tests.
    pub fn total(self) -> u64 {
        self.passed + self.failed + self.skipped
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// The result of a run.
#[derive(Debug, Default)]
pub struct Tally {
    /// Totals.
    pub counts: Counts,
    /// `name: reason` of each skip.
    pub skips: Vec<String>,
    /// The names of failed tests.
    pub failures: Vec<String>,
    /// The names of tests that failed beside others and passed alone.
    pub passed_alone: Vec<String>,
    /// `stage: name` of each test that passed or was skipped.
    pub tests: Vec<String>,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.counts += other.counts;
        self.skips.extend(other.skips);
        self.failures.extend(other.failures);
        self.passed_alone.extend(other.passed_alone);
        self.tests.extend(other.tests);
    }
}

impl Tally {
    /// Adds a failure.
    pub fn fail(&mut self, name: String) {
        self.counts.failed += 1;
        self.failures.push(name);
    }

    /// Adds a skip.
    pub fn skip(&mut self, reason: String) {
        self.counts.skipped += 1;
        self.skips.push(reason);
    }

    /// Counts the failed tests as passed.
    pub fn pass_alone(&mut self) {
        self.counts.failed = 0;
        self.counts.passed += self.failures.len() as u64;
        self.passed_alone.append(&mut self.failures);
    }

    /// True if a test passed and no test failed.
    pub fn success(&self) -> bool {
        self.counts.failed == 0 && self.counts.passed > 0
    }

    /// The skipped and failed tests; the last line has the totals.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        for skip in &self.skips {
            let _ = writeln!(text, "skipped: {skip}");
        }
        for name in &self.passed_alone {
            let _ = writeln!(text, "failed beside other tests, passed alone: {name}");
        }
        for failure in &self.failures {
            let _ = writeln!(text, "failed: {failure}");
        }
        let Counts { passed, failed, skipped } = self.counts;
        let _ = write!(text, "{passed} passed, {failed} failed, {skipped} skipped");
        text
    }
}

/// Counts of a line like `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
pub fn libtest_result(line: &str) -> Option<Counts> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |word: &str| -> Option<u64> {
        counts.split("; ").find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
    };
    Some(Counts { passed: number(" passed")?, failed: number(" failed")?, skipped: number(" ignored")? })
}

/// Counts of a line `3 passed, 0 failed, 1 skipped`, which may begin with a word and a colon.
pub fn closing_line(line: &str) -> Option<Counts> {
    let counts = match line.split_once(": ") {
        Some((word, rest)) if !word.contains(char::is_whitespace) => rest,
        _ => line,
    };
    let mut parts = counts.trim_end().split(", ");
    let mut number = |word: &str| parts.next()?.strip_suffix(word)?.parse::<u64>().ok();
    let result = Counts { passed: number(" passed")?, failed: number(" failed")?, skipped: number(" skipped")? };
    parts.next().is_none().then_some(result)
}

/// `name: reason` of a line `test name ... ignored, reason`, which libtest counts itself.
pub fn ignored(line: &str) -> Option<String> {
    let (name, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = reason.strip_prefix(", ").unwrap_or("not part of the test run");
    Some(format!("{name}: {reason}"))
}

/// `name: reason` of a line `SKIP name: reason`.
pub fn skip_reason(line: &str) -> Option<String> {
    let reason = line.trim().strip_prefix("SKIP ")?;
    reason.contains(':').then(|| reason.to_string())
}

/// `softefa tests/all` of cargo's line `     Running tests/all/main.rs (target/release/deps/all-0123)`: the program's name without its hash.
pub fn program_of_cargo(line: &str) -> Option<String> {
    let line = line.trim_start();
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(format!("doc {name}"));
    }
    let (source, program) = line.strip_prefix("Running ")?.split_once(" (")?;
    let program = Path::new(program.strip_suffix(')')?).file_name()?.to_str()?;
    let (name, _hash) = program.rsplit_once('-')?;
    Some(format!("{name} {}", source.trim_start_matches("unittests ")))
}

/// The lines of an output of tests that tell of failures, indented: without the tests that passed, and without what libtest's tests print
/// before it sums up.
pub fn without_passed_tests(output: &str) -> String {
    let mut kept = String::new();
    let mut program = None;
    let mut runs = false;
    for line in output.lines() {
        if program_of_cargo(line).is_some() {
            (program, runs) = (Some(line), false);
            continue;
        }
        let failed = line.starts_with("test ") && line.ends_with(" ... FAILED");
        // libtest prints what passed before what failed.
        runs = match line {
            "failures:" => false,
            // The second is cargo's word of a program that crashed.
            _ if line.starts_with("test result: ") || line.starts_with("error: ") => false,
            _ => runs || (line.starts_with("running ") && program.is_some()),
        };
        let dull = ["PASS ", "SKIP ", "test result: ok. "].iter().any(|word| line.starts_with(word));
        if failed || !(runs || dull || line.is_empty()) {
            for line in program.take().into_iter().chain([line]) {
                // No runner of tests takes it for a result of its own.
                kept.push_str("    ");
                kept.push_str(line);
                kept.push('\n');
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_parsed() {
        let line = "test result: ok. 13 passed; 2 failed; 1 ignored; 0 measured; 12 filtered out; finished in 2.64s";
        assert_eq!(libtest_result(line), Some(Counts { passed: 13, failed: 2, skipped: 1 }));
        assert_eq!(libtest_result("test result: "), None);
        assert_eq!(
            closing_line("foreign: 3 passed, 0 failed, 1 skipped"),
            closing_line("3 passed, 0 failed, 1 skipped")
        );
        assert_eq!(closing_line("3 passed, 0 failed, 1 skipped").map(Counts::total), Some(4));
        for line in ["3 passed", "a b: 3 passed, 0 failed, 1 skipped", "x passed, 0 failed, 0 skipped", ""] {
            assert_eq!(closing_line(line), None, "{line}");
        }
        assert_eq!(skip_reason("  SKIP tcp: no network").as_deref(), Some("tcp: no network"));
        assert_eq!(skip_reason("SKIPPED x"), None);
        assert_eq!(ignored("test a::b ... ignored, takes an hour").as_deref(), Some("a::b: takes an hour"));
        assert_eq!(ignored("test a::b ... ok"), None);
    }

    #[test]
    fn only_failures_are_kept() {
        let crashed = "     Running tests/all/main.rs (target/b-0f)\nrunning 2 tests\nprinted\nerror: test failed\n";
        assert_eq!(without_passed_tests(crashed).lines().last(), Some("    error: test failed"));
        let output = "   Compiling x\n     Running unittests src/lib.rs (target/a-0f)\n\nrunning 1 test\ntest a ... ok\n\nsuccesses:\n\n\
            ---- a stdout ----\nthread a panicked\n\ntest result: ok. 1 passed; 0 failed; 0 ignored\n\n     Running tests/all/main.rs (target/b-0f)\n\n\
            running 2 tests\ntest b ... ok\ntest c ... FAILED\n\nsuccesses:\n\n---- b stdout ----\nprinted by b\n\nsuccesses:\n    b\n\nfailures:\n\n\
            ---- c stdout ----\nprinted by c\n\nfailures:\n    c\n\ntest result: FAILED. 1 passed; 1 failed; 0 ignored\nerror: 1 target failed\n";
        let kept = [
            "       Compiling x",
            "         Running tests/all/main.rs (target/b-0f)",
            "    test c ... FAILED",
            "    failures:",
            "    ---- c stdout ----",
            "    printed by c",
            "    failures:",
            "        c",
            "    test result: FAILED. 1 passed; 1 failed; 0 ignored",
            "    error: 1 target failed",
        ];
        let kept: String = kept.iter().flat_map(|line| [line, "\n"]).collect();
        assert_eq!(without_passed_tests(output), kept);
        let of_script = without_passed_tests("PASS a (0.1 s)\nFAIL b\nerror[E0425]: no x\n");
        assert_eq!(of_script, "    FAIL b\n    error[E0425]: no x\n");
    }
}
