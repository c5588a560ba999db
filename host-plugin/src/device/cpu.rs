//! The CPU as device: host memory behind a memfd, which cards register like a GPU's dma-buf.
#![allow(unsafe_code)]

use super::interface::{
    Device, DeviceBuffer, DeviceError, DeviceKind, DeviceMapping, DmaBuf, HostBytes, Imported, Mapping, Use,
    WindowMemory, page_size,
};
use ferrogin_ffi::nccl;
use ferrogin_libfabric::MemoryKind;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::resource::{Resource, getrlimit};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// Host memory as device memory.
#[derive(Debug)]
pub struct CpuDevice {
    /// True if cards register memory through the memfd (the software card), false if by address (hardware, which can't
    /// use a memfd).
    export: bool,
}

impl CpuDevice {
    /// Opens the CPU. With `export`, cards register memory through the memfd.
    pub fn new(export: bool) -> Self {
        Self { export }
    }
}

fn system(call: &'static str, len: usize) -> impl FnOnce(nix::Error) -> DeviceError {
    move |errno| DeviceError::System { call, len, source: errno.into() }
}

impl Device for CpuDevice {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn allocate(&self, len: usize, usage: Use) -> Result<Box<dyn DeviceBuffer>, DeviceError> {
        let size = len
            .checked_next_multiple_of(page_size())
            .and_then(NonZeroUsize::new)
            .ok_or(DeviceError::Bounds { offset: 0, len, size: isize::MAX as usize })?;
        // Beyond this limit the kernel would kill the process with SIGXFSZ.
        let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE).map_err(system("getrlimit", len))?;
        if size.get() as u64 > limit {
            return Err(system("ftruncate", len)(nix::Error::EFBIG));
        }
        let file = memfd_create(c"ferrogin", MFdFlags::MFD_CLOEXEC).map_err(system("memfd_create", len))?;
        nix::unistd::ftruncate(&file, size.get() as i64).map_err(system("ftruncate", len))?;
        let flags = MapFlags::MAP_SHARED;
        // SAFETY: the kernel chooses the address, so the mapping replaces no other. Only this process has the file, so
        // its size doesn't change.
        let base = unsafe { mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags, &file, 0) }
            .map_err(system("mmap", len))?;
        let export = self.export && usage != Use::Tables;
        // SAFETY: the mapping has at least `len` bytes, and the buffer, which keeps this value, unmaps it on drop.
        let bytes = unsafe { HostBytes::new(base.as_ptr().cast(), len) };
        Ok(Box::new(CpuBuffer { base, bytes, size: size.get(), file: export.then_some(file) }))
    }

    unsafe fn map(
        &self,
        address: *mut c_void,
        _len: usize,
        _mapping: Mapping,
    ) -> Result<Box<dyn DeviceMapping>, DeviceError> {
        Ok(Box::new(Identity(address as u64)))
    }

    fn import(&self, parts: &[(OwnedFd, usize)]) -> Result<Imported, DeviceError> {
        let stride = parts.iter().map(|(_, size)| *size).max().unwrap_or(0).next_multiple_of(page_size());
        let len = stride.saturating_mul(parts.len());
        let size = NonZeroUsize::new(len).ok_or(DeviceError::Bounds { offset: 0, len, size: isize::MAX as usize })?;
        let none = ProtFlags::PROT_NONE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address, so the mapping replaces no other.
        let base = unsafe { mmap_anonymous(None, size, none, flags) }.map_err(system("mmap", len))?;
        let mapped = Mapped { base, size: len };
        for (i, (file, size)) in parts.iter().enumerate() {
            // An access beyond the end of a shorter file would end this process.
            let has = nix::sys::stat::fstat(file).map_err(system("fstat", *size))?.st_size;
            let (Some(part), true) = (NonZeroUsize::new(*size), has >= *size as i64) else {
                return Err(DeviceError::Bounds { offset: 0, len: *size, size: has as usize });
            };
            let at = NonZeroUsize::new(base.as_ptr() as usize + i * stride);
            let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
            // SAFETY: the address is in the range that this call has just reserved, and no one uses it yet.
            unsafe { mmap(at, part, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags, file, 0) }
                .map_err(system("mmap", *size))?;
        }
        Ok(Imported { base: base.as_ptr() as u64, stride: stride as u64, _mapped: Box::new(mapped) })
    }

    fn window(&self, address: *mut c_void, len: usize, _ptr_type: i32) -> Result<WindowMemory, DeviceError> {
        check_mapped(address as usize, len)?;
        Ok(WindowMemory::Address(MemoryKind::System))
    }

    fn ptr_support(&self) -> i32 {
        nccl::PTR_HOST | nccl::PTR_CUDA | nccl::PTR_DMABUF
    }
}

/// Checks that every page of the `len` bytes at `address` is mapped.
pub(super) fn check_mapped(address: usize, len: usize) -> Result<(), DeviceError> {
    let not_mapped = DeviceError::NotMapped { address, len };
    let start = address & !(page_size() - 1);
    let Some(end) = address.checked_add(len) else { return Err(not_mapped) };
    let mut pages = [0u8; 1024];
    let mut at = start;
    while at < end {
        let span = (end - at).min(pages.len() * page_size());
        // SAFETY: mincore writes one byte for each page of `span`, and `pages` has room for them. It reads no user
        // memory.
        let result = unsafe { libc::mincore(at as *mut c_void, span, pages.as_mut_ptr()) };
        if result != 0 {
            return Err(not_mapped);
        }
        at += span;
    }
    Ok(())
}

/// A range of addresses of this process.
struct Mapped {
    base: NonNull<c_void>,
    size: usize,
}

// SAFETY: the value only unmaps the range, which any thread may do.
unsafe impl Send for Mapped {}
// SAFETY: no method of a shared value uses the address.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `import` reserved the range for this value, and only this drop unmaps it.
        let _ = unsafe { munmap(self.base, self.size) };
    }
}

struct CpuBuffer {
    base: NonNull<c_void>,
    bytes: HostBytes,
    size: usize,
    file: Option<OwnedFd>,
}

// SAFETY: this object alone owns the mapping, and any thread may access and unmap it.
unsafe impl Send for CpuBuffer {}
// SAFETY: shared methods access the mapping through raw pointers, never through references. Set-up calls `write` and
// `read` of a buffer from one thread at a time.
unsafe impl Sync for CpuBuffer {}

impl DeviceBuffer for CpuBuffer {
    fn device_address(&self) -> u64 {
        self.bytes.base() as u64
    }

    fn host_address(&self) -> Option<*mut u8> {
        Some(self.bytes.base())
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }

    fn dma_buf(&self) -> Option<DmaBuf<'_>> {
        self.file.as_ref().map(|file| DmaBuf { fd: file.as_fd(), offset: 0, len: self.size, kind: MemoryKind::System })
    }

    fn share(&self) -> Option<Result<(OwnedFd, usize), DeviceError>> {
        let clone = |file: &OwnedFd| {
            file.try_clone().map_err(|source| DeviceError::System { call: "dup", len: self.size, source })
        };
        self.file.as_ref().map(|file| Ok((clone(file)?, self.size)))
    }

    fn write(&self, offset: usize, bytes: &[MaybeUninit<u8>]) -> Result<(), DeviceError> {
        self.bytes.write(offset, bytes)
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.bytes.read(offset, bytes)
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        // SAFETY: `allocate` created this mapping, and only this drop unmaps it. The owner drops the cards'
        // registrations of it first.
        if let Err(errno) = unsafe { munmap(self.base, self.size) } {
            crate::warn!("munmap of {} bytes of device memory failed: {errno}", self.size);
        }
    }
}

struct Identity(u64);

impl DeviceMapping for Identity {
    fn device_address(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::super::bytes_of;
    use super::*;

    #[test]
    fn allocation_is_zeroed_aligned_and_shared_with_its_descriptor() {
        let device = CpuDevice::new(true);
        let buffer = device.allocate(5000, Use::Card).unwrap();
        assert_eq!(buffer.device_address() % page_size() as u64, 0);
        assert_eq!(buffer.len(), 5000);
        let mut bytes = vec![0xa5u8; 5000];
        buffer.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|b| *b == 0));
        buffer.write(4992, bytes_of(&[0x0102_0304_0506_0708u64])).unwrap();
        let dma_buf = buffer.dma_buf().unwrap();
        assert_eq!((dma_buf.offset, dma_buf.len), (0, 8192));
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&dma_buf.fd));
        let content = std::fs::read(path).unwrap();
        assert_eq!(content[4992..5000], 0x0102_0304_0506_0708u64.to_le_bytes());
    }

    #[test]
    fn tables_and_hardware_memory_have_no_descriptor() {
        assert!(CpuDevice::new(true).allocate(1, Use::Tables).unwrap().dma_buf().is_none());
        assert!(CpuDevice::new(false).allocate(1, Use::Card).unwrap().dma_buf().is_none());
    }

    #[test]
    fn out_of_bounds_access_is_refused() {
        let buffer = CpuDevice::new(true).allocate(8, Use::Tables).unwrap();
        assert!(buffer.write(1, bytes_of(&[0u64])).is_err());
        assert!(buffer.read(usize::MAX, &mut [0u8; 2]).is_err());
        assert!(buffer.read(8, &mut []).is_ok());
        assert!(CpuDevice::new(true).allocate(usize::MAX, Use::Tables).is_err());
    }

    #[test]
    fn unmapped_window_is_refused() {
        let device = CpuDevice::new(true);
        let buffer = device.allocate(3 * page_size(), Use::Tables).unwrap();
        let base = buffer.device_address() as *mut c_void;
        assert!(device.window(base, 3 * page_size(), nccl::PTR_CUDA).is_ok());
        assert!(device.window(16 as *mut c_void, 8, nccl::PTR_HOST).is_err());
        assert!(device.window(base, usize::MAX, nccl::PTR_HOST).is_err());
        drop(buffer);
        // Another test may have mapped this address by now, but not 64 GiB.
        assert!(device.window(base, 64 << 30, nccl::PTR_CUDA).is_err());
    }
}
