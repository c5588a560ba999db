//! What the processor does for a card: stores to its memory, and fences that it honours.
//!
//! Rings and doorbells are written with relaxed stores and ordered by [`fence_system`]: a work request, a fence, the
//! doorbell. On the GPU the stores are MMIO stores, so that they reach the card one by one and unmerged.

/// Stores a word of a work request.
///
/// # Safety
///
/// `at` is valid for an 8-byte aligned write, and nothing accesses it meanwhile other than atomically.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub unsafe fn mmio_store_u64(at: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the address.
    let word = unsafe { core::sync::atomic::AtomicU64::from_ptr(at) };
    word.store(value, core::sync::atomic::Ordering::Relaxed);
}

/// Stores a doorbell.
///
/// # Safety
///
/// `at` is valid for a 4-byte aligned write, and nothing accesses it meanwhile other than atomically.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub unsafe fn mmio_store_u32(at: *mut u32, value: u32) {
    // SAFETY: the caller vouches for the address.
    let word = unsafe { core::sync::atomic::AtomicU32::from_ptr(at) };
    word.store(value, core::sync::atomic::Ordering::Relaxed);
}

/// Orders this thread's earlier accesses before its later ones for every processor and device.
#[cfg(not(target_arch = "nvptx64"))]
#[inline(always)]
pub fn fence_system() {
    core::sync::atomic::fence(core::sync::atomic::Ordering::AcqRel);
}

/// Stores a word of a work request.
///
/// # Safety
///
/// `at` is a global address valid for an 8-byte aligned write.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn mmio_store_u64(at: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        core::arch::asm!("st.mmio.relaxed.sys.global.b64 [{0}], {1};", in(reg64) at, in(reg64) value, options(nostack));
    }
}

/// Stores a doorbell.
///
/// # Safety
///
/// `at` is a global address valid for a 4-byte aligned write.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn mmio_store_u32(at: *mut u32, value: u32) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        core::arch::asm!("st.mmio.relaxed.sys.global.b32 [{0}], {1};", in(reg64) at, in(reg32) value, options(nostack));
    }
}

/// Orders this thread's earlier accesses before its later ones for every processor and device.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub fn fence_system() {
    // SAFETY: a fence touches no memory.
    unsafe { core::arch::asm!("fence.acq_rel.sys;", options(nostack)) };
}
