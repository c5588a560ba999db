//! Whether a GIN context has failed, to be asked by any thread without a lock.
//!
//! A failure is known when the watcher says so, or when one of the context's error counters has ticked. Kernels look at the
//! same counters: who heard of a failure from a kernel hears the same from here.
#![allow(unsafe_code)]

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// A card's counter of errors.
#[derive(Debug, Clone, Copy)]
pub struct ErrorCounter {
    address: *const u64,
    first: u64,
}

// SAFETY: the counter outlives its readers (see `new`), and is only read, atomically.
unsafe impl Send for ErrorCounter {}
// SAFETY: as above.
unsafe impl Sync for ErrorCounter {}

impl ErrorCounter {
    /// The counter at `address`; what it holds now counts as no error.
    ///
    /// # Safety
    /// 8-byte aligned memory that the card alone writes and that outlives every use of the result: of a [`Cell`], until
    /// [`Cell::close`] has returned.
    pub unsafe fn new(address: *const u64) -> Self {
        let mut counter = Self { address, first: 0 };
        counter.first = counter.read();
        counter
    }

    fn read(&self) -> u64 {
        // SAFETY: alive and aligned by `new`'s contract; the card writes it any time.
        unsafe { AtomicU64::from_ptr(self.address.cast_mut()) }.load(Ordering::Relaxed)
    }

    /// The card has counted an error.
    pub fn has_ticked(&self) -> bool {
        self.read() != self.first
    }
}

/// The place of one context at a time. Contexts have generations that differ, above 0.
#[derive(Debug, Default)]
pub struct Cell {
    /// Generation << 1 | failed; 0 without a context.
    word: AtomicU64,
    /// The context's counters, owned; null before they are known.
    counters: AtomicPtr<Vec<ErrorCounter>>,
    /// Threads that may be reading them.
    readers: AtomicUsize,
}

impl Cell {
    /// A context begins, without a failure.
    pub fn open(&self, generation: u64) {
        self.word.store(generation << 1, Ordering::SeqCst);
    }

    /// Error counters that [`Cell::failed`] looks at from now on, of the context that is here.
    pub fn look_at(&self, counters: Vec<ErrorCounter>) {
        self.replace(Box::into_raw(Box::new(counters)));
    }

    /// The context ends. After that nobody reads its counters any more.
    pub fn close(&self) {
        self.word.store(0, Ordering::SeqCst);
        self.replace(null_mut());
    }

    fn replace(&self, counters: *mut Vec<ErrorCounter>) {
        let old = self.counters.swap(counters, Ordering::SeqCst);
        if old.is_null() {
            return;
        }
        // Whoever comes from here on sees the new list; who came before is through in a moment.
        while self.readers.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
        // SAFETY: made by `look_at` from a box, taken out by this call alone, and read by nobody any more.
        drop(unsafe { Box::from_raw(old) });
    }

    /// Marks the context of `generation` as failed, for good; another one is left alone.
    pub fn raise(&self, generation: u64) {
        // Fails when the context is gone, or was marked already: nothing to do then.
        let _ = self.word.compare_exchange(generation << 1, generation << 1 | 1, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether the context of `generation` has failed; `None` when it is not here.
    pub fn failed(&self, generation: u64) -> Option<bool> {
        // A stranger is turned away before it could keep `close` waiting.
        if self.known(generation)? {
            return Some(true);
        }
        self.readers.fetch_add(1, Ordering::SeqCst);
        let ticked = self.has_ticked();
        self.readers.fetch_sub(1, Ordering::SeqCst);
        if ticked {
            // Of the context that was here when the counters were: another one's mark is not touched.
            self.raise(generation);
        }
        self.known(generation)
    }

    fn known(&self, generation: u64) -> Option<bool> {
        let word = self.word.load(Ordering::SeqCst);
        (word >> 1 == generation && generation != 0).then_some(word & 1 == 1)
    }

    /// The caller counts as a reader.
    fn has_ticked(&self) -> bool {
        let counters = self.counters.load(Ordering::SeqCst);
        // SAFETY: null, or a list that `replace` keeps as long as there are readers.
        unsafe { counters.as_ref() }.is_some_and(|counters| counters.iter().any(ErrorCounter::has_ticked))
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_ticks_is_a_failure_for_good() {
        let memory = [AtomicU64::new(7), AtomicU64::new(9)];
        // SAFETY: the memory outlives the cell, which is closed below.
        let counters = memory.each_ref().map(|word| unsafe { ErrorCounter::new(word.as_ptr()) });
        let cell = Cell::default();
        assert_eq!(cell.failed(0), None);
        cell.open(3);
        assert_eq!(cell.failed(3), Some(false));
        cell.look_at(counters.to_vec());
        assert_eq!((cell.failed(3), cell.failed(2)), (Some(false), None));
        memory[1].store(10, Ordering::Relaxed);
        assert_eq!(cell.failed(3), Some(true));
        memory[1].store(9, Ordering::Relaxed);
        assert_eq!(cell.failed(3), Some(true), "sticky");
        cell.close();
        assert_eq!(cell.failed(3), None);
        cell.open(4);
        cell.raise(3);
        assert_eq!(cell.failed(4), Some(false), "the next context's");
        cell.raise(4);
        assert_eq!(cell.failed(4), Some(true));
    }

    #[test]
    fn nobody_reads_counters_of_a_closed_context() {
        let (cell, latest, stop) = (Cell::default(), AtomicU64::new(1), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while stop.load(Ordering::Relaxed) == 0 {
                        let failed = cell.failed(latest.load(Ordering::Relaxed));
                        assert_ne!(failed, Some(true), "the memory was not its own any more");
                    }
                });
            }
            for generation in 1..20_000 {
                let memory = Box::new(AtomicU64::new(generation));
                cell.open(generation);
                latest.store(generation, Ordering::Relaxed);
                // SAFETY: the box outlives `close`.
                cell.look_at(vec![unsafe { ErrorCounter::new(memory.as_ptr()) }; 4]);
                cell.close();
                // What would be another's by now.
                memory.store(0, Ordering::Relaxed);
            }
            stop.store(1, Ordering::Relaxed);
        });
    }
}
