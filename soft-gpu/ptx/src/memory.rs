//! The process's memory, as far as a kernel may touch it.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;

/// A range of the process's addresses that a kernel may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first address.
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// Kernels may write to the range, too.
    pub writable: bool,
}

/// The memory that a kernel may touch. Addresses are the process's own.
///
/// The interpreter keeps ranges that it got and uses them until the generation changes.
///
/// # Safety
///
/// Every address of a range is mapped in this process, readable, and writable if the range says so, and no Rust reference covers
/// it, from the call that returned the range until the generation has changed and no kernel that began before the change runs.
pub unsafe trait Memory: Sync {
    /// A number that changes after each change of a range. One counter for the life of the memory.
    fn generation(&self) -> &AtomicU64;

    /// The range around `address`, as wide as it is known.
    fn range(&self, address: u64) -> Option<Range>;

    /// Why a kernel may not touch `address`, for the message of an error: "freed", "memory of the host that is not registered".
    fn explain(&self, address: u64) -> String {
        let _ = address;
        "no memory of the device and none that is registered with it".into()
    }
}
