//! Threads that make a call together: one alone, a warp, a CTA, or any other group.
//!
//! The group meets before and after the call. What the card has one queue for is done by the thread of rank 0, so that an
//! operation is posted once; what can be divided, a flush, is.

use crate::context::Context;
use crate::status::Status;

/// A group of threads. Each of them has its own value of it, and all make the same calls.
pub trait Coop {
    /// This thread's number in the group, below `size`.
    fn rank(&self) -> u32;
    /// Threads of the group, at least 1.
    fn size(&self) -> u32;
    /// Returns when all threads of the group have called it. What each wrote before is visible to all after it.
    fn sync(&self);
}

/// One thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Coop for Alone {
    #[inline(always)]
    fn rank(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn size(&self) -> u32 {
        1
    }

    #[inline(always)]
    fn sync(&self) {}
}

#[cfg(target_arch = "nvptx64")]
pub use gpu::{Cta, Warp};

#[cfg(target_arch = "nvptx64")]
mod gpu {
    use super::Coop;
    use core::arch::asm;

    /// A special register.
    macro_rules! register {
        ($name:literal) => {{
            let value: u32;
            // SAFETY: reads a register that every thread has.
            unsafe { asm!(concat!("mov.u32 {}, ", $name, ";"), out(reg32) value, options(pure, nomem, nostack)) }
            value
        }};
    }

    /// The 32 threads of a warp, all of which must be there.
    #[derive(Debug, Clone, Copy, Default)]
    pub struct Warp;

    /// The threads of a CTA, all of which must be there.
    #[derive(Debug, Clone, Copy, Default)]
    pub struct Cta;

    impl Coop for Warp {
        #[inline(always)]
        fn rank(&self) -> u32 {
            Cta.rank() % 32
        }

        #[inline(always)]
        fn size(&self) -> u32 {
            32
        }

        #[inline(always)]
        fn sync(&self) {
            // SAFETY: the lanes of the warp meet, as `Warp` asks for; memory between them is ordered by it.
            unsafe { asm!("bar.warp.sync 0xffffffff;", options(nostack)) }
        }
    }

    impl Coop for Cta {
        #[inline(always)]
        fn rank(&self) -> u32 {
            let (x, y, z) = (register!("%tid.x"), register!("%tid.y"), register!("%tid.z"));
            let (dx, dy) = (register!("%ntid.x"), register!("%ntid.y"));
            x + dx * (y + dy * z)
        }

        #[inline(always)]
        fn size(&self) -> u32 {
            register!("%ntid.x") * register!("%ntid.y") * register!("%ntid.z")
        }

        #[inline(always)]
        fn sync(&self) {
            // SAFETY: the threads of the CTA meet, as `Cta` asks for.
            unsafe { asm!("bar.sync 0;", options(nostack)) }
        }
    }
}

impl Context<'_> {
    /// Carries out `operation` once for the group, by the thread of rank 0, whose result it is: the others have no error.
    ///
    /// # Errors
    ///
    /// Those of `operation`.
    #[inline(always)]
    pub fn lead(&self, coop: &impl Coop, operation: impl FnOnce(&Self) -> Result<(), Status>) -> Result<(), Status> {
        coop.sync();
        let outcome = if coop.rank() == 0 { operation(self) } else { Ok(()) };
        coop.sync();
        outcome
    }

    /// [`Context::flush`] by a group: each thread waits for a part of the endpoints.
    ///
    /// # Errors
    ///
    /// As for [`Context::flush`], to the threads whose part it was.
    pub fn flush_with(&self, coop: &impl Coop) -> Result<(), Status> {
        coop.sync();
        let outcome = self.flush_part(coop.rank(), coop.size());
        coop.sync();
        outcome
    }
}
