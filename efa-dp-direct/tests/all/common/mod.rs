//! Reads the vectors: `FERROGIN_VECTORS` names a directory with the same files, by default the one in the repository.

pub mod memory;
pub mod sha256;

use efa_dp_direct::wqe::{
    Destination, Geometry, Hints, Inline, Operation, RemoteMem, RequestIds, SendData, SendWqe, Sge, WqeSize, WriteData,
};
use serde_json::Value;
use std::path::PathBuf;

/// A file of vectors.
pub fn file(name: &str) -> Value {
    let dir = std::env::var_os("FERROGIN_VECTORS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/vectors"), PathBuf::from);
    let path = dir.join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Runs `check` on every case of a section of `efa_dp.json`; a failure names the case.
pub fn each_case(section: &str, mut check: impl FnMut(&Value)) {
    let all = file("efa_dp.json");
    assert_eq!(all["schema"], "efa_dp/1", "unknown schema");
    let cases = all[section].as_array().unwrap_or_else(|| panic!("section {section} is missing"));
    for case in cases {
        let id = text(case, "id");
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(case)));
        assert!(outcome.is_ok(), "case {id} ({}) failed", case["kind"]);
    }
    println!("{section}: {} cases", cases.len());
}

/// Fails if `value` has a field that the test does not know and so would not test. Notes are for people.
pub fn only_fields(value: &Value, known: &[&str]) {
    for key in value.as_object().expect("an object").keys() {
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
    as_u64(&value[key])
}

pub fn u32_of(value: &Value, key: &str) -> u32 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 32 bits"))
}

pub fn u16_of(value: &Value, key: &str) -> u16 {
    u64_of(value, key).try_into().unwrap_or_else(|_| panic!("{key} has more than 16 bits"))
}

pub fn i64_of(value: &Value, key: &str) -> i64 {
    value[key].as_i64().unwrap_or_else(|| panic!("{key} is not a number: {}", value[key]))
}

pub fn bool_of(value: &Value, key: &str) -> bool {
    value[key].as_bool().unwrap_or_else(|| panic!("{key} is not a boolean: {}", value[key]))
}

pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("{key} is not a list: {}", value[key]))
}

pub fn u32s(value: &Value, key: &str) -> Vec<u32> {
    list(value, key).iter().map(|v| as_u64(v).try_into().expect("more than 32 bits")).collect()
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

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The API version of a case: "v0" or "v1".
pub fn request_ids(case: &Value) -> RequestIds {
    match text(case, "api") {
        "v0" => RequestIds::Bits16,
        "v1" => RequestIds::Bits64,
        other => panic!("unknown api {other}"),
    }
}

pub fn wqe_size(case: &Value) -> WqeSize {
    let bytes = u64_of(case, "wqe_size") as usize;
    WqeSize::from_bytes(bytes).unwrap_or_else(|| panic!("unknown wqe_size {bytes}"))
}

/// The geometry of the host providers.
pub fn host_geometry(case: &Value) -> Geometry {
    match wqe_size(case) {
        WqeSize::Narrow => Geometry::NARROW,
        WqeSize::Wide => Geometry::WIDE,
    }
}

pub fn destination(remote: &Value) -> Destination {
    only_fields(remote, &["ah", "qpn", "qkey"]);
    // The foreign call takes a 32-bit queue pair number, of which the request has room for the low half.
    Destination { ah: u16_of(remote, "ah"), qpn: u32_of(remote, "qpn") as u16, qkey: u32_of(remote, "qkey") }
}

pub fn sge(value: &Value) -> Sge {
    Sge { addr: u64_of(value, "addr"), length: u32_of(value, "length"), lkey: u32_of(value, "lkey") }
}

/// The payload of a case.
pub enum Payload {
    None,
    Sge(Sge),
    Inline(Vec<u8>),
}

pub fn payload(value: &Value) -> Payload {
    match text(value, "type") {
        "none" => {
            only_fields(value, &["type"]);
            Payload::None
        }
        "sge" => {
            only_fields(value, &["type", "addr", "length", "lkey"]);
            Payload::Sge(sge(value))
        }
        "inline" => {
            only_fields(value, &["type", "data"]);
            Payload::Inline(bytes_of(value, "data"))
        }
        other => panic!("unknown payload {other}"),
    }
}

fn remote_mem(case: &Value) -> RemoteMem {
    RemoteMem { addr: u64_of(case, "remote_addr"), rkey: u32_of(case, "rkey") }
}

/// The operation of a case, without its payload.
pub fn bare_operation(case: &Value) -> Operation {
    let imm = || Some(u32_of(case, "imm"));
    match text(case, "op") {
        "send" => Operation::Send { data: SendData::Empty, imm: None },
        "send_imm" => Operation::Send { data: SendData::Empty, imm: imm() },
        "rdma_write" => Operation::Write { remote: remote_mem(case), data: WriteData::Empty, imm: None },
        "rdma_write_imm" => Operation::Write { remote: remote_mem(case), data: WriteData::Empty, imm: imm() },
        "rdma_read" => Operation::Read { remote: remote_mem(case), into: None },
        other => panic!("unknown op {other}"),
    }
}

/// The operation with its payload; `None` if no request carries it at all.
pub fn with_payload(op: Operation, payload: &Payload) -> Option<Operation> {
    Some(match (op, payload) {
        (op, Payload::None) => op,
        (Operation::Send { imm, .. }, Payload::Sge(sge)) => Operation::Send { data: SendData::One(*sge), imm },
        (Operation::Send { imm, .. }, Payload::Inline(data)) => {
            Operation::Send { data: SendData::Inline(Inline::new(data)?), imm }
        }
        (Operation::Write { remote, imm, .. }, Payload::Sge(sge)) => {
            Operation::Write { remote, data: WriteData::One(*sge), imm }
        }
        (Operation::Write { remote, imm, .. }, Payload::Inline(data)) => {
            Operation::Write { remote, data: WriteData::Inline(Inline::new(data)?), imm }
        }
        (Operation::Read { remote, .. }, Payload::Sge(sge)) => Operation::Read { remote, into: Some(*sge) },
        (Operation::Read { .. }, Payload::Inline(_)) => return None,
    })
}

/// The request as it is parsed again: local keys have 24 bits.
pub fn as_sent(mut wqe: SendWqe) -> SendWqe {
    let trim = |sge: &mut Sge| sge.lkey &= 0x00ff_ffff;
    match &mut wqe.op {
        Operation::Send { data: SendData::One(sge), .. }
        | Operation::Write { data: WriteData::One(sge), .. }
        | Operation::Read { into: Some(sge), .. } => trim(sge),
        Operation::Send { data: SendData::Two(first, second), .. } => {
            trim(first);
            trim(second);
        }
        _ => {}
    }
    wqe
}

/// The hints of a case: null means that none were given.
pub fn hints(case: &Value) -> Hints {
    optional(case, "hints", |v| Hints::from_api(as_u64(v) as u32)).unwrap_or(Hints::NONE)
}
