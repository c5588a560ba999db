//! The GPU's atomics: at GPU scope for words in global memory that one GPU's threads share, and at system scope for
//! loads and stores of words that the card and the host also access.
//!
//! Rust's own atomics have system scope and take generic addresses, which the GPU has to resolve at each access.

use core::arch::asm;
use core::cell::UnsafeCell;
pub use core::sync::atomic::Ordering;

/// Fences at GPU scope, acquire and release, whatever the order.
#[inline(always)]
pub fn fence(_order: Ordering) {
    // SAFETY: the instruction touches no memory.
    unsafe { asm!("fence.acq_rel.gpu;", options(nostack)) };
}

/// `$op.ORDER$rest`: relaxed for `Ordering::Relaxed`, `$strong` for every other ordering.
macro_rules! ordered {
    ($given:expr, $op:literal, $strong:literal, $rest:expr, $($operands:tt)*) => {
        if matches!($given, Ordering::Relaxed) {
            // SAFETY: one access to an aligned word in global memory, for which the caller of `from_ptr` vouches.
            unsafe { asm!(concat!($op, ".relaxed", $rest), $($operands)*, options(nostack)) }
        } else {
            // SAFETY: one access to an aligned word in global memory, for which the caller of `from_ptr` vouches.
            unsafe { asm!(concat!($op, ".", $strong, $rest), $($operands)*, options(nostack)) }
        }
    };
}

/// A read-modify-write: acquire, release, relaxed, or for any other ordering acquire and release.
macro_rules! operation {
    ($given:expr, $rest:expr, $($operands:tt)*) => {
        if matches!($given, Ordering::Acquire) {
            // SAFETY: one access to an aligned word in global memory, for which the caller of `from_ptr` vouches.
            unsafe { asm!(concat!("atom.acquire", $rest), $($operands)*, options(nostack)) }
        } else if matches!($given, Ordering::Release) {
            // SAFETY: one access to an aligned word in global memory, for which the caller of `from_ptr` vouches.
            unsafe { asm!(concat!("atom.release", $rest), $($operands)*, options(nostack)) }
        } else {
            ordered!($given, "atom", "acq_rel", $rest, $($operands)*)
        }
    };
}

macro_rules! atomic {
    ($name:ident, $int:ty, $reg:ident, $bits:literal) => {
        /// An integer in global memory that one GPU's threads share.
        #[derive(Debug)]
        #[repr(transparent)]
        pub struct $name(UnsafeCell<$int>);

        // SAFETY: every access is one atomic instruction.
        unsafe impl Sync for $name {}

        impl $name {
            /// Returns the word at `at`.
            ///
            /// # Safety
            ///
            /// The word is aligned, lies in global memory, lives for `'a`, and is only accessed atomically.
            #[inline(always)]
            pub unsafe fn from_ptr<'a>(at: *mut $int) -> &'a Self {
                // SAFETY: the caller vouches for the word; the layout is the integer's.
                unsafe { &*at.cast() }
            }

            /// Returns the word's address.
            #[inline(always)]
            pub const fn as_ptr(&self) -> *mut $int {
                self.0.get()
            }

            /// Loads the word.
            #[inline(always)]
            pub fn load(&self, order: Ordering) -> $int {
                let value: $int;
                ordered!(order, "ld", "acquire",
                    concat!(".gpu.global.b", $bits, " {v}, [{p}];"),
                    p = in(reg64) self.0.get(), v = out($reg) value);
                value
            }

            /// Stores into the word.
            #[inline(always)]
            pub fn store(&self, value: $int, order: Ordering) {
                ordered!(order, "st", "release",
                    concat!(".gpu.global.b", $bits, " [{p}], {v};"),
                    p = in(reg64) self.0.get(), v = in($reg) value);
            }

            /// Adds to the word and returns the old value.
            #[inline(always)]
            pub fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                let old: $int;
                operation!(order,
                    concat!(".gpu.global.add.u", $bits, " {o}, [{p}], {v};"),
                    p = in(reg64) self.0.get(), v = in($reg) value, o = out($reg) old);
                old
            }

            /// Sets the bits of `value` in the word and returns the old value.
            #[inline(always)]
            pub fn fetch_or(&self, value: $int, order: Ordering) -> $int {
                let old: $int;
                operation!(order,
                    concat!(".gpu.global.or.b", $bits, " {o}, [{p}], {v};"),
                    p = in(reg64) self.0.get(), v = in($reg) value, o = out($reg) old);
                old
            }

            /// Replaces `current` with `new`, or returns the other value that the word had.
            #[inline(always)]
            pub fn compare_exchange(
                &self,
                current: $int,
                new: $int,
                order: Ordering,
                _: Ordering,
            ) -> Result<$int, $int> {
                let old: $int;
                operation!(order,
                    concat!(".gpu.global.cas.b", $bits, " {o}, [{p}], {c}, {v};"),
                    p = in(reg64) self.0.get(), c = in($reg) current, v = in($reg) new, o = out($reg) old);
                if old == current { Ok(old) } else { Err(old) }
            }
        }

        impl super::LoadExternal for $name {
            type Value = $int;

            #[inline(always)]
            fn load_external(&self, order: Ordering) -> $int {
                let value: $int;
                ordered!(order, "ld", "acquire",
                    concat!(".sys.global.b", $bits, " {v}, [{p}];"),
                    p = in(reg64) self.0.get(), v = out($reg) value);
                value
            }

            #[inline(always)]
            fn store_external(&self, value: $int, order: Ordering) {
                ordered!(order, "st", "release",
                    concat!(".sys.global.b", $bits, " [{p}], {v};"),
                    p = in(reg64) self.0.get(), v = in($reg) value);
            }
        }
    };
}

atomic!(AtomicU32, u32, reg32, "32");
atomic!(AtomicU64, u64, reg64, "64");
