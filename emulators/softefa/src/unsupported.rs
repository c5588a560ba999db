//! Operations that this provider lacks. Every entry of every table can be called, and these return `ENOSYS`.

use std::ffi::{c_char, c_int, c_void};

use ferrogin_libfabric::bindings as fi;

macro_rules! nosys {
    ($($name:ident($($arg:ty),*) -> $ret:ty;)*) => {
        $(
            pub(super) extern "C" fn $name($(_: $arg),*) -> $ret {
                -(fi::FI_ENOSYS as $ret)
            }
        )*
    };
}

type Void = *mut c_void;
type Bytes = *const c_void;
type Len = *mut usize;
type Addr = fi::fi_addr_t;
type Ep = *mut fi::fid_ep;
type Ioc = *const fi::fi_ioc;
type Descs = *mut Void;
type DataType = fi::fi_datatype::Type;
type Op = fi::fi_op::Type;

nosys! {
    // fid
    bind(*mut fi::fid, *mut fi::fid, u64) -> c_int;
    control(*mut fi::fid, c_int, Void) -> c_int;
    ops_open(*mut fi::fid, *const c_char, u64, Descs, Void) -> c_int;
    tostr(*const fi::fid, *mut c_char, usize) -> c_int;
    ops_set(*mut fi::fid, *const c_char, u64, Void, Void) -> c_int;
    // fabric
    passive_ep(*mut fi::fid_fabric, *mut fi::fi_info, *mut *mut fi::fid_pep, Void) -> c_int;
    wait_open(*mut fi::fid_fabric, *mut fi::fi_wait_attr, *mut *mut fi::fid_wait) -> c_int;
    // domain
    scalable_ep(*mut fi::fid_domain, *mut fi::fi_info, *mut Ep, Void) -> c_int;
    poll_open(*mut fi::fid_domain, *mut fi::fi_poll_attr, *mut *mut fi::fid_poll) -> c_int;
    stx_ctx(*mut fi::fid_domain, *mut fi::fi_tx_attr, *mut *mut fi::fid_stx, Void) -> c_int;
    srx_ctx(*mut fi::fid_domain, *mut fi::fi_rx_attr, *mut Ep, Void) -> c_int;
    query_atomic(*mut fi::fid_domain, DataType, Op, *mut fi::fi_atomic_attr, u64) -> c_int;
    query_collective(*mut fi::fid_domain, fi::fi_collective_op::Type, *mut fi::fi_collective_attr, u64) -> c_int;
    xpu_ctx(*mut fi::fid_domain, *mut fi::fi_xpu_attr, *mut *mut fi::fid_xpu_ctx, Void) -> c_int;
    // address vector
    insertsvc(*mut fi::fid_av, *const c_char, *const c_char, *mut Addr, u64, Void) -> c_int;
    insertsym(*mut fi::fid_av, *const c_char, usize, *const c_char, usize, *mut Addr, u64, Void) -> c_int;
    av_set(*mut fi::fid_av, *mut fi::fi_av_set_attr, *mut *mut fi::fid_av_set, Void) -> c_int;
    insert_auth_key(*mut fi::fid_av, Bytes, usize, *mut Addr, u64) -> c_int;
    lookup_auth_key(*mut fi::fid_av, Addr, Void, Len) -> c_int;
    set_user_id(*mut fi::fid_av, Addr, Addr, u64) -> c_int;
    lookup2(*mut fi::fid_av, Addr, Void, Len, u64, *mut fi::fid_xpu_ctx) -> c_int;
    // completion queue
    cq_export_xpu(*mut fi::fid_cq, u64, *mut fi::fid_xpu_cq) -> c_int;
    // counter
    cntr_export_xpu(*mut fi::fid_cntr, u64, *mut fi::fid_xpu_cntr) -> c_int;
    // endpoint
    tx_ctx(Ep, c_int, *mut fi::fi_tx_attr, *mut Ep, Void) -> c_int;
    rx_ctx(Ep, c_int, *mut fi::fi_rx_attr, *mut Ep, Void) -> c_int;
    size_left(Ep) -> isize;
    ep_export_xpu(Ep, u64, *mut fi::fid_xpu_ep) -> c_int;
    // connections
    setname(fi::fid_t, Void, usize) -> c_int;
    getpeer(Ep, Void, Len) -> c_int;
    connect(Ep, Bytes, Bytes, usize) -> c_int;
    listen(*mut fi::fid_pep) -> c_int;
    accept(Ep, Bytes, usize) -> c_int;
    reject(*mut fi::fid_pep, fi::fid_t, Bytes, usize) -> c_int;
    shutdown(Ep, u64) -> c_int;
    join(Ep, Bytes, u64, *mut *mut fi::fid_mc, Void) -> c_int;
    // atomics
    a_write(Ep, Bytes, usize, Void, Addr, u64, u64, DataType, Op, Void) -> isize;
    a_writev(Ep, Ioc, Descs, usize, Addr, u64, u64, DataType, Op, Void) -> isize;
    a_writemsg(Ep, *const fi::fi_msg_atomic, u64) -> isize;
    a_inject(Ep, Bytes, usize, Addr, u64, u64, DataType, Op) -> isize;
    a_readwrite(Ep, Bytes, usize, Void, Void, Void, Addr, u64, u64, DataType, Op, Void) -> isize;
    a_readwritev(Ep, Ioc, Descs, usize, *mut fi::fi_ioc, Descs, usize, Addr, u64, u64, DataType, Op, Void) -> isize;
    a_readwritemsg(Ep, *const fi::fi_msg_atomic, *mut fi::fi_ioc, Descs, usize, u64) -> isize;
    a_compwrite(Ep, Bytes, usize, Void, Bytes, Void, Void, Void, Addr, u64, u64, DataType, Op, Void) -> isize;
    a_compwritev(Ep, Ioc, Descs, usize, Ioc, Descs, usize, *mut fi::fi_ioc, Descs, usize, Addr, u64, u64, DataType, Op,
        Void) -> isize;
    a_compwritemsg(Ep, *const fi::fi_msg_atomic, Ioc, Descs, usize, *mut fi::fi_ioc, Descs, usize, u64) -> isize;
    a_valid(Ep, DataType, Op, Len) -> c_int;
}

/// The operations of a fid; each class has some of them.
pub(super) const FID: fi::fi_ops = fi::fi_ops {
    size: size_of::<fi::fi_ops>(),
    close: None,
    bind: Some(bind),
    control: Some(control),
    ops_open: Some(ops_open),
    tostr: Some(tostr),
    ops_set: Some(ops_set),
};

/// EFA has no atomics.
pub(super) static ATOMIC: fi::fi_ops_atomic = fi::fi_ops_atomic {
    size: size_of::<fi::fi_ops_atomic>(),
    write: Some(a_write),
    writev: Some(a_writev),
    writemsg: Some(a_writemsg),
    inject: Some(a_inject),
    readwrite: Some(a_readwrite),
    readwritev: Some(a_readwritev),
    readwritemsg: Some(a_readwritemsg),
    compwrite: Some(a_compwrite),
    compwritev: Some(a_compwritev),
    compwritemsg: Some(a_compwritemsg),
    writevalid: Some(a_valid),
    readwritevalid: Some(a_valid),
    compwritevalid: Some(a_valid),
};
