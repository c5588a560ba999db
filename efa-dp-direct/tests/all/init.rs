//! Sections `qp_init` and `cq_init`: the queue structs that the initialisers fill.

use crate::common::*;
use efa_dp_direct::queue::{CqAttrs, CqV0, InitError, QpAttrs, QpV0, QpV1, WrCtxV0};
use efa_dp_direct::wqe::Geometry;
use serde_json::{Value, json};
use std::ptr::{null_mut, without_provenance_mut};

fn pointer<T>(attrs: &Value, key: &str) -> *mut T {
    without_provenance_mut(u64_of(attrs, key) as usize)
}

fn qp_attrs(attrs: &Value) -> QpAttrs {
    let optional_u32 = |key| attrs.get(key).map_or(0, |_| u32_of(attrs, key));
    QpAttrs {
        sq_buffer: pointer(attrs, "sq_buffer"),
        rq_buffer: pointer(attrs, "rq_buffer"),
        sq_doorbell: pointer(attrs, "sq_doorbell"),
        rq_doorbell: pointer(attrs, "rq_doorbell"),
        sq_num_entries: u32_of(attrs, "sq_num_entries"),
        sq_entry_size: u32_of(attrs, "sq_entry_size"),
        sq_max_batch: u32_of(attrs, "sq_max_batch"),
        rq_num_entries: u32_of(attrs, "rq_num_entries"),
        rq_entry_size: u32_of(attrs, "rq_entry_size"),
        sq_max_inline_data: optional_u32("sq_max_inline_data"),
        sq_max_rdma_sges: optional_u32("sq_max_rdma_sges"),
        sq_caps: optional_u32("sq_caps"),
        rq_caps: optional_u32("rq_caps"),
        ..QpAttrs::ZERO
    }
}

fn wr_ctx_json(ctx: &WrCtxV0) -> Value {
    json!({
        "remote_mem_offset": ctx.remote_mem_offset, "local_mem_offset": ctx.local_mem_offset,
        "sgl_offset": ctx.sgl_offset, "send_inline_data_offset": ctx.send_inline_data_offset,
        "write_inline_data_offset": ctx.write_inline_data_offset, "max_inline_data": ctx.max_inline_data,
        "max_rdma_sges": ctx.max_rdma_sges, "wqe_size": ctx.wqe_size,
    })
}

#[test]
fn queue_pair_initialisers_match_vectors() {
    each_case("qp_init", |case| {
        only_fields(case, &["id", "kind", "api", "initializer", "attrs", "expect"]);
        let attrs = &case["attrs"];
        only_fields(
            attrs,
            &[
                "sq_buffer",
                "rq_buffer",
                "sq_doorbell",
                "rq_doorbell",
                "sq_num_entries",
                "sq_entry_size",
                "sq_max_batch",
                "rq_num_entries",
                "rq_entry_size",
                "sq_max_inline_data",
                "sq_max_rdma_sges",
                "sq_caps",
                "rq_caps",
            ],
        );
        let expect = &case["expect"];
        only_fields(expect, &["ret", "qp", "wr_ctx"]);
        let built: Result<(Vec<u8>, Option<WrCtxV0>), InitError> = match (text(case, "api"), text(case, "initializer"))
        {
            ("v0", "0.0.1") => QpV0::new(&qp_attrs(attrs)).map(|qp| (qp.to_bytes().to_vec(), None)),
            // A queue pair of version 0 is made as in the release that has no other.
            ("v0", "1.1.0") => return,
            ("v1", "1.1.0") => QpV1::new(&qp_attrs(attrs)).map(|qp| (qp.to_bytes().to_vec(), Some(qp.sq.wr_ctx))),
            other => panic!("unknown initializer {other:?}"),
        };
        assert_eq!(built.as_ref().map_or_else(|e| e.errno(), |_| 0), i64_of(expect, "ret") as i32);
        if let Ok((bytes, wr_ctx)) = built {
            assert_eq!(hex(&bytes), text(expect, "qp"));
            assert_eq!(wr_ctx.is_some(), expect.get("wr_ctx").is_some());
            if let Some(ctx) = wr_ctx {
                assert_eq!(wr_ctx_json(&ctx), expect["wr_ctx"]);
                let geometry = Geometry::from_wr_ctx(&ctx).expect("a geometry that exists");
                assert_eq!(geometry.wr_ctx(), WrCtxV0 { max_rdma_sges: 1, ..ctx });
            }
        }
    });
}

#[test]
fn completion_queue_initialiser_matches_vectors() {
    each_case("cq_init", |case| {
        only_fields(case, &["id", "kind", "attrs", "expect"]);
        only_fields(&case["attrs"], &["buffer", "num_entries", "entry_size"]);
        only_fields(&case["expect"], &["ret", "cq"]);
        let attrs = CqAttrs {
            comp_mask: 0,
            flags: 0,
            buffer: pointer(&case["attrs"], "buffer"),
            num_entries: u32_of(&case["attrs"], "num_entries"),
            entry_size: u32_of(&case["attrs"], "entry_size"),
        };
        let built = CqV0::new(&attrs);
        assert_eq!(built.as_ref().map_or_else(|e| e.errno(), |_| 0), i64_of(&case["expect"], "ret") as i32);
        if let Ok(cq) = built {
            assert_eq!(hex(&cq.to_bytes()), text(&case["expect"], "cq"));
        }
    });
}

#[test]
fn reserved_attributes_are_refused() {
    let good = QpAttrs { sq_num_entries: 8, rq_num_entries: 8, sq_entry_size: 64, ..QpAttrs::ZERO };
    assert!(QpV0::new(&good).is_ok());
    assert_eq!(QpV0::new(&QpAttrs { comp_mask: 1, ..good }), Err(InitError::Reserved(1)));
    assert_eq!(QpV0::new(&QpAttrs { flags: 2, ..good }), Err(InitError::Reserved(2)));
    let cq = CqAttrs { comp_mask: 0, flags: 0, buffer: null_mut(), num_entries: 8, entry_size: 32 };
    assert_eq!(CqV0::new(&CqAttrs { flags: 4, ..cq }), Err(InitError::Reserved(4)));
}

#[test]
fn reserved_bits_do_not_cancel_out() {
    let good = QpAttrs { sq_num_entries: 8, rq_num_entries: 8, sq_entry_size: 64, ..QpAttrs::ZERO };
    assert_eq!(QpV0::new(&QpAttrs { comp_mask: 5, flags: 5, ..good }), Err(InitError::Reserved(5)));
    assert_eq!(QpV0::new(&QpAttrs { comp_mask: 3, flags: 6, ..good }), Err(InitError::Reserved(7)));
    let cq = CqAttrs { comp_mask: 5, flags: 5, buffer: null_mut(), num_entries: 8, entry_size: 32 };
    assert_eq!(CqV0::new(&cq), Err(InitError::Reserved(5)));
    assert_eq!(CqV0::new(&CqAttrs { flags: 6, ..cq }), Err(InitError::Reserved(7)));
}

#[test]
fn refusals_name_the_attribute_and_its_value() {
    for (error, value, attribute) in [
        (InitError::Entries(12), "12", "power of two"),
        (InitError::WqeSize(96), "96", "byte requests"),
        (InitError::InlineData(81), "81", "inline bytes"),
        (InitError::RdmaSges(2), "2", "buffers"),
        (InitError::Caps(8), "0x8", "capabilities"),
        (InitError::Reserved(4), "0x4", "comp_mask or flags"),
    ] {
        let text = error.to_string();
        assert!(text.contains(value) && text.contains(attribute), "{error:?}: {text}");
    }
}
