//! Threads that make a call together: a thread, a warp, a CTA or any other group.
//!
//! The group synchronises before and after the call. The thread of rank 0 carries out an operation, so that it's posted
//! once. A flush is divided among the threads.

use crate::context::Context;
use crate::status::Status;

/// A group of threads. Each thread has its own value of this type, and all threads make the same calls.
pub trait Coop {
    /// Returns this thread's number in the group, below `size`.
    fn rank(&self) -> u32;
    /// Returns the number of threads in the group, at least 1.
    fn size(&self) -> u32;
    /// Returns once all threads of the group have called it. What each wrote before the call is visible to all after
    /// it.
    fn sync(&self);
}

/// A single thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Thread;

impl Coop for Thread {
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

    /// Reads a special register.
    macro_rules! register {
        ($name:literal) => {{
            let value: u32;
            // SAFETY: the instruction reads a register that every thread has, and touches no memory.
            unsafe { asm!(concat!("mov.u32 {}, ", $name, ";"), out(reg32) value, options(pure, nomem, nostack)) }
            value
        }};
    }

    /// The 32 threads of a warp, all of which make the call.
    #[derive(Debug, Clone, Copy, Default)]
    pub struct Warp;

    /// The threads of a CTA, all of which make the call.
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
            // SAFETY: all lanes of the warp make this call, as `Warp` requires; the barrier orders memory between them.
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
            // SAFETY: all threads of the CTA make this call, as `Cta` requires.
            unsafe { asm!("bar.sync 0;", options(nostack)) }
        }
    }
}

impl Context<'_> {
    /// Runs `operation` once for the group, in the thread of rank 0, which gets its result; the others get `Ok`.
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

    /// Flushes like [`Context::flush`], as a group: each thread waits for some of the endpoints.
    ///
    /// # Errors
    ///
    /// As for [`Context::flush`], in the thread whose part failed.
    pub fn flush_with(&self, coop: &impl Coop) -> Result<(), Status> {
        coop.sync();
        let outcome = self.flush_part(coop.rank(), coop.size());
        coop.sync();
        outcome
    }
}
