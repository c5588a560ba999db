//! The GPU as device, through the CUDA driver, which is loaded at run time.
//!
//! An EFA card works with GPU memory from `cuMemCreate` with the GPUDirect RDMA property, which it registers as a dma-buf; its
//! rings and doorbells are mapped into the GPU. The software card is a thread of this process: its memory, rings and doorbells
//! are host memory that is mapped into the GPU.
#![allow(unsafe_code)]

use super::interface::{
    Adds, Device, DeviceBuffer, DeviceError, DeviceKind, DeviceMapping, DmaBuf, Mapping, Use, WindowMemory, bounds,
    page_size,
};
use crate::turn::Round;
use cudarc::driver::sys as cu;
use ferrogin_ffi::nccl;
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

fn check(call: &'static str, result: cu::CUresult) -> Result<(), DeviceError> {
    if result == cu::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver writes the address of a constant string into `name`, a local variable.
    let found = unsafe { cu::cuGetErrorName(result, &mut name) };
    let text = if found == cu::CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: the driver succeeded, so `name`, which is not null, is its NUL-terminated constant string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown".to_owned()
    };
    Err(DeviceError::Cuda { call, code: result as u32, text })
}

/// The CUDA context and a non-blocking stream, which all objects of the device share.
struct Core {
    context: cu::CUcontext,
    device: cu::CUdevice,
    /// True if `open` retained the device's primary context.
    retained: bool,
    stream: cu::CUstream,
}

// SAFETY: the driver allows any thread to use a context and a stream, and every use makes the context current first.
unsafe impl Send for Core {}
// SAFETY: the driver's calls on a context and a stream are thread-safe, and no field changes after `open`.
unsafe impl Sync for Core {}

/// Keeps a context current on this thread until dropped, which restores the previous context. Until then the calls of this thread do not
/// fail, and do not spoil the capture, while the program captures a CUDA graph: `CU_STREAM_CAPTURE_MODE_RELAXED`.
struct Current {
    capture_mode: cu::CUstreamCaptureMode,
}

impl Core {
    fn enter(&self) -> Result<Current, DeviceError> {
        // SAFETY: the context is valid: `open` retained it, or it was current in `open` and the program keeps it.
        check("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(self.context) })?;
        let mut current = Current { capture_mode: cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED };
        current.exchange_capture_mode();
        Ok(current)
    }

    /// Waits for the copies on the stream.
    fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: `self` owns the stream and destroys it on drop.
        check("cuStreamSynchronize", unsafe { cu::cuStreamSynchronize(self.stream) })
    }
}

impl Current {
    /// An error leaves this thread's mode, which matters during a capture only.
    fn exchange_capture_mode(&mut self) {
        // SAFETY: the driver reads a mode from a local variable and writes another one to it.
        let _ = unsafe { cu::cuThreadExchangeStreamCaptureMode(&mut self.capture_mode) };
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        self.exchange_capture_mode();
        let mut context = std::ptr::null_mut();
        // SAFETY: `enter` pushed a context on this thread; the driver writes its address into a local variable.
        let _ = unsafe { cu::cuCtxPopCurrent_v2(&mut context) };
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Ok(_current) = self.enter() {
            // SAFETY: `open` made the stream, and only this drop destroys it. If the program destroyed the context, the driver
            // returns an error.
            let _ = unsafe { cu::cuStreamDestroy_v2(self.stream) };
        }
        if self.retained {
            // SAFETY: `open` retained the primary context once, and only this drop releases it.
            let _ = unsafe { cu::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

/// Host pages that this process registered with the driver, by address and size. Doorbells of several queues may share a page,
/// which the driver registers only once in a process.
static REGISTERED: LazyLock<Mutex<RegisteredPages>> = LazyLock::new(Mutex::default);
type RegisteredPages = HashMap<(usize, usize), Weak<Registered>>;

/// Required GPU attributes: the attribute, its least value, true if the software card needs it too, and the message.
const NEEDS: [(cu::CUdevice_attribute, i32, bool, &str); 4] = {
    use cu::CUdevice_attribute::*;
    [
        (
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            7,
            true,
            "the GPU is older than compute capability 7.0, which kernels with device-side networking need",
        ),
        (
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            1,
            true,
            "the driver has no virtual memory management (cuMemCreate) for this GPU",
        ),
        (
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            1,
            false,
            "cards cannot reach memory of cuMemCreate on this GPU (GPUDirect RDMA with VMM): check the driver, and that \
             nvidia-peermem or dma-buf is not disabled",
        ),
        (
            CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
            1,
            false,
            "the driver exports no dma-buf, by which cards register GPU memory: install the open kernel modules and Linux \
             5.12 or newer",
        ),
    ]
};

/// The GPU and its driver, for messages.
fn versions(device: cu::CUdevice) -> String {
    use cu::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    let (mut name, mut driver) = ([0 as std::ffi::c_char; 64], 0);
    let [major, minor] = [MAJOR, MINOR].map(|attribute| {
        let mut value = 0;
        // SAFETY: the device exists. The driver writes one int into a local variable.
        let _ = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) };
        value
    });
    // SAFETY: the driver writes at most the given number of bytes into a local array.
    let _ = unsafe { cu::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device) };
    // SAFETY: the driver writes one int into a local variable.
    let _ = unsafe { cu::cuDriverGetVersion(&mut driver) };
    // SAFETY: the array ends with a NUL byte, because the driver was given all bytes but the last.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
    format!("{name}, compute capability {major}.{minor}, driver of CUDA {}.{}", driver / 1000, driver % 1000 / 10)
}

/// `CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED`, of CUDA 13.1.
const ATOMIC_REDUCTION_SUPPORTED: i32 = 148;
/// `CU_STREAM_MEM_OP_ATOMIC_REDUCTION`, `CU_STREAM_ATOMIC_REDUCTION_OP_ADD` and `CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64`, of CUDA 13.1.
const ATOMIC_REDUCTION: u32 = 8;
const REDUCTION_ADD: u32 = 0;
const REDUCTION_U64: u32 = 22;
/// Operations of one `cuStreamBatchMemOp`.
const MEM_OPS: usize = 128;

/// A device attribute, also one that this release of the driver's bindings has no name for; 0 if the driver does not know it.
fn attribute(number: i32, device: cu::CUdevice) -> i32 {
    type Get = unsafe extern "C" fn(*mut i32, i32, cu::CUdevice) -> i32;
    // SAFETY: the driver is loaded already, so no initialiser runs.
    let Ok(driver) = (unsafe { libloading::Library::new("libcuda.so.1") }) else { return 0 };
    // SAFETY: cuda.h declares the function with this type.
    let Ok(get) = (unsafe { driver.get::<Get>(b"cuDeviceGetAttribute\0") }) else { return 0 };
    let mut value = 0;
    // SAFETY: the device exists. The driver writes one int into a local variable.
    let code = unsafe { get(&mut value, number, device) };
    if code == 0 { value } else { 0 }
}

/// How a host thread makes kernels see the bytes that a card wrote to GPU memory before a completion in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flush {
    /// Kernels see them: the driver says so, or it has no way and the software card wrote them through the driver or in host memory.
    NotNeeded,
    /// `cuFlushGPUDirectRDMAWrites`.
    Driver,
    /// The driver has no way.
    Missing,
}

impl Flush {
    fn of(device: cu::CUdevice, software: bool) -> Self {
        use cu::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS as OPTIONS,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as ORDERING,
        };
        let [options, ordering] = [OPTIONS, ORDERING].map(|number| attribute(number as i32, device));
        let owner = cu::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32;
        let by_host = cu::CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as i32;
        match (ordering >= owner, options & by_host != 0) {
            (true, _) => Self::NotNeeded,
            (false, true) => Self::Driver,
            (false, false) if software => Self::NotNeeded,
            (false, false) => Self::Missing,
        }
    }
}

/// A GPU.
pub struct CudaDevice {
    core: Arc<Core>,
    /// True for the software card.
    software: bool,
    flush: Flush,
    /// A stream has atomic reductions.
    reduces: bool,
    /// Atomic operations of the CPU on GPU memory are atomic for the GPU too.
    native_atomics: bool,
}

impl CudaDevice {
    /// Opens the GPU whose context is current on this thread, or else the first GPU.
    ///
    /// # Errors
    /// [`DeviceError::NoGpu`] without a driver or a suitable GPU; otherwise a failure of the driver.
    pub fn open(software: bool) -> Result<Self, DeviceError> {
        // cudarc panics if the library or one of its symbols is missing.
        // SAFETY: the call loads NVIDIA's driver library, whose initialisers any process may run.
        if !unsafe { cu::is_culib_present() } {
            return Err(DeviceError::NoGpu { reason: "the CUDA driver library libcuda.so.1 is missing".to_owned() });
        }
        catch_unwind(AssertUnwindSafe(|| Self::open_driver(software))).unwrap_or_else(|_| {
            Err(DeviceError::NoGpu { reason: "the CUDA driver is too old: it lacks a function".to_owned() })
        })
    }

    fn open_driver(software: bool) -> Result<Self, DeviceError> {
        let none = |error: DeviceError| DeviceError::NoGpu { reason: error.to_string() };
        // SAFETY: cuInit takes no pointers and may be called repeatedly.
        check("cuInit", unsafe { cu::cuInit(0) }).map_err(none)?;
        let mut count = 0;
        // SAFETY: the driver writes one int into a local variable.
        check("cuDeviceGetCount", unsafe { cu::cuDeviceGetCount(&mut count) }).map_err(none)?;
        if count < 1 {
            return Err(DeviceError::NoGpu { reason: "the CUDA driver finds no GPU".to_owned() });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer into a local variable.
        check("cuCtxGetCurrent", unsafe { cu::cuCtxGetCurrent(&mut context) })?;
        let mut device = 0;
        let retained = context.is_null();
        if retained {
            // SAFETY: device 0 exists, since the count is not 0. The driver writes one pointer into a local variable.
            check("cuDevicePrimaryCtxRetain", unsafe { cu::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        } else {
            // SAFETY: a context is current. The driver writes one int into a local variable.
            check("cuCtxGetDevice", unsafe { cu::cuCtxGetDevice(&mut device) })?;
        }
        let mut core = Core { context, device, retained, stream: std::ptr::null_mut() };
        for (attribute, least, for_software, reason) in NEEDS {
            let mut value = 0;
            // SAFETY: the device exists. The driver writes one int into a local variable.
            let result = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", result)?;
            if value < least && (for_software || !software) {
                return Err(DeviceError::NoGpu { reason: format!("{reason} ({})", versions(device)) });
            }
        }
        let current = core.enter()?;
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current. The driver writes one pointer into a local variable.
        check("cuStreamCreate", unsafe { cu::cuStreamCreate(&mut stream, flags) })?;
        core.stream = stream;
        drop(current);
        let native = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED as i32;
        let [reduces, native_atomics] =
            [ATOMIC_REDUCTION_SUPPORTED, native].map(|number| attribute(number, device) == 1);
        Ok(Self { core: Arc::new(core), software, flush: Flush::of(device, software), reduces, native_atomics })
    }

    /// Host memory, pinned and mapped into the GPU.
    fn host(&self, len: usize) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let _current = self.core.enter()?;
        let size = round_up(len, page_size())?;
        let mut host: *mut c_void = std::ptr::null_mut();
        let flags = cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the driver writes one pointer into a local variable.
        check("cuMemHostAlloc", unsafe { cu::cuMemHostAlloc(&mut host, size, flags) })?;
        let mut buffer = HostBuffer { core: self.core.clone(), host: host.cast(), device: 0, len };
        // SAFETY: `host` is mapped pinned memory from the call above. The driver writes one address into `buffer`.
        check("cuMemHostGetDevicePointer", unsafe { cu::cuMemHostGetDevicePointer_v2(&mut buffer.device, host, 0) })?;
        // SAFETY: `buffer.host` has `size` bytes, and no other thread has its address yet.
        unsafe { std::ptr::write_bytes(buffer.host, 0, size) };
        Ok(Box::new(buffer))
    }

    /// GPU memory, with `export` also as a dma-buf.
    fn gpu(&self, len: usize, export: bool) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let _current = self.core.enter()?;
        let location =
            cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.core.device };
        // SAFETY: the C struct consists of integers and a pointer, for which zero is valid.
        let mut prop: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location = location;
        prop.allocFlags.gpuDirectRDMACapable = u8::from(export);
        let mut granularity = 0;
        let recommended = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the driver reads `prop` and writes one size into a local variable.
        let result = unsafe { cu::cuMemGetAllocationGranularity(&mut granularity, &prop, recommended) };
        check("cuMemGetAllocationGranularity", result)?;
        let size = round_up(len, granularity.max(page_size()))?;
        let mut buffer =
            GpuBuffer { core: self.core.clone(), handle: None, base: 0, mapped: false, size, len, fd: None };
        let mut handle = 0;
        // SAFETY: the driver reads `prop` and writes one handle into a local variable.
        check("cuMemCreate", unsafe { cu::cuMemCreate(&mut handle, size, &prop, 0) })?;
        buffer.handle = Some(handle);
        let mut base = 0;
        // SAFETY: the driver writes one address into a local variable.
        check("cuMemAddressReserve", unsafe { cu::cuMemAddressReserve(&mut base, size, granularity, 0, 0) })?;
        buffer.base = base;
        // SAFETY: the reserved address range and the memory have `size` bytes each, and this buffer owns both.
        check("cuMemMap", unsafe { cu::cuMemMap(base, size, 0, handle, 0) })?;
        buffer.mapped = true;
        let access = cu::CUmemAccessDesc { location, flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the range is mapped by the call above; the driver reads one descriptor.
        check("cuMemSetAccess", unsafe { cu::cuMemSetAccess(base, size, &access, 1) })?;
        // SAFETY: `size` bytes at `base` are mapped by the calls above.
        check("cuMemsetD8Async", unsafe { cu::cuMemsetD8Async(base, 0, size, self.core.stream) })?;
        self.core.synchronize()?;
        if export {
            buffer.fd = Some(self.export(base, size)?);
        }
        Ok(Box::new(buffer))
    }

    /// The starts of the parts of `len` bytes at `address` that lie in one allocation each. Several adjacent allocations may make up a
    /// window. `None` if a byte is in no allocation of the driver.
    fn parts(_: &Current, address: u64, len: usize) -> Option<Vec<u64>> {
        let (mut at, end) = (address, address.checked_add(len as u64)?);
        let mut parts = Vec::new();
        while at < end {
            let (mut base, mut size) = (0, 0);
            // SAFETY: the driver looks `at` up without access to it, and writes an address and a size into local variables.
            let result = unsafe { cu::cuMemGetAddressRange_v2(&mut base, &mut size, at) };
            let next = base.saturating_add(size as u64);
            if result != cu::CUresult::CUDA_SUCCESS || !(base..next).contains(&at) {
                return None;
            }
            parts.push(at);
            at = next;
        }
        Some(parts)
    }

    /// True if an atomic operation of the CPU on a word at `address` is atomic for the GPU: the word is in host memory, or the CPU reaches
    /// it at the same address in GPU memory that is coherent with it, as on Grace.
    fn is_coherent(&self, _: &Current, address: u64) -> bool {
        use cu::CUpointer_attribute::{
            CU_POINTER_ATTRIBUTE_HOST_POINTER as HOST_POINTER, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as MEMORY_TYPE,
        };
        let (mut host, mut kind) = (0u64, 0u32);
        // SAFETY: the driver looks the address up without access to it, and writes one pointer into a local variable.
        let found = unsafe { cu::cuPointerGetAttribute((&raw mut host).cast(), HOST_POINTER, address) };
        // SAFETY: as above, with one 32-bit number.
        let typed = unsafe { cu::cuPointerGetAttribute((&raw mut kind).cast(), MEMORY_TYPE, address) };
        let success = cu::CUresult::CUDA_SUCCESS;
        let on_host = typed == success && kind == cu::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
        found == success && host == address && (on_host || self.native_atomics)
    }

    /// A call of the driver in a round of the agent, and the end of what it puts on the stream. False if the agent was abandoned meanwhile.
    fn on_stream(
        &self,
        round: &Round<'_>,
        name: &'static str,
        call: impl FnOnce(cu::CUstream) -> cu::CUresult,
    ) -> Result<bool, DeviceError> {
        let done = round.call(|| {
            let _current = self.core.enter()?;
            check(name, call(self.core.stream))?;
            self.core.synchronize()
        });
        done.transpose().map(|done| done.is_some())
    }

    /// Exports GPU memory as a dma-buf. `base` and `size` are multiples of the host's page size.
    fn export(&self, base: u64, size: usize) -> Result<OwnedFd, DeviceError> {
        export_for_pcie_or_plain(|flags| {
            let mut fd = -1i32;
            let kind = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
            // SAFETY: the driver checks the range and writes one descriptor into a local variable.
            let result = unsafe { cu::cuMemGetHandleForAddressRange((&raw mut fd).cast(), base, size, kind, flags) };
            check("cuMemGetHandleForAddressRange", result)?;
            // SAFETY: the driver succeeded and opened this descriptor for the caller, who alone has it.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })
    }
}

/// Exports with the mapping type PCIe, or without it if the driver refuses the flag. On machines with coherent memory of CPU and
/// GPU (GB200, B300), a card reaches GPU memory over PCIe only through such a mapping. Older drivers refuse the flag.
fn export_for_pcie_or_plain<T>(export: impl Fn(u64) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    let pcie = cu::CUmemRangeFlags::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64;
    export(pcie).or_else(|error| {
        crate::trace!("the CUDA driver exports no dma-buf of mapping type PCIe: {error}");
        export(0)
    })
}

fn round_up(len: usize, to: usize) -> Result<usize, DeviceError> {
    len.checked_next_multiple_of(to).ok_or(DeviceError::Bounds { offset: 0, len, size: isize::MAX as usize })
}

impl Device for CudaDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn allocate(&self, len: usize, usage: Use) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        match usage {
            Use::Tables => self.gpu(len, false),
            Use::Window => self.gpu(len, !self.software),
            Use::Card if !self.software => self.gpu(len, true),
            Use::Card | Use::Shared => self.host(len),
        }
    }

    unsafe fn map(
        &self,
        address: *mut c_void,
        len: usize,
        mapping: Mapping,
    ) -> Result<Box<dyn DeviceMapping>, DeviceError> {
        let _current = self.core.enter()?;
        let start = address as usize & !(page_size() - 1);
        let offset = address as usize - start;
        let size = round_up(offset.saturating_add(len), page_size())?;
        let mut known = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, pages| pages.strong_count() > 0);
        if let Some(pages) = known.get(&(start, size)).and_then(Weak::upgrade) {
            return Ok(Box::new(Mapped { pages, offset: offset as u64 }));
        }
        let mut flags = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;
        if mapping == Mapping::Mmio {
            flags |= cu::CU_MEMHOSTREGISTER_IOMEMORY;
        }
        // SAFETY: the caller keeps the bytes mapped until the mapping is dropped, which unregisters them. Whole pages are mapped
        // or not, so rounding to pages adds no unmapped byte.
        let result = unsafe { cu::cuMemHostRegister_v2(start as *mut c_void, size, flags) };
        check("cuMemHostRegister", result)?;
        let mut pages = Registered { core: self.core.clone(), start, device: 0 };
        // SAFETY: the call above registered the memory. The driver writes one address into `pages`.
        let result = unsafe { cu::cuMemHostGetDevicePointer_v2(&mut pages.device, start as *mut c_void, 0) };
        check("cuMemHostGetDevicePointer", result)?;
        let pages = Arc::new(pages);
        known.insert((start, size), Arc::downgrade(&pages));
        Ok(Box::new(Mapped { pages, offset: offset as u64 }))
    }

    fn window(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Result<WindowMemory, DeviceError> {
        if ptr_type == nccl::PTR_HOST {
            super::cpu::check_mapped(address as usize, len)?;
            return Ok(WindowMemory::Address);
        }
        let current = self.core.enter()?;
        Self::parts(&current, address as u64, len).ok_or(DeviceError::WrongMemory {
            address: address as usize,
            problem: "not GPU memory of the given size",
            cure: "register memory of ncclMemAlloc or cuMemCreate, or pass NCCL_PTR_HOST for host memory",
        })?;
        if self.software {
            return Ok(WindowMemory::CudaAddress(self.core.device));
        }
        let start = address as u64 & !(page_size() as u64 - 1);
        let inner = address as u64 - start;
        let span = round_up(len.saturating_add(inner as usize), page_size())?;
        Ok(WindowMemory::DmaBuf { fd: self.export(start, span)?, offset: inner })
    }

    fn ptr_support(&self) -> i32 {
        nccl::PTR_HOST | nccl::PTR_CUDA | nccl::PTR_DMABUF
    }

    fn adds(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Adds {
        let coherent = || {
            self.core.enter().is_ok_and(|current| {
                let parts = Self::parts(&current, address as u64, len);
                parts.is_some_and(|all| all.into_iter().all(|at| self.is_coherent(&current, at)))
            })
        };
        match self.reduces {
            _ if ptr_type == nccl::PTR_HOST || coherent() => Adds::Cpu,
            true => Adds::Stream,
            false => Adds::Copy,
        }
    }

    unsafe fn add(&self, round: &Round<'_>, adds: Adds, words: &[(u64, u64)]) -> Result<(), DeviceError> {
        if adds == Adds::Stream {
            for words in words.chunks(MEM_OPS) {
                // The form of CUDA 13.1: operation and flags, kind and type, address, value.
                let head = [u64::from(ATOMIC_REDUCTION), u64::from(REDUCTION_ADD) | u64::from(REDUCTION_U64) << 32];
                let operation = |(address, amount): &(u64, u64)| cu::CUstreamBatchMemOpParams {
                    pad: [head[0], head[1], *address, *amount, 0, 0],
                };
                let mut operations: Vec<_> = words.iter().map(operation).collect();
                let (count, list) = (operations.len() as u32, operations.as_mut_ptr());
                let added = self.on_stream(round, "cuStreamBatchMemOp", |stream| {
                    // SAFETY: the driver reads as many operations as stated. This function's caller keeps the words mapped until the
                    // stream has executed them.
                    unsafe { cu::cuStreamBatchMemOp_v2(stream, count, list, 0) }
                })?;
                if !added {
                    break;
                }
            }
            return Ok(());
        }
        for (address, amount) in words {
            let mut word = 0u64;
            let read = self.on_stream(round, "cuMemcpyDtoHAsync", |stream| {
                // SAFETY: this function's caller keeps the word mapped; the driver writes a local variable before `on_stream` returns.
                unsafe { cu::cuMemcpyDtoHAsync_v2((&raw mut word).cast(), *address, 8, stream) }
            })?;
            if !read {
                break;
            }
            let sum = word.wrapping_add(*amount);
            let written = self.on_stream(round, "cuMemcpyHtoDAsync", |stream| {
                // SAFETY: this function's caller keeps the word mapped; the driver reads a local variable before `on_stream` returns.
                unsafe { cu::cuMemcpyHtoDAsync_v2(*address, (&raw const sum).cast(), 8, stream) }
            })?;
            if !written {
                break;
            }
        }
        Ok(())
    }

    fn cannot_flush_writes(&self) -> Option<String> {
        let missing = self.flush == Flush::Missing;
        missing.then(|| {
            format!(
                "the driver cannot order a card's writes to GPU memory for the CPU ({})",
                versions(self.core.device)
            )
        })
    }

    fn flush_writes(&self) -> Result<(), DeviceError> {
        if self.flush == Flush::NotNeeded {
            return Ok(());
        }
        let _current = self.core.enter()?;
        let context = cu::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = cu::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the call takes no pointers, and the context is current.
        check("cuFlushGPUDirectRDMAWrites", unsafe { cu::cuFlushGPUDirectRDMAWrites(context, scope) })
    }

    fn gpu(&self) -> Option<(usize, String)> {
        let mut address = [0 as std::ffi::c_char; 32];
        // SAFETY: the driver writes at most the given number of bytes into a local array.
        let result =
            unsafe { cu::cuDeviceGetPCIBusId(address.as_mut_ptr(), address.len() as i32 - 1, self.core.device) };
        check("cuDeviceGetPCIBusId", result).ok()?;
        // SAFETY: the array ends with a NUL byte, because the driver was given all bytes but the last.
        let address = unsafe { CStr::from_ptr(address.as_ptr()) };
        // The driver writes upper case; sysfs has lower case.
        Some((usize::try_from(self.core.device).ok()?, address.to_str().ok()?.to_ascii_lowercase()))
    }
}

struct HostBuffer {
    core: Arc<Core>,
    host: *mut u8,
    device: u64,
    len: usize,
}

// SAFETY: this object alone owns the allocation, and any thread may access and free it.
unsafe impl Send for HostBuffer {}
// SAFETY: shared methods access the allocation through raw pointers, never through references. Set-up calls `write` and `read` of
// a buffer from one thread at a time.
unsafe impl Sync for HostBuffer {}

impl DeviceBuffer for HostBuffer {
    fn device_address(&self) -> u64 {
        self.device
    }

    fn host_address(&self) -> Option<*mut u8> {
        Some(self.host)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn dma_buf(&self) -> Option<DmaBuf<'_>> {
        None
    }

    fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `bounds` checked that `offset` is within the allocation.
        let to = unsafe { self.host.add(offset) };
        // SAFETY: `bounds` checked that the bytes from `to` are within the allocation, and no Rust reference covers it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `bounds` checked that `offset` is within the allocation.
        let from = unsafe { self.host.add(offset) };
        // SAFETY: `bounds` checked that the bytes from `from` are within the allocation, and no Rust reference covers it.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.enter() {
            // SAFETY: `CudaDevice::host` allocated the memory, and only this drop frees it.
            let _ = check("cuMemFreeHost", unsafe { cu::cuMemFreeHost(self.host.cast()) })
                .inspect_err(|error| crate::warn!("freeing device memory: {error}"));
        }
    }
}

struct GpuBuffer {
    core: Arc<Core>,
    handle: Option<cu::CUmemGenericAllocationHandle>,
    base: u64,
    mapped: bool,
    size: usize,
    len: usize,
    fd: Option<OwnedFd>,
}

impl DeviceBuffer for GpuBuffer {
    fn device_address(&self) -> u64 {
        self.base
    }

    fn host_address(&self) -> Option<*mut u8> {
        None
    }

    fn len(&self) -> usize {
        self.len
    }

    fn dma_buf(&self) -> Option<DmaBuf<'_>> {
        self.fd.as_ref().map(|fd| DmaBuf { fd: fd.as_fd(), offset: 0, len: self.size })
    }

    fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        let _current = self.core.enter()?;
        let to = self.base + offset as u64;
        // SAFETY: `bounds` checked that the range is within the allocation. The borrow keeps `bytes` alive until `synchronize`
        // returns, after the copy.
        let result = unsafe { cu::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.core.stream) };
        check("cuMemcpyHtoDAsync", result)?;
        self.core.synchronize()
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        let _current = self.core.enter()?;
        let from = self.base + offset as u64;
        // SAFETY: `bounds` checked that the range is within the allocation. The borrow keeps `bytes` alive and exclusive until
        // `synchronize` returns, after the copy.
        let result =
            unsafe { cu::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.core.stream) };
        check("cuMemcpyDtoHAsync", result)?;
        self.core.synchronize()
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        self.fd = None;
        let Ok(_current) = self.core.enter() else { return };
        if self.mapped {
            // SAFETY: `CudaDevice::gpu` mapped the range, and only this drop unmaps it.
            let _ = check("cuMemUnmap", unsafe { cu::cuMemUnmap(self.base, self.size) })
                .inspect_err(|error| crate::warn!("freeing device memory: {error}"));
        }
        if self.base != 0 {
            // SAFETY: `CudaDevice::gpu` reserved the range, and only this drop frees it.
            let _ = check("cuMemAddressFree", unsafe { cu::cuMemAddressFree(self.base, self.size) })
                .inspect_err(|error| crate::warn!("freeing device memory: {error}"));
        }
        if let Some(handle) = self.handle {
            // SAFETY: `CudaDevice::gpu` created the handle, and only this drop releases it.
            let _ = check("cuMemRelease", unsafe { cu::cuMemRelease(handle) })
                .inspect_err(|error| crate::warn!("freeing device memory: {error}"));
        }
    }
}

/// Host pages registered with the driver.
struct Registered {
    core: Arc<Core>,
    start: usize,
    device: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.enter() {
            // SAFETY: `CudaDevice::map` registered the pages, and only this drop unregisters them. The caller of `map` keeps them
            // mapped until now.
            let _ = check("cuMemHostUnregister", unsafe { cu::cuMemHostUnregister(self.start as *mut c_void) })
                .inspect_err(|error| crate::warn!("freeing device memory: {error}"));
        }
    }
}

struct Mapped {
    pages: Arc<Registered>,
    offset: u64,
}

impl DeviceMapping for Mapped {
    fn device_address(&self) -> u64 {
        self.pages.device + self.offset
    }
}

#[cfg(test)]
mod tests {
    use super::super::interface::bytes_of;
    use super::*;
    use crate::turn::Turn;
    use ferrogin_test_support::child;

    /// Runs `body` in a child process, with the driver of this machine or else on the software GPU.
    fn on_gpu(test: &str, body: impl FnOnce()) {
        if CudaDevice::open(true).is_ok() {
            child::run(test, &[], body);
        } else if let Some(path) = ferrogin_test_support::software_gpu(test) {
            child::run(test, &[("LD_LIBRARY_PATH", &path)], body);
        }
    }

    #[test]
    fn gpu_memory_is_zeroed_and_exported() {
        let test = "gpu_memory_is_zeroed_and_exported";
        on_gpu(test, || {
            // A GPU may lack what hardware cards need.
            let device = CudaDevice::open(false).or_else(|_| CudaDevice::open(true)).expect("a GPU");
            let buffer = device.allocate(5000, Use::Tables).unwrap();
            let mut bytes = vec![0xa5u8; 5000];
            buffer.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|b| *b == 0));
            buffer.write(8, bytes_of(&[0x0102_0304_0506_0708u64])).unwrap();
            buffer.read(8, &mut bytes[..8]).unwrap();
            assert_eq!(bytes[..8], 0x0102_0304_0506_0708u64.to_le_bytes());
            match device.allocate(5000, Use::Card) {
                Ok(card) => assert!(device.software || card.dma_buf().is_some()),
                Err(error) => ferrogin_test_support::skip(&format!("{test} (dma-buf)"), error),
            }
        });
    }

    #[test]
    fn dma_buf_export_tries_pcie_first() {
        let refused = |flags| DeviceError::Cuda { call: "export", code: 1, text: format!("flags {flags}") };
        let tried = std::cell::RefCell::new(Vec::new());
        let driver = |least: u64| {
            tried.borrow_mut().clear();
            let export = |flags| {
                tried.borrow_mut().push(flags);
                if flags <= least { Ok(flags) } else { Err(refused(flags)) }
            };
            export_for_pcie_or_plain(export).map_err(|error| error.to_string())
        };
        assert_eq!((driver(1), tried.borrow().clone()), (Ok(1), vec![1]), "a driver with the mapping type");
        assert_eq!((driver(0), tried.borrow().clone()), (Ok(0), vec![1, 0]), "an older driver");
        let none = export_for_pcie_or_plain(|flags| Err::<(), _>(refused(flags))).unwrap_err().to_string();
        assert!(none.contains("flags 0"), "the message has the plain export's error: {none}");
    }

    #[test]
    fn adds_reach_words_of_gpu_memory_in_each_way() {
        on_gpu("adds_reach_words_of_gpu_memory_in_each_way", || {
            let device = CudaDevice::open(true).expect("a GPU");
            let buffer = device.allocate(4096, Use::Window).unwrap();
            let address = buffer.device_address();
            let mut ways = vec![Adds::Copy];
            match device.adds(address as *mut c_void, 4096, nccl::PTR_CUDA) {
                Adds::Stream => ways.push(Adds::Stream),
                _ => ferrogin_test_support::skip("adds by a stream", "this driver has no atomic reductions"),
            }
            let turn = Turn::default();
            let round = turn.begin().expect("a round");
            for (at, adds) in ways.into_iter().enumerate() {
                let at = address + 512 * at as u64;
                let words: Vec<_> = (0..300).map(|n| (at + n % 3 * 8, (1 << 40) + n)).collect();
                // SAFETY: the words lie in `buffer`.
                unsafe { device.add(&round, adds, &words) }.unwrap();
                for word in 0..4 {
                    let mut bytes = [0; 8];
                    buffer.read((at - address) as usize + 8 * word, &mut bytes).unwrap();
                    let mine = words.iter().filter(|(place, _)| *place == at + 8 * word as u64);
                    assert_eq!(
                        u64::from_le_bytes(bytes),
                        mine.map(|(_, amount)| amount).sum::<u64>(),
                        "{adds:?}, word {word}"
                    );
                }
            }
            // SAFETY: the words lie in `buffer`; the driver refuses the last one.
            let refused = unsafe { device.add(&round, Adds::Stream, &[(address, 1), (address + 4, 1)]) };
            assert!(refused.is_err());
        });
    }

    /// Sets an attribute of the software GPU; false if another driver answers.
    fn set_attribute(number: i32, value: i32) -> bool {
        type Set = unsafe extern "C" fn(i32, i32) -> i32;
        // SAFETY: the driver is loaded already, so no initialiser runs.
        let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("the driver");
        // SAFETY: the software GPU defines the function with this type, and no other driver has it.
        let Ok(set) = (unsafe { driver.get::<Set>(b"cuSoftGpuSetAttribute\0") }) else { return false };
        // SAFETY: the function takes two numbers.
        unsafe { set(number, value) == 0 }
    }

    #[test]
    fn ways_of_adding_and_flushing_follow_the_attributes_of_the_driver() {
        let test = "ways_of_adding_and_flushing_follow_the_attributes_of_the_driver";
        on_gpu(test, || {
            let first = CudaDevice::open(true).expect("a GPU");
            // Native atomics, host page tables, atomic reductions; how the agent adds to GPU memory.
            let adds = [
                ([0, 0, 0], Adds::Copy),
                ([0, 0, 1], Adds::Stream),
                ([1, 0, 0], Adds::Copy),
                ([1, 0, 1], Adds::Stream),
                ([0, 1, 0], Adds::Copy),
                ([0, 1, 1], Adds::Stream),
                ([1, 1, 0], Adds::Cpu),
                ([1, 1, 1], Adds::Cpu),
            ];
            let buffer = first.allocate(1 << 22, Use::Window).expect("memory of the GPU");
            let host = first.allocate(4096, Use::Shared).expect("memory of the host");
            for (values, expected) in adds {
                for (number, value) in [86, 100, ATOMIC_REDUCTION_SUPPORTED].into_iter().zip(values) {
                    if !set_attribute(number, value) {
                        return ferrogin_test_support::skip(test, "the driver is not the software GPU");
                    }
                }
                let device = CudaDevice::open(true).expect("a GPU");
                let at = buffer.device_address() as *mut c_void;
                let ways = [4096, 1 << 22].map(|len| device.adds(at, len, nccl::PTR_CUDA));
                assert_eq!(ways, [expected; 2], "atomics, page tables, reductions: {values:?}");
                let past_the_end = device.adds(at, 1 << 40, nccl::PTR_CUDA);
                assert_ne!(past_the_end, Adds::Cpu, "bytes that the driver does not know: {values:?}");
                let on_host = host.host_address().expect("an address").cast();
                assert_eq!(device.adds(on_host, 4096, nccl::PTR_HOST), Adds::Cpu);
            }
            // Order of writes (0 none, 100 for the owner, 200 for all), ways to flush (1 by the host, 2 by a stream); with a hardware card, with
            // the software card.
            let flushes = [
                ([0, 0], Flush::Missing, Flush::NotNeeded),
                ([0, 2], Flush::Missing, Flush::NotNeeded),
                ([0, 1], Flush::Driver, Flush::Driver),
                ([0, 3], Flush::Driver, Flush::Driver),
                ([100, 0], Flush::NotNeeded, Flush::NotNeeded),
                ([100, 1], Flush::NotNeeded, Flush::NotNeeded),
                ([200, 3], Flush::NotNeeded, Flush::NotNeeded),
            ];
            for (values, hardware, software) in flushes {
                assert!(set_attribute(118, values[0]) && set_attribute(117, values[1]));
                for (is_software, expected) in [(false, hardware), (true, software)] {
                    let device = CudaDevice::open(is_software).expect("a GPU");
                    assert_eq!(device.flush, expected, "order, ways: {values:?}, software card: {is_software}");
                    assert_eq!(device.cannot_flush_writes().is_some(), expected == Flush::Missing);
                    assert_eq!(device.flush_writes().is_err(), expected == Flush::Missing);
                }
            }
        });
    }

    #[test]
    fn software_card_memory_is_host_memory() {
        on_gpu("software_card_memory_is_host_memory", || {
            let device = CudaDevice::open(true).expect("a GPU");
            let buffer = device.allocate(8, Use::Card).unwrap();
            assert!(buffer.host_address().is_some() && buffer.dma_buf().is_none());
            assert!(device.window(16 as *mut c_void, 8, nccl::PTR_CUDA).is_err());
        });
    }
}
