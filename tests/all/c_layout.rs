//! Generates `ferrogin/layout.h` from the Rust definitions, so that these and the C++ headers can't drift apart.
//!
//! The test fails if the checked-in header is out of date; `FERROGIN_REFRESH=1` rewrites it. C++ checks the numbers
//! against NCCL's own structs wherever `ferrogin/nccl_gin.cuh` is compiled.

use efa_dp_direct::queue::{QpV0, QpV1, RqV0, SqV0, SqV1, WqV0, WrCtxV0};
use ferrogin_ffi::device::{CounterHandle, DevHandle, EndpointHandle, MrHandle, MrPeer};
use ferrogin_ffi::ext::{ContextExt, EmulatedSignals, HEADER_MAGIC, HEADER_VERSION, HandleHeader};
use std::fmt::Write;
use std::mem::offset_of;
use std::path::Path;

/// One struct: its C name, size, alignment, and the fields with their offsets.
type Layout = (&'static str, usize, usize, Vec<(&'static str, usize)>);

/// A field with a different C name is written `rust as c`.
macro_rules! layout {
    ($c:literal, $ty:ty, { $($fields:tt)* }) => {
        ($c, size_of::<$ty>(), align_of::<$ty>(), layout!(@ $ty, [] $($fields)*))
    };
    (@ $ty:ty, [$($done:tt)*]) => { vec![$($done)*] };
    (@ $ty:ty, [$($done:tt)*] $field:ident as $c:ident $(, $($rest:tt)*)?) => {
        layout!(@ $ty, [$($done)* (stringify!($c), offset_of!($ty, $field)),] $($($rest)*)?)
    };
    (@ $ty:ty, [$($done:tt)*] $field:ident $(, $($rest:tt)*)?) => {
        layout!(@ $ty, [$($done)* (stringify!($field), offset_of!($ty, $field)),] $($($rest)*)?)
    };
}

fn handles() -> Vec<Layout> {
    vec![
        layout!("nccl_ofi_gin_gdaki_dev_endpoint_handle", EndpointHandle, {
            qp, cq, target_address_handles, target_remote_qpns, target_qkey, sq_lock, local_cntr_value, submitted_count,
            sq_size, putvalue_pad, putvalue_slice_base
        }),
        layout!("nccl_ofi_gin_gdaki_dev_counter_handle", CounterHandle, { base, cntr_value, cntr_offset }),
        layout!("nccl_ofi_gin_gdaki_dev_handle", DevHandle, {
            data, pvdata, counter_handles, signal_handles, n_counters as nCounters, n_signals as nSignals, nranks, rank,
            rail_id, scratch_lkey, scratch_pad, scratch_local_addr, scratch_remote_addrs, scratch_remote_rkeys,
            putvalue_lkey, putvalue_slot_size
        }),
        layout!("nccl_ofi_gin_gdaki_mr_peer", MrPeer, { remote_addr, rkey, pad }),
        layout!("nccl_ofi_gin_gdaki_mr_handle", MrHandle, { lkey, nranks, local_addr, peers }),
    ]
}

/// The queue structs, under one NCCL release's names.
macro_rules! queues {
    ($wq:literal, $sq:literal, $sq_ty:ty, { $($sq_fields:ident),* }, $rq:literal, $qp:literal, $qp_ty:ty) => {
        vec![
            layout!($wq, WqV0, {
                max_sge, max_wqes, queue_mask, queue_size_shift, max_batch, wqes_pending, wqes_posted, wqes_completed, pc,
                phase, buf, db
            }),
            layout!($sq, $sq_ty, { $($sq_fields),* }),
            layout!($rq, RqV0, { wq }),
            layout!($qp, $qp_ty, { comp_mask, sq, rq }),
        ]
    };
}

fn queues_of_231() -> Vec<Layout> {
    queues!("efa_cuda_wq", "efa_cuda_sq", SqV0, { wq, max_inline_data, max_rdma_sges }, "efa_cuda_rq", "efa_cuda_qp", QpV0)
}

fn queues_of_232() -> Vec<Layout> {
    let mut all =
        queues!("efa_cuda_wq_v0", "efa_cuda_sq_v1", SqV1, { wq, wr_ctx }, "efa_cuda_rq_v0", "efa_cuda_qp_v1", QpV1);
    all.push(layout!("efa_cuda_wr_ctx_v0", WrCtxV0, {
        remote_mem_offset, local_mem_offset, sgl_offset, send_inline_data_offset, write_inline_data_offset,
        max_inline_data, max_rdma_sges, wqe_size
    }));
    all.extend([
        layout!("efa_cuda_sq_v0", SqV0, { wq, max_inline_data, max_rdma_sges }),
        layout!("efa_cuda_qp_v0", QpV0, { comp_mask, sq, rq }),
    ]);
    all
}

fn list(text: &mut String, about: &str, name: &str, layouts: &[Layout]) {
    write!(text, "\n/* {about} */\n#define {name}(TYPE, FIELD)").unwrap();
    for (c, size, align, fields) in layouts {
        write!(text, " \\\n    TYPE({c}, {size}, {align})").unwrap();
        for (field, offset) in fields {
            write!(text, " \\\n    FIELD({c}, {field}, {offset})").unwrap();
        }
    }
    text.push('\n');
}

fn header() -> String {
    let mut text = String::from(
        "/* ferrogin: layouts of what the plugin and device code share. Written from the Rust definitions by\n \
         * tests/all/c_layout.rs (FERROGIN_REFRESH=1 cargo test -p ferrogin --test all c_layout): do not edit.\n \
         *\n \
         * SPDX-License-Identifier: Apache-2.0 */\n\
         #ifndef FERROGIN_LAYOUT_H\n#define FERROGIN_LAYOUT_H\n\n\
         /* What lies before the array of device handles, and what it leads to: FGIN_CONTEXT_SIZE bytes each. */\n",
    );
    let constants = [
        ("FGIN_HEADER_MAGIC", format!("{HEADER_MAGIC:#x}ull")),
        ("FGIN_HEADER_VERSION", format!("{HEADER_VERSION}u")),
        ("FGIN_HEADER_SIZE", size_of::<HandleHeader>().to_string()),
        ("FGIN_HEADER_MAGIC_OFFSET", offset_of!(HandleHeader, magic).to_string()),
        ("FGIN_HEADER_VERSION_OFFSET", offset_of!(HandleHeader, version).to_string()),
        ("FGIN_HEADER_N_CONTEXTS_OFFSET", offset_of!(HandleHeader, n_contexts).to_string()),
        ("FGIN_HEADER_CONTEXTS_OFFSET", offset_of!(HandleHeader, contexts).to_string()),
        ("FGIN_CONTEXT_SIZE", size_of::<ContextExt>().to_string()),
        ("FGIN_CONTEXT_EMULATED_OFFSET", offset_of!(ContextExt, emulated).to_string()),
        ("FGIN_EMULATED_WORDS_OFFSET", offset_of!(EmulatedSignals, words).to_string()),
        ("FGIN_EMULATED_N_SIGNALS_OFFSET", offset_of!(EmulatedSignals, n_signals).to_string()),
    ];
    for (name, value) in constants {
        writeln!(text, "#define {name} {value}").unwrap();
    }
    list(&mut text, "The handles, by NCCL's names.", "FGIN_HANDLE_LAYOUTS", &handles());
    list(&mut text, "The queues, by the names of NCCL 2.31.", "FGIN_QUEUE_LAYOUTS_231", &queues_of_231());
    list(&mut text, "The queues, by the names of NCCL 2.32.", "FGIN_QUEUE_LAYOUTS_232", &queues_of_232());
    text.push_str("\n#endif /* FERROGIN_LAYOUT_H */\n");
    text
}

#[test]
fn c_header_has_layouts_of_rust_definitions() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi-headers/include/ferrogin/layout.h");
    let wanted = header();
    if std::env::var_os("FERROGIN_REFRESH").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = wanted.lines().zip(found.lines()).find(|(wanted, found)| wanted != found);
    assert!(
        found == wanted,
        "{} is not what the Rust definitions give (first difference: {differs:?}); FERROGIN_REFRESH=1 writes it",
        path.display()
    );
}
