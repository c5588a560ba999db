//! Where registered bytes are, and copies to and from there.
#![allow(unsafe_code)]

use crate::cuda::{CudaError, Driver};
use crate::memory;

/// A first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In this process.
    Host(*mut u8),
    /// In the memory of this GPU.
    Cuda(u32, u64),
}

// SAFETY: an address; who follows it vouches for what is there.
unsafe impl Send for Place {}

impl Place {
    /// `bytes` further on.
    pub fn after(self, bytes: u64) -> Self {
        match self {
            Self::Host(at) => Self::Host(at.wrapping_add(bytes as usize)),
            Self::Cuda(device, at) => Self::Cuda(device, at.wrapping_add(bytes)),
        }
    }

    /// Copies `len` bytes from `from` to here.
    ///
    /// # Errors
    /// Of the CUDA driver.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes, and as many here are registered for writing.
    pub unsafe fn write(self, from: *const u8, len: usize) -> Result<(), CudaError> {
        match self {
            Self::Host(at) => {
                // SAFETY: by this function's contract.
                unsafe { memory::copy(at, from, len) };
                Ok(())
            }
            // SAFETY: by this function's contract; registration has found the memory to be this device's.
            Self::Cuda(device, at) => unsafe { Driver::get()?.write(device, at, from, len) },
        }
    }

    /// Copies `len` bytes from here to `to`.
    ///
    /// # Errors
    /// Of the CUDA driver.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes, and as many here are registered.
    pub unsafe fn read(self, to: *mut u8, len: usize) -> Result<(), CudaError> {
        match self {
            Self::Host(at) => {
                // SAFETY: by this function's contract.
                unsafe { memory::copy(to, at, len) };
                Ok(())
            }
            // SAFETY: as in `write`.
            Self::Cuda(device, at) => unsafe { Driver::get()?.read(device, to, at, len) },
        }
    }
}
