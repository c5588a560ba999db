//! Sections `wqe` and `send_2sge`: the bytes of single requests.

use crate::common::*;
use efa_dp_direct::wqe::{Destination, Geometry, Operation, SendData, SendWqe, parse};
use serde_json::Value;

fn check_wqe(case: &Value) {
    only_fields(
        case,
        &[
            "id",
            "kind",
            "api",
            "wqe_size",
            "op",
            "wr_id",
            "imm",
            "rkey",
            "remote_addr",
            "payload",
            "remote",
            "hints",
            "max_inline",
            "expect",
            "same_bytes",
        ],
    );
    only_fields(&case["expect"], &["ret", "wqe"]);
    let size = wqe_size(case);
    let request_ids = request_ids(case);
    let max_inline = match text(case, "api") {
        "v0" => 32,
        _ => u32_of(case, "max_inline"),
    };
    let geometry = Geometry { wqe_size: size, max_inline, request_ids };
    let wr_id = match text(case, "api") {
        "v0" => u64_of(case, "wr_id") & 0xffff,
        _ => u64_of(case, "wr_id"),
    };
    let bare = bare_operation(case);
    let payload = payload(&case["payload"]);
    let dest = optional(case, "remote", destination).unwrap_or_default();
    let (ret, want) = (i64_of(&case["expect"], "ret"), bytes_of(&case["expect"], "wqe"));
    assert_eq!(want.len(), size.bytes());

    let mut out = vec![0xa5; size.bytes()];
    assert!(matches!(ret, 0 | -22), "unknown ret {ret}");
    let op = if ret == 0 { with_payload(bare, &payload).expect("a payload that a request carries") } else { bare };
    let wqe = SendWqe { hints: hints(case), ..SendWqe::new(wr_id, dest, op) };
    wqe.emit(&geometry, &mut out).expect("a legal request");
    assert_eq!(hex(&out), hex(&want), "from the meaning");
    if wr_id <= 0xffff
        && let Some(words) = from_template(&as_sent(wqe), size)
    {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(hex(&bytes), hex(&want), "from a template");
    }
    if ret != 0
        && let Some(refused) = with_payload(bare, &payload)
    {
        out.fill(0xa5);
        assert!(SendWqe { op: refused, ..wqe }.emit(&geometry, &mut out).is_err());
        assert_eq!(hex(&out), hex(&want), "a refused payload leaves the request without it");
    }
    assert_eq!(parse(&want, &geometry), Ok(as_sent(wqe)), "parsed");
}

#[test]
fn requests_match_vectors() {
    each_case("wqe", check_wqe);
}

#[test]
fn sends_of_two_buffers_match_vectors() {
    each_case("send_2sge", |case| {
        only_fields(case, &["id", "kind", "wqe_size", "op", "wr_id", "imm", "sges", "remote", "expect", "same_bytes"]);
        only_fields(&case["expect"], &["wqe"]);
        let Operation::Send { imm, .. } = bare_operation(case) else { panic!("only sends gather") };
        let [first, second] = list(case, "sges") else { panic!("two buffers") };
        let data = SendData::Two(sge(first), sge(second));
        let dest = optional(case, "remote", destination).unwrap_or(Destination::default());
        let wqe = SendWqe::new(u64_of(case, "wr_id"), dest, Operation::Send { data, imm });
        let geometry = host_geometry(case);
        let want = bytes_of(&case["expect"], "wqe");
        let mut out = vec![0xa5; geometry.wqe_size.bytes()];
        wqe.emit(&geometry, &mut out).expect("a legal request");
        assert_eq!(hex(&out), hex(&want));
        assert_eq!(parse(&want, &geometry), Ok(as_sent(wqe)));
    });
}

/// Lists the sections read by tests here or by `gin_post` in ferrogin-device-kernels. A section with any other name
/// would have no test.
#[test]
fn every_section_of_vectors_has_test() {
    let all = file("efa_dp.json");
    let tested = [
        "schema",
        "about",
        "wqe",
        "send_2sge",
        "sq",
        "sq_long",
        "rq",
        "cqe",
        "cq",
        "qp_init",
        "cq_init",
        "limits",
        "host_sq",
        "cq_doorbell",
        "gin_post",
    ];
    only_fields(&all, &tested);
}
