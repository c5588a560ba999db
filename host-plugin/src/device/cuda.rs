//! The GPU as device, through the CUDA driver, which is loaded at run time.
//!
//! On hardware, what the card works with is GPU memory from `cuMemCreate` with the GPUDirect RDMA property, given to
//! the card as a dma-buf, and rings and doorbells are the card's, mapped into the GPU. With the software card, which
//! is a thread of this process, both are host memory mapped into the GPU.
#![allow(unsafe_code)]

use super::{
    Device, DeviceBuffer, DeviceError, DeviceKind, DeviceMapping, DmaBuf, Mapping, Use, WindowMemory, bounds, page_size,
};
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
    // SAFETY: writes a pointer to a constant string of the driver.
    let found = unsafe { cu::cuGetErrorName(result, &mut name) };
    let text = if found == cu::CUresult::CUDA_SUCCESS && !name.is_null() {
        // SAFETY: the driver's constant string, checked for null.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown".to_owned()
    };
    Err(DeviceError::Cuda { call, code: result as u32, text })
}

/// What every object of the device needs: the CUDA context and a stream that waits for no kernel.
struct Core {
    context: cu::CUcontext,
    device: cu::CUdevice,
    /// The device's primary context was retained here.
    retained: bool,
    stream: cu::CUstream,
}

// SAFETY: CUDA contexts and streams may be used from any thread; every use makes the context current first.
unsafe impl Send for Core {}
// SAFETY: as for `Send`; the driver locks.
unsafe impl Sync for Core {}

/// Makes a context current; the one before is current again when this is dropped.
struct Current;

impl Core {
    fn enter(&self) -> Result<Current, DeviceError> {
        // SAFETY: a context that the user keeps (current when we found it) or that we retained.
        check("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Current)
    }

    /// Waits for copies that were started on our stream.
    fn settle(&self) -> Result<(), DeviceError> {
        // SAFETY: our stream, alive as long as `self`.
        check("cuStreamSynchronize", unsafe { cu::cuStreamSynchronize(self.stream) })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: pops what `enter` pushed on this thread.
        let _ = unsafe { cu::cuCtxPopCurrent_v2(&mut context) };
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Ok(_current) = self.enter() {
            // SAFETY: made in `open`, ended once. A context that the user destroyed makes this fail harmlessly.
            let _ = unsafe { cu::cuStreamDestroy_v2(self.stream) };
        }
        if self.retained {
            // SAFETY: balances the retain in `open`.
            let _ = unsafe { cu::cuDevicePrimaryCtxRelease_v2(self.device) };
        }
    }
}

/// Host pages registered with the driver, by address and size, of all communicators: doorbells of several queues may share
/// a page, which the driver registers once in a process.
static REGISTERED: LazyLock<Mutex<RegisteredPages>> = LazyLock::new(Mutex::default);
type RegisteredPages = HashMap<(usize, usize), Weak<Registered>>;

/// What a GPU must have: the driver's attribute, its least value, whether the software card needs it too, and what to
/// tell who lacks it.
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
            "the driver exports no dma-buf, which gives GPU memory to the card: it needs the open kernel modules and Linux \
             5.12 or newer",
        ),
    ]
};

/// A GPU.
pub struct CudaDevice {
    core: Arc<Core>,
    /// The card is the software card.
    software: bool,
}

impl CudaDevice {
    /// Opens the GPU whose context is current on this thread, or the first one.
    ///
    /// # Errors
    /// [`DeviceError::NoGpu`] without a driver or a GPU; the driver's failure otherwise.
    pub fn open(software: bool) -> Result<Self, DeviceError> {
        // cudarc panics when the library or a symbol of it is missing.
        // SAFETY: loads the driver library, whose initialisers are made to be run.
        if !unsafe { cu::is_culib_present() } {
            return Err(DeviceError::NoGpu { reason: "the CUDA driver library libcuda.so.1 is not there".to_owned() });
        }
        catch_unwind(AssertUnwindSafe(|| Self::open_driver(software))).unwrap_or_else(|_| {
            Err(DeviceError::NoGpu { reason: "the CUDA driver is too old: it lacks a function".to_owned() })
        })
    }

    fn open_driver(software: bool) -> Result<Self, DeviceError> {
        let none = |error: DeviceError| DeviceError::NoGpu { reason: error.to_string() };
        // SAFETY: no pointers; may be called again and again.
        check("cuInit", unsafe { cu::cuInit(0) }).map_err(none)?;
        let mut count = 0;
        // SAFETY: writes one int.
        check("cuDeviceGetCount", unsafe { cu::cuDeviceGetCount(&mut count) }).map_err(none)?;
        if count < 1 {
            return Err(DeviceError::NoGpu { reason: "the CUDA driver finds no GPU".to_owned() });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check("cuCtxGetCurrent", unsafe { cu::cuCtxGetCurrent(&mut context) })?;
        let mut device = 0;
        let retained = context.is_null();
        if retained {
            // SAFETY: device 0 is there, since the count is not 0.
            check("cuDevicePrimaryCtxRetain", unsafe { cu::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        } else {
            // SAFETY: a context is current.
            check("cuCtxGetDevice", unsafe { cu::cuCtxGetDevice(&mut device) })?;
        }
        let mut core = Core { context, device, retained, stream: std::ptr::null_mut() };
        for (attribute, least, for_software, reason) in NEEDS {
            let mut value = 0;
            // SAFETY: writes one int; the device is there.
            let result = unsafe { cu::cuDeviceGetAttribute(&mut value, attribute, device) };
            check("cuDeviceGetAttribute", result)?;
            if value < least && (for_software || !software) {
                return Err(DeviceError::NoGpu { reason: reason.to_owned() });
            }
        }
        let current = core.enter()?;
        let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; writes one pointer.
        check("cuStreamCreate", unsafe { cu::cuStreamCreate(&mut stream, flags) })?;
        core.stream = stream;
        drop(current);
        Ok(Self { core: Arc::new(core), software })
    }

    /// Host memory, pinned and mapped into the GPU.
    fn host(&self, len: usize) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let _current = self.core.enter()?;
        let size = round_up(len, page_size())?;
        let mut host: *mut c_void = std::ptr::null_mut();
        let flags = cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one pointer.
        check("cuMemHostAlloc", unsafe { cu::cuMemHostAlloc(&mut host, size, flags) })?;
        let mut buffer = HostBuffer { core: self.core.clone(), host: host.cast(), device: 0, len };
        // SAFETY: pinned memory just allocated, mapped.
        check("cuMemHostGetDevicePointer", unsafe { cu::cuMemHostGetDevicePointer_v2(&mut buffer.device, host, 0) })?;
        // SAFETY: `size` bytes just allocated, which nobody else knows yet.
        unsafe { std::ptr::write_bytes(buffer.host, 0, size) };
        Ok(Box::new(buffer))
    }

    /// GPU memory; `export` as a dma-buf.
    fn gpu(&self, len: usize, export: bool) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let _current = self.core.enter()?;
        let location =
            cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.core.device };
        // SAFETY: a C struct of integers and a pointer, for which zero is valid.
        let mut prop: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location = location;
        prop.allocFlags.gpuDirectRDMACapable = u8::from(export);
        let mut granularity = 0;
        let recommended = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: writes one size.
        let result = unsafe { cu::cuMemGetAllocationGranularity(&mut granularity, &prop, recommended) };
        check("cuMemGetAllocationGranularity", result)?;
        let size = round_up(len, granularity.max(page_size()))?;
        let mut buffer =
            GpuBuffer { core: self.core.clone(), handle: None, base: 0, mapped: false, size, len, fd: None };
        let mut handle = 0;
        // SAFETY: writes one handle.
        check("cuMemCreate", unsafe { cu::cuMemCreate(&mut handle, size, &prop, 0) })?;
        buffer.handle = Some(handle);
        let mut base = 0;
        // SAFETY: writes one address.
        check("cuMemAddressReserve", unsafe { cu::cuMemAddressReserve(&mut base, size, granularity, 0, 0) })?;
        buffer.base = base;
        // SAFETY: an address range just reserved and memory just created, both of `size` bytes.
        check("cuMemMap", unsafe { cu::cuMemMap(base, size, 0, handle, 0) })?;
        buffer.mapped = true;
        let access = cu::CUmemAccessDesc { location, flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the mapping just made; one descriptor.
        check("cuMemSetAccess", unsafe { cu::cuMemSetAccess(base, size, &access, 1) })?;
        // SAFETY: `size` bytes just mapped.
        check("cuMemsetD8Async", unsafe { cu::cuMemsetD8Async(base, 0, size, self.core.stream) })?;
        self.core.settle()?;
        if export {
            buffer.fd = Some(self.export(base, size)?);
        }
        Ok(Box::new(buffer))
    }

    /// A dma-buf of GPU memory; both numbers are multiples of the host page.
    fn export(&self, base: u64, size: usize) -> Result<OwnedFd, DeviceError> {
        export_by_first(|flags| {
            let mut fd = -1i32;
            let kind = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
            // SAFETY: writes one descriptor; the driver checks the range.
            let result = unsafe { cu::cuMemGetHandleForAddressRange((&raw mut fd).cast(), base, size, kind, flags) };
            check("cuMemGetHandleForAddressRange", result)?;
            // SAFETY: a descriptor that the driver just opened for us.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })
    }
}

/// Exports with the mapping type PCIe first: where CPU and GPU share coherent memory (GB200, B300), the card reaches GPU memory by
/// PCIe only through such a mapping. Older drivers refuse the flag, and then the plain export is right.
fn export_by_first<T>(export: impl Fn(u64) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    let pcie = cu::CUmemRangeFlags::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64;
    export(pcie).or_else(|error| {
        crate::trace!("no dma-buf of mapping type PCIe: {error}");
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
        // SAFETY: the caller keeps the bytes mapped; whole pages of them are pinned.
        let result = unsafe { cu::cuMemHostRegister_v2(start as *mut c_void, size, flags) };
        check("cuMemHostRegister", result)?;
        let mut pages = Registered { core: self.core.clone(), start, device: 0 };
        // SAFETY: registered memory; writes one address.
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
        let _current = self.core.enter()?;
        let wrong = || DeviceError::WrongMemory {
            address: address as usize,
            what: "not GPU memory of the given size",
            cure: "register what ncclMemAlloc or cuMemCreate gave, or pass NCCL_PTR_HOST for host memory",
        };
        // A window may be mapped from several allocations, one behind the other.
        let (mut at, end) = (address as u64, (address as u64).checked_add(len as u64).ok_or_else(wrong)?);
        while at < end {
            let (mut base, mut size) = (0, 0);
            // SAFETY: writes an address and a size; the driver looks the address up.
            let result = unsafe { cu::cuMemGetAddressRange_v2(&mut base, &mut size, at) };
            let next = base.saturating_add(size as u64);
            if result != cu::CUresult::CUDA_SUCCESS || !(base..next).contains(&at) {
                return Err(wrong());
            }
            at = next;
        }
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
}

struct HostBuffer {
    core: Arc<Core>,
    host: *mut u8,
    device: u64,
    len: usize,
}

// SAFETY: the allocation belongs to this object alone and is reached through raw pointers only.
unsafe impl Send for HostBuffer {}
// SAFETY: as for `Send`; `write` and `read` copy bytes, and their callers order them.
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
        // SAFETY: `offset` is within the allocation, by `bounds`.
        let to = unsafe { self.host.add(offset) };
        // SAFETY: `bytes.len()` bytes from `to` are within the allocation, which no Rust reference overlaps.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `offset` is within the allocation, by `bounds`.
        let from = unsafe { self.host.add(offset) };
        // SAFETY: as in `write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.enter() {
            // SAFETY: allocated in `host`, freed once.
            let _ = check("cuMemFreeHost", unsafe { cu::cuMemFreeHost(self.host.cast()) })
                .inspect_err(|error| crate::warn!("{error}"));
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
        // SAFETY: the range is within the allocation, by `bounds`; the source lives until `settle` returns.
        let result = unsafe { cu::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.core.stream) };
        check("cuMemcpyHtoDAsync", result)?;
        self.core.settle()
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        let _current = self.core.enter()?;
        let from = self.base + offset as u64;
        // SAFETY: as in `write`, the other way round.
        let result =
            unsafe { cu::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.core.stream) };
        check("cuMemcpyDtoHAsync", result)?;
        self.core.settle()
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        self.fd = None;
        let Ok(_current) = self.core.enter() else { return };
        if self.mapped {
            // SAFETY: mapped in `gpu`, unmapped once.
            let _ = check("cuMemUnmap", unsafe { cu::cuMemUnmap(self.base, self.size) })
                .inspect_err(|error| crate::warn!("{error}"));
        }
        if self.base != 0 {
            // SAFETY: reserved in `gpu`, freed once.
            let _ = check("cuMemAddressFree", unsafe { cu::cuMemAddressFree(self.base, self.size) })
                .inspect_err(|error| crate::warn!("{error}"));
        }
        if let Some(handle) = self.handle {
            // SAFETY: created in `gpu`, released once.
            let _ =
                check("cuMemRelease", unsafe { cu::cuMemRelease(handle) }).inspect_err(|error| crate::warn!("{error}"));
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
            // SAFETY: registered in `map`, ended once, while the bytes are still mapped (see `Device::map`).
            let _ = check("cuMemHostUnregister", unsafe { cu::cuMemHostUnregister(self.start as *mut c_void) })
                .inspect_err(|error| crate::warn!("{error}"));
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
    use super::super::bytes_of;
    use super::*;
    use std::io::Write;

    /// Past the test runner's capture: a skip must be seen.
    fn skip(name: &str, why: &DeviceError) {
        let _ = writeln!(std::io::stdout(), "SKIP {name}: {why}");
    }

    fn open(name: &str, software: bool) -> Option<CudaDevice> {
        match CudaDevice::open(software) {
            Ok(device) => Some(device),
            Err(error) => {
                skip(name, &error);
                None
            }
        }
    }

    #[test]
    fn gpu_memory_is_zeroed_and_exported() {
        let Some(device) = open("gpu_memory_is_zeroed_and_exported", false) else { return };
        let buffer = device.allocate(5000, Use::Tables).unwrap();
        let mut bytes = vec![0xa5u8; 5000];
        buffer.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 0));
        buffer.write(8, bytes_of(&[0x0102_0304_0506_0708u64])).unwrap();
        buffer.read(8, &mut bytes[..8]).unwrap();
        assert_eq!(bytes[..8], 0x0102_0304_0506_0708u64.to_le_bytes());
        match device.allocate(5000, Use::Card) {
            Ok(card) => assert!(card.dma_buf().is_some()),
            Err(error) => skip("gpu_memory_is_zeroed_and_exported (dma-buf)", &error),
        }
    }

    #[test]
    fn dma_bufs_are_exported_for_pcie_first() {
        let refused = |flags| DeviceError::Cuda { call: "export", code: 1, text: format!("flags {flags}") };
        let tried = std::cell::RefCell::new(Vec::new());
        let driver = |least: u64| {
            tried.borrow_mut().clear();
            let export = |flags| {
                tried.borrow_mut().push(flags);
                if flags <= least { Ok(flags) } else { Err(refused(flags)) }
            };
            export_by_first(export).map_err(|error| error.to_string())
        };
        assert_eq!((driver(1), tried.borrow().clone()), (Ok(1), vec![1]), "a driver with the mapping type");
        assert_eq!((driver(0), tried.borrow().clone()), (Ok(0), vec![1, 0]), "an older driver");
        let none = export_by_first(|flags| Err::<(), _>(refused(flags))).unwrap_err().to_string();
        assert!(none.contains("flags 0"), "the plain export's error is the one that is told: {none}");
    }

    #[test]
    fn the_software_card_gets_host_memory() {
        let Some(device) = open("the_software_card_gets_host_memory", true) else { return };
        let buffer = device.allocate(8, Use::Card).unwrap();
        assert!(buffer.host_address().is_some() && buffer.dma_buf().is_none());
        assert!(device.window(16 as *mut c_void, 8, nccl::PTR_CUDA).is_err());
    }
}
