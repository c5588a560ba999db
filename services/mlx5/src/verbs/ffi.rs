//! Declarations of rdma-core's libibverbs and libmlx5: `infiniband/verbs.h` and `infiniband/mlx5dv.h`, release 64; the
//! parts used here have not changed since release 28. Offsets are those that a C compiler finds in these headers.

use crate::assert_layout;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};

/// An object that only the library creates. A type in `library.rs` owns the object and destroys it, and calls get it
/// from there.
#[repr(transparent)]
pub(super) struct Ptr<T>(NonNull<T>);

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ptr<T> {}

impl<T> Ptr<T> {
    /// Returns the fields that programs read, which the library sets once.
    pub(super) fn get(&self) -> &T {
        // SAFETY: the object's owner, from which the pointer came, keeps it alive.
        unsafe { self.0.as_ref() }
    }

    pub(super) fn cast(self) -> *mut c_void {
        self.0.as_ptr().cast()
    }
}

/// A type whose fields only the library uses.
macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub(super) struct $name {
            _opaque: [u8; 0],
        }
    )*};
}
opaque!(Device, Pd, Cq, Channel);

/// The first fields of `ibv_context`; the others are private to the library.
#[repr(C)]
pub(super) struct Context {
    pub device: *mut Device,
    /// `_compat_query_device` to `_compat_dereg_mr`.
    compat: [*mut c_void; 7],
    pub alloc_mw: Option<extern "C" fn(Ptr<Pd>, c_int) -> Option<Ptr<Mw>>>,
    pub bind_mw: *mut c_void,
    pub dealloc_mw: Option<unsafe extern "C" fn(Ptr<Mw>) -> c_int>,
}
assert_layout!(Context, size 88, align 8, { device @ 0, compat @ 8, alloc_mw @ 64, bind_mw @ 72, dealloc_mw @ 80 });

/// `ibv_mr`.
#[repr(C)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}
assert_layout!(Mr, size 48, align 8, { lkey @ 36, rkey @ 40 });

/// `ibv_mw`.
#[repr(C)]
pub(super) struct Mw {
    context: *mut Context,
    pd: *mut Pd,
    pub rkey: u32,
    handle: u32,
    kind: c_int,
}
assert_layout!(Mw, size 32, align 8, { rkey @ 16, handle @ 20, kind @ 24 });

/// The first fields of `ibv_qp`.
#[repr(C)]
pub(super) struct Qp {
    context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut Srq,
    handle: u32,
    pub qp_num: u32,
}
assert_layout!(Qp, size 56, align 8, { handle @ 48, qp_num @ 52 });

opaque!(Srq);

/// `ibv_qp_cap`.
#[repr(C)]
#[derive(Default)]
pub(super) struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}
assert_layout!(QpCap, size 20, align 4, { max_recv_wr @ 4, max_send_sge @ 8, max_recv_sge @ 12, max_inline_data @ 16 });

/// `ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: Ptr<Cq>,
    pub recv_cq: Ptr<Cq>,
    pub srq: Option<Ptr<Srq>>,
    pub cap: QpCap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}
assert_layout!(QpInitAttr, size 64, align 8, { send_cq @ 8, recv_cq @ 16, srq @ 24, cap @ 32, qp_type @ 52, sq_sig_all @ 56 });

/// `ibv_srq_init_attr`.
#[repr(C)]
pub(super) struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}
assert_layout!(SrqInitAttr, size 24, align 8, { max_wr @ 8, max_sge @ 12, srq_limit @ 16 });

/// `ibv_global_route`, the GID first.
#[repr(C)]
#[derive(Default)]
pub(super) struct GlobalRoute {
    /// Two words, because the C union is aligned to a word.
    pub dgid: [u64; 2],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}
assert_layout!(GlobalRoute, size 24, align 8, { flow_label @ 16, sgid_index @ 20, hop_limit @ 21, traffic_class @ 22 });

/// `ibv_ah_attr`.
#[repr(C)]
#[derive(Default)]
pub(super) struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}
assert_layout!(AhAttr, size 32, align 8, {
    grh @ 0, dlid @ 24, sl @ 26, src_path_bits @ 27, static_rate @ 28, is_global @ 29, port_num @ 30,
});

/// `ibv_qp_attr`.
#[repr(C)]
#[derive(Default)]
pub(super) struct QpAttr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}
assert_layout!(QpAttr, size 144, align 8, {
    qkey @ 16, rq_psn @ 20, sq_psn @ 24, dest_qp_num @ 28, qp_access_flags @ 32, cap @ 36, ah_attr @ 56,
    alt_ah_attr @ 88, pkey_index @ 120, max_rd_atomic @ 126, max_dest_rd_atomic @ 127, min_rnr_timer @ 128,
    port_num @ 129, timeout @ 130, retry_cnt @ 131, rnr_retry @ 132, alt_timeout @ 134, rate_limit @ 136,
});

/// `ibv_port_attr`; the exported call fills the first 48 bytes.
#[repr(C)]
#[derive(Default)]
pub(super) struct PortAttr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    rest: [u32; 5],
    rest2: u16,
    pub lid: u16,
    rest3: [u8; 10],
    pub link_layer: u8,
    pub flags: u8,
    rest4: [u32; 2],
}
assert_layout!(PortAttr, size 56, align 4, { active_mtu @ 8, lid @ 34, link_layer @ 46, flags @ 47 });

/// `ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr {
    head: [u64; 14],
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    rest: [c_int; 2],
    pub max_cqe: c_int,
    rest2: [c_int; 7],
    pub atomic_cap: c_int,
    rest3: [c_int; 16],
}
assert_layout!(DeviceAttr, size 232, align 8, {
    max_qp_wr @ 112, device_cap_flags @ 116, max_sge @ 120, max_cqe @ 132, atomic_cap @ 164,
});

impl DeviceAttr {
    pub(super) const ZERO: Self = Self {
        head: [0; 14],
        max_qp_wr: 0,
        device_cap_flags: 0,
        max_sge: 0,
        rest: [0; 2],
        max_cqe: 0,
        rest2: [0; 7],
        atomic_cap: 0,
        rest3: [0; 16],
    };
}

/// One pair of `mlx5dv_obj`: the object, and the struct that receives its layout.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DvPair {
    pub object: *mut c_void,
    pub answer: *mut c_void,
}

/// `mlx5dv_obj`: eight pairs, by the bit numbers of `MLX5DV_OBJ_*`.
pub(super) type DvObj = [DvPair; 8];

/// A queue of `mlx5dv_qp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DvQueue {
    pub buf: *mut c_void,
    pub wqe_cnt: u32,
    pub stride: u32,
}

/// `mlx5dv_qp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DvQp {
    pub dbrec: *mut u32,
    pub sq: DvQueue,
    pub rq: DvQueue,
    pub bf_reg: *mut c_void,
    pub bf_size: u32,
    pub comp_mask: u64,
    pub rest: [u64; 4],
}
assert_layout!(DvQp, size 96, align 8, { dbrec @ 0, sq @ 8, rq @ 24, bf_reg @ 40, bf_size @ 48, comp_mask @ 56 });

/// `mlx5dv_cq`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DvCq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub cqe_cnt: u32,
    pub cqe_size: u32,
    pub cq_uar: *mut c_void,
    pub cqn: u32,
    pub comp_mask: u64,
}
assert_layout!(DvCq, size 48, align 8, { dbrec @ 8, cqe_cnt @ 16, cqe_size @ 20, cq_uar @ 24, cqn @ 32, comp_mask @ 40 });

/// `ibv_cq_init_attr_ex`.
#[repr(C)]
pub(super) struct CqInitAttrEx {
    cqe: u32,
    cq_context: *mut c_void,
    channel: *mut Channel,
    comp_vector: u32,
    wc_flags: u64,
    comp_mask: u32,
    flags: u32,
    parent_domain: *mut Pd,
}
assert_layout!(CqInitAttrEx, size 56, align 8, {
    cqe @ 0, cq_context @ 8, channel @ 16, comp_vector @ 24, wc_flags @ 32, comp_mask @ 40, flags @ 44, parent_domain @ 48,
});

impl CqInitAttrEx {
    pub(super) fn of(entries: u32) -> Self {
        Self {
            cqe: entries,
            cq_context: null_mut(),
            channel: null_mut(),
            comp_vector: 0,
            wc_flags: 0,
            comp_mask: 0,
            flags: 0,
            parent_domain: null_mut(),
        }
    }
}

/// `mlx5dv_cq_init_attr`.
#[repr(C)]
pub(super) struct DvCqInitAttr {
    comp_mask: u64,
    cqe_comp_res_format: u8,
    flags: u32,
    cqe_size: u16,
}
assert_layout!(DvCqInitAttr, size 24, align 8, { comp_mask @ 0, cqe_comp_res_format @ 8, flags @ 12, cqe_size @ 16 });

impl DvCqInitAttr {
    /// MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE, with this format.
    pub(super) fn compressed(format: u8) -> Self {
        Self { comp_mask: 1, cqe_comp_res_format: format, flags: 0, cqe_size: 0 }
    }
}

/// `mlx5dv_context`: the fields that this crate asks for, and room for the others and for those of later releases.
#[repr(C)]
pub(super) struct DvContext {
    version: u8,
    flags: u64,
    comp_mask: u64,
    /// Completions of the largest compressed block; 0 without compression.
    pub max_compressed: u32,
    /// Bits of `CompressedFormat`.
    pub compressed_formats: u32,
    rest: [u64; 64],
}
assert_layout!(DvContext, size 544, align 8, { flags @ 8, comp_mask @ 16, max_compressed @ 24, compressed_formats @ 28, rest @ 32 });

impl DvContext {
    /// MLX5DV_CONTEXT_MASK_CQE_COMPRESION: asks for compression.
    pub(super) const COMPRESSION: Self =
        Self { version: 0, flags: 0, comp_mask: 1, max_compressed: 0, compressed_formats: 0, rest: [0; 64] };
}

/// `mlx5dv_context_attr`.
#[repr(C)]
pub(super) struct DvContextAttr {
    flags: u32,
    comp_mask: u64,
}
assert_layout!(DvContextAttr, size 16, align 8, { flags @ 0, comp_mask @ 8 });

impl DvContextAttr {
    /// MLX5DV_CONTEXT_FLAGS_DEVX: for firmware commands.
    pub(super) const DEVX: Self = Self { flags: 1, comp_mask: 0 };
}

/// `mlx5dv_srq`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DvSrq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub stride: u32,
    pub head: u32,
    pub tail: u32,
    pub comp_mask: u64,
    pub srqn: u32,
}
assert_layout!(DvSrq, size 48, align 8, { dbrec @ 8, stride @ 16, head @ 20, tail @ 24, comp_mask @ 32, srqn @ 40 });

/// Bits of `MLX5DV_OBJ_*`.
pub(super) const DV_QP: u64 = 1 << 0;
pub(super) const DV_CQ: u64 = 1 << 1;
pub(super) const DV_SRQ: u64 = 1 << 2;
/// `MLX5DV_SRQ_MASK_SRQN`: asks for the queue's number too.
pub(super) const DV_SRQ_MASK_SRQN: u64 = 1 << 0;
/// `MLX5_CQ_DOORBELL`: offset of the arm register in the user page.
pub(super) const CQ_DOORBELL: usize = 0x20;

pub(super) const QPT_RC: c_int = 2;
pub(super) const QPT_UD: c_int = 4;
pub(super) const MW_TYPE_1: c_int = 1;
pub(super) const MW_TYPE_2: c_int = 2;
pub(super) const QPS_INIT: c_int = 1;
pub(super) const QPS_RTR: c_int = 2;
pub(super) const QPS_RTS: c_int = 3;
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;
pub(super) const DEVICE_MEM_WINDOW: c_uint = 1 << 17;
pub(super) const DEVICE_MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;

/// `IBV_QP_*`: the attributes that a call changes.
pub(super) mod mask {
    use std::ffi::c_int;

    pub const STATE: c_int = 1 << 0;
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const QKEY: c_int = 1 << 6;
    pub const AV: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRY_CNT: c_int = 1 << 10;
    pub const RNR_RETRY: c_int = 1 << 11;
    pub const RQ_PSN: c_int = 1 << 12;
    pub const MAX_RD_ATOMIC: c_int = 1 << 13;
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    pub const SQ_PSN: c_int = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub const DEST_QPN: c_int = 1 << 20;
}

/// Declares a library's calls by name. Those that aren't unsafe take any values of their types: an object, a struct
/// that the call reads and sets, `None` for null.
macro_rules! calls {
    ($name:ident; $($call:ident: $function:ty;)*) => {
        /// Entry points of a library.
        #[allow(non_snake_case, reason = "the fields bear the names of the calls")]
        pub(super) struct $name {
            $(pub $call: $function,)*
            _library: libloading::Library,
        }

        impl $name {
            /// Finds every call; the error names the first one that is missing.
            pub(super) fn find(library: libloading::Library) -> Result<Self, String> {
                Ok(Self {
                    $($call: {
                        let name = concat!(stringify!($call), "\0");
                        // SAFETY: the library's header declares the symbol with this type, which says what it takes.
                        let symbol = unsafe { library.get(name.as_bytes()) };
                        *symbol.map_err(|error| format!("{} is missing: {error}", stringify!($call)))?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

calls! {
    Verbs;
    ibv_get_device_list: extern "C" fn(&mut c_int) -> *mut Ptr<Device>;
    ibv_free_device_list: unsafe extern "C" fn(*mut Ptr<Device>);
    ibv_get_device_name: extern "C" fn(Ptr<Device>) -> *const c_char;
    ibv_open_device: extern "C" fn(Ptr<Device>) -> Option<Ptr<Context>>;
    ibv_close_device: unsafe extern "C" fn(Ptr<Context>) -> c_int;
    ibv_query_device: extern "C" fn(Ptr<Context>, &mut DeviceAttr) -> c_int;
    ibv_query_port: extern "C" fn(Ptr<Context>, u8, &mut PortAttr) -> c_int;
    ibv_query_gid: extern "C" fn(Ptr<Context>, u8, c_int, &mut [u8; 16]) -> c_int;
    ibv_alloc_pd: extern "C" fn(Ptr<Context>) -> Option<Ptr<Pd>>;
    ibv_dealloc_pd: unsafe extern "C" fn(Ptr<Pd>) -> c_int;
    ibv_reg_mr: unsafe extern "C" fn(Ptr<Pd>, *mut c_void, usize, c_int) -> Option<Ptr<Mr>>;
    ibv_dereg_mr: unsafe extern "C" fn(Ptr<Mr>) -> c_int;
    ibv_create_cq: extern "C" fn(Ptr<Context>, c_int, *mut c_void, Option<Ptr<Channel>>, c_int) -> Option<Ptr<Cq>>;
    ibv_destroy_cq: unsafe extern "C" fn(Ptr<Cq>) -> c_int;
    ibv_create_srq: extern "C" fn(Ptr<Pd>, &mut SrqInitAttr) -> Option<Ptr<Srq>>;
    ibv_destroy_srq: unsafe extern "C" fn(Ptr<Srq>) -> c_int;
    ibv_create_qp: extern "C" fn(Ptr<Pd>, &mut QpInitAttr) -> Option<Ptr<Qp>>;
    ibv_destroy_qp: unsafe extern "C" fn(Ptr<Qp>) -> c_int;
    ibv_modify_qp: extern "C" fn(Ptr<Qp>, &mut QpAttr, c_int) -> c_int;
}

calls! {
    Dv;
    mlx5dv_is_supported: extern "C" fn(Ptr<Device>) -> bool;
    mlx5dv_open_device: extern "C" fn(Ptr<Device>, &mut DvContextAttr) -> Option<Ptr<Context>>;
    mlx5dv_devx_general_cmd: unsafe extern "C" fn(Ptr<Context>, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5dv_query_device: extern "C" fn(Ptr<Context>, &mut DvContext) -> c_int;
    // Returns an `ibv_cq_ex`, which begins with the fields of an `ibv_cq`.
    mlx5dv_create_cq: extern "C" fn(Ptr<Context>, &mut CqInitAttrEx, &mut DvCqInitAttr) -> Option<Ptr<Cq>>;
    mlx5dv_init_obj: unsafe extern "C" fn(*mut DvObj, u64) -> c_int;
}
