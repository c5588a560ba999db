//! On a CPU: whether a call comes from a forked child. It has a copy of its parent's contexts, but neither the card nor
//! the host's threads behind them, and shares the queues' cursors with its parent.

use core::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many forks lie between the process that opened the first context and this one, and how many there were at the
/// latest opening.
static FORKS: AtomicU32 = AtomicU32::new(0);
static OPENED_AFTER: AtomicU32 = AtomicU32::new(0);

type Handler = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
}

unsafe extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Notes that this process opens a context.
pub(crate) fn opens_context() {
    static COUNTS: Once = Once::new();
    // SAFETY: the handler changes an atomic and nothing else. If the library is unloaded, the C library forgets the
    // handler.
    COUNTS.call_once(|| _ = unsafe { pthread_atfork(None, None, Some(count_fork)) });
    OPENED_AFTER.store(FORKS.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Returns whether only the parent process has opened contexts.
#[inline]
pub(crate) fn only_parent_opened() -> bool {
    FORKS.load(Ordering::Relaxed) != OPENED_AFTER.load(Ordering::Relaxed)
}
