//! Buffers that the provider reads and writes during operations: raw memory, never borrowed meanwhile.

use std::io;
use std::ptr::{self, NonNull};

use ferrogin_libfabric::Error;

/// Buffers of one size in one mapping: the kernel gives a page when it is used first, however much memory the process used and freed before.
pub(super) struct Pool {
    base: NonNull<u8>,
    bytes: usize,
    stride: usize,
    size: usize,
    count: usize,
}

// SAFETY: the pool owns the memory; the endpoint that owns the pool decides which code uses which buffer.
unsafe impl Send for Pool {}

impl Pool {
    /// `count` buffers of `size` bytes, zeroed; the first is at the start of a page.
    ///
    /// # Errors
    /// That is nothing, or overflows; the system gives no memory.
    pub fn new(count: usize, size: usize) -> Result<Self, Error> {
        let stride = size.checked_next_multiple_of(64).unwrap_or(usize::MAX);
        let bytes = stride.checked_mul(count).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| Error::Argument {
            what: format!("message endpoint: {count} buffers of {size} bytes are out of range"),
        })?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: the kernel chooses a free address, so the new mapping replaces no memory in use.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
        let base = NonNull::new(base.cast()).filter(|_| base != libc::MAP_FAILED).ok_or_else(|| {
            let error = io::Error::last_os_error();
            Error::Call { call: "mmap", code: error.raw_os_error().unwrap_or(libc::ENOMEM), text: error.to_string() }
        })?;
        Ok(Self { base, bytes, stride, size, count })
    }

    /// Bytes of one buffer.
    pub fn size(&self) -> usize {
        self.size
    }

    /// First byte of a buffer.
    pub fn buffer(&self, index: usize) -> *mut u8 {
        assert!(index < self.count, "buffer {index} of {}", self.count);
        self.base.as_ptr().wrapping_add(index * self.stride)
    }

    /// The first `len` bytes of a buffer.
    ///
    /// # Safety
    /// No operation on this buffer is under way as long as the slice lives, and no other slice of it exists.
    pub unsafe fn bytes(&self, index: usize, len: usize) -> &[u8] {
        let len = len.min(self.size);
        // SAFETY: the bytes are inside the mapping and initialised; the caller excludes other uses of the buffer.
        unsafe { std::slice::from_raw_parts(self.buffer(index), len) }
    }

    /// A whole buffer, to write.
    ///
    /// # Safety
    /// As [`Pool::bytes`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, index: usize) -> &mut [u8] {
        // SAFETY: the bytes are inside the mapping and initialised; the caller excludes other uses of the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.buffer(index), self.size) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: `new` mapped the range, and no operation of the endpoint uses it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// A receive into this buffer of the receive pool.
    Receive(u32),
    /// A send of this slot.
    Send(u32),
    /// A control message to this peer.
    Control(u32),
    /// A receive for a long message.
    ReceiveLong(u32),
}

pub(super) type Context = ferrogin_libfabric::Context<Operation>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_do_not_overlap() {
        let pool = Pool::new(3, 100).unwrap();
        for index in 0..3 {
            // SAFETY: no operation uses the pool.
            unsafe { pool.bytes_mut(index) }.fill(index as u8 + 1);
        }
        for index in 0..3 {
            // SAFETY: no operation uses the pool.
            assert!(unsafe { pool.bytes(index, 100) }.iter().all(|&byte| byte == index as u8 + 1));
        }
        assert!(Pool::new(0, 8).is_err());
        assert!(Pool::new(usize::MAX, 4096).is_err());
    }

    /// Pages of the pool that are in memory.
    fn touched(pool: &Pool) -> usize {
        let mut pages = vec![0; pool.bytes.div_ceil(4096)];
        // SAFETY: the range is the pool's mapping, and `pages` has a byte for each of its pages.
        let code = unsafe { libc::mincore(pool.base.as_ptr().cast(), pool.bytes, pages.as_mut_ptr()) };
        assert_eq!(code, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn new_pool_touches_no_pages() {
        // Of memory that was freed, the allocator gives a later pool what it must zero.
        for _ in 0..3 {
            let pool = Pool::new(128, 6_000).unwrap();
            // Without huge pages, where the kernel has them.
            // SAFETY: the range is the pool's mapping, and its contents stay.
            unsafe { libc::madvise(pool.base.as_ptr().cast(), pool.bytes, libc::MADV_NOHUGEPAGE) };
            assert_eq!(pool.base.addr().get() % 4096, 0);
            assert_eq!(touched(&pool), 0);
            // SAFETY: no operation is under way on a new pool.
            assert!(unsafe { pool.bytes(127, 6_000) }.iter().all(|byte| *byte == 0));
            // SAFETY: no operation is under way on a new pool.
            unsafe { pool.bytes_mut(0) }.fill(1);
            assert!((1..6).contains(&touched(&pool)));
        }
    }
}
