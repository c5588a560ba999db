//! Maps the cards' rings and doorbells for kernels.
#![allow(unsafe_code)]

use super::driver::{Core, check, check_free};
use super::memory::round_up;
use crate::device::interface::{DeviceError, DeviceMapping, Mapping, page_size};
use cudarc::driver::sys as cu;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Weak};

/// Host pages that this process registered with the driver, by address and size. Doorbells of several queues may share
/// a page, which the driver registers only once per process.
static REGISTERED: LazyLock<Mutex<RegisteredPages>> = LazyLock::new(Mutex::default);
type RegisteredPages = HashMap<(usize, usize), Weak<Registered>>;

/// Maps `len` bytes at `address` for kernels.
///
/// # Safety
/// The bytes must stay mapped in this process until the result is dropped.
pub unsafe fn map(
    core: &Arc<Core>,
    address: *mut c_void,
    len: usize,
    mapping: Mapping,
) -> Result<Box<dyn DeviceMapping>, DeviceError> {
    let _current = core.enter()?;
    let start = address as usize & !(page_size() - 1);
    let offset = address as usize - start;
    let size = round_up(offset.saturating_add(len), page_size())?;
    let mut known = REGISTERED.lock();
    known.retain(|_, pages| pages.strong_count() > 0);
    if let Some(pages) = known.get(&(start, size)).and_then(Weak::upgrade) {
        return Ok(Box::new(Mapped { address: pages.device + offset as u64, pages: Some(pages) }));
    }
    let mut flags = cu::CU_MEMHOSTREGISTER_PORTABLE | cu::CU_MEMHOSTREGISTER_DEVICEMAP;
    if mapping == Mapping::Mmio {
        flags |= cu::CU_MEMHOSTREGISTER_IOMEMORY;
    }
    // SAFETY: the caller keeps the bytes mapped until the mapping is dropped, which unregisters them. Only whole pages
    // are mapped, so rounding to pages adds no unmapped bytes.
    let result = unsafe { cu::cuMemHostRegister_v2(start as *mut c_void, size, flags) };
    check("cuMemHostRegister", result)?;
    let mut pages = Registered { core: core.clone(), start, device: 0 };
    // SAFETY: the call above registered the memory. The driver writes one address into `pages`.
    let result = unsafe { cu::cuMemHostGetDevicePointer_v2(&mut pages.device, start as *mut c_void, 0) };
    check("cuMemHostGetDevicePointer", result)?;
    let pages = Arc::new(pages);
    known.insert((start, size), Arc::downgrade(&pages));
    Ok(Box::new(Mapped { address: pages.device + offset as u64, pages: Some(pages) }))
}

/// Host pages registered with the driver.
struct Registered {
    core: Arc<Core>,
    start: usize,
    device: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(_current) = self.core.enter() {
            // SAFETY: `map` registered the pages, and only this drop unregisters them. The caller of `map` keeps them
            // mapped until now.
            check_free("cuMemHostUnregister", unsafe { cu::cuMemHostUnregister(self.start as *mut c_void) });
        }
    }
}

struct Mapped {
    address: u64,
    pages: Option<Arc<Registered>>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Under the lock, so that `map` doesn't register the same pages before they are unregistered.
        let _known = REGISTERED.lock();
        self.pages = None;
    }
}

impl DeviceMapping for Mapped {
    fn device_address(&self) -> u64 {
        self.address
    }
}
