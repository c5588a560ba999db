//! Kernels in Rust with one mistake each, and with the feature `repaired` their repaired twins, as in the other files here (check.h).
#![no_std]
#![feature(abi_ptx)]

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};
use ferrogin_device::coop::Cta;
use ferrogin_device::{Action, Context, Coop, Flags, Span, Window};

const REPAIRED: bool = cfg!(feature = "repaired");

/// The arguments that check.h declares.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Args {
    handle: *mut c_void,
    window: Window,
    bytes: *mut u8,
    memory: *mut u32,
    wrong: *mut u32,
    rank: u32,
    peer: u32,
    freed: Window,
}

impl Args {
    fn context(&self) -> Context<'_> {
        // SAFETY: the driver keeps the context open until the kernel has ended.
        match unsafe { Context::from_handle(self.handle, 0) } {
            Ok(context) => context,
            Err(_) => loop {},
        }
    }

    fn at(&self, offset: u64) -> Span {
        self.window.at(offset)
    }

    /// The 32-bit word at `offset` in the window.
    fn word(&self, offset: usize) -> *mut u32 {
        self.bytes.wrapping_add(offset).cast()
    }

    fn expect(&self, right: bool) {
        if !right {
            // SAFETY: the driver's memory, which only this function accesses.
            unsafe { AtomicU32::from_ptr(self.wrong) }.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Gives the peer's put something to read: 64 bytes that begin with this rank's number.
    fn fill(&self, offset: usize) {
        for i in 0..16 {
            // SAFETY: in the window.
            unsafe { self.word(offset).add(i).write(100 + self.rank) }
        }
    }

    /// What every kernel but one begins with: a thread's context.
    fn of_one_thread(&self) -> Option<Context<'_>> {
        (Cta.rank() == 0).then(|| self.context())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_read_without_wait(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    let value = u64::from(100 + a.rank);
    let _ = gin.put_value(a.peer, a.at(0), value, 4, Action::signal_inc(0), Flags::NONE); // CHECK read
    if REPAIRED {
        let _ = gin.wait_signal(0, 1);
    }
    // SAFETY: in the window.
    a.expect(unsafe { a.word(0).read() } == 100 + a.peer); // CHECK read
    if !REPAIRED {
        let _ = gin.wait_signal(0, 1);
    }
    let _ = gin.flush();
}

/// Polls a value that the peer's card may write before the put.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_flag_after_put(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    a.fill(1024);
    let _ = gin.put(a.peer, a.at(0), a.at(1024), 64, Action::NONE, Flags::NONE); // CHECK read
    if REPAIRED {
        let _ = gin.flush();
    }
    let _ = gin.put_value(a.peer, a.at(2048), 1, 4, Action::NONE, Flags::NONE);
    // SAFETY: in the window, and aligned.
    let flag = unsafe { AtomicU32::from_ptr(a.word(2048)) };
    while flag.load(Ordering::Acquire) != 1 {}
    // SAFETY: in the window.
    a.expect(unsafe { a.word(0).read() } == 100 + a.peer); // CHECK read
    let _ = gin.flush();
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_get_without_flush(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    let _ = gin.get(a.peer, a.at(0), a.at(1024), 64, Flags::NONE); // CHECK read
    if REPAIRED {
        let _ = gin.flush();
    }
    // SAFETY: in the window.
    a.expect(unsafe { a.word(1024).read() } == 0); // CHECK read
    if !REPAIRED {
        let _ = gin.flush();
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_two_puts_to_the_same_bytes(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    let _ = gin.put_value(a.peer, a.at(0), 1, 4, Action::NONE, Flags::NONE); // CHECK write
    if REPAIRED {
        let _ = gin.flush();
    }
    let _ = gin.put_value(a.peer, a.at(0), 2, 4, Action::signal_inc(0), Flags::NONE); // CHECK write
    let _ = gin.wait_signal(0, 1);
    let _ = gin.flush();
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_source_reused(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    a.fill(1024);
    let _ = gin.put(a.peer, a.at(0), a.at(1024), 64, Action::signal_inc(0), Flags::NONE); // CHECK source
    if REPAIRED {
        let _ = gin.flush();
    }
    // SAFETY: in the window.
    unsafe { a.word(1024).write(1) } // CHECK source
    let _ = gin.wait_signal(0, 1);
    let _ = gin.flush();
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_never_rung(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    a.fill(1024);
    let _ = gin.put(a.peer, a.at(0), a.at(1024), 64, Action::NONE, Flags::AGGREGATE); // CHECK unrung
    if REPAIRED {
        let _ = gin.flush();
    }
}

/// Between the baseline and the peer's put is a barrier that orders only itself: each rank polls a value of the other.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_baseline_before_barrier(a: Args) {
    let Some(gin) = a.of_one_thread() else { return };
    gin.set_timeout_ns(200_000_000);
    let baseline = gin.read_signal(0).unwrap_or(0); // CHECK baseline
    if REPAIRED {
        let _ = gin.signal(a.peer, Action::signal_inc(1), Flags::NONE);
        let _ = gin.wait_signal(1, 1);
    }
    let _ = gin.put_value(a.peer, a.at(2048), 1, 4, Action::NONE, Flags::NONE);
    // SAFETY: in the window, and aligned.
    while unsafe { AtomicU32::from_ptr(a.word(2048)) }.load(Ordering::Relaxed) != 1 {}
    let _ = gin.put_value(a.peer, a.at(0), 1, 4, Action::signal_inc(0), Flags::NONE); // CHECK baseline
    a.expect(gin.wait_signal(0, baseline + 1).is_ok());
    let _ = gin.flush();
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_threads_without_barrier(a: Args) {
    // SAFETY: the driver's memory.
    let value = unsafe { &mut *a.memory };
    if Cta.rank() == 0 {
        *value = 7; // CHECK race
    }
    if REPAIRED {
        Cta.sync();
    }
    if Cta.rank() == 32 {
        a.expect(*value == 7); // CHECK race
    }
}

/// Another warp writes the source without meeting the thread that posts.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn rust_source_not_written_yet(a: Args) {
    if Cta.rank() == 32 {
        // SAFETY: in the window.
        unsafe { a.word(1024).write(100 + a.rank) } // CHECK source
    }
    if REPAIRED {
        Cta.sync();
    }
    let Some(gin) = a.of_one_thread() else { return };
    let _ = gin.put(a.peer, a.at(0), a.at(1024), 64, Action::signal_inc(0), Flags::NONE); // CHECK source
    let _ = gin.wait_signal(0, 1);
    let _ = gin.flush();
}
