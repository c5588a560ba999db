//! The host: atomics, plus a store fence for write-combining memory.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Stores `value` in one 4-byte access, relaxed.
///
/// # Safety
/// `ptr` is valid for writes, 4-byte aligned, and only accessed atomically or by a device meanwhile.
#[inline(always)]
pub unsafe fn mmio_store_u32(ptr: *mut u32, value: u32) {
    // SAFETY: the caller vouches for validity and alignment, and that other threads access the bytes only atomically.
    let cell = unsafe { AtomicU32::from_ptr(ptr) };
    cell.store(value, Ordering::Relaxed);
}

/// Stores `value` in one 8-byte access, relaxed.
///
/// # Safety
/// `ptr` is valid for writes, 8-byte aligned, and only accessed atomically or by a device meanwhile.
#[inline(always)]
pub unsafe fn mmio_store_u64(ptr: *mut u64, value: u64) {
    // SAFETY: the caller vouches for validity and alignment, and that other threads access the bytes only atomically.
    let cell = unsafe { AtomicU64::from_ptr(ptr) };
    cell.store(value, Ordering::Relaxed);
}

/// Stores zeros in the second half of the 128 bytes at `ptr`, in accesses of at least 8 bytes.
///
/// # Safety
/// `ptr` is valid for writes of 128 bytes, 8-byte aligned, and only accessed atomically or by a device meanwhile.
#[inline(always)]
pub unsafe fn mmio_zero_second_half(ptr: *mut u64) {
    // Half as many stores as with 8 bytes each. In assembly, since no atomic type has 16 bytes.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller vouches that the 64 bytes are valid for writes and that other threads access them only
    // atomically; SSE is part of every x86-64.
    unsafe {
        core::arch::asm!(
            "xorps {z}, {z}",
            "movups [{p} + 64], {z}",
            "movups [{p} + 80], {z}",
            "movups [{p} + 96], {z}",
            "movups [{p} + 112], {z}",
            p = in(reg) ptr, z = out(xmm_reg) _, options(nostack, preserves_flags)
        );
    };
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: the caller vouches for validity and that there are no plain accesses; 8-byte alignment is enough for a
    // pair of words.
    unsafe {
        core::arch::asm!(
            "stp xzr, xzr, [{p}, 64]",
            "stp xzr, xzr, [{p}, 80]",
            "stp xzr, xzr, [{p}, 96]",
            "stp xzr, xzr, [{p}, 112]",
            p = in(reg) ptr, options(nostack, preserves_flags)
        );
    };
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    for i in 8..16 {
        // SAFETY: the caller vouches that the eight words are valid for writes and aligned, and that other threads
        // access them only atomically.
        unsafe { mmio_store_u64(ptr.wrapping_add(i), 0) };
    }
}

/// Loads 4 bytes in one access, relaxed.
///
/// # Safety
/// `ptr` is valid for reads, 4-byte aligned, and only accessed atomically or by a device meanwhile.
#[inline(always)]
pub unsafe fn load_u32(ptr: *const u32) -> u32 {
    // SAFETY: the caller vouches for validity and alignment, and that other threads access the bytes only atomically;
    // this only reads.
    let cell = unsafe { AtomicU32::from_ptr(ptr.cast_mut()) };
    cell.load(Ordering::Relaxed)
}

/// Loads 8 bytes in one access, relaxed.
///
/// # Safety
/// `ptr` is valid for reads, 8-byte aligned, and only accessed atomically or by a device meanwhile.
#[inline(always)]
pub unsafe fn load_u64(ptr: *const u64) -> u64 {
    // SAFETY: the caller vouches for validity and alignment, and that other threads access the bytes only atomically;
    // this only reads.
    let cell = unsafe { AtomicU64::from_ptr(ptr.cast_mut()) };
    cell.load(Ordering::Relaxed)
}

/// Stores a word shared between threads, relaxed.
///
/// # Safety
/// As [`mmio_store_u32`].
#[inline(always)]
pub unsafe fn store_u32(ptr: *mut u32, value: u32) {
    // SAFETY: the caller vouches for validity and alignment, and that other threads access the bytes only atomically.
    unsafe { mmio_store_u32(ptr, value) };
}

/// Orders all earlier accesses before all later ones, for threads and for the card.
#[inline(always)]
pub fn fence_system() {
    fence(Ordering::AcqRel);
    // On x86, AcqRel is only a compiler fence. But stores to write-combining memory, which a real ring is, may leave in
    // any order until a store fence.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is part of every x86-64, and a fence accesses nothing.
    unsafe {
        core::arch::x86_64::_mm_sfence()
    };
    // An atomic fence only reaches the inner shareable domain, and a card is outside it. `dsb` rather than `dmb`,
    // because it also drains stores to write-combining memory, as rdma-core's `mmio_flush_writes` does (`dsb st`; here
    // loads are ordered too).
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a barrier accesses nothing.
    unsafe {
        core::arch::asm!("dsb sy", options(nostack, preserves_flags))
    };
}

/// Keeps later loads from passing earlier ones: the completion entry after its phase bit.
#[inline(always)]
pub fn fence_acquire() {
    fence(Ordering::Acquire);
    // What a card wrote needs the outer shareable domain: rdma-core's `udma_from_device_barrier`.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a barrier accesses nothing.
    unsafe {
        core::arch::asm!("dmb oshld", options(nostack, preserves_flags))
    };
}
