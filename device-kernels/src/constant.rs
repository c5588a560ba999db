//! Constants in memory that a post reads.
//!
//! On a GPU a dependent load costs a round trip to memory, so a post loads what it needs in words of 16 bytes that begin at the same
//! time, before its first branch on them and before its reservation, after which every acquire would fetch them again. On a CPU
//! a [`Constant`] is a reference: each field is loaded where it is used, which takes fewer registers.

#[cfg(not(target_arch = "nvptx64"))]
pub use cpu::{Constant, load, read};
#[cfg(target_arch = "nvptx64")]
pub use gpu::{Constant, load, read};

#[cfg(not(target_arch = "nvptx64"))]
mod cpu {
    /// A constant.
    pub type Constant<'a, T> = &'a T;

    /// The constant at `at`.
    ///
    /// # Safety
    ///
    /// `at` is aligned to 16 bytes and points to a `T` in global memory, which stays constant for `'a`.
    #[inline(always)]
    pub unsafe fn load<'a, T: Copy>(at: *const T) -> Constant<'a, T> {
        // SAFETY: the caller vouches for the constant.
        unsafe { &*at }
    }

    /// A field of a constant, read here and not earlier: the compiler would otherwise read several fields at once, and keep them in
    /// registers.
    #[inline(always)]
    pub fn read<T: Copy>(field: &T) -> T {
        // SAFETY: a reference.
        unsafe { (&raw const *field).read_volatile() }
    }
}

#[cfg(target_arch = "nvptx64")]
mod gpu {
    use core::arch::asm;
    use core::marker::PhantomData;
    use core::mem::MaybeUninit;
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

    /// A field of a constant.
    #[inline(always)]
    pub fn read<T: Copy>(field: &T) -> T {
        *field
    }

    /// The constant at `at`.
    ///
    /// # Safety
    ///
    /// `at` is aligned to 16 bytes and points to a `T` in global memory, which stays constant for `'a`.
    #[inline(always)]
    pub unsafe fn load<'a, T: Copy>(at: *const T) -> Constant<'a, T> {
        const { assert!(size_of::<T>() % 16 == 0) };
        let mut value = MaybeUninit::<T>::uninit();
        for i in 0..size_of::<T>() / 16 {
            let (low, high): (u64, u64);
            // In assembly, so that the compiler does not move the load behind a branch.
            // SAFETY: the caller vouches for the memory.
            unsafe {
                asm!(
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
        Constant(unsafe { value.assume_init() }, PhantomData)
    }
}
