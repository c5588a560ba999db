//! Buffers that the provider reads and writes during operations: raw memory, never borrowed meanwhile.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Bytes of a page.
const PAGE: usize = 4096;

/// Buffers of one size in one allocation. Unused pages are never touched.
pub(super) struct Pool {
    allocation: NonNull<u8>,
    layout: Layout,
    /// The first buffer, at the start of a page.
    base: *mut u8,
    stride: usize,
    size: usize,
    count: usize,
}

// SAFETY: the pool owns the memory; the endpoint that owns the pool decides which code uses which buffer.
unsafe impl Send for Pool {}

impl Pool {
    /// `count` buffers of `size` bytes, zeroed. None when that overflows or is empty.
    pub fn new(count: usize, size: usize) -> Option<Self> {
        let stride = size.checked_next_multiple_of(64)?;
        let bytes = stride.checked_mul(count).filter(|bytes| *bytes > 0)?;
        // std zeroes memory of a larger alignment itself, which touches every page.
        let layout = Layout::from_size_align(bytes.checked_add(PAGE - 1)?, 16).ok()?;
        // SAFETY: the size is not zero.
        let allocation = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(allocation).unwrap_or_else(|| handle_alloc_error(layout));
        let to_page = allocation.addr().get().wrapping_neg() % PAGE;
        // SAFETY: inside the allocation, which has PAGE - 1 bytes more than the buffers.
        let base = unsafe { allocation.as_ptr().add(to_page) };
        Some(Self { allocation, layout, base, stride, size, count })
    }

    /// Bytes of one buffer.
    pub fn size(&self) -> usize {
        self.size
    }

    /// First byte of a buffer.
    pub fn buffer(&self, index: usize) -> *mut u8 {
        assert!(index < self.count, "buffer {index} of {}", self.count);
        // SAFETY: inside the allocation, as just checked.
        unsafe { self.base.add(index * self.stride) }
    }

    /// The first `len` bytes of a buffer.
    ///
    /// # Safety
    /// No operation on this buffer is under way as long as the slice lives, and no other slice of it exists.
    pub unsafe fn bytes(&self, index: usize, len: usize) -> &[u8] {
        let len = len.min(self.size);
        // SAFETY: the bytes are inside the allocation and initialised; the caller excludes other uses of the buffer.
        unsafe { std::slice::from_raw_parts(self.buffer(index), len) }
    }

    /// A whole buffer, to write.
    ///
    /// # Safety
    /// As [`Pool::bytes`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, index: usize) -> &mut [u8] {
        // SAFETY: the bytes are inside the allocation and initialised; the caller excludes other uses of the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.buffer(index), self.size) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
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
        assert!(Pool::new(0, 8).is_none());
        assert!(Pool::new(usize::MAX, 4096).is_none());
    }

    fn resident_pages() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn pool_starts_at_a_page_and_touches_no_pages() {
        let before = resident_pages();
        let pool = Pool::new(4096, 60_000).unwrap();
        assert_eq!(pool.buffer(0).addr() % PAGE, 0);
        let touched = resident_pages().saturating_sub(before);
        assert!(touched < 30_000, "{touched} of 60,000 pages");
        // SAFETY: no operation is under way on a new pool.
        assert!(unsafe { pool.bytes(4095, 60_000) }.iter().all(|byte| *byte == 0));
    }
}
