//! The only shim of atomics: the processor's atomics, the GPU's, or loom's in a model.

#[cfg(not(any(loom, target_arch = "nvptx64")))]
pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[cfg(target_arch = "nvptx64")]
#[allow(unsafe_code)]
mod nvptx64;
#[cfg(target_arch = "nvptx64")]
pub use nvptx64::{AtomicU32, AtomicU64, Ordering};

/// A word that the card or the host writes, and threads only read.
pub trait LoadExternal {
    /// Its integer.
    type Value;

    /// Loads the word from memory, past the GPU's caches.
    fn load_external(&self, order: Ordering) -> Self::Value;
}

#[cfg(not(target_arch = "nvptx64"))]
impl LoadExternal for AtomicU32 {
    type Value = u32;

    #[inline(always)]
    fn load_external(&self, order: Ordering) -> u32 {
        self.load(order)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl LoadExternal for AtomicU64 {
    type Value = u64;

    #[inline(always)]
    fn load_external(&self, order: Ordering) -> u64 {
        self.load(order)
    }
}
