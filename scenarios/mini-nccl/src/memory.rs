//! Memory for windows: page-aligned, zeroed, and written by a card and its owner at once.
//!
//! It is either host memory behind a memfd, which cards register the way they register a GPU's dma-buf, or GPU memory
//! that the caller allocates. All access is by checked offset: through raw pointers, because a peer can write the
//! memory at any time, or through copies by the GPU's driver.
#![allow(unsafe_code)]

use crate::error::Error;
use ferrogin_ffi::nccl;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sizes are rounded up to a multiple of this, as for device memory.
pub const GRANULARITY: usize = 64 << 10;

/// One GPU allocation, freed on drop, and the copies from and to it.
pub trait GpuMemory: Send + Sync {
    /// Returns the address for kernels and cards.
    fn address(&self) -> u64;

    /// Returns the bytes.
    fn len(&self) -> usize;

    /// Returns whether the allocation has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true for memory of the host that kernels can use too.
    fn is_on_host(&self) -> bool {
        false
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// The driver fails.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), String>;

    /// Copies from `offset` to `bytes`.
    ///
    /// # Errors
    /// The driver fails.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), String>;

    /// Returns a dma-buf of the memory, and the offset of the memory's first byte in it.
    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }
}

/// One allocation; unmapped on drop.
pub struct DeviceMemory {
    base: NonNull<u8>,
    len: usize,
    home: Home,
}

enum Home {
    Host(OwnedFd),
    Gpu(Box<dyn GpuMemory>),
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:p}", self.len, self.base)
    }
}

// SAFETY: only this value owns the mapping, and any thread may access and unmap it.
unsafe impl Send for DeviceMemory {}
// SAFETY: shared methods access the mapping through raw pointers and atomics, never through references to plain memory.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Allocates at least `bytes`, zeroed.
    ///
    /// # Errors
    /// The system has too little memory.
    pub fn alloc(bytes: usize) -> Result<DeviceMemory, Error> {
        let failed = |call, source| Error::Memory { call, bytes, source };
        let len = bytes.max(1).checked_next_multiple_of(GRANULARITY);
        let len = len.filter(|&len| isize::try_from(len).is_ok());
        let len = len.ok_or_else(|| Error::Usage(format!("{bytes} bytes are more than an address space has")))?;
        let fd = memfd_create("mini-nccl", MFdFlags::MFD_CLOEXEC).map_err(|why| failed("memfd_create", why.into()))?;
        ftruncate(&fd, len as libc::off_t).map_err(|why| failed("ftruncate", why.into()))?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so the mapping replaces no other.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        match NonNull::new(at.cast::<u8>()) {
            Some(base) if at != libc::MAP_FAILED => Ok(DeviceMemory { base, len, home: Home::Host(fd) }),
            _ => Err(failed("mmap", io::Error::last_os_error())),
        }
    }

    /// Wraps GPU memory.
    pub fn of_gpu(memory: Box<dyn GpuMemory>) -> DeviceMemory {
        let base = NonNull::new(memory.address() as *mut u8).expect("the driver allocates at no null address");
        DeviceMemory { base, len: memory.len(), home: Home::Gpu(memory) }
    }

    /// Returns the first byte. The host may use it only if the memory is the host's.
    pub fn as_ptr(&self) -> *mut c_void {
        self.base.as_ptr().cast()
    }

    /// Returns the bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the file descriptor for `regMrSymDmaBuf`, and the first byte's offset in it.
    pub fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.home {
            Home::Host(fd) => Some((fd.as_fd(), 0)),
            Home::Gpu(memory) => memory.dma_buf(),
        }
    }

    /// Returns the argument `type` of `regMrSym`.
    pub fn kind(&self) -> c_int {
        match &self.home {
            Home::Gpu(memory) if !memory.is_on_host() => nccl::PTR_CUDA,
            _ => nccl::PTR_HOST,
        }
    }

    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.len);
        assert!(inside, "{bytes} bytes at {offset} are outside of an allocation of {}", self.len);
        self.base.as_ptr().wrapping_add(offset)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(matches!(self.home, Home::Host(_)), "the host has no words of a GPU's memory: use read and write");
        let at = self.at(offset, 8).cast::<u64>();
        assert!(at.is_aligned(), "offset {offset} is not a multiple of 8");
        // SAFETY: the assert checked the alignment, `at` the bounds, and `self` keeps the memory mapped. Concurrent
        // writers, including the card, write whole words.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// Reads the 8-byte word at `offset` with acquire ordering. Panics out of bounds.
    pub fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Writes the 8-byte word at `offset` with release ordering. Panics out of bounds.
    pub fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// Atomically replaces the 8-byte word at `offset` and returns its old value. Panics out of bounds.
    pub fn swap(&self, offset: usize, value: u64) -> u64 {
        self.word(offset).swap(value, Ordering::AcqRel)
    }

    /// Copies `bytes` to `offset`. Panics out of bounds, or if the GPU's driver fails.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        if let Home::Gpu(memory) = &self.home {
            return memory.write(offset, bytes).expect("the driver copies to the GPU");
        }
        // SAFETY: `at` checked the bounds of `to`. A borrowed slice does not overlap the mapping, which no reference
        // points into.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies from `offset` to `bytes`. Panics out of bounds, or if the GPU's driver fails.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        if let Home::Gpu(memory) = &self.home {
            return memory.read(offset, bytes).expect("the driver copies from the GPU");
        }
        // SAFETY: `at` checked the bounds of `from`. A borrowed slice does not overlap the mapping, which no reference
        // points into.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Sets all bytes to `byte`.
    pub fn fill(&self, byte: u8) {
        if let Home::Gpu(_) = &self.home {
            return self.write(0, &vec![byte; self.len]);
        }
        // SAFETY: `base` and `len` are those of the mapping.
        unsafe { std::ptr::write_bytes(self.base.as_ptr(), byte, self.len) };
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Home::Host(_) = self.home {
            // SAFETY: `alloc` made this mapping, and only this drop unmaps it; borrows of `self` have ended.
            unsafe { libc::munmap(self.as_ptr(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::AssertUnwindSafe;
    use std::sync::Mutex;

    /// A driver whose copies the test can see.
    struct Copies(Mutex<Vec<u8>>);

    impl GpuMemory for Copies {
        fn address(&self) -> u64 {
            16
        }

        fn len(&self) -> usize {
            64
        }

        fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), String> {
            self.0.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), String> {
            bytes.copy_from_slice(&self.0.lock().unwrap()[offset..offset + bytes.len()]);
            Ok(())
        }
    }

    #[test]
    fn gpu_memory_is_only_copied() {
        let memory = DeviceMemory::of_gpu(Box::new(Copies(Mutex::new(vec![0; 64]))));
        memory.fill(7);
        memory.write(8, &[1, 2]);
        let mut bytes = [0; 4];
        memory.read(7, &mut bytes);
        assert_eq!((bytes, memory.kind(), memory.dma_buf().is_none()), ([7, 1, 2, 7], nccl::PTR_CUDA, true));
        assert!(
            std::panic::catch_unwind(AssertUnwindSafe(|| memory.load(0))).is_err(),
            "no load at an address of the GPU"
        );
        assert!(std::panic::catch_unwind(AssertUnwindSafe(|| memory.write(63, &[0; 2]))).is_err());
    }

    #[test]
    fn words_and_bytes_share_memory() {
        let memory = DeviceMemory::alloc(10).unwrap();
        assert_eq!(memory.len(), GRANULARITY);
        memory.fill(0xa5);
        memory.store(8, 0x0102_0304_0506_0708);
        let mut bytes = [0; 10];
        memory.read(7, &mut bytes);
        assert_eq!(bytes, [0xa5, 8, 7, 6, 5, 4, 3, 2, 1, 0xa5]);
        memory.write(8, &[1; 8]);
        assert_eq!(memory.load(8), 0x0101_0101_0101_0101);
        assert!(DeviceMemory::alloc(usize::MAX).is_err());
        assert!(std::panic::catch_unwind(AssertUnwindSafe(|| memory.load(GRANULARITY - 4))).is_err());
    }
}
