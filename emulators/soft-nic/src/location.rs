//! Where registered bytes are, in this process or on a GPU, and copies to and from there.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;

use crate::cuda::{CudaError, Driver};
use crate::log;
use crate::memory::{self, Mapping};

/// The location of a range's first byte.
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
    /// Returns the location of `len` bytes of a dma-buf from `offset` on, and the card's mapping of them. If a GPU's
    /// driver lets no CPU map its exports, the CUDA driver copies instead: on the software GPU at the address where its
    /// driver has the bytes, on others at `address`, where the caller says this process has them.
    ///
    /// # Errors
    /// The mapping's error; the log says why the driver cannot copy.
    pub fn of_dma_buf(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: Option<u64>,
    ) -> io::Result<(Self, Option<Mapping>)> {
        match Mapping::shared(fd, offset, len) {
            Ok(map) => Ok((Self::Host(map.as_ptr()), Some(map))),
            Err(error) => Ok((Self::by_driver(error, fd, offset, len, address)?, None)),
        }
    }

    /// Returns the location of a dma-buf's bytes whose mapping failed with `error`.
    ///
    /// # Errors
    /// `error`; the log says why the driver cannot copy.
    pub fn by_driver(
        error: io::Error,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: Option<u64>,
    ) -> io::Result<Self> {
        if !is_unmappable(&error) {
            return Err(error);
        }
        let found = Driver::get().and_then(|driver| {
            let at = driver.attach(fd, offset, len).or_else(|error| address.ok_or(error))?;
            Ok(Self::Cuda(driver.owner(at, len)?, at))
        });
        found.map_err(|why| {
            log::line(format_args!(
                "softefa: the CPU cannot map a dma-buf ({error}), and the CUDA driver cannot copy its bytes: {why}"
            ));
            error
        })
    }

    /// Returns the location `bytes` after this one.
    pub fn after(self, bytes: u64) -> Self {
        match self {
            Self::Host(at) => Self::Host(at.wrapping_add(bytes as usize)),
            Self::Cuda(device, at) => Self::Cuda(device, at.wrapping_add(bytes)),
        }
    }

    /// Copies `len` bytes from `from` to here.
    ///
    /// # Errors
    /// The CUDA driver's error.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes, and `len` bytes here are registered for writing.
    pub unsafe fn write(self, from: *const u8, len: usize) -> Result<(), CudaError> {
        match self {
            Self::Host(at) => {
                // SAFETY: the caller keeps `from` readable and this location registered, for `len` bytes each.
                unsafe { memory::copy(at, from, len) };
                Ok(())
            }
            // SAFETY: the caller keeps `from` readable for `len` bytes; registration found that many bytes of this
            // device at `at`.
            Self::Cuda(device, at) => unsafe { Driver::get()?.write(device, at, from, len) },
        }
    }

    /// Copies `len` bytes from here to `to`.
    ///
    /// # Errors
    /// The CUDA driver's error.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes, and `len` bytes here are registered.
    pub unsafe fn read(self, to: *mut u8, len: usize) -> Result<(), CudaError> {
        match self {
            Self::Host(at) => {
                // SAFETY: the caller keeps `to` writable and this location registered, for `len` bytes each.
                unsafe { memory::copy(to, at, len) };
                Ok(())
            }
            // SAFETY: the caller keeps `to` writable for `len` bytes; registration found that many bytes of this device
            // at `at`.
            Self::Cuda(device, at) => unsafe { Driver::get()?.read(device, to, at, len) },
        }
    }
}

/// Whether a descriptor's memory cannot be mapped at all, whatever the range.
fn is_unmappable(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EACCES | libc::EPERM | libc::EOPNOTSUPP))
}
