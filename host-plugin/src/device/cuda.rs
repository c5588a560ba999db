//! The GPU as device, through the CUDA driver, which is loaded at run time.
//!
//! A card works with GPU memory from `cuMemCreate` with the GPUDirect RDMA property, and registers it as a dma-buf; its
//! rings and doorbells are mapped into the GPU. A software card is a thread of this process, and can only access the
//! software GPU's dma-bufs: that GPU's driver has a function for it. With any other GPU, a software card's memory is
//! host memory mapped into the GPU.
#![allow(unsafe_code)]

mod capabilities;
mod driver;
mod gdrcopy;
mod mapping;
mod memory;
mod pool;
mod words;

use super::interface::{
    Adds, Device, DeviceBuffer, DeviceError, DeviceKind, DeviceMapping, Imported, Mapping, Use, WindowMemory,
    WordMapping, page_size,
};
use capabilities::{ATOMIC_REDUCTION_SUPPORTED, Flush, attribute, check_needs, versions};
use cudarc::driver::sys as cu;
use driver::{Core, check};
use ferrogin_ffi::nccl;
use ferrogin_libfabric::MemoryKind;
use gdrcopy::GdrCopy;
use std::ffi::{CStr, c_void};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

/// A GPU.
pub struct CudaDevice {
    core: Arc<Core>,
    /// False for a software card that the driver doesn't let access the GPU's memory.
    reachable: bool,
    flush: Flush,
    /// True if streams have atomic reductions.
    reduces: bool,
    /// Opened when the first window is mapped; `None` if this machine doesn't have it.
    gdrcopy: OnceLock<Option<Arc<GdrCopy>>>,
    /// True if the CPU's atomic operations on GPU memory are atomic for the GPU too.
    native_atomics: bool,
}

impl CudaDevice {
    /// Opens the GPU whose context is current on this thread, or the first GPU if none is. NCCL always calls a plugin
    /// with the context of the communicator's GPU current; other callers must make their rank's GPU current themselves.
    ///
    /// # Errors
    /// [`DeviceError::NoGpu`] if there is no driver or no suitable GPU; otherwise the driver's error.
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
        let reachable = !software || capabilities::lets_software_cards_in();
        check_needs(device, reachable)?;
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
        let (core, flush, gdrcopy) = (Arc::new(core), Flush::of(device, software), OnceLock::new());
        Ok(Self { core, reachable, flush, reduces, gdrcopy, native_atomics })
    }
}

impl Device for CudaDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn allocate(&self, len: usize, usage: Use) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        match usage {
            Use::Tables => pool::allocate(&self.core, len, false),
            Use::Window => Ok(Box::new(memory::gpu(&self.core, len, self.reachable)?)),
            Use::Card if self.reachable => pool::allocate(&self.core, len, true),
            Use::Card | Use::Shared => memory::host(&self.core, len),
        }
    }

    unsafe fn map(
        &self,
        address: *mut c_void,
        len: usize,
        mapping: Mapping,
    ) -> Result<Box<dyn DeviceMapping>, DeviceError> {
        // SAFETY: this function's caller keeps the bytes mapped.
        unsafe { mapping::map(&self.core, address, len, mapping) }
    }

    fn import(&self, parts: &[(OwnedFd, usize)]) -> Result<Imported, DeviceError> {
        memory::import(&self.core, parts)
    }

    fn window(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Result<WindowMemory, DeviceError> {
        if ptr_type == nccl::PTR_HOST {
            super::cpu::check_mapped(address as usize, len)?;
            return Ok(WindowMemory::Address(MemoryKind::System));
        }
        let current = self.core.enter()?;
        words::parts(&current, address as u64, len).ok_or(DeviceError::WrongMemory {
            address: address as usize,
            problem: "not GPU memory of the given size",
            fix: "register memory from ncclMemAlloc or cuMemCreate, or pass NCCL_PTR_HOST for host memory",
        })?;
        let kind = MemoryKind::Cuda(self.core.device);
        if !self.reachable {
            return Ok(WindowMemory::Address(kind));
        }
        let start = address as u64 & !(page_size() as u64 - 1);
        let inner = address as u64 - start;
        let span = memory::round_up(len.saturating_add(inner as usize), page_size())?;
        Ok(WindowMemory::DmaBuf { fd: memory::export_range(start, span)?, offset: inner, kind })
    }

    fn ptr_support(&self) -> i32 {
        nccl::PTR_HOST | nccl::PTR_CUDA | nccl::PTR_DMABUF
    }

    fn adds(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Adds {
        let coherent = || {
            self.core.enter().is_ok_and(|current| {
                let parts = words::parts(&current, address as u64, len);
                parts.is_some_and(|all| all.into_iter().all(|at| words::is_coherent(self.native_atomics, &current, at)))
            })
        };
        match self.reduces {
            _ if ptr_type == nccl::PTR_HOST || coherent() => Adds::Cpu,
            true => Adds::Stream,
            false => Adds::Copy,
        }
    }

    fn map_words(&self, address: *mut c_void, len: usize) -> Option<WordMapping> {
        let gdrcopy = self.gdrcopy.get_or_init(GdrCopy::open).as_ref()?;
        let _current = self.core.enter().ok()?;
        match gdrcopy.map(address as u64, len) {
            Ok(mapped) => Some(WordMapping { distance: mapped.distance(), _mapped: Box::new(mapped) }),
            Err(error) => {
                crate::warn!("GDRCopy can't map {len} bytes of GPU memory at {address:p}: {error}");
                None
            }
        }
    }

    unsafe fn add(&self, adds: Adds, words: &[(u64, u64)]) -> Result<(), DeviceError> {
        let add = if adds == Adds::Stream { words::add_by_stream } else { words::add_by_copies };
        // SAFETY: this function's caller keeps the words mapped.
        unsafe { add(&self.core, words) }
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

    fn needs_flush(&self) -> bool {
        self.flush != Flush::NotNeeded
    }

    fn flush_writes(&self) -> Result<(), DeviceError> {
        if !self.needs_flush() {
            return Ok(());
        }
        let _current = self.core.enter()?;
        let context = cu::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = cu::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
        // SAFETY: the call takes no pointers, and the context is current.
        check("cuFlushGPUDirectRDMAWrites", unsafe { cu::cuFlushGPUDirectRDMAWrites(context, scope) })
    }

    fn gpu(&self) -> Option<(usize, String)> {
        let mut address = [0u8; 32];
        // SAFETY: the driver writes at most the given number of bytes into a local array.
        let result =
            unsafe { cu::cuDeviceGetPCIBusId(address.as_mut_ptr().cast(), address.len() as i32 - 1, self.core.device) };
        check("cuDeviceGetPCIBusId", result).ok()?;
        let address = CStr::from_bytes_until_nul(&address).ok()?;
        // The driver uses upper case, sysfs lower case.
        Some((usize::try_from(self.core.device).ok()?, address.to_str().ok()?.to_ascii_lowercase()))
    }
}

#[cfg(test)]
mod tests;
