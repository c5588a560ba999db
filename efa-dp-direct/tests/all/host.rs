//! Sections `limits`, `host_sq` and `cq_doorbell`: where the host providers differ from the device convention.

#![allow(unsafe_code)]

use crate::common::memory::{Doorbell, Ring};
use crate::common::*;
use efa_dp_direct::host::{CardLimits, Flavour, HostSq, SqReport, cq_doorbell, max_sq_depth};
use efa_dp_direct::wqe::words::{NARROW, WIDE};
use efa_dp_direct::wqe::{Destination, SendWqe, WqeSize};
use serde_json::{Value, json};

#[test]
fn queue_limits_match_vectors() {
    each_case("limits", |case| {
        let inline = (u32_of(case, "max_inline_data"), bool_of(case, "inline_write"));
        match text(case, "kind") {
            "sq_depth" | "sq_depth_reject" => {
                only_fields(case, &["id", "kind", "max_llq_size", "max_inline_data", "inline_write", "expect"]);
                only_fields(&case["expect"], &["max_sq_depth"]);
                let depth = max_sq_depth(u32_of(case, "max_llq_size"), inline.0, inline.1);
                let depth = depth.map_or_else(|e| e.errno().into(), i64::from);
                assert_eq!(depth, i64_of(&case["expect"], "max_sq_depth"));
            }
            "qp" => {
                only_fields(
                    case,
                    &[
                        "id",
                        "kind",
                        "max_tx_batch",
                        "min_sq_wr",
                        "max_inline_data",
                        "inline_write",
                        "max_send_wr",
                        "expect",
                    ],
                );
                let card =
                    CardLimits { max_tx_batch: u16_of(case, "max_tx_batch"), min_sq_wr: u16_of(case, "min_sq_wr") };
                let report = SqReport::new(card, u16_of(case, "max_send_wr"), inline.0, inline.1).expect("fits");
                let got = json!({
                    "wqe_size": report.wqe_size.bytes(), "num_entries": report.num_entries,
                    "max_batch": report.max_batch, "caps": report.caps,
                });
                assert_eq!(got, case["expect"]);
            }
            other => panic!("unknown kind {other}"),
        }
    });
}

#[test]
fn completion_doorbell_matches_vectors() {
    each_case("cq_doorbell", |case| {
        only_fields(case, &["id", "kind", "consumer_counter", "cmd_sn", "arm", "expect"]);
        only_fields(&case["expect"], &["word"]);
        let word = cq_doorbell(u16_of(case, "consumer_counter"), u32_of(case, "cmd_sn"), bool_of(case, "arm"));
        assert_eq!(word, u32_of(&case["expect"], "word"));
    });
}

/// Returns a request in a list as words.
fn request<const N: usize>(case: &Value, request: &Value) -> [u64; N] {
    only_fields(request, &["op", "wr_id", "imm", "rkey", "remote_addr", "payload", "remote", "hints"]);
    let op = with_payload(bare_operation(request), &payload(&request["payload"])).expect("a legal request");
    let dest = optional(request, "remote", destination).unwrap_or(Destination::default());
    let mut wqe = SendWqe::new(u64_of(request, "wr_id"), dest, op);
    if request.get("hints").is_some() {
        wqe.hints = hints(request);
    }
    let mut bytes = vec![0xa5; N * 8];
    wqe.emit(&host_geometry(case), &mut bytes).expect("a legal request");
    std::array::from_fn(|i| u64::from_le_bytes(bytes[i * 8..][..8].try_into().expect("eight bytes")))
}

fn check_host_sq<const N: usize>(case: &Value) {
    let flavour = match text(case, "provider") {
        "libfabric" => Flavour::Libfabric,
        "rdma-core" | "rdma-core-post-send" => Flavour::RdmaCore,
        other => panic!("unknown provider {other}"),
    };
    let entries = u32_of(case, "entries");
    let ring = Ring::new(entries as usize * N * 8, 0);
    // Host providers' doorbells have 16 bits, so none has this value.
    let db = Doorbell::new(u32::MAX);
    only_fields(&case["start"], &["pc", "phase"]);
    let (pc, phase) = (u16_of(&case["start"], "pc"), u32_of(&case["start"], "phase"));
    let max_batch = u32_of(case, "max_batch");
    // SAFETY: the ring and the doorbell outlive the queue, and nothing else writes to them.
    let queue = unsafe { HostSq::<N>::new(ring.as_ptr(), db.as_ptr(), entries, max_batch, flavour, pc, phase) };
    let mut queue = queue.expect("legal sizes");
    let mut all = Vec::new();
    for step in list(case, "steps") {
        only_fields(step, &["requests", "doorbells", "pc", "phase"]);
        let mut rung = Vec::new();
        let mut requests = list(step, "requests").iter();
        // The queue takes a request after each write, and once more at the end of the list, so this closure sees every
        // doorbell.
        queue.post(std::iter::from_fn(|| {
            rung.extend(db.take());
            requests.next().map(|r| request(case, r))
        }));
        rung.extend(db.take());
        let want = u32s(step, "doorbells");
        assert_eq!((u32::from(queue.pc()), queue.phase()), (u32_of(step, "pc"), u32_of(step, "phase")));
        assert_eq!(rung, want);
        all.extend(rung);
    }
    only_fields(&case["expect"], &["doorbells", "ring_sha256"]);
    assert_eq!(all, u32s(&case["expect"], "doorbells"));
    assert_eq!(sha256_hex(&ring.bytes()), text(&case["expect"], "ring_sha256"));
}

#[test]
fn host_send_queue_matches_vectors() {
    each_case("host_sq", |case| {
        only_fields(case, &["id", "kind", "provider", "wqe_size", "entries", "max_batch", "start", "steps", "expect"]);
        match wqe_size(case) {
            WqeSize::Narrow => check_host_sq::<NARROW>(case),
            WqeSize::Wide => check_host_sq::<WIDE>(case),
        }
    });
}
