//! Handles: numbers that identify objects in a table. A handle is never used as a pointer and never reused for another
//! object, so a stale or made-up one is an error.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

/// Objects of one kind by handle.
pub(crate) struct Table<T>(LazyLock<RwLock<HashMap<usize, Arc<T>>>>);

/// Returns an unused handle. It is neither null nor one of the small numbers that name the default streams.
pub(crate) fn fresh() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x50F7_0000_0000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(RwLock::default))
    }

    /// Adds an object under a handle from [`fresh`].
    pub(crate) fn insert(&self, handle: usize, object: Arc<T>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(handle, object);
    }

    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&handle)
    }

    /// Removes and returns the objects for which `leave` is true.
    pub(crate) fn remove_if(&self, leave: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        table.extract_if(|_, object| leave(object)).map(|(_, object)| object).collect()
    }

    /// Returns the objects for which `wanted` is true.
    pub(crate) fn all(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let table = self.0.read().unwrap_or_else(PoisonError::into_inner);
        table.values().filter(|object| wanted(object)).cloned().collect()
    }
}
