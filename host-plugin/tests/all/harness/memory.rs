//! Memory of the plugin's device, CPU or GPU.

use ferrogin_ffi::nccl;
use mini_nccl::{DeviceMemory, GpuMemory};
use nccl_gin_ferrogin::device::cuda::CudaDevice;
use nccl_gin_ferrogin::device::{Device, DeviceBuffer, Use, WindowMemory, bytes_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Part of a GPU allocation, and its dma-buf, which begins at the first byte's page.
struct Part {
    buffer: Box<dyn DeviceBuffer>,
    skip: usize,
    len: usize,
    dma_buf: (OwnedFd, u64),
}

/// Allocates memory that the plugin registers as its device's: GPU memory with FERROGIN_DEVICE=cuda, otherwise host
/// memory.
pub fn device_memory(len: usize) -> Arc<DeviceMemory> {
    if std::env::var("FERROGIN_DEVICE").is_ok_and(|device| device == "cuda") {
        return gpu_memory(0, len);
    }
    Arc::new(DeviceMemory::alloc(len).expect("memory"))
}

/// Allocates `len` bytes of GPU memory, `skip` bytes into their allocation.
pub fn gpu_memory(skip: usize, len: usize) -> Arc<DeviceMemory> {
    // A device for hardware cards, so its memory has dma-bufs.
    let gpu = CudaDevice::open(false).expect("a GPU");
    let buffer = gpu.allocate(skip + len, Use::Window).expect("memory of the GPU");
    let window = gpu.window((buffer.device_address() as usize + skip) as *mut _, len, nccl::PTR_CUDA);
    let Ok(WindowMemory::DmaBuf { fd, offset, .. }) = window else { panic!("{window:?} is not a dma-buf") };
    Arc::new(DeviceMemory::of_gpu(Box::new(Part { buffer, skip, len, dma_buf: (fd, offset) })))
}

impl GpuMemory for Part {
    fn address(&self) -> u64 {
        self.buffer.device_address() + self.skip as u64
    }

    fn len(&self) -> usize {
        self.len
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), String> {
        self.buffer.write(self.skip + offset, bytes_of(bytes)).map_err(|error| error.to_string())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), String> {
        self.buffer.read(self.skip + offset, bytes).map_err(|error| error.to_string())
    }

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        Some((self.dma_buf.0.as_fd(), self.dma_buf.1))
    }
}
