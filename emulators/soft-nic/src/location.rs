//! The location of registered bytes, in this process or in a GPU, and copies to and from it.
#![allow(unsafe_code)]

use crate::cuda::{CudaError, Driver};
use crate::memory;

/// The location of a first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// In this process.
    Host(*mut u8),
    /// In the memory of this GPU.
    Cuda(u32, u64),
}

// SAFETY: an address is a plain number. `read` and `write` are unsafe, and their callers keep the memory registered.
unsafe impl Send for Location {}

impl Location {
    /// The location `bytes` behind this one.
    pub fn after(self, bytes: u64) -> Self {
        match self {
            Self::Host(at) => Self::Host(at.wrapping_add(bytes as usize)),
            Self::Cuda(device, at) => Self::Cuda(device, at.wrapping_add(bytes)),
        }
    }

    /// Copies `len` bytes from `from` to here.
    ///
    /// # Errors
    /// The error of the CUDA driver.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes, and as many here are registered for writing.
    pub unsafe fn write(self, from: *const u8, len: usize) -> Result<(), CudaError> {
        match self {
            Self::Host(at) => {
                // SAFETY: the caller keeps `from` readable and this location registered, for `len` bytes each.
                unsafe { memory::copy(at, from, len) };
                Ok(())
            }
            // SAFETY: the caller keeps `from` readable for `len` bytes; registration found as many bytes of this device at `at`.
            Self::Cuda(device, at) => unsafe { Driver::get()?.write(device, at, from, len) },
        }
    }

    /// Copies `len` bytes from here to `to`.
    ///
    /// # Errors
    /// The error of the CUDA driver.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes, and as many here are registered.
    pub unsafe fn read(self, to: *mut u8, len: usize) -> Result<(), CudaError> {
        match self {
            Self::Host(at) => {
                // SAFETY: the caller keeps `to` writable and this location registered, for `len` bytes each.
                unsafe { memory::copy(to, at, len) };
                Ok(())
            }
            // SAFETY: the caller keeps `to` writable for `len` bytes; registration found as many bytes of this device at `at`.
            Self::Cuda(device, at) => unsafe { Driver::get()?.read(device, to, at, len) },
        }
    }
}
