//! Loading rdma-core, and owned handles of what it makes.

use super::ffi;
use crate::device::{DeviceError, Handle};
use std::ffi::{CStr, c_int};
use std::sync::Arc;

const VERBS: &str = "libibverbs.so.1";
/// "Function not implemented": what the library says when the kernel has no RDMA.
const ENOSYS: i32 = 38;
const DV: &str = "libmlx5.so.1";

/// Both libraries.
pub(super) struct Api {
    pub verbs: ffi::Verbs,
    pub dv: ffi::Dv,
}

fn library<T>(name: &'static str, find: fn(libloading::Library) -> Result<T, String>) -> Result<T, DeviceError> {
    let missing = |why: String| DeviceError::Library { library: name, why };
    // SAFETY: rdma-core's initialisers register drivers and do nothing else.
    let library = unsafe { libloading::Library::new(name) }.map_err(|error| missing(error.to_string()))?;
    find(library).map_err(missing)
}

impl Api {
    pub(super) fn load() -> Result<Arc<Self>, DeviceError> {
        Ok(Arc::new(Self { verbs: library(VERBS, ffi::Verbs::find)?, dv: library(DV, ffi::Dv::find)? }))
    }

    /// Calls `each` with every device, its name, and whether it is one of ours, until it gives something.
    pub(super) fn find_device<R>(
        &self,
        mut each: impl FnMut(*mut ffi::Device, &str, bool) -> Option<R>,
    ) -> Result<Option<R>, DeviceError> {
        let mut count: c_int = 0;
        // SAFETY: the count outlives the call.
        let list = unsafe { (self.verbs.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            // Without RDMA in the kernel there is no device: that is no failure of the call.
            return match last_error() {
                0 | ENOSYS => Ok(None),
                errno => Err(DeviceError::Call { call: "ibv_get_device_list", errno }),
            };
        }
        let mut found = None;
        for at in 0..count.max(0) as usize {
            // SAFETY: the list has `count` entries.
            let device = unsafe { list.wrapping_add(at).read() };
            // SAFETY: a device of the list.
            let name = unsafe { (self.verbs.ibv_get_device_name)(device) };
            if name.is_null() {
                continue;
            }
            // SAFETY: a string of the library, valid while the list is.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
            // SAFETY: a device of the list.
            let ours = unsafe { (self.dv.mlx5dv_is_supported)(device) };
            found = each(device, &name, ours);
            if found.is_some() {
                break;
            }
        }
        // SAFETY: the list came from the library, and nothing of it is used after.
        unsafe { (self.verbs.ibv_free_device_list)(list) };
        Ok(found)
    }
}

/// The number of the last system error, which is what these calls leave behind.
pub(super) fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// `pointer`, or the error that the call left.
pub(super) fn check_pointer<T>(pointer: *mut T, call: &'static str) -> Result<*mut T, DeviceError> {
    if pointer.is_null() { Err(DeviceError::Call { call, errno: last_error() }) } else { Ok(pointer) }
}

/// Success, or the error that the call returned.
pub(super) fn check_status(status: c_int, call: &'static str) -> Result<(), DeviceError> {
    match status {
        0 => Ok(()),
        -1 => Err(DeviceError::Call { call, errno: last_error() }),
        errno => Err(DeviceError::Call { call, errno: errno.abs() }),
    }
}

/// An owned object of the library: destroyed when dropped, before what it is made on.
macro_rules! owned {
    ($($(#[$attr:meta])* $name:ident($object:ty), $destroy:ident, keeps { $($keep_alive:ident: $kept:ty),* };)*) => {$(
        $(#[$attr])*
        pub(super) struct $name {
            pub object: *mut $object,
            pub context: Arc<Context>,
            $(pub $keep_alive: $kept,)*
        }

        // SAFETY: verbs calls are thread-safe, and the object is reached through them alone.
        unsafe impl Send for $name {}
        // SAFETY: the same.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the library, destroyed once. A failure leaves nothing to do: the object is leaked.
                let _ = unsafe { (self.context.api.verbs.$destroy)(self.object) };
            }
        }
    )*};
}

/// An open device.
pub(super) struct Context {
    pub object: *mut ffi::Context,
    pub api: Arc<Api>,
}

// SAFETY: verbs calls are thread-safe, and the context is reached through them alone.
unsafe impl Send for Context {}
// SAFETY: the same.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by the library, closed once, after all that was made on it.
        let _ = unsafe { (self.api.verbs.ibv_close_device)(self.object) };
    }
}

owned! {
    Pd(ffi::Pd), ibv_dealloc_pd, keeps {};
    Mr(ffi::Mr), ibv_dereg_mr, keeps { _pd: Handle };
    Cq(ffi::Cq), ibv_destroy_cq, keeps {};
    Srq(ffi::Srq), ibv_destroy_srq, keeps { _pd: Handle };
    Qp(ffi::Qp), ibv_destroy_qp, keeps { datagram: bool, psn: u32, _on: Vec<Handle> };
}

/// A window; its calls are the driver's.
pub(super) struct Mw {
    pub object: *mut ffi::Mw,
    pub context: Arc<Context>,
    pub _pd: Handle,
}

// SAFETY: the driver's calls are thread-safe, and the object is reached through them alone.
unsafe impl Send for Mw {}
// SAFETY: the same.
unsafe impl Sync for Mw {}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the context is open.
        let dealloc = unsafe { (*self.context.object).dealloc_mw };
        if let Some(dealloc) = dealloc {
            // SAFETY: allocated by the driver, freed once.
            let _ = unsafe { dealloc(self.object) };
        }
    }
}
