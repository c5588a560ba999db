//! A GIN context's failure flag, which any thread can read without a lock.
//!
//! A context has failed when the watcher raised its flag, or when one of its error counters changed. Kernels read the
//! same counters, so a query after a kernel's error always returns true. Counters in a GPU's memory are copied for each
//! query.
#![allow(unsafe_code)]

use crate::device::{DeviceBuffer, DeviceError};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long the end of a context waits for queries, which may be stuck in the GPU's driver.
const LIMIT: Duration = Duration::from_secs(2);

/// An error counter that a card writes.
#[derive(Debug, Clone, Copy)]
pub struct ErrorCounter {
    address: *const u64,
    first: u64,
}

// SAFETY: any thread may read the counter. The caller of `new` keeps the memory alive, and all reads are atomic.
unsafe impl Send for ErrorCounter {}
// SAFETY: several threads may read the counter at once. The caller of `new` keeps the memory alive, and all reads are
// atomic.
unsafe impl Sync for ErrorCounter {}

impl ErrorCounter {
    /// Watches the counter at `address`. Its current value means no error.
    ///
    /// # Safety
    /// `address` must be 8-byte aligned memory that only the card writes, and must outlive every use of the result. A
    /// [`FailureFlag`] uses its counters until [`FailureFlag::close`] returns.
    pub unsafe fn new(address: *const u64) -> Self {
        let mut counter = Self { address, first: 0 };
        counter.first = counter.read();
        counter
    }

    fn read(&self) -> u64 {
        // SAFETY: the caller of `new` keeps the memory alive and aligned. The card may write it at any time, and the
        // access is atomic.
        unsafe { AtomicU64::from_ptr(self.address.cast_mut()) }.load(Ordering::Relaxed)
    }

    /// Returns how many errors the card has counted, modulo 2^31.
    pub fn count(&self) -> u32 {
        (self.read().wrapping_sub(self.first) as u32) & (u32::MAX >> 1)
    }

    /// Returns true if the card has counted an error.
    pub fn has_changed(&self) -> bool {
        self.read() != self.first
    }
}

/// A context's error counters.
pub enum ErrorCounters {
    /// With host addresses.
    Host(Vec<ErrorCounter>),
    /// In a GPU's memory.
    Device(DeviceCounters),
}

impl ErrorCounters {
    fn has_changed(&self) -> bool {
        match self {
            Self::Host(counters) => counters.iter().any(ErrorCounter::has_changed),
            Self::Device(counters) => counters.has_changed().unwrap_or_else(|error| {
                crate::trace!("reading error counters: {error}");
                false
            }),
        }
    }
}

/// Distance between two counters in bytes: a cache line, because the card writes one counter while kernels read
/// another.
pub const COUNTER_STRIDE: usize = 64;

/// Error counters in memory that only the driver reads, at distances of [`COUNTER_STRIDE`].
pub struct DeviceCounters {
    buffer: Arc<dyn DeviceBuffer>,
    offset: usize,
    /// As they were in [`DeviceCounters::new`].
    first: Vec<u8>,
}

impl DeviceCounters {
    /// Watches `count` counters from `offset` on. Their current values mean no error.
    ///
    /// # Errors
    /// The driver fails.
    pub fn new(buffer: Arc<dyn DeviceBuffer>, offset: usize, count: usize) -> Result<Self, DeviceError> {
        let mut first = vec![0; count * COUNTER_STRIDE];
        buffer.read(offset, &mut first)?;
        Ok(Self { buffer, offset, first })
    }

    fn has_changed(&self) -> Result<bool, DeviceError> {
        // Only the card writes this memory, and only the counters.
        let mut now = vec![0; self.first.len()];
        self.buffer.read(self.offset, &mut now)?;
        Ok(now != self.first)
    }
}

/// A flag that serves one context at a time. Each context has its own generation, above 0.
#[derive(Debug, Default)]
pub struct FailureFlag {
    /// `generation << 1 | failed`; 0 if there is no context.
    word: AtomicU64,
    /// The context's counters, which this flag owns; null before `set_counters`.
    counters: AtomicPtr<ErrorCounters>,
    /// Number of threads that may be reading the counters.
    readers: AtomicUsize,
}

impl FailureFlag {
    /// Starts a context, in the non-failed state.
    pub fn open(&self, generation: u64) {
        self.word.store(generation << 1, Ordering::SeqCst);
    }

    /// Sets the current context's error counters, which [`FailureFlag::failed`] reads.
    pub fn set_counters(&self, counters: ErrorCounters) {
        self.replace(Box::into_raw(Box::new(counters)));
    }

    /// Ends the context. After this call no thread reads its counters, or only ones that keep their memory.
    pub fn close(&self) {
        self.word.store(0, Ordering::SeqCst);
        self.replace(null_mut());
    }

    fn replace(&self, counters: *mut ErrorCounters) {
        let old = self.counters.swap(counters, Ordering::SeqCst);
        if old.is_null() {
            return;
        }
        // Later readers load the new list. Earlier readers finish soon: they wait for nothing but the driver, if for
        // anything.
        let began = Instant::now();
        while self.readers.load(Ordering::SeqCst) != 0 {
            // SAFETY: the swap above gave the list to this call alone, which hasn't freed it; readers only have shared
            // references.
            if began.elapsed() > LIMIT && matches!(unsafe { &*old }, ErrorCounters::Device(_)) {
                // The list and the memory are left to a reader that is stuck.
                return;
            }
            std::thread::yield_now();
        }
        // SAFETY: `set_counters` created the pointer from a box, and the swap above gave it to this call alone. No
        // reader has it, since the number of readers was 0 after the swap.
        drop(unsafe { Box::from_raw(old) });
    }

    /// Marks the context of `generation` as failed for good. Does nothing for another context.
    pub fn raise(&self, generation: u64) {
        // The exchange fails if the context has ended or is already marked.
        let _ = self.word.compare_exchange(generation << 1, generation << 1 | 1, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Returns true if the context of `generation` has failed; `None` if the flag belongs to another context.
    pub fn failed(&self, generation: u64) -> Option<bool> {
        // A stale generation returns here, so that it never keeps `close` waiting.
        if self.state(generation)? {
            return Some(true);
        }
        self.readers.fetch_add(1, Ordering::SeqCst);
        let changed = self.has_changed();
        self.readers.fetch_sub(1, Ordering::SeqCst);
        if changed {
            // `raise` does nothing if another context has started in the meantime.
            self.raise(generation);
        }
        self.state(generation)
    }

    /// As [`FailureFlag::failed`], but without reading the counters.
    pub fn state(&self, generation: u64) -> Option<bool> {
        let word = self.word.load(Ordering::SeqCst);
        (word >> 1 == generation && generation != 0).then_some(word & 1 == 1)
    }

    /// The caller must be counted in `readers`.
    fn has_changed(&self) -> bool {
        let counters = self.counters.load(Ordering::SeqCst);
        // SAFETY: the pointer is null or a list that `replace` frees only when `readers` is 0; the caller is counted
        // there.
        unsafe { counters.as_ref() }.is_some_and(ErrorCounters::has_changed)
    }
}

impl Drop for FailureFlag {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_counter_fails_context_for_good() {
        let memory = [AtomicU64::new(7), AtomicU64::new(9)];
        // SAFETY: the memory is aligned and outlives the flag, which is closed below.
        let counters = memory.each_ref().map(|word| unsafe { ErrorCounter::new(word.as_ptr()) });
        let flag = FailureFlag::default();
        assert_eq!(flag.failed(0), None);
        flag.open(3);
        assert_eq!(flag.failed(3), Some(false));
        flag.set_counters(ErrorCounters::Host(counters.to_vec()));
        assert_eq!((flag.failed(3), flag.failed(2)), (Some(false), None));
        memory[1].store(10, Ordering::Relaxed);
        assert_eq!(flag.failed(3), Some(true));
        memory[1].store(9, Ordering::Relaxed);
        assert_eq!(flag.failed(3), Some(true), "sticky");
        flag.close();
        assert_eq!(flag.failed(3), None);
        flag.open(4);
        flag.raise(3);
        assert_eq!(flag.failed(4), Some(false), "the flag belongs to the next context");
        flag.raise(4);
        assert_eq!(flag.failed(4), Some(true));
    }

    #[test]
    fn errors_are_counted_across_the_wrap_of_the_counter() {
        let word = AtomicU64::new((1 << 31) - 1);
        // SAFETY: the word is aligned and outlives the counter.
        let counter = unsafe { ErrorCounter::new(word.as_ptr()) };
        let counts = [(1 << 31) - 1, 0, 5].map(|value| {
            word.store(value, Ordering::Relaxed);
            counter.count()
        });
        assert_eq!(counts, [0, 1, 6]);
    }

    #[test]
    fn counters_of_closed_context_are_not_read() {
        let (flag, latest, stop) = (FailureFlag::default(), AtomicU64::new(1), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while stop.load(Ordering::Relaxed) == 0 {
                        let failed = flag.failed(latest.load(Ordering::Relaxed));
                        assert_ne!(failed, Some(true), "a read after the context ended");
                    }
                });
            }
            for generation in 1..20_000 {
                let memory = Box::new(AtomicU64::new(generation));
                flag.open(generation);
                latest.store(generation, Ordering::Relaxed);
                // SAFETY: the box is aligned and outlives `close`.
                flag.set_counters(ErrorCounters::Host(vec![unsafe { ErrorCounter::new(memory.as_ptr()) }; 4]));
                flag.close();
                // A later read of this memory would see a different value.
                memory.store(0, Ordering::Relaxed);
            }
            stop.store(1, Ordering::Relaxed);
        });
    }
}
