//! The GPU's atomics: words in global memory that threads of one GPU share, at GPU scope; and
//! loads, at system scope, of those that the card and the host write.
//!
//! Rust's own are all of system scope and take generic addresses, for which the GPU has to ask where the word lies.

use core::arch::asm;
use core::cell::UnsafeCell;
pub use core::sync::atomic::Ordering;

/// `$op.ORDER$rest`, relaxed if that is asked for and `$strong` otherwise.
macro_rules! ordered {
    ($given:expr, $op:literal, $strong:literal, $rest:expr, $($operands:tt)*) => {
        if matches!($given, Ordering::Relaxed) {
            // SAFETY: one access to an aligned word in global memory, for which `from_ptr`'s caller vouched.
            unsafe { asm!(concat!($op, ".relaxed", $rest), $($operands)*, options(nostack)) }
        } else {
            // SAFETY: as above.
            unsafe { asm!(concat!($op, ".", $strong, $rest), $($operands)*, options(nostack)) }
        }
    };
}

/// An atomic operation: acquire if that is asked for, relaxed or both otherwise.
macro_rules! operation {
    ($given:expr, $rest:expr, $($operands:tt)*) => {
        if matches!($given, Ordering::Acquire) {
            // SAFETY: as above.
            unsafe { asm!(concat!("atom.acquire", $rest), $($operands)*, options(nostack)) }
        } else {
            ordered!($given, "atom", "acq_rel", $rest, $($operands)*)
        }
    };
}

macro_rules! atomic {
    ($name:ident, $int:ty, $reg:ident, $bits:literal) => {
        /// An integer in global memory that threads of this GPU share.
        #[derive(Debug)]
        #[repr(transparent)]
        pub struct $name(UnsafeCell<$int>);

        // SAFETY: every access is one atomic instruction.
        unsafe impl Sync for $name {}

        impl $name {
            /// The word at `at`.
            ///
            /// # Safety
            ///
            /// It is aligned, lies in global memory, lives for `'a`, and is only accessed atomically.
            #[inline(always)]
            pub unsafe fn from_ptr<'a>(at: *mut $int) -> &'a Self {
                // SAFETY: the caller vouches for it; the layout is that of the integer.
                unsafe { &*at.cast() }
            }

            /// Where the word is.
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

            /// Adds to the word, and returns what it was.
            #[inline(always)]
            pub fn fetch_add(&self, value: $int, order: Ordering) -> $int {
                let old: $int;
                operation!(order,
                    concat!(".gpu.global.add.u", $bits, " {o}, [{p}], {v};"),
                    p = in(reg64) self.0.get(), v = in($reg) value, o = out($reg) old);
                old
            }

            /// Replaces `current` by `new`, or returns what was there instead.
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

            /// As `compare_exchange`.
            #[inline(always)]
            pub fn compare_exchange_weak(
                &self,
                current: $int,
                new: $int,
                order: Ordering,
                other: Ordering,
            ) -> Result<$int, $int> {
                self.compare_exchange(current, new, order, other)
            }
        }

        impl super::Outside for $name {
            type Value = $int;

            #[inline(always)]
            fn load_outside(&self, order: Ordering) -> $int {
                let value: $int;
                ordered!(order, "ld", "acquire",
                    concat!(".sys.global.b", $bits, " {v}, [{p}];"),
                    p = in(reg64) self.0.get(), v = out($reg) value);
                value
            }
        }
    };
}

atomic!(AtomicU32, u32, reg32, "32");
atomic!(AtomicU64, u64, reg64, "64");
