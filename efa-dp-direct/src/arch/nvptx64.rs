//! The GPU: MMIO stores and system-scope fences in PTX (sm_70 or newer, PTX ISA 8.2 or newer for `.mmio`).

use core::arch::asm;

/// Stores `value` in one 4-byte access, neither split nor merged.
///
/// # Safety
/// `ptr` is a 4-byte aligned global address that is valid for writes.
#[inline(always)]
pub unsafe fn mmio_store_u32(ptr: *mut u32, value: u32) {
    // SAFETY: the caller vouches that the address is valid and aligned for this access.
    unsafe {
        asm!("st.mmio.relaxed.sys.global.u32 [{p}], {v};", p = in(reg64) ptr, v = in(reg32) value, options(nostack))
    };
}

/// Stores `value` in one 8-byte access, neither split nor merged.
///
/// # Safety
/// `ptr` is an 8-byte aligned global address that is valid for writes.
#[inline(always)]
pub unsafe fn mmio_store_u64(ptr: *mut u64, value: u64) {
    // SAFETY: the caller vouches that the address is valid and aligned for this access.
    unsafe {
        asm!("st.mmio.relaxed.sys.global.u64 [{p}], {v};", p = in(reg64) ptr, v = in(reg64) value, options(nostack))
    };
}

/// Stores zeros in the second half of the 128 bytes at `ptr`, in 8-byte accesses, neither split nor merged.
///
/// # Safety
/// `ptr` is an 8-byte aligned global address that is valid for writes of 128 bytes.
#[inline(always)]
pub unsafe fn mmio_zero_second_half(ptr: *mut u64) {
    for i in 8..16 {
        // SAFETY: the caller vouches that the words are valid for writes and aligned.
        unsafe { mmio_store_u64(ptr.wrapping_add(i), 0) };
    }
}

/// Loads 4 bytes in one access, relaxed, at system scope.
///
/// # Safety
/// `ptr` is a 4-byte aligned address that is valid for reads.
#[inline(always)]
pub unsafe fn load_u32(ptr: *const u32) -> u32 {
    let value: u32;
    // SAFETY: the caller vouches that the address is valid and aligned for this access.
    unsafe { asm!("ld.relaxed.sys.u32 {v}, [{p}];", p = in(reg64) ptr, v = out(reg32) value, options(nostack)) };
    value
}

/// Loads 8 bytes in one access, relaxed, at system scope.
///
/// # Safety
/// `ptr` is an 8-byte aligned address that is valid for reads.
#[inline(always)]
pub unsafe fn load_u64(ptr: *const u64) -> u64 {
    let value: u64;
    // SAFETY: the caller vouches that the address is valid and aligned for this access.
    unsafe { asm!("ld.relaxed.sys.u64 {v}, [{p}];", p = in(reg64) ptr, v = out(reg64) value, options(nostack)) };
    value
}

/// Stores a word shared between threads, relaxed, at system scope.
///
/// # Safety
/// `ptr` is a 4-byte aligned address that is valid for writes.
#[inline(always)]
pub unsafe fn store_u32(ptr: *mut u32, value: u32) {
    // SAFETY: the caller vouches that the address is valid and aligned for this access.
    unsafe { asm!("st.relaxed.sys.u32 [{p}], {v};", p = in(reg64) ptr, v = in(reg32) value, options(nostack)) };
}

/// Orders all earlier accesses before all later ones, for threads, the host and the card.
#[inline(always)]
pub fn fence_system() {
    // SAFETY: a barrier accesses nothing.
    unsafe { asm!("fence.acq_rel.sys;", options(nostack)) };
}

/// Keeps later loads from passing earlier ones: the completion entry after its phase bit.
#[inline(always)]
pub fn fence_acquire() {
    fence_system();
}
