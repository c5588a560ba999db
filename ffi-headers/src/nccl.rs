//! The NCCL GIN plugin ABI: `ncclGin_v14_t` and `ncclGin_v13_t` with the structs that their functions take and return.
//!
//! Source: NCCL's plugin headers as carried by aws-ofi-nccl (August 2026); `ncclNetProperties_v12_t` and
//! `ncclNetDeviceHandle_v11_t` also in the example plugins of NCCL 2.30.7.

use crate::assert_layout;
use core::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`. Not a Rust enum, because a foreign library may return any value.
pub type Result = c_int;
/// Success.
pub const SUCCESS: Result = 0;
/// A CUDA call failed.
pub const UNHANDLED_CUDA_ERROR: Result = 1;
/// A system call failed.
pub const SYSTEM_ERROR: Result = 2;
/// A bug, or corrupted memory.
pub const INTERNAL_ERROR: Result = 3;
/// An argument has an invalid value.
pub const INVALID_ARGUMENT: Result = 4;
/// The call is not allowed now or with this configuration.
pub const INVALID_USAGE: Result = 5;
/// A peer failed.
pub const REMOTE_ERROR: Result = 6;

/// `ncclDebugLogLevel`: a warning, always shown.
pub const LOG_WARN: c_int = 2;
/// `ncclDebugLogLevel`: shown with NCCL_DEBUG=INFO.
pub const LOG_INFO: c_int = 3;
/// `ncclDebugLogLevel`: shown with NCCL_DEBUG=TRACE.
pub const LOG_TRACE: c_int = 5;
/// Subsystem bit of NCCL_DEBUG_SUBSYS: initialisation.
pub const SUBSYS_INIT: c_ulong = 0x1;
/// Subsystem bit of NCCL_DEBUG_SUBSYS: network.
pub const SUBSYS_NET: c_ulong = 0x10;

/// Pointer type: host memory.
pub const PTR_HOST: c_int = 1;
/// Pointer type: CUDA memory.
pub const PTR_CUDA: c_int = 2;
/// Pointer support: memory given as a dma-buf.
pub const PTR_DMABUF: c_int = 4;
/// Size of a listen handle in bytes.
pub const HANDLE_MAXSIZE: usize = 128;
/// `regMrSym` flag: strict ordering.
pub const MR_FLAG_FORCE_SO: u64 = 1;
/// `ncclNetDeviceType` of the EFA GIN backend.
pub const NET_DEVICE_GIN_EFA_GDA: c_int = 5;
/// Most connections per communicator.
pub const GIN_MAX_CONNECTIONS: usize = 4;
/// Most devices that can make up a virtual device, v12.
pub const NET_MAX_DEVS_PER_NIC_V12: usize = 8;

/// `ncclDebugLogger_t`: `(level, subsystem flags, file, line, printf format, ...)`.
pub type DebugLogger = Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;

/// `ncclNetVDeviceProps_v12_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct NetVDevicePropsV12 {
    /// Entries of `devs` in use.
    pub ndevs: c_int,
    /// Physical devices.
    pub devs: [c_int; NET_MAX_DEVS_PER_NIC_V12],
}
assert_layout!(NetVDevicePropsV12, size 36, align 4, { ndevs @ 0, devs @ 4 });

/// `ncclNetProperties_v12_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NetPropertiesV12 {
    /// Device name; lives as long as the plugin.
    pub name: *const c_char,
    /// Sysfs path of the PCI device, or null.
    pub pci_path: *const c_char,
    /// Unique number of the device.
    pub guid: u64,
    /// Sum of [`PTR_HOST`], [`PTR_CUDA`], [`PTR_DMABUF`].
    pub ptr_support: c_int,
    /// Nonzero if a registration serves all communicators of the process.
    pub reg_is_global: c_int,
    /// Nonzero if receives need a flush.
    pub force_flush: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// Communicators that can be open at once.
    pub max_comms: c_int,
    /// Receives that one call can post.
    pub max_recvs: c_int,
    /// `ncclNetDeviceType`.
    pub net_device_type: c_int,
    /// Version of the device API.
    pub net_device_version: c_int,
    /// The physical devices that make up a virtual device.
    pub v_props: NetVDevicePropsV12,
    /// Largest point-to-point transfer, bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer, bytes.
    pub max_coll_bytes: usize,
    /// Requests that can be grouped.
    pub max_multi_request_size: c_int,
    /// Rail, or -1.
    pub rail_id: i16,
    /// Plane, or -1.
    pub plane_id: i16,
}
assert_layout!(NetPropertiesV12, size 128, align 8, {
    name @ 0, pci_path @ 8, guid @ 16, ptr_support @ 24, reg_is_global @ 28, force_flush @ 32, speed @ 36, port @ 40,
    latency @ 44, max_comms @ 48, max_recvs @ 52, net_device_type @ 56, net_device_version @ 60, v_props @ 64,
    max_p2p_bytes @ 104, max_coll_bytes @ 112, max_multi_request_size @ 120, rail_id @ 124, plane_id @ 126,
});

/// `ncclNetDeviceHandle_v11_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NetDeviceHandleV11 {
    /// `ncclNetDeviceType`.
    pub net_device_type: c_int,
    /// Version of the device API.
    pub net_device_version: c_int,
    /// Device address of an array of contexts.
    pub handle: *mut c_void,
    /// Size of one array element in bytes.
    pub size: usize,
    /// Nonzero asks NCCL to call `ginProgress`.
    pub needs_proxy_progress: c_int,
}
assert_layout!(NetDeviceHandleV11, size 32, align 8, {
    net_device_type @ 0, net_device_version @ 4, handle @ 8, size @ 16, needs_proxy_progress @ 24,
});

/// `ncclGinProperties_v14_t`. The fields are C `bool`: 0 or 1.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct GinPropertiesV14 {
    /// Signals become visible after every earlier put to that peer.
    pub supports_strong_signals: u8,
    /// Signals can live at any address of a window.
    pub supports_va_signals: u8,
}
assert_layout!(GinPropertiesV14, size 2, align 1, { supports_strong_signals @ 0, supports_va_signals @ 1 });

/// `ncclGinConfig_v13_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GinConfigV13 {
    /// Signals of each context.
    pub n_signals: c_int,
    /// Counters of each context.
    pub n_counters: c_int,
    /// Contexts of this connection.
    pub n_contexts: c_int,
    /// Work requests in flight; 0 is the plugin's default.
    pub queue_depth: c_int,
    /// Traffic class; -1 is none.
    pub traffic_class: c_int,
}
assert_layout!(GinConfigV13, size 20, align 4, {
    n_signals @ 0, n_counters @ 4, n_contexts @ 8, queue_depth @ 12, traffic_class @ 16,
});

/// `ncclGinConfig_v14_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GinConfigV14 {
    /// Signals of each context.
    pub n_signals: c_int,
    /// Counters of each context.
    pub n_counters: c_int,
    /// Contexts of this connection.
    pub n_contexts: c_int,
    /// Work requests in flight; 0 is the plugin's default.
    pub queue_depth: c_int,
    /// Traffic class; -1 is none.
    pub traffic_class: c_int,
    /// Layout of the device structs: 0 or 1 (NCCL 2.31 kernels), 2 (NCCL 2.32 kernels).
    pub backend_version: c_int,
    /// A hint: kernels only post to peers whose distance is a multiple of this.
    pub rank_stride: c_int,
}
assert_layout!(GinConfigV14, size 28, align 4, {
    n_signals @ 0, n_counters @ 4, n_contexts @ 8, queue_depth @ 12, traffic_class @ 16, backend_version @ 20,
    rank_stride @ 24,
});

/// `init(&ctx, commHash, logger)`.
pub type InitFn = unsafe extern "C" fn(*mut *mut c_void, u64, DebugLogger) -> Result;
/// `devices(&n)`.
pub type DevicesFn = unsafe extern "C" fn(*mut c_int) -> Result;
/// `getGinProperties(&props)`.
pub type GetGinPropertiesFn = unsafe extern "C" fn(*mut GinPropertiesV14) -> Result;
/// `getProperties(dev, &props)`.
pub type GetPropertiesFn = unsafe extern "C" fn(c_int, *mut NetPropertiesV12) -> Result;
/// `listen(ctx, dev, handle, &listenComm)`; `handle` has [`HANDLE_MAXSIZE`] bytes.
pub type ListenFn = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> Result;
/// `connect(ctx, handles, nranks, rank, listenComm, &collComm)`.
pub type ConnectFn =
    unsafe extern "C" fn(*mut c_void, *mut *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> Result;
/// `createContext(collComm, config, &ginCtx, &devHandle)`, v13.
pub type CreateContextV13Fn =
    unsafe extern "C" fn(*mut c_void, *mut GinConfigV13, *mut *mut c_void, *mut *mut NetDeviceHandleV11) -> Result;
/// `createContext(collComm, config, &ginCtx, &devHandle)`, v14.
pub type CreateContextV14Fn =
    unsafe extern "C" fn(*mut c_void, *mut GinConfigV14, *mut *mut c_void, *mut *mut NetDeviceHandleV11) -> Result;
/// `regMrSym(collComm, data, size, type, flags, &mhandle, &ginHandle)`.
pub type RegMrSymFn =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, *mut *mut c_void, *mut *mut c_void) -> Result;
/// `regMrSymDmaBuf(collComm, data, size, type, offset, fd, flags, &mhandle, &ginHandle)`.
pub type RegMrSymDmaBufFn = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Result;
/// `deregMrSym(collComm, mhandle)`.
pub type DeregMrSymFn = unsafe extern "C" fn(*mut c_void, *mut c_void) -> Result;
/// A call that takes one handle: destroyContext, closeColl, closeListen, ginProgress, finalize.
pub type HandleFn = unsafe extern "C" fn(*mut c_void) -> Result;
/// `queryLastError(ginCtx, &hasError)`; `hasError` is a C `bool`.
pub type QueryLastErrorFn = unsafe extern "C" fn(*mut c_void, *mut u8) -> Result;
/// The put, get and test entries of v13, which a plugin with device kernels leaves null.
pub type UnusedFn = Option<unsafe extern "C" fn() -> Result>;

/// `ncclGin_v14_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GinV14 {
    /// Name of the plugin.
    pub name: *const c_char,
    /// See [`InitFn`].
    pub init: Option<InitFn>,
    /// See [`DevicesFn`].
    pub devices: Option<DevicesFn>,
    /// See [`GetGinPropertiesFn`].
    pub get_gin_properties: Option<GetGinPropertiesFn>,
    /// See [`GetPropertiesFn`].
    pub get_properties: Option<GetPropertiesFn>,
    /// See [`ListenFn`].
    pub listen: Option<ListenFn>,
    /// See [`ConnectFn`].
    pub connect: Option<ConnectFn>,
    /// See [`CreateContextV14Fn`].
    pub create_context: Option<CreateContextV14Fn>,
    /// See [`RegMrSymFn`].
    pub reg_mr_sym: Option<RegMrSymFn>,
    /// See [`RegMrSymDmaBufFn`].
    pub reg_mr_sym_dma_buf: Option<RegMrSymDmaBufFn>,
    /// See [`DeregMrSymFn`].
    pub dereg_mr_sym: Option<DeregMrSymFn>,
    /// Destroys a GIN context.
    pub destroy_context: Option<HandleFn>,
    /// Closes a collective communicator.
    pub close_coll: Option<HandleFn>,
    /// Closes a listening communicator.
    pub close_listen: Option<HandleFn>,
    /// Progress call, made when a handle asks for it.
    pub gin_progress: Option<HandleFn>,
    /// See [`QueryLastErrorFn`].
    pub query_last_error: Option<QueryLastErrorFn>,
    /// Releases what `init` created.
    pub finalize: Option<HandleFn>,
}
assert_layout!(GinV14, size 136, align 8, {
    name @ 0, init @ 8, devices @ 16, get_gin_properties @ 24, get_properties @ 32, listen @ 40, connect @ 48,
    create_context @ 56, reg_mr_sym @ 64, reg_mr_sym_dma_buf @ 72, dereg_mr_sym @ 80, destroy_context @ 88,
    close_coll @ 96, close_listen @ 104, gin_progress @ 112, query_last_error @ 120, finalize @ 128,
});
// SAFETY: a table of function pointers and one pointer to a constant string; no code writes through it.
#[allow(unsafe_code)]
unsafe impl Sync for GinV14 {}

/// `ncclGin_v13_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GinV13 {
    /// Name of the plugin.
    pub name: *const c_char,
    /// See [`InitFn`].
    pub init: Option<InitFn>,
    /// See [`DevicesFn`].
    pub devices: Option<DevicesFn>,
    /// See [`GetPropertiesFn`].
    pub get_properties: Option<GetPropertiesFn>,
    /// See [`ListenFn`].
    pub listen: Option<ListenFn>,
    /// See [`ConnectFn`].
    pub connect: Option<ConnectFn>,
    /// See [`CreateContextV13Fn`].
    pub create_context: Option<CreateContextV13Fn>,
    /// See [`RegMrSymFn`].
    pub reg_mr_sym: Option<RegMrSymFn>,
    /// See [`RegMrSymDmaBufFn`].
    pub reg_mr_sym_dma_buf: Option<RegMrSymDmaBufFn>,
    /// See [`DeregMrSymFn`].
    pub dereg_mr_sym: Option<DeregMrSymFn>,
    /// Destroys a GIN context.
    pub destroy_context: Option<HandleFn>,
    /// Closes a collective communicator.
    pub close_coll: Option<HandleFn>,
    /// Closes a listening communicator.
    pub close_listen: Option<HandleFn>,
    /// Puts from the host.
    pub iput: UnusedFn,
    /// Puts with a signal from the host.
    pub iput_signal: UnusedFn,
    /// Gets from the host.
    pub iget: UnusedFn,
    /// Flushes from the host.
    pub iflush: UnusedFn,
    /// Tests a host request.
    pub test: UnusedFn,
    /// Progress call, made when a handle asks for it.
    pub gin_progress: Option<HandleFn>,
    /// See [`QueryLastErrorFn`].
    pub query_last_error: Option<QueryLastErrorFn>,
    /// Releases what `init` created.
    pub finalize: Option<HandleFn>,
}
assert_layout!(GinV13, size 168, align 8, {
    name @ 0, init @ 8, devices @ 16, get_properties @ 24, listen @ 32, connect @ 40, create_context @ 48,
    reg_mr_sym @ 56, reg_mr_sym_dma_buf @ 64, dereg_mr_sym @ 72, destroy_context @ 80, close_coll @ 88,
    close_listen @ 96, iput @ 104, iput_signal @ 112, iget @ 120, iflush @ 128, test @ 136, gin_progress @ 144,
    query_last_error @ 152, finalize @ 160,
});
// SAFETY: a table of function pointers and one pointer to a constant string; no code writes through it.
#[allow(unsafe_code)]
unsafe impl Sync for GinV13 {}
