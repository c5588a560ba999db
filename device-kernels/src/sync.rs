//! The only shim for atomics: the processor's, the GPU's, or loom's in a model.

#[cfg(not(any(loom, target_arch = "nvptx64")))]
pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(target_arch = "nvptx64")]
#[allow(unsafe_code)]
mod nvptx64;
#[cfg(target_arch = "nvptx64")]
pub use nvptx64::{AtomicU32, AtomicU64, Ordering, fence};

/// A word that the card or the host also accesses.
pub trait LoadExternal {
    /// The word's integer type.
    type Value;

    /// Loads the word from memory, bypassing the GPU's caches.
    fn load_external(&self, order: Ordering) -> Self::Value;

    /// Stores into the word in memory, where the card and the host see it.
    fn store_external(&self, value: Self::Value, order: Ordering);
}

#[cfg(not(target_arch = "nvptx64"))]
macro_rules! external {
    ($($word:ident: $int:ty),*) => {$(
        impl LoadExternal for $word {
            type Value = $int;

            #[inline(always)]
            fn load_external(&self, order: Ordering) -> $int {
                self.load(order)
            }

            #[inline(always)]
            fn store_external(&self, value: $int, order: Ordering) {
                self.store(value, order);
            }
        }
    )*};
}

#[cfg(not(target_arch = "nvptx64"))]
external!(AtomicU32: u32, AtomicU64: u64);
