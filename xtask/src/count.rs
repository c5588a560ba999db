//! Counts tests in the output of test runners.

/// Tests by result.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Tests that passed.
    pub passed: u64,
    /// `stage: name` of each test that failed.
    pub failures: Vec<String>,
    /// `name: reason` of each test that was skipped.
    pub skips: Vec<String>,
}

impl Count {
    /// Adds the tests of another stage.
    pub fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.skips.extend(other.skips);
    }

    /// Returns whether a test passed and none failed.
    pub fn success(&self) -> bool {
        self.failures.is_empty() && self.passed > 0
    }

    /// Returns what was skipped and what failed, one per line; the last line has the totals.
    pub fn summary(&self) -> String {
        let skips = self.skips.iter().map(|skip| format!("skipped: {skip}\n"));
        let failures = self.failures.iter().map(|failure| format!("failed: {failure}\n"));
        let lines: String = skips.chain(failures).collect();
        format!("{lines}{} passed, {} failed, {} skipped", self.passed, self.failures.len(), self.skips.len())
    }
}

/// Counts the tests in the output of a stage that ended with `success`.
///
/// libtest prints `test result: ok. 3 passed; …` for each program; to libtest, a test that prints `SKIP name: why` and
/// returns has passed. A script prints `PASS name`, `FAIL name` or `SKIP name: why` for each test, and ends with `word:
/// 3 passed, 0 failed, 1 skipped`.
pub fn count(stage: &str, output: &str, success: bool) -> Count {
    let (mut programs, mut script) = (0, None);
    let mut count = Count::default();
    for line in output.lines() {
        if let Some(result) = line.strip_prefix("test result: ").and_then(|line| line.split_once(". ")) {
            programs += number_before(result.1, " passed").unwrap_or(0);
        } else if let Some(failed) = line.strip_prefix("FAIL ").or_else(|| result_of(line, "FAILED")) {
            let name = format!("{stage}: {failed}");
            // A test that reruns itself in a child process prints the child's line too.
            if !count.failures.contains(&name) {
                count.failures.push(name);
            }
        } else if let Some(skip) = line.trim_start().strip_prefix("SKIP ").filter(|skip| skip.contains(':')) {
            count.skips.push(skip.to_owned());
        } else if let Some(passed) = closing_line(line) {
            script = Some(passed);
        }
    }
    count.passed = script.unwrap_or_else(|| (programs as u64).saturating_sub(count.skips.len() as u64));
    match success {
        true if count.passed == 0 && count.skips.is_empty() => count.failures.push(format!("{stage}: it ran no test")),
        false if count.failures.is_empty() => {
            count.failures.push(format!("{stage}: the command failed, but no test did"))
        }
        _ => {}
    }
    count
}

/// Returns the output lines that are about failures, indented so that readers of test results don't count them again.
pub fn without_passed(output: &str) -> String {
    let dull = |line: &&str| {
        let passed = ["PASS ", "SKIP ", "test result: ok. ", "running "].iter().any(|word| line.starts_with(word));
        line.is_empty() || passed || line.starts_with("test ") && !line.ends_with("FAILED")
    };
    output.lines().filter(|line| !dull(line)).map(|line| format!("    {line}\n")).collect()
}

/// Returns the name in a line like `test NAME ... RESULT`.
fn result_of<'a>(line: &'a str, result: &str) -> Option<&'a str> {
    line.strip_prefix("test ")?.strip_suffix(result)?.strip_suffix(" ... ")
}

/// Returns the last number before `word`.
fn number_before(text: &str, word: &str) -> Option<usize> {
    text.split_once(word)?.0.rsplit(' ').next()?.parse().ok()
}

/// Returns the number of passed tests in a line like `word: 3 passed, 0 failed, 1 skipped`.
fn closing_line(line: &str) -> Option<u64> {
    let (word, counts) = line.split_once(": ")?;
    let [passed, failed, skipped] = counts.split(", ").collect::<Vec<_>>().try_into().ok()?;
    let valid = !word.contains(' ') && failed.ends_with(" failed") && skipped.ends_with(" skipped");
    valid.then_some(())?;
    passed.strip_suffix(" passed")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_test_programs_are_added_up() {
        let output = "test a::b ... FAILED\ntest a::b ... FAILED\ntest a::c ... ok\ntest a::d ... ignored, make check\n  SKIP c: no card\n\
            test result: FAILED. 5 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.0s\n\
            test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.0s\n";
        let counted = count("s", output, false);
        let expected = Count { passed: 6, failures: vec!["s: a::b".into()], skips: vec!["c: no card".into()] };
        assert_eq!(counted, expected);
        assert!(!counted.success());
        assert_eq!(counted.summary(), "skipped: c: no card\nfailed: s: a::b\n6 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn closing_line_of_a_script_replaces_other_results() {
        let output =
            "test result: ok. 9 passed; 0 failed\nFAIL b\nSKIP c: no card\nforeign: 7 passed, 1 failed, 1 skipped\n";
        let counted = count("s", output, false);
        assert_eq!((counted.passed, counted.failures.len(), counted.skips.len()), (7, 1, 1));
        for line in ["3 passed", "a b: 3 passed, 0 failed, 1 skipped", "a: x passed, 0 failed, 0 skipped", ""] {
            assert_eq!(closing_line(line), None, "{line}");
        }
    }

    #[test]
    fn failed_build_and_missing_tests_are_failures() {
        assert!(!count("s", "", true).success());
        assert!(!count("s", "error: linking failed", false).success());
        let crashed = count("s", "test result: ok. 2 passed; 0 failed\n", false);
        assert_eq!((crashed.passed, crashed.failures.len()), (2, 1));
        assert!(count("s", "SKIP all: no compiler\ns: 0 passed, 0 failed, 1 skipped\n", true).failures.is_empty());
    }

    #[test]
    fn only_lines_about_failures_are_shown() {
        let output = "   Compiling x\n\nrunning 2 tests\ntest b ... ok\ntest c ... FAILED\nPASS d\nerror: no x\ntest result: ok. 1 passed\n";
        assert_eq!(without_passed(output), "       Compiling x\n    test c ... FAILED\n    error: no x\n");
    }
}
