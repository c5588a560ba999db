//! The mlx5 vectors.

pub mod fake;

pub use ferrogin_test_support::vectors::*;
use serde_json::Value;

/// All vector files that the tests read.
const FILES: [&str; 2] = ["mlx5_wqe.json", "mlx5_cqe_zip.json"];

/// Fails if the directory has mlx5 vectors that no test reads.
pub fn only_known_files() {
    let dir = directory();
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    for name in entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()) {
        let known = !name.starts_with("mlx5") || FILES.contains(&&*name);
        assert!(known, "{}: no test reads this file", dir.join(name).display());
    }
}

/// Runs `check` on every case of a file, then fails with the names of the failed cases.
pub fn each_case(name: &str, mut check: impl FnMut(&Value)) {
    assert!(FILES.contains(&name));
    let all = file(name);
    only_fields(&all, &["format", "source", "cases"]);
    let cases = list(&all, "cases");
    assert!(!cases.is_empty(), "{name} has no cases");
    let mut failed = Vec::new();
    for (at, case) in cases.iter().enumerate() {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(case)));
        if outcome.is_err() {
            let category = case.get("category").and_then(Value::as_str).unwrap_or("-");
            failed.push(format!("{at}: {category}/{}", text(case, "name")));
        }
    }
    println!("{name}: {} cases, {} failed", cases.len(), failed.len());
    assert!(failed.is_empty(), "{name}: failed cases: {failed:#?}");
}
