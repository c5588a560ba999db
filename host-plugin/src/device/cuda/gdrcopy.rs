//! GDRCopy, which maps GPU memory for the CPU. Its library, `libgdrapi.so.2`, is loaded at run time.
#![allow(unsafe_code)]

use crate::device::interface::DeviceError;
use libloading::Library;
use std::ffi::{c_int, c_ulong, c_void};
use std::sync::Arc;

/// `GPU_PAGE_SIZE`: what GDRCopy pins and maps is a multiple of it.
const PAGE: u64 = 1 << 16;

/// `gdr_mh_t`, a structure that is passed by value.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Pin {
    handle: c_ulong,
}

type Open = unsafe extern "C" fn() -> *mut c_void;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type PinBuffer = unsafe extern "C" fn(*mut c_void, c_ulong, usize, u64, u32, *mut Pin) -> c_int;
type UnpinBuffer = unsafe extern "C" fn(*mut c_void, Pin) -> c_int;
type Map = unsafe extern "C" fn(*mut c_void, Pin, *mut *mut c_void, usize) -> c_int;
type Unmap = unsafe extern "C" fn(*mut c_void, Pin, *mut c_void, usize) -> c_int;

/// The library, connected to its kernel module.
pub struct GdrCopy {
    connection: *mut c_void,
    close: Close,
    pin: PinBuffer,
    unpin: UnpinBuffer,
    map: Map,
    unmap: Unmap,
    _library: Library,
}

// SAFETY: GDRCopy's functions lock the connection, so any thread may use it.
unsafe impl Send for GdrCopy {}
// SAFETY: as above.
unsafe impl Sync for GdrCopy {}

impl GdrCopy {
    /// Loads the library and connects to its kernel module; `None` if the machine doesn't have both.
    pub fn open() -> Option<Arc<Self>> {
        // SAFETY: the call loads NVIDIA's library, whose initialisers any process may run.
        let library = unsafe { Library::new("libgdrapi.so.2") }.ok()?;
        macro_rules! function {
            ($name:literal, $type:ty) => {
                // SAFETY: gdrapi.h of GDRCopy 2 declares the function with this type. The library stays loaded as long
                // as it's used.
                *unsafe { library.get::<$type>($name) }.ok()?
            };
        }
        let (open, close) = (function!(b"gdr_open\0", Open), function!(b"gdr_close\0", Close));
        let (pin, unpin) = (function!(b"gdr_pin_buffer\0", PinBuffer), function!(b"gdr_unpin_buffer\0", UnpinBuffer));
        let (map, unmap) = (function!(b"gdr_map\0", Map), function!(b"gdr_unmap\0", Unmap));
        // SAFETY: the call takes no arguments.
        let connection = unsafe { open() };
        let gdrcopy = || Self { connection, close, pin, unpin, map, unmap, _library: library };
        (!connection.is_null()).then(|| Arc::new(gdrcopy()))
    }

    /// Maps `len` bytes of GPU memory at `address` for the CPU.
    ///
    /// # Errors
    /// GDRCopy refuses the memory, or its kernel module lacks room for it.
    pub fn map(self: &Arc<Self>, address: u64, len: usize) -> Result<Mapped, DeviceError> {
        let start = address & !(PAGE - 1);
        let size = (address - start + len as u64).next_multiple_of(PAGE) as usize;
        let check = |call, code| match code {
            0 => Ok(()),
            code => Err(DeviceError::System { call, len: size, source: std::io::Error::from_raw_os_error(code) }),
        };
        let mut pin = Pin::default();
        // SAFETY: the connection is open. GDRCopy checks the range, and writes a handle to a local variable.
        check("gdr_pin_buffer", unsafe { (self.pin)(self.connection, start, size, 0, 0, &mut pin) })?;
        let mut mapped = Mapped { gdrcopy: self.clone(), pin, start, at: std::ptr::null_mut(), size };
        // SAFETY: the pages are pinned. GDRCopy writes an address to `mapped`.
        check("gdr_map", unsafe { (self.map)(self.connection, pin, &mut mapped.at, size) })?;
        Ok(mapped)
    }
}

impl Drop for GdrCopy {
    fn drop(&mut self) {
        // SAFETY: `open` opened the connection, and all mappings, which hold a reference to this object, are gone.
        unsafe { (self.close)(self.connection) };
    }
}

/// GPU memory that's mapped for the CPU until this is dropped.
pub struct Mapped {
    gdrcopy: Arc<GdrCopy>,
    pin: Pin,
    start: u64,
    /// Null if it isn't mapped.
    at: *mut c_void,
    size: usize,
}

// SAFETY: any thread may unmap and unpin the memory.
unsafe impl Send for Mapped {}
// SAFETY: no field changes.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Returns the distance from the GPU's addresses to the CPU's.
    pub fn distance(&self) -> u64 {
        (self.at as u64).wrapping_sub(self.start)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let GdrCopy { connection, unmap, unpin, .. } = *self.gdrcopy;
        if !self.at.is_null() {
            // SAFETY: `map` mapped this memory, and nothing accesses it any more.
            unsafe { unmap(connection, self.pin, self.at, self.size) };
        }
        // SAFETY: `map` pinned this memory, which isn't mapped any more.
        unsafe { unpin(connection, self.pin) };
    }
}
