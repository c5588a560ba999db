//! MMIO stores, fences and accesses to shared memory: everything that differs between targets.
//!
//! Both targets export the same names. The card and other threads read and write the memory behind these pointers, so
//! it never becomes a reference.

#[cfg(not(target_arch = "nvptx64"))]
#[allow(unsafe_code)]
#[path = "arch/host.rs"]
mod target;

#[cfg(target_arch = "nvptx64")]
#[allow(unsafe_code)]
#[path = "arch/nvptx64.rs"]
mod target;

pub use target::{
    fence_acquire, fence_system, load_u32, load_u64, mmio_store_u32, mmio_store_u64, mmio_zero_second_half, store_u32,
};
