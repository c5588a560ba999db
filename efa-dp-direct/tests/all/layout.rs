//! Checks the Rust types against the "efa-dp-direct …" groups in `efa_layout.json`, which a C++ compiler wrote from the
//! foreign headers: size, alignment, every field, every enumerator, every constant; and the request geometries.
//!
//! Anything found on only one side fails the test: a struct, field, enumerator or constant in the file that no line
//! here names, a line here that the file lacks, and (at compile time) a Rust field that no line here names.

use crate::common::{file, list, text, u32_of, u64_of};
use efa_dp_direct::queue::*;
use efa_dp_direct::wire::*;
use efa_dp_direct::wqe::{Geometry, WqeSize};
use serde_json::Value;
use std::collections::BTreeMap;

/// A struct as Rust lays it out: fields by C name, each with offset and size.
struct Struct {
    size: usize,
    align: usize,
    fields: BTreeMap<&'static str, (usize, usize)>,
}

impl Struct {
    /// Adds a member of an unnamed union, or a field that differs in another release.
    fn with(mut self, name: &'static str, offset: usize, size: usize) -> Self {
        self.fields.insert(name, (offset, size));
        self
    }

    fn without(mut self, name: &str) -> Self {
        assert!(self.fields.remove(name).is_some());
        self
    }
}

type Structs = BTreeMap<&'static str, Struct>;

/// Returns a field's size, from a function that reaches it but is never called.
fn size_through<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// `layout!(Type { field = "c_field", padding = "" })`; the list must be complete to compile.
macro_rules! layout {
    ($ty:ident { $($field:ident $(= $c_field:literal)?),* $(,)? }) => {{
        let _complete = |value: &$ty| {
            let $ty { $($field: _),* } = value;
        };
        let mut fields = BTreeMap::new();
        $({
            #[allow(unused_mut, unused_assignments)]
            let mut name = stringify!($field);
            $(name = $c_field;)?
            if !name.is_empty() {
                fields.insert(name, (core::mem::offset_of!($ty, $field), size_through(|s: &$ty| &s.$field)));
            }
        })*
        Struct { size: size_of::<$ty>(), align: align_of::<$ty>(), fields }
    }};
}

fn wq() -> Struct {
    layout!(WqV0 {
        max_sge,
        max_wqes,
        queue_mask,
        queue_size_shift,
        max_batch,
        wqes_pending,
        wqes_posted,
        wqes_completed,
        pc,
        phase,
        buf,
        db,
    })
}

fn cq() -> Struct {
    layout!(CqV0 { comp_mask, entry_size, num_entries, queue_mask, queue_size_shift, cc, phase, buf, db })
}

fn sq() -> Struct {
    layout!(SqV0 { wq, max_inline_data, max_rdma_sges })
}

fn rq() -> Struct {
    layout!(RqV0 { wq })
}

fn qp() -> Struct {
    layout!(QpV0 { comp_mask, sq, rq })
}

fn queue_structs_0_0_1() -> Structs {
    Structs::from([
        ("efa_cuda_cq", cq()),
        ("efa_cuda_wq", wq()),
        ("efa_cuda_rq", rq()),
        ("efa_cuda_sq", sq()),
        ("efa_cuda_qp", qp()),
    ])
}

fn queue_structs_1_1_0() -> Structs {
    let wr_ctx = layout!(WrCtxV0 {
        remote_mem_offset, local_mem_offset, sgl_offset, send_inline_data_offset, write_inline_data_offset, pad0 = "",
        max_inline_data, max_rdma_sges, wqe_size, pad1 = "",
    });
    Structs::from([
        ("efa_cuda_cq_v0", cq()),
        ("efa_cuda_wq_v0", wq()),
        ("efa_cuda_rq_v0", rq()),
        ("efa_cuda_sq_v0", sq()),
        ("efa_cuda_qp_v0", qp()),
        ("efa_cuda_wr_ctx_v0", wr_ctx),
        ("efa_cuda_sq_v1", layout!(SqV1 { wq, wr_ctx, pad = "" })),
        ("efa_cuda_qp_v1", layout!(QpV1 { comp_mask, sq, rq })),
    ])
}

/// Returns the wire structs that are the same in both releases.
fn wire_structs() -> Structs {
    let wqe = layout!(TxWqe { meta, data });
    let rx_ex = layout!(RxCdescEx { base, extra = "u" });
    Structs::from([
        ("efa_io_tx_buf_desc", layout!(TxBufDesc { length, lkey, buf_addr_lo, buf_addr_hi })),
        ("efa_io_remote_mem_addr", layout!(RemoteMemAddr { length, rkey, buf_addr_lo, buf_addr_hi })),
        ("efa_io_rdma_req", layout!(RdmaReq { remote_mem, local_mem })),
        (
            "efa_io_tx_wqe",
            wqe.with("data.sgl", 32, TX_DESC_NUM_BUFS * TxBufDesc::SIZE)
                .with("data.inline_data", 32, TX_DESC_INLINE_MAX_SIZE)
                .with("data.rdma_req", 32, RdmaReq::SIZE)
                .with("data.reg_mr_req", 32, 32)
                .with("data.inv_mr_req", 32, 32),
        ),
        ("efa_io_rx_desc", layout!(RxDesc { buf_addr_lo, buf_addr_hi, req_id, length, lkey_ctrl })),
        ("efa_io_cdesc_common", layout!(CdescCommon { req_id, status, flags, qp_num })),
        ("efa_io_rx_cdesc", layout!(RxCdesc { common, length, ah, src_qp_num, imm })),
        ("efa_io_rx_cdesc_rdma_write", layout!(RxCdescRdmaWrite { length_hi })),
        ("efa_io_rx_cdesc_ex", rx_ex.with("u.rdma_write", 16, RxCdescRdmaWrite::SIZE).with("u.src_addr", 16, 16)),
    ])
}

fn meta_desc() -> Struct {
    layout!(TxMetaDesc {
        req_id,
        ctrl1,
        ctrl2,
        dest_qp_num,
        length,
        immediate_data,
        ah,
        ctrl3,
        reserved,
        qkey,
        reserved2,
        req_id_ex,
    })
}

fn wire_structs_0_0_1() -> Structs {
    let mut all = wire_structs();
    all.insert("efa_io_tx_meta_desc", meta_desc().without("req_id_ex").with("reserved2", 20, 12));
    all.insert("efa_io_tx_cdesc", layout!(TxCdescV0 { common, reserved16 }));
    all
}

fn wire_structs_1_1_0() -> Structs {
    let mut all = wire_structs();
    let rdma = layout!(RdmaReq128 { remote_mem, local = "local_mem" });
    let wqe = layout!(TxWqe128 { meta, data });
    all.insert("efa_io_req_id_ex", layout!(ReqIdEx { w }));
    all.insert("efa_io_tx_meta_desc", meta_desc());
    all.insert("efa_io_tx_cdesc", layout!(TxCdesc { common, req_id_ex, reserved }));
    all.insert(
        "efa_io_rdma_req_128",
        rdma.with("local_mem", 16, TxBufDesc::SIZE).with("inline_data", 16, TX_DESC_INLINE_MAX_SIZE_128),
    );
    all.insert(
        "efa_io_tx_wqe_128",
        wqe.with("data.sgl", 32, TX_DESC_NUM_BUFS * TxBufDesc::SIZE)
            .with("data.inline_data", 32, TX_DESC_INLINE_MAX_SIZE_128)
            .with("data.rdma_req", 32, RdmaReq128::SIZE)
            .with("data.reg_mr_req", 32, 32)
            .with("data.inv_mr_req", 32, 32),
    );
    all
}

fn cq_attrs() -> Struct {
    layout!(CqAttrs { comp_mask, flags, buffer, num_entries, entry_size })
}

fn host_structs_1_1_0() -> Structs {
    let qp = layout!(QpAttrs {
        comp_mask, flags, sq_buffer, rq_buffer, sq_doorbell, rq_doorbell, sq_num_entries, sq_entry_size, sq_max_batch,
        rq_num_entries, rq_entry_size, sq_max_inline_data, sq_max_rdma_sges, sq_caps, rq_caps, pad = "",
    });
    Structs::from([("efa_cuda_cq_attrs", cq_attrs()), ("efa_cuda_qp_attrs", qp)])
}

type Numbers = BTreeMap<&'static str, u64>;
type Enums = BTreeMap<&'static str, Numbers>;

/// Returns the enumerators in the wire structs' header. `with_18`: whether completion status 18 exists.
fn wire_enums(with_18: bool) -> Enums {
    let status = |name, status: CompStatus| (name, u64::from(status.raw()));
    let mut statuses = Numbers::from([
        status("EFA_IO_COMP_STATUS_OK", CompStatus::Ok),
        status("EFA_IO_COMP_STATUS_FLUSHED", CompStatus::Flushed),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_QP_INTERNAL_ERROR", CompStatus::LocalQpInternalError),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_UNSUPPORTED_OP", CompStatus::LocalUnsupportedOp),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_INVALID_AH", CompStatus::LocalInvalidAh),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_INVALID_LKEY", CompStatus::LocalInvalidLkey),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_BAD_LENGTH", CompStatus::LocalBadLength),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_BAD_ADDRESS", CompStatus::RemoteBadAddress),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_ABORT", CompStatus::RemoteAbort),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_BAD_DEST_QPN", CompStatus::RemoteBadDestQpn),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_RNR", CompStatus::RemoteRnr),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_BAD_LENGTH", CompStatus::RemoteBadLength),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_BAD_STATUS", CompStatus::RemoteBadStatus),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_UNRESP_REMOTE", CompStatus::LocalUnresponsiveRemote),
        status("EFA_IO_COMP_STATUS_REMOTE_ERROR_UNKNOWN_PEER", CompStatus::RemoteUnknownPeer),
        status("EFA_IO_COMP_STATUS_LOCAL_ERROR_UNREACH_REMOTE", CompStatus::LocalUnreachableRemote),
    ]);
    if with_18 {
        let name = "EFA_IO_COMP_STATUS_REMOTE_ERROR_FEATURE_MISMATCH";
        statuses.insert(name, CompStatus::RemoteFeatureMismatch.raw().into());
        assert_eq!(statuses.len(), CompStatus::ALL.len(), "a status without a C name");
    }
    let queue = |name, queue: QueueType| (name, u64::from(queue.raw()));
    let op = |name, op: SendOp| (name, u64::from(op.raw()));
    let hint = |name, hint: ProcessingHint| (name, u64::from(hint.raw()));
    let wc = |name, opcode: WcOpcode| (name, u64::from(opcode.raw()));
    Enums::from([
        ("efa_io_comp_status", statuses),
        (
            "efa_io_queue_type",
            Numbers::from([queue("EFA_IO_SEND_QUEUE", QueueType::Send), queue("EFA_IO_RECV_QUEUE", QueueType::Recv)]),
        ),
        (
            "efa_io_send_op_type",
            Numbers::from([
                op("EFA_IO_SEND", SendOp::Send),
                op("EFA_IO_RDMA_READ", SendOp::RdmaRead),
                op("EFA_IO_RDMA_WRITE", SendOp::RdmaWrite),
                op("EFA_IO_FAST_REG", SendOp::FastReg),
                op("EFA_IO_FAST_INV", SendOp::FastInv),
            ]),
        ),
        (
            "efa_io_processing_hint",
            Numbers::from([hint("EFA_IO_PROCESSING_HINT_BURST_PPS_SENSITIVE", ProcessingHint::BurstPpsSensitive)]),
        ),
        (
            "efa_cuda_processing_hint",
            Numbers::from([hint("EFA_CUDA_PROCESSING_HINT_BURST_PPS_SENSITIVE", ProcessingHint::BurstPpsSensitive)]),
        ),
        (
            "efa_cuda_wc_opcode",
            Numbers::from([
                wc("EFA_CUDA_WC_SEND", WcOpcode::Send),
                wc("EFA_CUDA_WC_RDMA_WRITE", WcOpcode::RdmaWrite),
                wc("EFA_CUDA_WC_RDMA_READ", WcOpcode::RdmaRead),
                wc("EFA_CUDA_WC_RECV", WcOpcode::Recv),
                wc("EFA_CUDA_WC_RECV_RDMA_WITH_IMM", WcOpcode::RecvRdmaWithImm),
            ]),
        ),
    ])
}

fn wire_constants(with_wide: bool) -> Numbers {
    let mut all = Numbers::from([
        ("EFA_IO_TX_DESC_NUM_BUFS", TX_DESC_NUM_BUFS as u64),
        ("EFA_IO_TX_DESC_NUM_RDMA_BUFS", TX_DESC_NUM_RDMA_BUFS as u64),
        ("EFA_IO_TX_DESC_INLINE_MAX_SIZE", TX_DESC_INLINE_MAX_SIZE as u64),
        ("EFA_IO_TX_DESC_IMM_DATA_SIZE", TX_DESC_IMM_DATA_SIZE as u64),
        ("EFA_IO_TX_META_DESC_OP_TYPE_MASK", Ctrl1::OP_TYPE.into()),
        ("EFA_IO_TX_META_DESC_HAS_IMM_MASK", Ctrl1::HAS_IMM.into()),
        ("EFA_IO_TX_META_DESC_INLINE_MSG_MASK", Ctrl1::INLINE_MSG.into()),
        ("EFA_IO_TX_META_DESC_META_EXTENSION_MASK", Ctrl1::META_EXTENSION.into()),
        ("EFA_IO_TX_META_DESC_META_DESC_MASK", Ctrl1::META_DESC.into()),
        ("EFA_IO_TX_META_DESC_PHASE_MASK", Ctrl2::PHASE.into()),
        ("EFA_IO_TX_META_DESC_FIRST_MASK", Ctrl2::FIRST.into()),
        ("EFA_IO_TX_META_DESC_LAST_MASK", Ctrl2::LAST.into()),
        ("EFA_IO_TX_META_DESC_COMP_REQ_MASK", Ctrl2::COMP_REQ.into()),
        ("EFA_IO_TX_META_DESC_PROCESSING_HINTS_MASK", Ctrl3::PROCESSING_HINTS.into()),
        ("EFA_IO_TX_BUF_DESC_LKEY_MASK", Lkey::LKEY.into()),
        ("EFA_IO_RX_DESC_LKEY_MASK", LkeyCtrl::LKEY.into()),
        ("EFA_IO_RX_DESC_FIRST_MASK", LkeyCtrl::FIRST.into()),
        ("EFA_IO_RX_DESC_LAST_MASK", LkeyCtrl::LAST.into()),
        ("EFA_IO_CDESC_COMMON_PHASE_MASK", CdescFlags::PHASE.into()),
        ("EFA_IO_CDESC_COMMON_Q_TYPE_MASK", CdescFlags::Q_TYPE.into()),
        ("EFA_IO_CDESC_COMMON_HAS_IMM_MASK", CdescFlags::HAS_IMM.into()),
        ("EFA_IO_CDESC_COMMON_OP_TYPE_MASK", CdescFlags::OP_TYPE.into()),
        ("EFA_IO_CDESC_COMMON_UNSOLICITED_MASK", CdescFlags::UNSOLICITED.into()),
    ]);
    if with_wide {
        all.insert("EFA_IO_TX_DESC_INLINE_MAX_SIZE_128", TX_DESC_INLINE_MAX_SIZE_128 as u64);
    }
    all
}

fn version(major: u64, minor: u64, subminor: u64) -> Numbers {
    Numbers::from([
        ("EFA_CUDA_DP_VERSION_MAJOR", major),
        ("EFA_CUDA_DP_VERSION_MINOR", minor),
        ("EFA_CUDA_DP_VERSION_SUBMINOR", subminor),
    ])
}

/// A group's Rust types and constants.
struct Group {
    structs: Structs,
    enums: Enums,
    constants: Numbers,
}

fn groups() -> BTreeMap<&'static str, Group> {
    let none = Numbers::new;
    let caps = Numbers::from([("EFA_CUDA_WQ_CAPS_64_BIT_REQ_ID", WQ_CAPS_64_BIT_REQ_ID.into())]);
    let group = |structs, enums, constants| Group { structs, enums, constants };
    BTreeMap::from([
        ("efa-dp-direct 0.0.1 queue structs", group(queue_structs_0_0_1(), Enums::new(), version(0, 0, 1))),
        ("efa-dp-direct 1.1.0 queue structs", group(queue_structs_1_1_0(), Enums::new(), version(1, 1, 0))),
        ("efa-dp-direct 0.0.1 wire structs", group(wire_structs_0_0_1(), wire_enums(false), wire_constants(false))),
        ("efa-dp-direct 1.1.0 wire structs", group(wire_structs_1_1_0(), wire_enums(true), wire_constants(true))),
        (
            "efa-dp-direct host API 1.1.0",
            group(host_structs_1_1_0(), Enums::from([("efa_cuda_wq_caps", caps)]), none()),
        ),
    ])
}

/// Returns one of the group's lists, or nothing if the group has no such list.
fn entries<'a>(group: &'a Value, key: &str) -> &'a [Value] {
    group.get(key).map_or(&[], |_| list(group, key))
}

/// Returns a JSON object's numbers by name.
fn numbers(object: Option<&Value>) -> BTreeMap<&str, u64> {
    let Some(object) = object else { return BTreeMap::new() };
    let object = object.as_object().expect("names with numbers");
    object.iter().map(|(name, value)| (name.as_str(), value.as_u64().expect("a number"))).collect()
}

/// Fast registrations, which the kernel posts and nothing here does.
const NOT_IN_RUST: [&str; 3] = ["efa_io_fast_mr_reg_req", "efa_io_fast_mr_inv_req", "efa_io_frwr_pbl_mode"];

fn check_group(ours: &Group, foreign: &Value) {
    let names = |key| entries(foreign, key).iter().map(|s| text(s, "name")).collect::<Vec<_>>();
    for name in ours.structs.keys() {
        assert!(names("structs").contains(name), "{name} is not in the file");
    }
    for foreign in entries(foreign, "structs").iter().filter(|foreign| !NOT_IN_RUST.contains(&text(foreign, "name"))) {
        let name = text(foreign, "name");
        let ours = ours.structs.get(name).unwrap_or_else(|| panic!("{name} is not in Rust"));
        let fields: BTreeMap<_, _> = list(foreign, "fields")
            .iter()
            .map(|f| (text(f, "name"), (u64_of(f, "offset") as usize, u64_of(f, "size") as usize)))
            .collect();
        assert_eq!(
            (ours.size as u64, ours.align as u64),
            (u64_of(foreign, "size"), u64_of(foreign, "align")),
            "{name}"
        );
        assert_eq!(ours.fields, fields, "fields of {name}: offset, size");
    }
    for name in ours.enums.keys() {
        assert!(names("enums").contains(name), "{name} is not in the file");
    }
    for foreign in entries(foreign, "enums").iter().filter(|foreign| !NOT_IN_RUST.contains(&text(foreign, "name"))) {
        let name = text(foreign, "name");
        let ours = ours.enums.get(name).unwrap_or_else(|| panic!("{name} is not in Rust"));
        assert_eq!(*ours, numbers(foreign.get("values")), "{name}");
    }
    assert_eq!(ours.constants, numbers(foreign.get("constants")), "constants");
}

#[test]
fn layouts_match_vectors() {
    let all = file("efa_layout.json");
    let mut ours = groups();
    for foreign in list(&all, "groups").iter().filter(|g| text(g, "name").starts_with("efa-dp-direct")) {
        let name = text(foreign, "name");
        if name == "efa-dp-direct host API 0.0.1" {
            // Attributes for an initialiser that isn't called: only what it makes is shared.
            continue;
        }
        let ours = ours.remove(name).unwrap_or_else(|| panic!("group {name:?} is not known to this test"));
        check_group(&ours, foreign);
    }
    assert!(ours.is_empty(), "groups missing in the file: {:?}", ours.keys());
}

#[test]
fn request_geometries_match_vectors() {
    for foreign in list(&file("efa_layout.json"), "wr_ctx") {
        let size = WqeSize::from_bytes(u64_of(foreign, "wqe_size") as usize).expect("64 or 128 bytes");
        let geometry = if size == WqeSize::Wide { Geometry::WIDE } else { Geometry::NARROW };
        let ctx = geometry.wr_ctx();
        let field = |name| u32_of(foreign, name);
        assert_eq!(u32::from(ctx.remote_mem_offset), field("remote_mem_offset"));
        assert_eq!(u32::from(ctx.local_mem_offset), field("local_mem_offset"));
        assert_eq!(u32::from(ctx.sgl_offset), field("sgl_offset"));
        assert_eq!(u32::from(ctx.send_inline_data_offset), field("send_inline_data_offset"));
        assert_eq!(u32::from(ctx.write_inline_data_offset), field("write_inline_data_offset"));
        assert_eq!((ctx.max_inline_data, ctx.max_rdma_sges), (field("max_inline_data"), field("max_rdma_sges")));

        let attrs = QpAttrs {
            sq_num_entries: 8,
            rq_num_entries: 8,
            sq_entry_size: field("wqe_size"),
            sq_max_inline_data: field("max_inline_data"),
            sq_max_rdma_sges: field("max_rdma_sges"),
            sq_caps: WQ_CAPS_64_BIT_REQ_ID,
            ..QpAttrs::ZERO
        };
        assert_eq!(QpV1::new(&attrs).map(|qp| qp.sq.wr_ctx), Ok(ctx), "the largest values are accepted");
        let inline = attrs.sq_max_inline_data + 1;
        let too_long = QpV1::new(&QpAttrs { sq_max_inline_data: inline, ..attrs });
        assert_eq!(too_long, Err(InitError::InlineData(inline)));
        let sges = attrs.sq_max_rdma_sges + 1;
        assert_eq!(QpV1::new(&QpAttrs { sq_max_rdma_sges: sges, ..attrs }), Err(InitError::RdmaSges(sges)));
    }
}
