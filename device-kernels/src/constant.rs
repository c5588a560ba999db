//! Constants in memory that a post reads.
//!
//! On a GPU a dependent load costs a round trip to memory, so a post loads what it needs in words of 16 bytes that begin at the same
//! time, before its first branch on them and before its reservation, after which every acquire would fetch them again.

use core::marker::PhantomData;
use core::ops::Deref;

/// A constant, in registers.
#[derive(Clone, Copy)]
pub struct Constant<'a, T>(T, PhantomData<&'a T>);

impl<T> Deref for Constant<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The constant at `at`.
///
/// # Safety
///
/// `at` is aligned to 16 bytes and points to a `T` in global memory, which stays constant for `'a`.
#[inline(always)]
pub unsafe fn load<'a, T: Copy>(at: *const T) -> Constant<'a, T> {
    const { assert!(size_of::<T>().is_multiple_of(16)) };
    // SAFETY: the caller vouches for the memory.
    Constant(unsafe { read(at) }, PhantomData)
}

#[cfg(not(target_arch = "nvptx64"))]
use core::ptr::read;

/// Reads a `T` by loads of 16 bytes, in assembly, so that the compiler does not move them behind a branch.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
unsafe fn read<T: Copy>(at: *const T) -> T {
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
        // SAFETY: 16 bytes of `value`, whose size is a multiple of that.
        unsafe { words.write_unaligned([low, high]) };
    }
    // SAFETY: all bytes are those of a `T`.
    unsafe { value.assume_init() }
}
