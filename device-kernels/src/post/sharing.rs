//! Sharing modes: which threads may use an endpoint while a call lasts. The fewer they are, the cheaper the shared words.
//!
//! Every mode keeps the same words in the same state, so calls in different modes may follow one another. Only calls at the
//! same time must use one mode. The caller orders calls of different modes, as it orders any use of memory by two threads.

use crate::sync::{AtomicU64, Ordering};

/// The threads with which a call shares the endpoint that it posts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sharing {
    /// All threads of the device, or of the process on a CPU.
    #[default]
    Gpu,
    /// The threads of one CTA.
    Cta,
    /// No other thread.
    Thread,
}

/// The read-modify-writes of one mode.
pub trait Share: Copy {
    /// No other thread uses the endpoint, so no read-modify-write is needed.
    const EXCLUSIVE: bool;
    /// Adds, and returns the old value.
    fn add(word: &AtomicU64, value: u64, order: Ordering) -> u64;
    /// Replaces `from` by `to`. Returns false when the word had another value.
    fn replace(word: &AtomicU64, from: u64, to: u64, order: Ordering) -> bool;
}

/// [`Sharing::Gpu`].
#[derive(Debug, Clone, Copy)]
pub struct Gpu;
/// [`Sharing::Cta`].
#[derive(Debug, Clone, Copy)]
pub struct Cta;
/// [`Sharing::Thread`].
#[derive(Debug, Clone, Copy)]
pub struct Thread;

impl Share for Gpu {
    const EXCLUSIVE: bool = false;

    #[inline(always)]
    fn add(word: &AtomicU64, value: u64, order: Ordering) -> u64 {
        word.fetch_add(value, order)
    }

    #[inline(always)]
    fn replace(word: &AtomicU64, from: u64, to: u64, order: Ordering) -> bool {
        word.compare_exchange(from, to, order, Ordering::Relaxed).is_ok()
    }
}

/// A CPU has no narrower scope.
#[cfg(not(target_arch = "nvptx64"))]
impl Share for Cta {
    const EXCLUSIVE: bool = false;

    #[inline(always)]
    fn add(word: &AtomicU64, value: u64, order: Ordering) -> u64 {
        Gpu::add(word, value, order)
    }

    #[inline(always)]
    fn replace(word: &AtomicU64, from: u64, to: u64, order: Ordering) -> bool {
        Gpu::replace(word, from, to, order)
    }
}

/// The scope is that of the CTA.
#[cfg(target_arch = "nvptx64")]
impl Share for Cta {
    const EXCLUSIVE: bool = false;

    #[inline(always)]
    fn add(word: &AtomicU64, value: u64, order: Ordering) -> u64 {
        crate::platform::cta_add(word, value, order)
    }

    #[inline(always)]
    fn replace(word: &AtomicU64, from: u64, to: u64, order: Ordering) -> bool {
        crate::platform::cta_replace(word, from, to, order) == from
    }
}

impl Share for Thread {
    const EXCLUSIVE: bool = true;

    #[inline(always)]
    fn add(word: &AtomicU64, value: u64, _: Ordering) -> u64 {
        let old = word.load(Ordering::Relaxed);
        word.store(old.wrapping_add(value), Ordering::Relaxed);
        old
    }

    #[inline(always)]
    fn replace(word: &AtomicU64, from: u64, to: u64, _: Ordering) -> bool {
        let same = word.load(Ordering::Relaxed) == from;
        if same {
            word.store(to, Ordering::Relaxed);
        }
        same
    }
}
