//! Reads the vectors: `FERROGIN_VECTORS` names a directory with the same files, by default the one in the repository.

pub mod fake;
pub mod memory;

use serde_json::Value;
use std::path::{Path, PathBuf};

/// All files of vectors that the tests read.
const FILES: [&str; 2] = ["mlx5_wqe.json", "mlx5_cqe_zip.json"];

/// The directory of vectors. A relative one is relative to the working directory of the tests, or to the top of the repository,
/// from which `cargo test` was likely started.
fn vectors() -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match std::env::var_os("FERROGIN_VECTORS").map(PathBuf::from) {
        Some(dir) if dir.is_dir() => dir,
        Some(dir) => top.join(dir),
        None => top.join("tests/vectors"),
    }
}

/// Fails if the directory has mlx5 vectors that no test reads.
pub fn only_known_files() {
    let dir = vectors();
    let entries = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    for name in entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()) {
        let known = !name.starts_with("mlx5") || FILES.contains(&&*name);
        assert!(known, "{}: no test reads this file", dir.join(name).display());
    }
}

/// A file of vectors.
pub fn file(name: &str) -> Value {
    assert!(FILES.contains(&name));
    let path = vectors().join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Runs `check` on every case of a file, and then fails with the names of the failed cases.
pub fn each_case(name: &str, mut check: impl FnMut(&Value)) {
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

/// Fails if `value` has a field that the test does not know, which would remain untested. The field `note` is ignored.
pub fn only_fields(value: &Value, known: &[&str]) {
    for key in value.as_object().unwrap_or_else(|| panic!("not an object: {value}")).keys() {
        assert!(key == "note" || known.contains(&key.as_str()), "field {key:?} is not known to this test");
    }
}

pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} is not a string: {}", value[key]))
}

/// A number, or a hex string with 0x.
pub fn as_u64(value: &Value) -> u64 {
    match value {
        Value::String(s) => {
            let digits = s.strip_prefix("0x").unwrap_or_else(|| panic!("{s:?} does not begin with 0x"));
            u64::from_str_radix(digits, 16).unwrap_or_else(|e| panic!("{s:?}: {e}"))
        }
        other => other.as_u64().unwrap_or_else(|| panic!("{other} is not an unsigned number")),
    }
}

pub fn u64_of(value: &Value, key: &str) -> u64 {
    as_u64(value.get(key).unwrap_or_else(|| panic!("{key} is missing")))
}

pub fn u32_of(value: &Value, key: &str) -> u32 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 32 bits"))
}

pub fn u16_of(value: &Value, key: &str) -> u16 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 16 bits"))
}

pub fn u8_of(value: &Value, key: &str) -> u8 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 8 bits"))
}

pub fn bool_of(value: &Value, key: &str) -> bool {
    value[key].as_bool().unwrap_or_else(|| panic!("{key} is not a boolean: {}", value[key]))
}

pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("{key} is not a list: {}", value[key]))
}

/// `None` for null; an absent field fails.
pub fn optional<T>(value: &Value, key: &str, read: impl Fn(&Value) -> T) -> Option<T> {
    match value.get(key).unwrap_or_else(|| panic!("{key} is missing")) {
        Value::Null => None,
        present => Some(read(present)),
    }
}

pub fn unhex(digits: &str) -> Vec<u8> {
    assert!(digits.len().is_multiple_of(2), "odd number of hex digits");
    (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).expect("hex digits")).collect()
}

pub fn bytes_of(value: &Value, key: &str) -> Vec<u8> {
    unhex(text(value, key))
}

/// A fixed number of hex bytes.
pub fn array_of<const N: usize>(value: &Value, key: &str) -> [u8; N] {
    bytes_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has not {N} bytes"))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
