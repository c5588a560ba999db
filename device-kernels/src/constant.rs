//! Constants in memory that a post reads.
//!
//! On a GPU a dependent load costs a round trip to memory. So a post loads what it needs as 16-byte words, all issued
//! together, before its first branch on them and before its reservation: after that, every acquire would make it fetch
//! them again.

#[cfg(not(target_arch = "nvptx64"))]
pub use core::ptr::read as load;

/// Loads the constant at `at` in assembly, so that the compiler can't move the load behind a branch.
///
/// # Safety
///
/// `at` is aligned to 16 bytes and points to a `T` in global memory that no thread writes.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn load<T: Copy>(at: *const T) -> T {
    const { assert!(size_of::<T>().is_multiple_of(16)) };
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    for i in 0..size_of::<T>() / 16 {
        let (low, high): (u64, u64);
        // SAFETY: the caller vouches for the memory.
        unsafe {
            core::arch::asm!(
                "ld.global.v2.b64 {{{low}, {high}}}, [{p}];",
                p = in(reg64) at.wrapping_byte_add(16 * i), low = out(reg64) low, high = out(reg64) high,
                options(nostack, readonly)
            )
        };
        let words = value.as_mut_ptr().cast::<[u64; 2]>().wrapping_add(i);
        // SAFETY: 16 bytes inside `value`, whose size is a multiple of 16.
        unsafe { words.write_unaligned([low, high]) };
    }
    // SAFETY: the loop has written every byte of the `T`.
    unsafe { value.assume_init() }
}
