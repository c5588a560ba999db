//! The interface of both back ends: the trait [`Device`], and its memory and error types.

use ferrogin_libfabric::MemoryKind;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::LazyLock;

/// The kind of device that kernels run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// CPU threads; device memory is host memory.
    Cpu,
    /// A GPU.
    Cuda,
}

impl DeviceKind {
    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// Who uses an allocation besides kernels, which determines the kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// The host, during set-up only: handles and tables.
    Tables,
    /// The card, and the program that owns the window.
    Window,
    /// The card: counters, value slots, scratch. And words that the host writes at any time.
    Card,
    /// The host, which reads it at any time, and the card: the first failure's record, receive buffers.
    Shared,
}

/// The kind of memory being mapped into the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// A card's registers or device memory.
    Mmio,
    /// Host memory, which the software card uses as its own.
    Host,
}

/// How the signal proxy adds to a 64-bit word in a window. The owner may reset a word with a plain store at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adds {
    /// An atomic operation by the CPU, on memory that the CPU and the device access coherently.
    Cpu,
    /// An atomic reduction on a stream.
    Stream,
    /// A load and a store by the CPU through a [`WordMapping`], which undo a reset in between.
    Mapped {
        /// Distance from the window's addresses to the mapping's.
        distance: u64,
    },
    /// A copy from the device and one back, which undo a reset in between.
    Copy,
}

impl Adds {
    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "atomic adds by the CPU",
            Self::Stream => "atomic reductions on a stream",
            Self::Mapped { .. } => "loads and stores through GDRCopy, which undo a reset in between",
            Self::Copy => "copies, which undo a reset between the read and the write",
        }
    }
}

/// The error of a failed device memory call.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The machine has no usable GPU.
    #[error(
        "no usable GPU: {reason}; set FERROGIN_DEVICE=cpu to run kernels on the CPU, or run the program on the software GPU: ferrogin gpu -- \
         PROGRAM"
    )]
    NoGpu {
        /// The reason.
        reason: String,
    },
    /// A system call failed.
    #[error("{call} of {len} bytes failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Its size argument.
        len: usize,
        /// Its error.
        source: std::io::Error,
    },
    /// A CUDA driver call failed.
    #[error("{call} failed: {text} (CUresult {code})")]
    Cuda {
        /// The call.
        call: &'static str,
        /// Its `CUresult`.
        code: u32,
        /// The driver's name for the result.
        text: String,
    },
    /// A write or read is outside its allocation.
    #[error("{len} bytes at {offset} are outside an allocation of {size} bytes")]
    Bounds {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Size of the allocation.
        size: usize,
    },
    /// A window's memory is not mapped.
    #[error(
        "{len} bytes at {address:#x} are not mapped in this process: register allocated memory, with its real size"
    )]
    NotMapped {
        /// First byte.
        address: usize,
        /// Bytes.
        len: usize,
    },
    /// The device can't use memory of this kind.
    #[error("memory at {address:#x} is {problem}: {fix}")]
    WrongMemory {
        /// First byte.
        address: usize,
        /// The problem.
        problem: &'static str,
        /// The fix.
        fix: &'static str,
    },
}

/// An allocation as a dma-buf.
#[derive(Debug, Clone, Copy)]
pub struct DmaBuf<'a> {
    /// Open while the allocation exists.
    pub fd: BorrowedFd<'a>,
    /// Offset of the allocation's first byte in the dma-buf.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    /// The memory behind it.
    pub kind: MemoryKind,
}

/// An allocation that kernels can use. Zeroed when created, freed when dropped.
pub trait DeviceBuffer: Send + Sync {
    /// Returns the address for kernels, on a page boundary.
    fn device_address(&self) -> u64;
    /// Returns the address for the host, if there is one. [`Use::Shared`] always has one.
    fn host_address(&self) -> Option<*mut u8>;
    /// Returns the size in bytes.
    fn len(&self) -> usize;
    /// Returns true if the allocation is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the allocation as a dma-buf, if cards register it as one.
    fn dma_buf(&self) -> Option<DmaBuf<'_>>;
    /// Exports GPU memory as a dma-buf with or without mapping type PCIe, to compare the two. Returns `None` for host
    /// memory.
    fn export(&self, _pcie: bool) -> Option<Result<std::os::fd::OwnedFd, DeviceError>> {
        None
    }
    /// Returns the memory for [`Device::import`] in another process, and the size of the allocation. `None` if it can't
    /// be shared.
    fn share(&self) -> Option<Result<(OwnedFd, usize), DeviceError>> {
        None
    }
    /// Copies bytes in from the host. Not ordered with running kernels.
    ///
    /// # Errors
    /// The range is out of bounds, or the driver fails.
    fn write(&self, offset: usize, bytes: &[std::mem::MaybeUninit<u8>]) -> Result<(), DeviceError>;
    /// Copies bytes out to the host. Not ordered with running kernels.
    ///
    /// # Errors
    /// The range is out of bounds, or the driver fails.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;
}

/// How a card registers a window's memory.
#[derive(Debug)]
pub enum WindowMemory {
    /// By address.
    Address(MemoryKind),
    /// As a dma-buf.
    DmaBuf {
        /// Closed when dropped; the registration keeps its own reference.
        fd: OwnedFd,
        /// Offset of the window's first byte in the dma-buf.
        offset: u64,
        /// The memory behind it.
        kind: MemoryKind,
    },
}

/// Memory that stays mapped for kernels until this is dropped.
pub trait DeviceMapping: Send + Sync {
    /// Returns the device address of the first byte.
    fn device_address(&self) -> u64;
}

/// Memory of several processes, mapped until this is dropped.
pub struct Imported {
    /// The device address of the first part.
    pub base: u64,
    /// From each part to the next, in bytes.
    pub stride: u64,
    pub(super) _mapped: Box<dyn Send + Sync>,
}

/// Device memory that stays mapped for the CPU until this is dropped.
pub struct WordMapping {
    /// Distance from the memory's addresses to the mapping's.
    pub distance: u64,
    pub(crate) _mapped: Box<dyn Send + Sync>,
}

/// A device: allocates memory, and maps the cards' memory for kernels.
pub trait Device: Send + Sync {
    /// Returns the kind of device.
    fn kind(&self) -> DeviceKind;

    /// Allocates `len` zeroed bytes; `len` must not be 0.
    ///
    /// # Errors
    /// The device is out of memory.
    fn allocate(&self, len: usize, usage: Use) -> Result<Box<dyn DeviceBuffer>, DeviceError>;

    /// Maps `len` bytes at `address`, a ring or a doorbell, for kernels.
    ///
    /// # Safety
    /// The bytes must stay mapped in this process until the result is dropped.
    ///
    /// # Errors
    /// The driver fails.
    #[allow(unsafe_code)]
    unsafe fn map(
        &self,
        address: *mut c_void,
        len: usize,
        mapping: Mapping,
    ) -> Result<Box<dyn DeviceMapping>, DeviceError>;

    /// Maps memory that other processes [share](DeviceBuffer::share), and each one's size, at equal distances.
    ///
    /// # Errors
    /// The memory is of another kind of device, or this device can't access it.
    fn import(&self, parts: &[(OwnedFd, usize)]) -> Result<Imported, DeviceError>;

    /// Returns how a card registers `len` bytes at `address`, of NCCL's memory type `ptr_type`.
    ///
    /// # Errors
    /// The memory isn't mapped, or the device can't use it.
    fn window(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Result<WindowMemory, DeviceError>;

    /// Returns the memory types that NCCL may register: a sum of `PTR_*`.
    fn ptr_support(&self) -> i32;

    /// Returns how the signal proxy adds to words in a window of `len` bytes at `address`, of NCCL's memory type
    /// `ptr_type`.
    fn adds(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Adds {
        let _ = (address, len, ptr_type);
        Adds::Cpu
    }

    /// Maps device memory for the CPU: words of windows, for use instead of [`Adds::Copy`], and a context's words that
    /// the host writes. `None` if this machine can't.
    fn map_words(&self, address: *mut c_void, len: usize) -> Option<WordMapping> {
        let _ = (address, len);
        None
    }

    /// Adds to words in device memory, in order, with [`Adds::Stream`] or [`Adds::Copy`].
    ///
    /// # Safety
    /// Each address must be 8-byte aligned, and mapped on the device until the end of the round.
    ///
    /// # Errors
    /// The driver fails.
    #[allow(unsafe_code)]
    unsafe fn add(&self, adds: Adds, words: &[(u64, u64)]) -> Result<(), DeviceError> {
        let _ = (adds, words);
        Ok(())
    }

    /// Returns why the host can't make a card's writes visible to kernels; `None` if it can.
    fn cannot_flush_writes(&self) -> Option<String> {
        None
    }

    /// Returns false if [`flush_writes`](Self::flush_writes) has nothing to do.
    fn needs_flush(&self) -> bool {
        false
    }

    /// Makes visible to kernels what cards wrote to device memory before the completions that the host has read.
    ///
    /// # Errors
    /// The driver fails.
    fn flush_writes(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Returns the GPU's number and PCI address; `None` for the CPU.
    fn gpu(&self) -> Option<(usize, String)> {
        None
    }
}

/// Returns the system's page size in bytes: 4 KiB on most machines, 64 KiB on some aarch64 ones (Grace).
pub fn page_size() -> usize {
    static SIZE: LazyLock<usize> = LazyLock::new(|| {
        let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        // Linux always answers. If it didn't, the largest page size would work for smaller pages too.
        size.and_then(|size| usize::try_from(size).ok()).filter(|size| size.is_power_of_two()).unwrap_or(1 << 16)
    });
    *SIZE
}

pub(super) fn bounds(offset: usize, len: usize, size: usize) -> Result<(), DeviceError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(DeviceError::Bounds { offset, len, size }),
    }
}

/// Host memory that the owner keeps alive. Cards and kernels access it too, so no Rust reference to it is ever created.
pub(super) struct HostBytes {
    base: *mut u8,
    len: usize,
}

impl HostBytes {
    /// # Safety
    /// `len` bytes at `base` must stay readable and writable as long as the value lives.
    #[allow(unsafe_code)]
    pub(super) unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[allow(unsafe_code)]
    pub(super) fn write(&self, offset: usize, bytes: &[std::mem::MaybeUninit<u8>]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        let to = self.base.wrapping_add(offset);
        // SAFETY: `bounds` checked that the bytes from `to` are within the memory, and no Rust reference covers it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
        Ok(())
    }

    #[allow(unsafe_code)]
    pub(super) fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bounds(offset, bytes.len(), self.len)?;
        let from = self.base.wrapping_add(offset);
        // SAFETY: `bounds` checked that the bytes from `from` are within the memory, and no Rust reference covers it.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}
