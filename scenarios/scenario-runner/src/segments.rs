//! Window memory as PyTorch and NCCL make it, in place of the plugin's own: several allocations side by side, as
//! PyTorch's expandable segments are, or memory of a NUMA node of the host, as NCCL's queues are.
#![allow(unsafe_code)]

use crate::driver::{check, cuda};
use cudarc::driver::sys as cu;
use mini_nccl::GpuMemory;
use std::ptr::null_mut;

/// The memory of windows on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WindowMemory {
    /// One allocation of the plugin.
    #[default]
    Whole,
    /// Several allocations of GPU memory; the window begins near the end of the first one.
    Segments,
    /// Host memory of node 0.
    Host,
}

/// What the first segment keeps of the window: a multiple of every page size.
const IN_FIRST: usize = 64 << 10;

/// Mapped memory, unmapped and freed on drop.
pub struct Mapped {
    context: cu::CUcontext,
    base: u64,
    /// Bytes of each mapped allocation.
    pieces: Vec<usize>,
    reserved: usize,
    skip: usize,
    len: usize,
    on_host: bool,
}

// SAFETY: any thread may use the context and the memory, which only this value frees.
unsafe impl Send for Mapped {}
// SAFETY: as above; the driver orders its copies itself.
unsafe impl Sync for Mapped {}

fn place(kind: cu::CUmemLocationType, id: i32) -> cu::CUmemLocation {
    cu::CUmemLocation { type_: kind, id }
}

impl Mapped {
    /// Maps memory for a window of `len` bytes, for kernels of the current context.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(device: cu::CUdevice, len: usize, memory: WindowMemory) -> Result<Self, String> {
        let on_host = memory == WindowMemory::Host;
        let gpu = place(cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, device);
        let node = place(cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
        // SAFETY: the C struct consists of integers and a pointer, for which zero is valid.
        let mut prop: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location = if on_host { node } else { gpu };
        prop.allocFlags.gpuDirectRDMACapable = u8::from(!on_host);
        let mut unit = 0;
        let minimum = cu::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        cuda!(cuMemGetAllocationGranularity(&mut unit, &prop, minimum))?;
        let skip = if memory == WindowMemory::Segments { unit.saturating_sub(IN_FIRST) } else { 0 };
        let reserved = (skip + len).next_multiple_of(unit);
        let piece = if memory == WindowMemory::Segments { unit } else { reserved };
        let mut mapped = Self { context: null_mut(), base: 0, pieces: Vec::new(), reserved, skip, len, on_host };
        cuda!(cuCtxGetCurrent(&mut mapped.context))?;
        cuda!(cuMemAddressReserve(&mut mapped.base, reserved, 0, 0, 0))?;
        for at in (0..reserved).step_by(piece) {
            let mut handle = 0;
            cuda!(cuMemCreate(&mut handle, piece, &prop, 0))?;
            let result = cuda!(cuMemMap(mapped.base + at as u64, piece, 0, handle, 0));
            // The mapping keeps the memory.
            cuda!(cuMemRelease(handle))?;
            result?;
            mapped.pieces.push(piece);
        }
        let open = |location| cu::CUmemAccessDesc {
            location,
            flags: cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let access = [open(gpu), open(node)];
        cuda!(cuMemSetAccess(mapped.base, reserved, access.as_ptr(), if on_host { 2 } else { 1 }))?;
        cuda!(cuMemsetD8_v2(mapped.base, 0, reserved))?;
        Ok(mapped)
    }

    /// Runs `act` with the context current.
    fn within(&self, act: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        cuda!(cuCtxPushCurrent_v2(self.context))?;
        let result = act();
        let mut popped = null_mut();
        result.and(cuda!(cuCtxPopCurrent_v2(&mut popped)))
    }

    fn check(&self, offset: usize, len: usize) -> Result<u64, String> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if inside {
            Ok(self.address() + offset as u64)
        } else {
            Err(format!("{len} bytes at {offset} of {}", self.len))
        }
    }
}

impl GpuMemory for Mapped {
    fn address(&self) -> u64 {
        self.base + self.skip as u64
    }

    fn len(&self) -> usize {
        self.len
    }

    fn is_on_host(&self) -> bool {
        self.on_host
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), String> {
        let to = self.check(offset, bytes.len())?;
        self.within(|| cuda!(cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len())))
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), String> {
        let from = self.check(offset, bytes.len())?;
        self.within(|| cuda!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len())))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let mut at = self.base;
        for piece in &self.pieces {
            let _ = cuda!(cuMemUnmap(at, *piece));
            at += *piece as u64;
        }
        if self.base != 0 {
            let _ = cuda!(cuMemAddressFree(self.base, self.reserved));
        }
    }
}
