//! Golden bytes in JSON files: finds the files and reads their fields. A test fails if a field has a different type
//! than it expects.

use serde_json::Value;
use std::path::PathBuf;

/// The vectors' directory: `FERROGIN_VECTORS`, or the one in the repository. A relative path is relative to the tests'
/// working directory, or to the repository's root, where `cargo test` was probably started.
pub fn directory() -> PathBuf {
    match std::env::var_os("FERROGIN_VECTORS").map(PathBuf::from) {
        Some(dir) if dir.is_dir() => dir,
        Some(dir) => crate::workspace().join(dir),
        None => crate::workspace().join("tests/vectors"),
    }
}

/// A file of vectors.
pub fn file(name: &str) -> Value {
    let path = directory().join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Fails if `value` has a field that the test doesn't know, and so wouldn't test. The field `note` is ignored.
pub fn only_fields(value: &Value, known: &[&str]) {
    for key in value.as_object().unwrap_or_else(|| panic!("not an object: {value}")).keys() {
        assert!(key == "note" || known.contains(&key.as_str()), "field {key:?} is not known to this test");
    }
}

/// A string.
pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} is not a string: {}", value[key]))
}

/// A number, or a hex string that starts with 0x.
pub fn as_u64(value: &Value) -> u64 {
    match value {
        Value::String(s) => {
            let digits = s.strip_prefix("0x").unwrap_or_else(|| panic!("{s:?} does not begin with 0x"));
            u64::from_str_radix(digits, 16).unwrap_or_else(|e| panic!("{s:?}: {e}"))
        }
        other => other.as_u64().unwrap_or_else(|| panic!("{other} is not an unsigned number")),
    }
}

/// A 64-bit number.
pub fn u64_of(value: &Value, key: &str) -> u64 {
    as_u64(value.get(key).unwrap_or_else(|| panic!("{key} is missing")))
}

/// A 32-bit number.
pub fn u32_of(value: &Value, key: &str) -> u32 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 32 bits"))
}

/// A 16-bit number.
pub fn u16_of(value: &Value, key: &str) -> u16 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 16 bits"))
}

/// An 8-bit number.
pub fn u8_of(value: &Value, key: &str) -> u8 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 8 bits"))
}

/// A boolean.
pub fn bool_of(value: &Value, key: &str) -> bool {
    value[key].as_bool().unwrap_or_else(|| panic!("{key} is not a boolean: {}", value[key]))
}

/// A signed number.
pub fn i64_of(value: &Value, key: &str) -> i64 {
    value[key].as_i64().unwrap_or_else(|| panic!("{key} is not a number: {}", value[key]))
}

/// A list.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("{key} is not a list: {}", value[key]))
}

/// A list of 32-bit numbers.
pub fn u32s(value: &Value, key: &str) -> Vec<u32> {
    list(value, key).iter().map(|v| as_u64(v).try_into().expect("more than 32 bits")).collect()
}

/// Returns `None` for null; fails if the field is missing.
pub fn optional<T>(value: &Value, key: &str, read: impl Fn(&Value) -> T) -> Option<T> {
    match value.get(key).unwrap_or_else(|| panic!("{key} is missing")) {
        Value::Null => None,
        present => Some(read(present)),
    }
}

/// Decodes hex digits.
pub fn unhex(digits: &str) -> Vec<u8> {
    assert!(digits.len().is_multiple_of(2), "odd number of hex digits");
    (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).expect("hex digits")).collect()
}

/// Bytes in hex.
pub fn bytes_of(value: &Value, key: &str) -> Vec<u8> {
    unhex(text(value, key))
}

/// Exactly `N` bytes in hex.
pub fn array_of<const N: usize>(value: &Value, key: &str) -> [u8; N] {
    bytes_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has not {N} bytes"))
}

/// Bytes as hex digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
