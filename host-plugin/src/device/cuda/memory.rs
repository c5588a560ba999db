//! Device memory: pinned host memory, GPU memory, and exporting it as a dma-buf.
#![allow(unsafe_code)]

use super::driver::{Core, check, check_free};
use crate::device::interface::{DeviceBuffer, DeviceError, DmaBuf, HostBytes, Imported, bounds, page_size};
use cudarc::driver::sys as cu;
use ferrogin_libfabric::MemoryKind;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Allocates host memory, pinned and mapped into the GPU.
pub fn host(core: &Arc<Core>, len: usize) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
    let _current = core.enter()?;
    let size = round_up(len, page_size())?;
    let mut host: *mut c_void = std::ptr::null_mut();
    let flags = cu::CU_MEMHOSTALLOC_PORTABLE | cu::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: the driver writes one pointer into a local variable.
    check("cuMemHostAlloc", unsafe { cu::cuMemHostAlloc(&mut host, size, flags) })?;
    // SAFETY: the driver allocated at least `len` bytes, and the buffer that keeps this value frees them on drop.
    let bytes = unsafe { HostBytes::new(host.cast(), len) };
    let mut buffer = HostBuffer { core: core.clone(), bytes, device: 0 };
    // SAFETY: `host` is mapped pinned memory from the call above. The driver writes one address into `buffer`.
    check("cuMemHostGetDevicePointer", unsafe { cu::cuMemHostGetDevicePointer_v2(&mut buffer.device, host, 0) })?;
    // SAFETY: the allocation has `size` bytes, and no other thread has its address yet.
    unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, size) };
    Ok(Box::new(buffer))
}

/// Allocates GPU memory and, with `export`, exports it as a dma-buf.
pub fn gpu(core: &Arc<Core>, len: usize, export: bool) -> Result<GpuBuffer, DeviceError> {
    let _current = core.enter()?;
    let location = cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: core.device };
    // SAFETY: the C struct consists of integers and a pointer, for which zero is valid.
    let mut prop: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    prop.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = DESCRIPTOR;
    prop.location = location;
    prop.allocFlags.gpuDirectRDMACapable = u8::from(export);
    let mut granularity = 0;
    let recommended = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: the driver reads `prop` and writes one size into a local variable.
    let result = unsafe { cu::cuMemGetAllocationGranularity(&mut granularity, &prop, recommended) };
    check("cuMemGetAllocationGranularity", result)?;
    let size = round_up(len, granularity.max(page_size()))?;
    let mut buffer = GpuBuffer { core: core.clone(), handle: None, base: 0, mapped: false, size, len, fd: None };
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
    unsafe { fill(core, base, size, 0) }?;
    if export {
        buffer.fd = Some(export_range(base, size)?);
    }
    Ok(buffer)
}

/// Sets each byte of GPU memory to `byte`.
///
/// # Safety
/// `len` bytes at `address` must be mapped, and be the caller's.
pub unsafe fn fill(core: &Core, address: u64, len: usize, byte: u8) -> Result<(), DeviceError> {
    let _current = core.enter()?;
    // SAFETY: this function's caller owns the mapped bytes.
    check("cuMemsetD8Async", unsafe { cu::cuMemsetD8Async(address, byte, len, core.stream) })?;
    core.synchronize()
}

/// Copies bytes into GPU memory.
///
/// # Safety
/// As many bytes at `address` must be mapped, and be the caller's.
pub unsafe fn copy_in(core: &Core, address: u64, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
    let _current = core.enter()?;
    // SAFETY: this function's caller owns the mapped bytes. The borrow keeps `bytes` alive until `synchronize` returns,
    // after the copy.
    let result = unsafe { cu::cuMemcpyHtoDAsync_v2(address, bytes.as_ptr().cast(), bytes.len(), core.stream) };
    check("cuMemcpyHtoDAsync", result)?;
    core.synchronize()
}

/// Copies bytes out of GPU memory.
///
/// # Safety
/// As many bytes at `address` must be mapped.
pub unsafe fn copy_out(core: &Core, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
    let _current = core.enter()?;
    // SAFETY: this function's caller says that the bytes are mapped. The borrow keeps `bytes` alive and exclusive until
    // `synchronize` returns, after the copy.
    let result = unsafe { cu::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address, bytes.len(), core.stream) };
    check("cuMemcpyDtoHAsync", result)?;
    core.synchronize()
}

const DESCRIPTOR: cu::CUmemAllocationHandleType =
    cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A range of device addresses with other processes' memory.
struct Mapped {
    core: Arc<Core>,
    base: u64,
    stride: usize,
    /// Sizes of the parts that are mapped so far.
    sizes: Vec<usize>,
    len: usize,
}

/// Maps memory that other processes exported, at distances that are multiples of 4 GiB, as NCCL's device code expects.
pub fn import(core: &Arc<Core>, parts: &[(OwnedFd, usize)]) -> Result<Imported, DeviceError> {
    let _current = core.enter()?;
    let stride = round_up(parts.iter().map(|(_, size)| *size).max().unwrap_or(0), 1 << 32)?;
    let len = stride.saturating_mul(parts.len());
    let mut mapped = Mapped { core: core.clone(), base: 0, stride, sizes: Vec::new(), len };
    // SAFETY: the driver writes one address into a local variable.
    check("cuMemAddressReserve", unsafe { cu::cuMemAddressReserve(&mut mapped.base, len, 0, 0, 0) })?;
    let location = cu::CUmemLocation { type_: cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: core.device };
    let access = cu::CUmemAccessDesc { location, flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    for (i, (file, size)) in parts.iter().enumerate() {
        let (at, mut handle) = (mapped.base + (i * stride) as u64, 0);
        let file = file.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor, which the driver takes as a pointer, is open during the call. The driver writes one
        // handle.
        let result = unsafe { cu::cuMemImportFromShareableHandle(&mut handle, file, DESCRIPTOR) };
        check("cuMemImportFromShareableHandle", result)?;
        // SAFETY: `mapped` owns the range, in which nothing is mapped yet, and `handle` is valid.
        let result = check("cuMemMap", unsafe { cu::cuMemMap(at, *size, 0, handle, 0) });
        // SAFETY: the handle is this call's own. The mapping keeps the memory.
        check_free("cuMemRelease", unsafe { cu::cuMemRelease(handle) });
        result?;
        mapped.sizes.push(*size);
        // SAFETY: the range is mapped by the call above; the driver reads one descriptor.
        check("cuMemSetAccess", unsafe { cu::cuMemSetAccess(at, *size, &access, 1) })?;
    }
    Ok(Imported { base: mapped.base, stride: stride as u64, _mapped: Box::new(mapped) })
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_current) = self.core.enter() else { return };
        for (i, size) in self.sizes.iter().enumerate() {
            let at = self.base + (i * self.stride) as u64;
            // SAFETY: `import` mapped the range, and only this drop unmaps it.
            check_free("cuMemUnmap", unsafe { cu::cuMemUnmap(at, *size) });
        }
        if self.base != 0 {
            // SAFETY: `import` reserved the range, and only this drop frees it.
            check_free("cuMemAddressFree", unsafe { cu::cuMemAddressFree(self.base, self.len) });
        }
    }
}

/// Exports GPU memory as a dma-buf. `base` and `size` must be multiples of the host's page size.
pub fn export_range(base: u64, size: usize) -> Result<OwnedFd, DeviceError> {
    export_for_pcie_or_plain(|flags| export_with(base, size, flags))
}

/// [`export_range`] with or without mapping type PCIe.
pub fn export_for(pcie: bool, base: u64, size: usize) -> Result<OwnedFd, DeviceError> {
    export_with(base, size, if pcie { PCIE } else { 0 })
}

fn export_with(base: u64, size: usize, flags: u64) -> Result<OwnedFd, DeviceError> {
    let mut fd = -1i32;
    let kind = cu::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // SAFETY: the driver checks the range and writes one descriptor into a local variable.
    let result = unsafe { cu::cuMemGetHandleForAddressRange((&raw mut fd).cast(), base, size, kind, flags) };
    check("cuMemGetHandleForAddressRange", result)?;
    // SAFETY: the driver succeeded and opened this descriptor for the caller, who alone has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

const PCIE: u64 = cu::CUmemRangeFlags::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64;

/// Exports with mapping type PCIe, or without it if the driver refuses the flag, as older drivers do. On machines with
/// coherent CPU and GPU memory (GB200, B300), a card can reach GPU memory over PCIe only through such a mapping.
pub fn export_for_pcie_or_plain<T>(export: impl Fn(u64) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
    export(PCIE).or_else(|error| {
        crate::trace!("the CUDA driver exports no dma-buf of mapping type PCIe: {error}");
        export(0)
    })
}

/// Rounds `len` up to a multiple of `to`.
pub fn round_up(len: usize, to: usize) -> Result<usize, DeviceError> {
    len.checked_next_multiple_of(to).ok_or(DeviceError::Bounds { offset: 0, len, size: isize::MAX as usize })
}

struct HostBuffer {
    core: Arc<Core>,
    bytes: HostBytes,
    device: u64,
}

// SAFETY: this object alone owns the allocation, and any thread may access and free it.
unsafe impl Send for HostBuffer {}
// SAFETY: shared methods access the allocation through raw pointers, never through references. Set-up calls `write` and
// `read` of a buffer from one thread at a time.
unsafe impl Sync for HostBuffer {}

impl DeviceBuffer for HostBuffer {
    fn device_address(&self) -> u64 {
        self.device
    }

    fn host_address(&self) -> Option<*mut u8> {
        Some(self.bytes.base())
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn dma_buf(&self) -> Option<DmaBuf<'_>> {
        None
    }

    fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
        self.bytes.write(offset, bytes)
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.bytes.read(offset, bytes)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.enter() {
            // SAFETY: `host` allocated the memory, and only this drop frees it.
            check_free("cuMemFreeHost", unsafe { cu::cuMemFreeHost(self.bytes.base().cast()) });
        }
    }
}

/// An allocation of GPU memory.
pub struct GpuBuffer {
    core: Arc<Core>,
    handle: Option<cu::CUmemGenericAllocationHandle>,
    base: u64,
    mapped: bool,
    size: usize,
    len: usize,
    fd: Option<OwnedFd>,
}

impl GpuBuffer {
    /// Returns the bytes that the driver allocated: `len`, rounded up.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns whether the memory belongs to the CUDA context of `core`, and is exported or not.
    pub fn is_of(&self, core: &Core, export: bool) -> bool {
        self.core.context == core.context && self.fd.is_some() == export
    }
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
        self.fd.as_ref().map(|fd| DmaBuf {
            fd: fd.as_fd(),
            offset: 0,
            len: self.size,
            kind: MemoryKind::Cuda(self.core.device),
        })
    }

    fn export(&self, pcie: bool) -> Option<Result<OwnedFd, DeviceError>> {
        Some(self.core.enter().and_then(|_current| export_for(pcie, self.base, self.size)))
    }

    fn share(&self) -> Option<Result<(OwnedFd, usize), DeviceError>> {
        let handle = self.handle?;
        let export = |_current| {
            let mut fd = -1i32;
            // SAFETY: this buffer owns the handle. The driver writes one descriptor into a local variable.
            let result = unsafe { cu::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, DESCRIPTOR, 0) };
            check("cuMemExportToShareableHandle", result)?;
            // SAFETY: the driver succeeded and opened this descriptor for the caller, who alone has it.
            Ok((unsafe { OwnedFd::from_raw_fd(fd) }, self.size))
        };
        Some(self.core.enter().and_then(export))
    }

    fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `bounds` checked that the range is within the allocation.
        unsafe { copy_in(&self.core, self.base + offset as u64, bytes) }
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        // SAFETY: `bounds` checked that the range is within the allocation.
        unsafe { copy_out(&self.core, self.base + offset as u64, bytes) }
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        self.fd = None;
        let Ok(_current) = self.core.enter() else { return };
        if self.mapped {
            // SAFETY: `gpu` mapped the range, and only this drop unmaps it.
            check_free("cuMemUnmap", unsafe { cu::cuMemUnmap(self.base, self.size) });
        }
        if self.base != 0 {
            // SAFETY: `gpu` reserved the range, and only this drop frees it.
            check_free("cuMemAddressFree", unsafe { cu::cuMemAddressFree(self.base, self.size) });
        }
        if let Some(handle) = self.handle {
            // SAFETY: `gpu` created the handle, and only this drop releases it.
            check_free("cuMemRelease", unsafe { cu::cuMemRelease(handle) });
        }
    }
}
