//! rdma-core's own tests, from Debian's packages: those for EFA, and those for all devices.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use crate::{libraries, on_card, run};

/// Debian's Python, which finds Debian's pyverbs.
const PYTHON: &str = "/usr/bin/python3";
/// Debian's package ships the tests as documentation, each file compressed.
const TESTS: &str = "/usr/share/doc/rdma-core/tests";

/// Returns a line for each of rdma-core's tests, or `None` if pyverbs or the tests are missing.
fn lines(test: &str) -> Option<&'static [String]> {
    static LINES: OnceLock<Result<Vec<String>, &str>> = OnceLock::new();
    let lines = LINES.get_or_init(|| {
        let imports = Command::new(PYTHON).args(["-c", "import pyverbs.providers.efa.efadv"]).output();
        if !imports.is_ok_and(|output| output.status.success()) {
            return Err("pyverbs is not installed (Debian: python3-pyverbs)");
        }
        if !Path::new(TESTS).join("test_efa_srd.py.gz").is_file() {
            return Err("/usr/share/doc/rdma-core/tests is not there: dpkg may be set up to leave documentation out");
        }
        let unpacked = libraries().join("tests");
        let unpack = r#"cp -R "$0" "$1" && find "$1" -name '*.gz' -exec gunzip {} +"#;
        let status = Command::new("sh").args(["-c", unpack, TESTS]).arg(&unpacked).status();
        assert!(status.is_ok_and(|status| status.success()), "{TESTS} cannot be unpacked");
        let mut command = on_card(PYTHON);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run_pyverbs.py")).arg(unpacked);
        let text = run(command);
        let is_result = |line: &&str| ["ok ", "skip ", "FAIL "].iter().any(|word| line.starts_with(word));
        Ok(text.lines().filter(is_result).map(str::to_owned).collect())
    });
    match lines {
        Ok(lines) => Some(lines),
        Err(why) => {
            ferrogin_test_support::skip(test, why);
            None
        }
    }
}

#[test]
fn tests_of_efa_all_pass() {
    let Some(lines) = lines("tests_of_efa_all_pass") else { return };
    let of_efa: Vec<&String> = lines.iter().filter(|line| line.contains(" tests.test_efa")).collect();
    // 11 for SRD and 5 for efadv.
    assert_eq!(of_efa.iter().filter(|line| line.starts_with("ok ")).count(), 16, "{of_efa:#?}");
}

/// Tests for what EFA lacks skip themselves, because the calls return EOPNOTSUPP.
#[test]
fn tests_of_other_devices_pass_or_are_not_for_efa() {
    let Some(lines) = lines("tests_of_other_devices_pass_or_are_not_for_efa") else { return };
    let failed: Vec<&String> = lines.iter().filter(|line| line.starts_with("FAIL ")).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let passed = lines.iter().filter(|line| line.starts_with("ok ")).count();
    println!("{passed} of {} tests of pyverbs pass", lines.len());
    assert!(passed >= 50, "only {passed} pass: {lines:#?}");
}
