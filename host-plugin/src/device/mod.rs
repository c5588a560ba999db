//! Memory that kernels see: one narrow trait, a CPU back end ([`cpu`]) and a CUDA back end ([`cuda`]).

pub mod cpu;
pub mod cuda;

use crate::config::{DeviceChoice, Provider};
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, LazyLock};

/// Where kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// On CPU threads; device memory is host memory.
    Cpu,
    /// On a GPU.
    Cuda,
}

impl DeviceKind {
    /// The name that messages use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// Who works with an allocation besides kernels; decides where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// The host, during set-up only: handles and tables.
    Tables,
    /// The card: completion counters, value slots, scratch.
    Card,
    /// The card and, at any time, the host: error counters, the abort flag.
    Shared,
}

/// What a pointer that is mapped into the device points at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// Registers or device memory of a card.
    Mmio,
    /// Ordinary host memory that plays a card's.
    Host,
}

/// A device memory call failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// FERROGIN_DEVICE asks for a GPU that is not there.
    #[error(
        "no GPU to use: {reason}. Set FERROGIN_DEVICE=cpu to run kernels on the CPU with FERROGIN_PROVIDER=softefa"
    )]
    NoGpu {
        /// What is missing.
        reason: String,
    },
    /// A system call failed.
    #[error("{call} of {len} bytes failed: {source}")]
    System {
        /// Its name.
        call: &'static str,
        /// Bytes asked for.
        len: usize,
        /// Why.
        source: std::io::Error,
    },
    /// A CUDA driver call failed.
    #[error("{call} failed: {text} (CUresult {code})")]
    Cuda {
        /// Its name.
        call: &'static str,
        /// `CUresult`.
        code: u32,
        /// The driver's name of it.
        text: String,
    },
    /// A write or read beyond an allocation.
    #[error("{len} bytes at {offset} are outside an allocation of {size} bytes")]
    Bounds {
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes there are.
        size: usize,
    },
    /// Memory that a window names is not there.
    #[error("{len} bytes at {address:#x} are not mapped in this process")]
    NotMapped {
        /// First byte.
        address: usize,
        /// Bytes.
        len: usize,
    },
    /// Memory of a kind that this device has not.
    #[error("memory at {address:#x} is {what}: {cure}")]
    WrongMemory {
        /// First byte.
        address: usize,
        /// What it is.
        what: &'static str,
        /// What to do.
        cure: &'static str,
    },
}

/// An allocation as a dma-buf.
#[derive(Debug, Clone, Copy)]
pub struct DmaBuf<'a> {
    /// Open as long as the allocation lives.
    pub fd: BorrowedFd<'a>,
    /// First byte of the allocation within the dma-buf.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
}

/// An allocation that kernels can use, zeroed at first. Ends when dropped.
pub trait DeviceBuffer: Send + Sync {
    /// Address that kernels use; on a page of its own.
    fn device_address(&self) -> u64;
    /// Address that the host may use, where there is one. Always there for [`Use::Shared`].
    fn host_address(&self) -> Option<*mut u8>;
    /// Bytes.
    fn len(&self) -> usize;
    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The allocation as a dma-buf, where cards shall be given one.
    fn dma_buf(&self) -> Option<DmaBuf<'_>>;
    /// Copies host bytes in. Not ordered against running kernels.
    ///
    /// # Errors
    /// Out of bounds, or the driver's failure.
    fn write(&self, offset: usize, bytes: &[std::mem::MaybeUninit<u8>]) -> Result<(), DeviceError>;
    /// Copies bytes out. Not ordered against running kernels.
    ///
    /// # Errors
    /// Out of bounds, or the driver's failure.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;
}

/// How a window's memory is to be given to the card.
#[derive(Debug)]
pub enum WindowMemory {
    /// By its address.
    Address,
    /// By its address on the CUDA device of that number.
    CudaAddress(i32),
    /// As a dma-buf.
    DmaBuf {
        /// Closed when dropped; a registration keeps its own reference.
        fd: OwnedFd,
        /// Where the window's first byte is in it.
        offset: u64,
    },
}

/// Host memory made visible to kernels; the mapping ends when dropped.
pub trait DeviceMapping: Send + Sync {
    /// Device address of the first byte.
    fn device_address(&self) -> u64;
}

/// A device: allocates, and maps what cards own.
pub trait Device: Send + Sync {
    /// Which.
    fn kind(&self) -> DeviceKind;

    /// Allocates `len` zeroed bytes; `len` is not 0.
    ///
    /// # Errors
    /// Out of memory.
    fn allocate(&self, len: usize, usage: Use) -> Result<Box<dyn DeviceBuffer>, DeviceError>;

    /// Makes `len` bytes at `address` visible to kernels: rings and doorbells.
    ///
    /// # Safety
    /// The bytes are mapped in this process, and stay so until the result is dropped.
    ///
    /// # Errors
    /// The driver's failure.
    #[allow(unsafe_code)]
    unsafe fn map(
        &self,
        address: *mut c_void,
        len: usize,
        mapping: Mapping,
    ) -> Result<Box<dyn DeviceMapping>, DeviceError>;

    /// Finds out how a user's memory, `len` bytes from `address` of NCCL's type `ptr_type`, reaches the card.
    ///
    /// # Errors
    /// Memory that is not there, or not of this device's kind.
    fn window(&self, address: *mut c_void, len: usize, ptr_type: i32) -> Result<WindowMemory, DeviceError>;

    /// What NCCL may register: a sum of `PTR_*`.
    fn ptr_support(&self) -> i32;
}

/// Opens the device that the settings ask for.
///
/// `auto` is a GPU if a driver and a GPU are there. Without one it is the CPU for the software card, which was chosen
/// by name; for hardware it is an error, since kernels on CPU threads are no substitute for a GPU job.
///
/// # Errors
/// [`DeviceError::NoGpu`], or the driver's failure.
pub fn open(choice: DeviceChoice, provider: Provider) -> Result<Arc<dyn Device>, DeviceError> {
    let software = provider == Provider::SoftEfa;
    match choice {
        DeviceChoice::Cpu => Ok(Arc::new(cpu::CpuDevice::new(software))),
        DeviceChoice::Cuda => Ok(Arc::new(cuda::CudaDevice::open(software)?)),
        DeviceChoice::Auto => match cuda::CudaDevice::open(software) {
            Ok(device) => Ok(Arc::new(device)),
            Err(DeviceError::NoGpu { .. }) if software => Ok(Arc::new(cpu::CpuDevice::new(true))),
            Err(error) => Err(error),
        },
    }
}

/// Bytes of a page of this system: 4 KiB on most, 64 KiB on some aarch64 machines (Grace).
pub fn page_size() -> usize {
    static SIZE: LazyLock<usize> = LazyLock::new(|| {
        let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        // Linux always answers. The largest page that it has is right wherever a smaller one is.
        size.and_then(|size| usize::try_from(size).ok()).filter(|size| size.is_power_of_two()).unwrap_or(1 << 16)
    });
    *SIZE
}

fn bounds(offset: usize, len: usize, size: usize) -> Result<(), DeviceError> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(DeviceError::Bounds { offset, len, size }),
    }
}

/// Bytes of `value` for [`DeviceBuffer::write`]. Padding may be uninitialised, hence `MaybeUninit`.
#[allow(unsafe_code)]
pub fn bytes_of<T: Copy>(value: &[T]) -> &[std::mem::MaybeUninit<u8>] {
    // SAFETY: the bytes of a live slice, borrowed as long as it; `MaybeUninit<u8>` has no invalid value.
    unsafe { std::slice::from_raw_parts(value.as_ptr().cast(), size_of_val(value)) }
}
