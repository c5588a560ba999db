//! Access to GPU memory by address: the CUDA driver copies to and from it. The driver is loaded when GPU memory is
//! first registered; without one, the registration fails with an error that names it. The software GPU's driver also
//! finds the address of a dma-buf.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::Library;

/// Why GPU memory cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No CUDA driver can be loaded.
    #[error("the CUDA driver cannot be loaded ({0}): is it installed?")]
    Absent(String),
    /// The CUDA driver lacks a function.
    #[error("the CUDA driver has no {0}")]
    Missing(&'static str),
    /// A CUDA driver call failed.
    #[error("{call}: CUDA error {code} ({text})")]
    Failed {
        /// The call.
        call: &'static str,
        /// Its result.
        code: c_int,
        /// The driver's text for it.
        text: String,
    },
    /// The range is not in allocations of one GPU.
    #[error("{len} bytes at {addr:#x} are not allocated memory of one GPU")]
    Range {
        /// First byte.
        addr: u64,
        /// Length of the range in bytes.
        len: usize,
    },
}

/// A context from the driver, retained until the process ends, or none.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Context(*mut c_void);

/// A stream from the driver, which is never destroyed, or none.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Stream(*mut c_void);

// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Context {}
// SAFETY: a handle of the driver, which any thread may use.
unsafe impl Send for Stream {}

/// The driver's entry points, with their types in cuda.h, releases 11 to 13. Those that are not unsafe take all values
/// of their types: the driver checks numbers, sets the variables behind references, and made the contexts and streams
/// itself.
struct Entries {
    init: extern "C" fn(u32) -> c_int,
    text: extern "C" fn(c_int, &mut *const c_char) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int,
    device: extern "C" fn(&mut c_int, c_int) -> c_int,
    retain: extern "C" fn(&mut Context, c_int) -> c_int,
    push: extern "C" fn(Context) -> c_int,
    pop: extern "C" fn(&mut Context) -> c_int,
    stream: extern "C" fn(&mut Stream, u32) -> c_int,
    to_device: unsafe extern "C" fn(u64, *const c_void, usize, Stream) -> c_int,
    from_device: unsafe extern "C" fn(*mut c_void, u64, usize, Stream) -> c_int,
    synchronize: extern "C" fn(Stream) -> c_int,
    /// Only in the software GPU's driver.
    attach: Option<extern "C" fn(&mut u64, c_int, u64, usize) -> c_int>,
}

/// `CU_POINTER_ATTRIBUTE_*`.
const DEVICE_ORDINAL: c_int = 9;
const RANGE_START: c_int = 11;
const RANGE_SIZE: c_int = 12;
/// A stream that waits for no other stream: a kernel on the default stream may spin until the card has copied.
const NON_BLOCKING: u32 = 1;

/// The loaded driver.
pub struct Driver {
    entries: Entries,
    /// The primary context and the driver's own stream of each device in use, by ordinal.
    devices: Mutex<Vec<Option<Device>>>,
    _library: Library,
}

#[derive(Clone, Copy)]
struct Device {
    context: Context,
    stream: Stream,
}

impl Driver {
    /// Returns this process's driver, loading it on first use.
    ///
    /// # Errors
    /// The first call's error, which every later call returns too.
    pub fn get() -> Result<&'static Self, CudaError> {
        static DRIVER: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        DRIVER.get_or_init(|| Self::load("libcuda.so.1")).as_ref().map_err(Clone::clone)
    }

    fn load(name: &str) -> Result<Self, CudaError> {
        // SAFETY: the initialisers of the driver's library change nothing else in the process.
        let library = unsafe { Library::new(name) }.map_err(|error| CudaError::Absent(error.to_string()))?;
        macro_rules! entry {
            ($name:literal) => {{
                // SAFETY: cuda.h declares the function with the type of the field, which says what it takes.
                let symbol = unsafe { library.get(concat!($name, "\0").as_bytes()) };
                *symbol.map_err(|_| CudaError::Missing($name))?
            }};
        }
        let entries = Entries {
            init: entry!("cuInit"),
            text: entry!("cuGetErrorString"),
            attribute: entry!("cuPointerGetAttribute"),
            device: entry!("cuDeviceGet"),
            retain: entry!("cuDevicePrimaryCtxRetain"),
            push: entry!("cuCtxPushCurrent_v2"),
            pop: entry!("cuCtxPopCurrent_v2"),
            stream: entry!("cuStreamCreate"),
            to_device: entry!("cuMemcpyHtoDAsync_v2"),
            from_device: entry!("cuMemcpyDtoHAsync_v2"),
            synchronize: entry!("cuStreamSynchronize"),
            // SAFETY: the software GPU defines the function with this type, and no other driver has it.
            attach: unsafe { library.get(b"cuSoftGpuAttachDmaBuf\0") }.ok().map(|symbol| *symbol),
        };
        let driver = Self { entries, devices: Mutex::default(), _library: library };
        driver.check("cuInit", (driver.entries.init)(0))?;
        Ok(driver)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        (self.entries.text)(code, &mut text);
        let text = if text.is_null() {
            "unknown".to_owned()
        } else {
            // SAFETY: not null, so the driver set it to a NUL-terminated constant of its own.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(CudaError::Failed { call, code, text })
    }

    /// Returns the address of `len` bytes of a dma-buf from `offset` on.
    ///
    /// # Errors
    /// The driver is not the software GPU's, or has not exported the dma-buf in this process.
    pub fn attach(&self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<u64, CudaError> {
        const NAME: &str = "cuSoftGpuAttachDmaBuf";
        let attach = self.entries.attach.ok_or(CudaError::Missing(NAME))?;
        let mut addr = 0;
        self.check(NAME, attach(&mut addr, fd.as_raw_fd(), offset, len))?;
        Ok(addr)
    }

    /// Returns the device whose memory is at `addr`, for `len` bytes of one allocation or of adjacent ones.
    ///
    /// # Errors
    /// The range is not memory of one GPU.
    pub fn owner(&self, addr: u64, len: usize) -> Result<u32, CudaError> {
        let range = CudaError::Range { addr, len };
        let end = addr.checked_add(len as u64).ok_or_else(|| range.clone())?;
        let (mut at, mut owner) = (addr, None);
        while at < end || owner.is_none() {
            let (ordinal, next) = self.allocation(at).filter(|(_, next)| *next > at).ok_or_else(|| range.clone())?;
            if owner.is_some_and(|owner| owner != ordinal) {
                return Err(range);
            }
            (at, owner) = (next, Some(ordinal));
        }
        let ordinal = owner.and_then(|ordinal| u32::try_from(ordinal).ok()).ok_or(range)?;
        self.device(ordinal)?;
        Ok(ordinal)
    }

    /// Returns the device and the end of the allocation that contains `addr`.
    fn allocation(&self, addr: u64) -> Option<(c_int, u64)> {
        let (mut ordinal, mut start, mut size) = (0 as c_int, 0u64, 0usize);
        for (attribute, to) in [
            (DEVICE_ORDINAL, (&raw mut ordinal).cast::<c_void>()),
            (RANGE_START, (&raw mut start).cast()),
            (RANGE_SIZE, (&raw mut size).cast()),
        ] {
            // SAFETY: `to` points to a variable of the attribute's type by cuda.h.
            if unsafe { (self.entries.attribute)(to, attribute, addr) } != 0 {
                return None;
            }
        }
        Some((ordinal, start.checked_add(size as u64)?))
    }

    fn device(&self, ordinal: u32) -> Result<Device, CudaError> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let at = ordinal as usize;
        if let Some(device) = devices.get(at).copied().flatten() {
            return Ok(device);
        }
        let (mut number, mut context, mut stream) = (0, Context(ptr::null_mut()), Stream(ptr::null_mut()));
        self.check("cuDeviceGet", (self.entries.device)(&mut number, ordinal as c_int))?;
        self.check("cuDevicePrimaryCtxRetain", (self.entries.retain)(&mut context, number))?;
        self.within(context, || self.check("cuStreamCreate", (self.entries.stream)(&mut stream, NON_BLOCKING)))?;
        let device = Device { context, stream };
        if devices.len() <= at {
            devices.resize(at + 1, None);
        }
        devices[at] = Some(device);
        Ok(device)
    }

    /// Runs `act` with `context` current, and restores the thread's context.
    fn within(&self, context: Context, act: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        self.check("cuCtxPushCurrent", (self.entries.push)(context))?;
        let result = act();
        let mut popped = Context(ptr::null_mut());
        result.and(self.check("cuCtxPopCurrent", (self.entries.pop)(&mut popped)))
    }

    /// Copies to GPU memory. The bytes are there when the call returns.
    ///
    /// # Errors
    /// The CUDA driver's error.
    ///
    /// # Safety
    /// `from` is readable and `to` is memory of the device, for `len` bytes.
    pub unsafe fn write(&self, ordinal: u32, to: u64, from: *const u8, len: usize) -> Result<(), CudaError> {
        let Device { context, stream } = self.device(ordinal)?;
        self.within(context, || {
            // SAFETY: this function's caller keeps `len` bytes at `from` readable and at `to` mapped in the device's
            // memory.
            let code = unsafe { (self.entries.to_device)(to, from.cast(), len, stream) };
            self.check("cuMemcpyHtoDAsync", code)?;
            self.check("cuStreamSynchronize", (self.entries.synchronize)(stream))
        })
    }

    /// Copies from GPU memory. The bytes are there when the call returns.
    ///
    /// # Errors
    /// The CUDA driver's error.
    ///
    /// # Safety
    /// `to` is writable and `from` is memory of the device, for `len` bytes.
    pub unsafe fn read(&self, ordinal: u32, to: *mut u8, from: u64, len: usize) -> Result<(), CudaError> {
        let Device { context, stream } = self.device(ordinal)?;
        self.within(context, || {
            // SAFETY: this function's caller keeps `len` bytes at `to` writable and at `from` mapped in the device's
            // memory.
            let code = unsafe { (self.entries.from_device)(to.cast(), from, len, stream) };
            self.check("cuMemcpyDtoHAsync", code)?;
            self.check("cuStreamSynchronize", (self.entries.synchronize)(stream))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_driver_is_named() {
        let error = Driver::load("libcuda-that-is-not-there.so").map(drop).unwrap_err();
        assert!(error.to_string().contains("cannot be loaded") && error.to_string().contains("installed?"), "{error}");
        let error = Driver::load("libm.so.6").map(drop).unwrap_err();
        assert_eq!(error, CudaError::Missing("cuInit"));
    }

    #[test]
    fn bytes_round_trip_through_gpu_memory() {
        let test = "bytes_round_trip_through_gpu_memory";
        if let Ok(driver) = Driver::get() {
            return round_trip(driver);
        }
        // The software GPU stands in for a driver.
        let Some(path) = ferrogin_test_support::software_gpu(test) else { return };
        ferrogin_test_support::child::run(test, &[("LD_LIBRARY_PATH", &path)], || round_trip(Driver::get().unwrap()));
    }

    fn round_trip(driver: &Driver) {
        let host = [7u8; 64];
        assert!(driver.owner(host.as_ptr() as u64, 64).is_err(), "host memory is no GPU's");
        let device = driver.device(0).unwrap();
        // SAFETY: cuda.h declares the functions with these types.
        let alloc: libloading::Symbol<'_, unsafe extern "C" fn(*mut u64, usize) -> c_int> =
            unsafe { driver._library.get(b"cuMemAlloc_v2\0") }.unwrap();
        let mut at = 0;
        // SAFETY: the context is current; `at` is written on success.
        driver.within(device.context, || driver.check("cuMemAlloc", unsafe { alloc(&raw mut at, 64) })).unwrap();
        assert_eq!(driver.owner(at, 64), Ok(0));
        assert!(driver.owner(at, 1 << 40).is_err());
        let mut back = [0u8; 64];
        // SAFETY: the device memory and both arrays have 64 bytes.
        unsafe { driver.write(0, at, host.as_ptr(), 64) }.unwrap();
        // SAFETY: the device memory and both arrays have 64 bytes.
        unsafe { driver.read(0, back.as_mut_ptr(), at, 64) }.unwrap();
        assert_eq!(host, back);
    }
}
