//! The EFA vectors.

pub mod memory;

use efa_dp_direct::wqe::{
    Destination, Geometry, Hints, Inline, Operation, RemoteMem, RequestIds, SendData, SendWqe, Sge, WqeSize, WriteData,
    words,
};
pub use ferrogin_test_support::vectors::*;
use serde_json::Value;
use sha2::{Digest, Sha256};

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

/// Returns the kind of request ids for a case's API version: "v0" or "v1".
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

/// Returns the host providers' geometry.
pub fn host_geometry(case: &Value) -> Geometry {
    match wqe_size(case) {
        WqeSize::Narrow => Geometry::NARROW,
        WqeSize::Wide => Geometry::WIDE,
    }
}

pub fn destination(remote: &Value) -> Destination {
    only_fields(remote, &["ah", "qpn", "qkey"]);
    // The foreign call takes a 32-bit queue pair number; the request only has room for its low half.
    Destination { ah: u16_of(remote, "ah"), qpn: u32_of(remote, "qpn") as u16, qkey: u32_of(remote, "qkey") }
}

pub fn sge(value: &Value) -> Sge {
    Sge { addr: u64_of(value, "addr"), length: u32_of(value, "length"), lkey: u32_of(value, "lkey") }
}

/// A case's payload.
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

/// Returns a case's operation, without its payload.
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

/// Returns the operation with its payload; `None` if no request can carry that.
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

/// Returns the request as it parses back: local keys have 24 bits.
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

/// Returns a case's hints: null means that none were given.
pub fn hints(case: &Value) -> Hints {
    optional(case, "hints", |v| Hints::from_api(as_u64(v) as u32)).unwrap_or(Hints::NONE)
}

/// Returns a ring's SHA-256, which is all that the vectors give for large rings.
pub fn sha256_hex(data: &[u8]) -> String {
    hex(&Sha256::digest(data))
}

/// Returns the request made from a template, if there is such a request. Its id has 16 bits, and its local key 24.
pub fn from_template(wqe: &SendWqe, size: WqeSize) -> Option<Vec<u64>> {
    let template = words::WqeTemplate::new(wqe.wr_id as u16, wqe.dest, wqe.hints);
    let request = match wqe.op {
        Operation::Write { remote, data: WriteData::One(from), .. } => template.write(remote, from),
        Operation::Write { remote, data: WriteData::Inline(data), .. } => {
            let size = words::ValueSize::new(data.data().len() as u32)?;
            let mut value = [0; 8];
            value[..data.data().len()].copy_from_slice(data.data());
            template.write_value(remote, u64::from_le_bytes(value), size)
        }
        Operation::Read { remote, into: Some(into) } => template.read(remote, into),
        Operation::Send { data: SendData::Inline(data), .. } => {
            let data: &[u8; words::SEND_BYTES] = data.data().try_into().ok()?;
            template.send_inline(std::array::from_fn(|i| u64::from_le_bytes(data.as_chunks().0[i])))
        }
        _ => return None,
    };
    if let (Operation::Write { data: WriteData::One(_), .. }, Some(imm)) = (wqe.op, wqe.op.imm()) {
        assert_eq!(words::with_imm(template.write_meta(), imm)[..], words::with_imm(request, imm)[..4]);
    }
    let mut request = wqe.op.imm().map_or(request, |imm| words::with_imm(request, imm)).to_vec();
    request[0] = words::with_phase(request[0], wqe.phase);
    request.resize(size.bytes() / 8, 0);
    Some(request)
}
