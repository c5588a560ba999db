//! Failed operations: the word where the host finds a context's first one.

use crate::sync::{AtomicU64, LoadExternal, Ordering};
use ferrogin_ffi::ext::ContextExt;
use ferrogin_ffi::failure::{Failure, Subject};

/// What a call to the C ABI is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    /// All earlier operations.
    Context,
    /// An operation with a peer, and its action.
    Post { peer: u32, action: u64 },
    /// A signal of this rank, and the count that a wait needs.
    Signal { id: u32, least: u64 },
    /// A counter, and the count that a wait needs.
    Counter { id: u32, least: u64 },
}

impl About {
    #[inline(always)]
    pub(crate) fn subject(self) -> Subject {
        match self {
            About::Context => Subject::Context,
            About::Post { peer, .. } => Subject::Peer(peer),
            About::Signal { id, .. } => Subject::Signal(id),
            About::Counter { id, .. } => Subject::Counter(id),
        }
    }
}

/// Keeps the first failure of a context for the host.
#[cold]
#[inline(never)]
pub(crate) fn note(ext: &ContextExt, failure: Failure) {
    if ext.failure_offset == 0 {
        return;
    }
    let at = ext.abort_flag.wrapping_byte_add(ext.failure_offset as usize).cast();
    // SAFETY: the host has placed an aligned word there, and keeps it as long as the context; all accesses are atomic.
    let word = unsafe { AtomicU64::from_ptr(at) };
    // Of two threads that fail at the same time, either may count as the first.
    if word.load_external(Ordering::Relaxed) == 0 {
        word.store_external(failure.to_word(), Ordering::Relaxed);
    }
}
