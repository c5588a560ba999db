//! The NCCL RMA plugin ABI: `ncclRma_v13_t` to `ncclRma_v16_t`, through which a NCCL host thread puts, gets and
//! signals.
//!
//! Source: `src/include/plugin/rma/rma_v13.h` to `rma_v16.h` of NCCL 2.30.7, 2.31.2 and 2.32.3. C `bool` is `u8` here,
//! because a foreign caller may pass any byte.

use crate::assert_layout;
use crate::nccl::{
    CreateContextV13Fn, DeregMrSymFn, DevicesFn, GetPropertiesFn, HandleFn, InitFn, ListenFn, QueryLastErrorFn,
    RegMrSymDmaBufFn, RegMrSymFn, Result,
};
use core::ffi::{c_char, c_int, c_void};

/// `ncclNetDeviceType` of plugins that a NCCL host thread drives. NCCL requires it from v13 plugins.
pub const NET_DEVICE_GIN_PROXY: c_int = 2;
/// `regMrSym` flag: the words are 0 when registered, and only the plugin ever writes them.
pub const MR_FLAG_SIGNAL_NEVER_RESET: u64 = 2;
/// `signalOp`: adds 1.
pub const SIGNAL_OP_INC: u32 = 1;
/// `signalOp`: adds `signalValue`.
pub const SIGNAL_OP_ADD: u32 = 2;
/// `optFlags`: another operation to the same peer follows.
pub const OPT_AGGREGATE_REQUESTS: u32 = 1;

/// `ncclRmaConfig_v14_t`, also v15 and v16.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RmaConfigV14 {
    /// Contexts behind one handle; operations number them from 0.
    pub n_contexts: c_int,
    /// Traffic class; -1 is none.
    pub traffic_class: c_int,
    /// A hint: only peers whose distance is a multiple of this are used.
    pub rank_stride: c_int,
}
assert_layout!(RmaConfigV14, size 12, align 4, { n_contexts @ 0, traffic_class @ 4, rank_stride @ 8 });

/// `ncclRmaProperties_v16_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RmaPropertiesV16 {
    /// A C `bool`: any signal from any peer makes visible all puts that this rank received before it.
    pub flushes_all_puts_on_any_signal: u8,
}
assert_layout!(RmaPropertiesV16, size 1, align 1, { flushes_all_puts_on_any_signal @ 0 });

/// `getRmaProperties(collComm, &props)`.
pub type GetRmaPropertiesFn = unsafe extern "C" fn(*mut c_void, *mut RmaPropertiesV16) -> Result;
/// `connect(ctx, handles, nranks, rank, listenComm, &collComm)`. `ctx` may belong to another plugin.
pub type ConnectFn = crate::nccl::ConnectFn;
/// `createContext(collComm, config, &rmaCtx)`, from v14 on.
pub type CreateContextFn = unsafe extern "C" fn(*mut c_void, *mut RmaConfigV14, *mut *mut c_void) -> Result;
/// `regMrSym(collComm, data, size, type, flags, &mhandle)`, from v14 on.
pub type RegMrFn = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void) -> Result;
/// `regMrSymDmaBuf(collComm, data, size, type, offset, fd, flags, &mhandle)`, from v14 on.
pub type RegMrDmaBufFn =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, u64, *mut *mut c_void) -> Result;
/// `iflush(rmaCtx, context, mhandle, rank, &request)`.
pub type FlushFn = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, u32, *mut *mut c_void) -> Result;
/// `test(collComm, request, &done)`.
pub type TestFn = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int) -> Result;

/// The types of one version's `iput`, `iputSignal` and `iget`: first the arguments that all versions share, then the
/// version's own.
macro_rules! operations {
    ($version:literal, $put:ident, $signal:ident, ($($strong:ty)?), ($($flags:ty)?)) => {
        #[doc = concat!(
            "`iput(rmaCtx, context, srcOff, srcMhandle, size, dstOff, dstMhandle, rank, …, &request)` and `iget` with remote, then local \
             memory, ", $version, "."
        )]
        pub type $put = unsafe extern "C" fn(
            *mut c_void, c_int, u64, *mut c_void, usize, u64, *mut c_void, u32, $($flags,)? *mut *mut c_void,
        ) -> Result;
        #[doc = concat!(
            "`iputSignal`: the arguments of `iput` up to `rank`, then signalOff, signalMhandle, signalValue, signalOp, …, &request, ",
            $version, "."
        )]
        pub type $signal = unsafe extern "C" fn(
            *mut c_void, c_int, u64, *mut c_void, usize, u64, *mut c_void, u32,
            u64, *mut c_void, u64, u32, $($strong,)? $($flags,)? *mut *mut c_void,
        ) -> Result;
    };
}
operations!("v13", PutV13Fn, PutSignalV13Fn, (), ());
operations!("v14", PutV14Fn, PutSignalV14Fn, (u8), ());
operations!("v15 and v16", PutV15Fn, PutSignalV15Fn, (u8), (u32));

/// A function table: the plugin's name, then the entries in order.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident, size $size:literal, { $($field:ident: $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name {
            /// Name of the plugin.
            pub name: *const c_char,
            $(#[doc = concat!("Entry `", stringify!($field), "`.")] pub $field: Option<$ty>,)*
        }
        const _: () = {
            assert!(size_of::<$name>() == $size && align_of::<$name>() == 8);
            // Consecutive pointers, in the order of the list.
            let mut at = size_of::<*const c_char>();
            $(
                assert!(core::mem::offset_of!($name, $field) == at);
                at += 8;
            )*
            assert!(at == $size);
        };
        // SAFETY: a table of function pointers and one pointer to a constant string; no code writes through it.
        #[allow(unsafe_code)]
        unsafe impl Sync for $name {}
        // SAFETY: as for `Sync`.
        #[allow(unsafe_code)]
        unsafe impl Send for $name {}
    };
}

table! {
    /// `ncclRma_v16_t`.
    RmaV16, size 176, {
        init: InitFn, devices: DevicesFn, get_rma_properties: GetRmaPropertiesFn, get_properties: GetPropertiesFn, listen: ListenFn,
        connect: ConnectFn, create_context: CreateContextFn, reg_mr_sym: RegMrFn, reg_mr_sym_dma_buf: RegMrDmaBufFn,
        dereg_mr_sym: DeregMrSymFn, destroy_context: HandleFn, close_coll: HandleFn, close_listen: HandleFn, iput: PutV15Fn,
        iput_signal: PutSignalV15Fn, iget: PutV15Fn, iflush: FlushFn, test: TestFn, rma_progress: HandleFn,
        query_last_error: QueryLastErrorFn, finalize: HandleFn,
    }
}
table! {
    /// `ncclRma_v15_t`.
    RmaV15, size 168, {
        init: InitFn, devices: DevicesFn, get_properties: GetPropertiesFn, listen: ListenFn, connect: ConnectFn,
        create_context: CreateContextFn, reg_mr_sym: RegMrFn, reg_mr_sym_dma_buf: RegMrDmaBufFn, dereg_mr_sym: DeregMrSymFn,
        destroy_context: HandleFn, close_coll: HandleFn, close_listen: HandleFn, iput: PutV15Fn, iput_signal: PutSignalV15Fn,
        iget: PutV15Fn, iflush: FlushFn, test: TestFn, rma_progress: HandleFn, query_last_error: QueryLastErrorFn, finalize: HandleFn,
    }
}
table! {
    /// `ncclRma_v14_t`.
    RmaV14, size 168, {
        init: InitFn, devices: DevicesFn, get_properties: GetPropertiesFn, listen: ListenFn, connect: ConnectFn,
        create_context: CreateContextFn, reg_mr_sym: RegMrFn, reg_mr_sym_dma_buf: RegMrDmaBufFn, dereg_mr_sym: DeregMrSymFn,
        destroy_context: HandleFn, close_coll: HandleFn, close_listen: HandleFn, iput: PutV14Fn, iput_signal: PutSignalV14Fn,
        iget: PutV14Fn, iflush: FlushFn, test: TestFn, rma_progress: HandleFn, query_last_error: QueryLastErrorFn, finalize: HandleFn,
    }
}
table! {
    /// `ncclRma_v13_t`, which is `ncclGin_v13_t`. NCCL ignores the device handle and the `ginHandle`.
    RmaV13, size 168, {
        init: InitFn, devices: DevicesFn, get_properties: GetPropertiesFn, listen: ListenFn, connect: ConnectFn,
        create_context: CreateContextV13Fn, reg_mr_sym: RegMrSymFn, reg_mr_sym_dma_buf: RegMrSymDmaBufFn, dereg_mr_sym: DeregMrSymFn,
        destroy_context: HandleFn, close_coll: HandleFn, close_listen: HandleFn, iput: PutV13Fn, iput_signal: PutSignalV13Fn,
        iget: PutV13Fn, iflush: FlushFn, test: TestFn, rma_progress: HandleFn, query_last_error: QueryLastErrorFn, finalize: HandleFn,
    }
}
