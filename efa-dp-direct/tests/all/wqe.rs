//! Sections `wqe` and `send_2sge`: the bytes of single requests.

use crate::common::*;
use efa_dp_direct::wqe::{
    Builder, Destination, Geometry, Operation, SendData, SendWqe, WqeSize, WriteData, parse, words,
};
use serde_json::Value;

/// Returns the words as bytes, to compare them with what the byte builder writes.
fn to_bytes<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns the request built in registers, if the posting path can build such a request.
fn in_words(wqe: &SendWqe, size: WqeSize) -> Option<Vec<u8>> {
    macro_rules! by_size {
        ($build:ident ( $($arg:expr),* )) => {
            match size {
                WqeSize::Narrow => to_bytes(words::$build::<{ words::NARROW }>($($arg),*)),
                WqeSize::Wide => to_bytes(words::$build::<{ words::WIDE }>($($arg),*)),
            }
        };
    }
    let head = words::Head { wr_id: wqe.wr_id, dest: wqe.dest, imm: wqe.op.imm(), hints: wqe.hints };
    Some(match wqe.op {
        Operation::Write { remote, data: WriteData::One(sge), .. } => by_size!(write(head, remote, sge)),
        Operation::Write { remote, data: WriteData::Empty, .. } => by_size!(write_empty(head, remote)),
        Operation::Write { remote, data: WriteData::Inline(data), .. } if data.data().len() <= 8 => {
            let mut value = [0; 8];
            value[..data.data().len()].copy_from_slice(data.data());
            to_bytes(words::write_value(head, remote, u64::from_le_bytes(value), data.data().len() as u8))
        }
        Operation::Read { remote, into: Some(sge) } => by_size!(read(head, remote, sge)),
        Operation::Send { data: SendData::One(sge), .. } => by_size!(send(head, sge)),
        _ => return None,
    })
}

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
    let mut builder = Builder::new(&geometry, &mut out, &bare, u64_of(case, "wr_id"));
    let outcome = match &payload {
        Payload::None => Ok(()),
        Payload::Sge(sge) => builder.set_sge(*sge),
        Payload::Inline(data) => builder.set_inline(data),
    };
    builder.set_destination(dest).set_hints(hints(case));
    match ret {
        0 => assert_eq!(outcome, Ok(())),
        -22 => assert!(outcome.is_err()),
        other => panic!("unknown ret {other}"),
    }
    assert_eq!(hex(&out), hex(&want), "step by step");

    let op = if ret == 0 { with_payload(bare, &payload).expect("a payload that a request carries") } else { bare };
    let wqe = SendWqe { hints: hints(case), ..SendWqe::new(wr_id, dest, op) };
    out.fill(0xa5);
    wqe.emit(&geometry, &mut out).expect("a legal request");
    assert_eq!(hex(&out), hex(&want), "from the meaning");
    if let Some(words) = in_words(&wqe, size) {
        assert_eq!(hex(&words), hex(&want), "in words");
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

/// Lists the sections read by tests here or by `gin_post` in ferrogin-device-kernels. A section with any other name would have no test.
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
